//! Probes of misbehaving targets: servers for all protocols, and commands.

mod cases;
mod commands;
mod load;
mod prober;

use std::time::Duration;

use health_probe::mechanism::Deadline;
use tests::PATIENCE;
use tests::hostile::Hostile;

use self::cases::{CASES, Case, Way, is_timeout};

/// Timeout where no answer is expected.
const SHORT: Duration = Duration::from_millis(300);
/// Number of times that each server is probed.
const ROUNDS: usize = 3;

fn hostile() -> anyhow::Result<Hostile> {
    Hostile::start(env!("CARGO_BIN_EXE_hostile"))
}

fn runtime() -> anyhow::Result<tokio::runtime::Runtime> {
    Ok(tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()?)
}

/// Probes all servers of these types, one after another.
fn each_comes_to_what_is_expected(ways: &[Way]) -> anyhow::Result<()> {
    let hostile = hostile()?;
    let runtime = runtime()?;
    let cases = CASES.iter().filter(|case| ways.contains(&case.way));
    for case in cases.clone() {
        for _ in 0..ROUNDS {
            runtime.block_on(comes_to_what_is_expected(case, &hostile));
        }
    }
    assert!(cases.count() > 0);
    Ok(())
}

/// On a busy machine, a probe may time out before the expected stage, and is then repeated with a longer timeout.
async fn comes_to_what_is_expected(case: &Case, hostile: &Hostile) {
    let mut timeout = if case.times_out() { SHORT } else { PATIENCE };
    loop {
        let outcome = case.probe(hostile, Deadline::after(timeout)).await;
        if case.expects(&outcome, true) {
            break;
        }
        let again = case.times_out() && is_timeout(&outcome) && timeout < PATIENCE;
        assert!(again, "{case:?}: {outcome:?}");
        timeout *= 2;
    }
}

#[test]
#[ignore = "needs root"]
fn tcp_probes_ask_no_more_than_to_be_accepted() -> anyhow::Result<()> {
    each_comes_to_what_is_expected(&[Way::Tcp])
}

#[test]
#[ignore = "needs root"]
fn http_servers_that_misbehave_fail_but_for_a_body_that_breaks_off() -> anyhow::Result<()> {
    each_comes_to_what_is_expected(&[Way::Http])
}

#[test]
#[ignore = "needs root"]
fn servers_that_do_not_come_to_speak_tls_fail() -> anyhow::Result<()> {
    each_comes_to_what_is_expected(&[Way::Https, Way::GrpcTls])
}

#[test]
#[ignore = "needs root"]
fn grpc_servers_that_misbehave_fail() -> anyhow::Result<()> {
    each_comes_to_what_is_expected(&[Way::Grpc])
}

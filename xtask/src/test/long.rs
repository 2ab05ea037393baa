//! Additional work in long runs besides the tests: a Kubernetes cluster, random packets, and a cluster on another architecture. Each is a
//! separate command, so that a failure shows which command to rerun.

use std::env;
use std::process::Command;

use anyhow::Context as _;

use super::environment;
use crate::process::run;

/// Runs a Kubernetes cluster, ten million random packets and a cluster of agents on aarch64.
pub(super) fn run_all() -> anyhow::Result<()> {
    let seed = format!("--seed={}", environment::new_seed());
    for words in [
        &["test", "kubernetes_cluster"][..],
        &["fuzz", "--runs=10000000", &seed],
        &["run", "--once", "--vm=6.12", "--arch=aarch64"],
    ] {
        println!("\ncargo xtask {}", words.join(" "));
        let own = env::current_exe().context("cannot find this program's own file")?;
        run(Command::new(own).args(words))?;
    }
    Ok(())
}

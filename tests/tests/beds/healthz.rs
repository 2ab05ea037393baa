//! `/healthz` reports problems of the agent itself, and `status` reports them too.

use std::fs;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::unix::net::UnixListener;

use anyhow::{Context as _, ensure};
use health_server::liveness::{Level, Liveness};
use nix::sys::signal::Signal;
use tests::bed::Node;
use tests::http::get;
use tests::liveness::{HEALTHZ_PORT, liveness, page};
use tests::{Bed, PATIENCE, wait_for};

use super::metrics::{Samples, scrape};

/// Waits until `/healthz` returns 503 for exactly these checks, and returns its message. Without checks, waits until
/// all is well.
fn wait_failing(node: &Node, checks: &[&str]) -> anyhow::Result<String> {
    wait_for(&format!("{checks:?} to fail"), PATIENCE, || {
        let (code, liveness) = liveness(node)?;
        let expected = if checks.is_empty() { 200 } else { 503 };
        ensure!(code == expected, "{code}: {liveness:?}");
        ensure!(liveness.failing == checks, "{liveness:?}");
        let is_starting = checks.is_empty() && liveness.state != Level::Ok;
        ensure!(!is_starting, "{liveness:?}");
        Ok(Some(liveness.msg))
    })
}

#[test]
#[ignore = "needs root"]
fn healthz_fails_when_the_socket_is_gone_or_another_process_has_it() -> anyhow::Result<()> {
    let bed = Bed::builder().nodes(1).start()?;
    let node = bed.node(1);
    wait_failing(node, &[])?;
    let (_, fine) = liveness(node)?;
    let names: Vec<_> = fine
        .checks
        .iter()
        .map(|check| check.name.as_str())
        .collect();
    assert_eq!(
        names,
        [
            "api-socket",
            "prober",
            "datapath",
            "maps",
            "responders",
            "events",
            "conntrack",
            "routes",
            "policy",
            "identity-store",
            "identity-collector",
            "endpoints",
            "registry",
        ]
    );

    let aside = node.runtime_dir().join("aside.sock");
    fs::rename(node.socket(), &aside)?;
    let message = wait_failing(node, &["api-socket"])?;
    assert!(message.contains("health.sock"), "{message}");
    assert_eq!(page(node, "/livez")?.0, 503);
    assert_eq!(scrape(node)?["health_agent_healthy"], 0.0);

    let other = UnixListener::bind(node.socket())?;
    let message = wait_failing(node, &["api-socket"])?;
    let pid = format!("pid {}", std::process::id());
    assert!(message.contains(&pid), "{message}");
    drop(other);

    fs::rename(&aside, node.socket())?;
    wait_failing(node, &[])?;
    assert_eq!(scrape(node)?["health_agent_healthy"], 1.0);
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn healthz_fails_while_the_datapath_cannot_be_repaired() -> anyhow::Result<()> {
    let bed = Bed::builder().nodes(1).start()?;
    let node = bed.node(1);
    wait_failing(node, &[])?;
    // A device that belongs to someone else is left alone.
    node.exec("ip link set dev lxc_health alias foreign")?;
    let message = wait_failing(node, &["datapath"])?;
    assert!(message.contains("lxc_health"), "{message}");
    let (code, reason) = page(node, "/readyz")?;
    assert!(code == 503 && reason.contains("lxc_health"), "{reason}");
    let (code, hangs) = page(node, "/livez")?;
    assert_eq!(code, 200, "a restart does not end it: {hangs}");
    let shown = node.cli("status")?;
    let own = format!("health-agent/{}", node.name());
    node.exec(&format!("ip link set dev lxc_health alias {own}"))?;
    wait_failing(node, &[])?;
    assert_eq!(shown.code, Some(0), "peers are still reported: {shown:?}");
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn a_stale_registry_is_a_warning_and_shown_with_its_age() -> anyhow::Result<()> {
    let bed = Bed::builder().nodes(1).start()?;
    let node = bed.node(1);
    wait_failing(node, &[])?;
    bed.write_nodes_file("nodes: {no list")?;
    let message = wait_for("the warning", PATIENCE, || {
        let (code, liveness) = liveness(node)?;
        ensure!(code == 200, "{code}");
        Ok((liveness.state == Level::Warning).then_some(liveness.msg))
    })?;
    assert!(message.starts_with("registry: "), "{message}");
    let stale = |samples: &Samples| {
        let value = |name: &str| {
            let prefix = format!("health_agent_registry_{name}{{registry=\"file:");
            let mut found = samples.iter().filter(|(s, _)| s.starts_with(&prefix));
            found.next().map(|(_, value)| *value)
        };
        Some((value("stale")?, value("age_seconds")?))
    };
    let (is_stale, age) = stale(&scrape(node)?).context("no registry")?;
    assert_eq!(is_stale, 1.0);
    assert!(age > 0.0, "{age}");
    assert_eq!(
        scrape(node)?["health_agent_registry_nodes{cluster=\"default\"}"],
        1.0
    );

    bed.write_nodes_file(&tests::bed::registry(bed.nodes()))?;
    wait_for("the registry to be right again", PATIENCE, || {
        Ok((liveness(node)?.1.state == Level::Ok).then_some(()))
    })?;
    let (is_stale, age) = stale(&scrape(node)?).context("no registry")?;
    assert_eq!(is_stale, 0.0);
    assert!(age > 0.0, "it was looked at some time ago");
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn healthz_is_the_agents_own_whatever_peers_do() -> anyhow::Result<()> {
    let bed = Bed::builder()
        .nodes(2)
        .ipv6(true)
        .probing(500, 200)
        .start()?;
    bed.wait_all_reachable(PATIENCE)?;
    let node = bed.node(1);
    bed.node(2).kill_agent(Signal::SIGKILL)?;
    wait_for("the peer to be unreachable", PATIENCE, || {
        Ok((node.cli("status")?.code == Some(3)).then_some(()))
    })?;
    for address in [
        SocketAddr::from((Ipv4Addr::LOCALHOST, HEALTHZ_PORT)),
        SocketAddr::from((Ipv6Addr::LOCALHOST, HEALTHZ_PORT)),
    ] {
        let (code, body) = get(node, address, "/healthz")?;
        assert_eq!(code, 200, "{body}");
        let liveness: Liveness = serde_json::from_str(&body)?;
        assert_eq!(liveness.state, Level::Ok, "{body}");
        assert!(liveness.failing.is_empty(), "{body}");
        for path in ["/livez", "/readyz"] {
            let (code, body) = get(node, address, path)?;
            assert_eq!(code, 200, "{path}: {body}");
        }
    }
    Ok(())
}

/// Waits until both `/healthz` and `status` warn about this check only, in these words.
fn wait_warning(node: &Node, check: &str, words: &str) -> anyhow::Result<()> {
    wait_for(&format!("a warning of {check}"), PATIENCE, || {
        let (code, liveness) = liveness(node)?;
        let problems = liveness.problems();
        let is_it = problems.len() == 1 && problems[0].check == check;
        ensure!(code == 200 && is_it, "{code}: {liveness:?}");
        ensure!(problems[0].message.contains(words), "{problems:?}");
        ensure!(node.status()?.local.problems == problems, "not in status");
        let shown = node.cli("status --succinct")?.stdout;
        let line = format!("Agent warning:   {check}: ");
        ensure!(shown.contains(&line), "{shown}");
        Ok(Some(()))
    })
}

#[test]
#[ignore = "needs root"]
fn healthz_fails_when_nobody_answers_hello_any_more() -> anyhow::Result<()> {
    let bed = Bed::builder().nodes(1).start()?;
    let node = bed.node(1);
    wait_failing(node, &[])?;
    node.exec(&format!(
        "ss --tcp --kill state listening src {}:4240",
        node.ipv4()
    ))?;
    let message = wait_failing(node, &["responders"])?;
    assert!(message.contains(&node.ipv4().to_string()), "{message}");
    wait_for("status to report it", PATIENCE, || {
        let problems = node.status()?.local.problems;
        let is_reported = problems
            .iter()
            .any(|one| one.check == "responders" && one.is_failure);
        ensure!(is_reported, "{problems:?}");
        Ok(Some(()))
    })
}

#[test]
#[ignore = "needs root"]
fn healthz_warns_of_a_store_of_identities_that_is_away() -> anyhow::Result<()> {
    let bed = Bed::builder().nodes(1).start()?;
    let node = bed.node(1);
    wait_failing(node, &[])?;
    let path = node.runtime_dir().join("state/identities.json");
    let good = fs::read(&path)?;
    fs::write(&path, "{ rubbish")?;
    wait_warning(node, "identity-store", "is not an identity file")?;
    let (_, reported) = liveness(node)?;
    let check = reported
        .checks
        .iter()
        .find(|one| one.name == "identity-store");
    let check = check.context("no check")?;
    ensure!(
        check
            .last_success
            .is_some_and(|at| at <= check.last_updated)
    );
    fs::write(&path, good)?;
    wait_failing(node, &[])?;
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn healthz_warns_of_a_route_that_somebody_else_has() -> anyhow::Result<()> {
    let bed = Bed::builder().nodes(2).start()?;
    bed.wait_all_reachable(PATIENCE)?;
    let node = bed.node(1);
    wait_failing(node, &[])?;
    let route = format!("{} dev eth0", bed.node(2).pod_cidrs()[0]);
    // The agent may be faster to restore its own route.
    wait_for("another route", PATIENCE, || {
        node.exec(&format!("ip route delete {route}"))?;
        Ok(node
            .exec(&format!("ip route add {route} proto static"))
            .is_ok()
            .then_some(()))
    })?;
    wait_warning(node, "routes", "not this agent's")?;
    node.exec(&format!("ip route delete {route}"))?;
    wait_failing(node, &[])?;
    bed.wait_all_reachable(PATIENCE)
}

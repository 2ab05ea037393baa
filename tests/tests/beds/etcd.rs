//! Nodes that know each other from etcd alone, and what happens when etcd or the path to it fails: no agent loses a
//! live node, and news arrives after recovery.

use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicBool, Ordering};

use nix::sys::signal::Signal;
use tests::bed::Etcd;
use tests::{Bed, Node, PATIENCE, RaisedAtEnd, wait_for};

const SERVER: Ipv4Addr = Ipv4Addr::new(172, 30, 0, 254);
const PREFIX: &str = "/health-agent/v1/default/";

fn flags(index: u8) -> String {
    format!(
        "--registry etcd:http://{SERVER}:2379 --node-address 172.30.0.{index} \
         --pod-cidr 10.244.{index}.0/24"
    )
}

/// Three nodes that reach each other, known from etcd alone.
fn three_nodes(etcd_flags: &str) -> anyhow::Result<(Etcd, Bed)> {
    let bed = Bed::builder().registry(flags).without_agents().start()?;
    std::fs::remove_file(tests::bed::NODES_FILE)?;
    let etcd = Etcd::start(&bed, SERVER, etcd_flags)?;
    for node in bed.nodes() {
        node.start_agent()?;
    }
    bed.wait_all_reachable(PATIENCE)?;
    for node in bed.nodes() {
        wait_for("the registration", PATIENCE, || {
            let keys = etcd.keys(&format!("{PREFIX}presence/{}", node.name()))?;
            Ok((keys.len() == 1).then_some(()))
        })?;
    }
    Ok((etcd, bed))
}

fn is_stale(node: &Node) -> anyhow::Result<bool> {
    Ok(node.stale_registry()?.is_some())
}

/// Runs an action during which every agent that responds must always list all the bed's nodes.
fn while_nobody_is_lost<T>(
    bed: &Bed,
    work: impl FnOnce() -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    let done = AtomicBool::new(false);
    let all: Vec<String> = bed.nodes().iter().map(Node::full_name).collect();
    std::thread::scope(|scope| {
        let vigil = scope.spawn(|| {
            let mut looks = 0_u32;
            while !done.load(Ordering::Relaxed) {
                for node in bed.nodes() {
                    // An agent that is restarting does not respond.
                    let Ok(names) = node.listed_nodes() else {
                        continue;
                    };
                    // An agent that has just started serves its API before it knows any nodes.
                    if names.is_empty() {
                        continue;
                    }
                    looks += 1;
                    let lost: Vec<_> = all.iter().filter(|name| !names.contains(name)).collect();
                    if !lost.is_empty() {
                        return Err(format!("{} has lost {lost:?}", node.name()));
                    }
                }
            }
            Ok(looks)
        });
        let result = {
            let _ends_vigil = RaisedAtEnd(&done);
            work()
        };
        match vigil.join().expect("the vigil does not panic") {
            Ok(looks) => assert!(looks > 0, "nobody was ever asked"),
            Err(lost) => panic!("{lost}"),
        }
        result
    })
}

/// Registers another node, and waits until every agent knows it.
fn news_arrive(nodes: &[Node], etcd: &Etcd, index: u8) -> anyhow::Result<()> {
    let name = format!("news{index}");
    let record =
        format!(r#"{{"name":"{name}","cluster":"default","addresses":["172.30.0.{index}"]}}"#);
    etcd.put(&format!("{PREFIX}nodes/{name}"), &record)?;
    wait_for_all(nodes, &name)
}

fn wait_for_all(nodes: &[Node], name: &str) -> anyhow::Result<()> {
    let name = format!("default/{name}");
    for node in nodes {
        wait_for(
            &format!("{name} to be known to {}", node.name()),
            PATIENCE,
            || {
                let known = node.listed_nodes()?.contains(&name) && !is_stale(node)?;
                Ok(known.then_some(()))
            },
        )?;
    }
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn agents_find_each_other_also_when_etcd_comes_after_them() -> anyhow::Result<()> {
    let bed = Bed::builder().registry(flags).start()?;
    std::fs::remove_file(tests::bed::NODES_FILE)?;
    for node in bed.nodes() {
        wait_for("an agent without etcd to know itself", PATIENCE, || {
            Ok((node.listed_nodes()? == [node.full_name()]).then_some(()))
        })?;
        assert!(is_stale(node)?);
    }
    let etcd = Etcd::start(&bed, SERVER, "")?;
    bed.wait_all_reachable(PATIENCE)?;
    for node in bed.nodes() {
        let key = format!("{PREFIX}nodes/{}", node.name());
        let record = etcd
            .ctl(&format!("get --print-value-only {key}"))?
            .success()?;
        let record: serde_json::Value = serde_json::from_str(&record)?;
        let health = node.health_ipv4()?.to_string();
        assert_eq!(record["healthAddresses"], serde_json::json!([health]));
    }
    // Dropped before etcd, while its nodes can still deregister.
    drop(bed);
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn nobody_is_lost_when_etcd_is_killed_and_an_agent_starts_without_it() -> anyhow::Result<()> {
    let (mut etcd, bed) = three_nodes("")?;
    bed.node(1).wait_kept(bed.nodes())?;
    while_nobody_is_lost(&bed, || {
        etcd.kill()?;
        for node in bed.nodes() {
            wait_for("the loss to be reported", PATIENCE, || {
                Ok(is_stale(node)?.then_some(()))
            })?;
        }
        bed.node(1).kill_agent(Signal::SIGKILL)?;
        bed.node(1).start_agent()?;
        bed.wait_all_reachable(PATIENCE)?;
        etcd.restart()?;
        news_arrive(bed.nodes(), &etcd, 201)
    })
}

#[test]
#[ignore = "needs root"]
fn nobody_is_lost_when_the_history_is_compacted_behind_an_agent_that_was_cut_off()
-> anyhow::Result<()> {
    let (etcd, bed) = three_nodes("")?;
    while_nobody_is_lost(&bed, || {
        let alone = bed.node(3);
        bed.cut_off(alone)?;
        wait_for("the loss to be reported", PATIENCE, || {
            Ok(is_stale(alone)?.then_some(()))
        })?;
        // The keys bound to the lease are removed, as if the lease had expired.
        etcd.revoke_leases()?;
        etcd.put(&format!("{PREFIX}other"), "1")?;
        let revision = etcd.revision()?;
        etcd.ctl(&format!("compact {revision}"))?.success()?;
        bed.reconnect(alone)?;
        news_arrive(bed.nodes(), &etcd, 202)?;
        wait_for("the agent to register anew", PATIENCE, || {
            let keys = etcd.keys(&format!("{PREFIX}presence/"))?;
            Ok((keys.len() == bed.nodes().len()).then_some(()))
        })?;
        assert!(!alone.logged(&["compacted"])?.is_empty());
        Ok(())
    })
}

#[test]
#[ignore = "needs root"]
fn nobody_is_lost_when_leases_are_revoked_and_records_deleted() -> anyhow::Result<()> {
    let (etcd, bed) = three_nodes("")?;
    while_nobody_is_lost(&bed, || {
        for deletion in ["nodes/", "presence/", ""] {
            assert!(etcd.revoke_leases()? >= bed.nodes().len());
            etcd.ctl(&format!("del --prefix {PREFIX}{deletion}"))?
                .success()?;
            wait_for("all to register anew", PATIENCE, || {
                let keys = etcd.keys(PREFIX)?;
                Ok((keys.len() == 2 * bed.nodes().len()).then_some(()))
            })?;
        }
        news_arrive(bed.nodes(), &etcd, 203)
    })
}

#[test]
#[ignore = "needs root"]
fn nobody_is_lost_when_etcds_disk_is_full() -> anyhow::Result<()> {
    let (etcd, bed) = three_nodes("--quota-backend-bytes 16777216")?;
    while_nobody_is_lost(&bed, || {
        let filler = "x".repeat(1 << 20);
        let full = (0..64).any(|i| {
            let put = etcd.try_put(&format!("/filler/{i}"), &filler);
            put.is_ok_and(|ran| ran.stderr.contains("space exceeded"))
        });
        assert!(full, "etcd takes more than its quota");
        // The agent must register now, and cannot.
        bed.node(2).kill_agent(Signal::SIGKILL)?;
        bed.node(2).start_agent()?;
        wait_for("the failure to be reported", PATIENCE, || {
            let list = bed.node(2).cli("node list")?;
            Ok(list.stderr.contains("space exceeded").then_some(()))
        })?;
        bed.wait_all_reachable(PATIENCE)?;

        etcd.ctl("del --prefix /filler/")?.success()?;
        let revision = etcd.revision()?;
        etcd.ctl(&format!("compact {revision}"))?.success()?;
        etcd.ctl("defrag")?.success()?;
        etcd.ctl("alarm disarm")?.success()?;
        news_arrive(bed.nodes(), &etcd, 204)?;
        wait_for("the failure to be over", PATIENCE, || {
            Ok(bed
                .node(2)
                .cli("node list")?
                .stderr
                .is_empty()
                .then_some(()))
        })
    })
}

#[test]
#[ignore = "needs root"]
fn invalid_entries_are_reported_by_key_and_no_node_is_lost_to_them() -> anyhow::Result<()> {
    let (etcd, bed) = three_nodes("")?;
    while_nobody_is_lost(&bed, || {
        let large = "x".repeat(1 << 20);
        let record =
            |name: &str, rest: &str| format!(r#"{{"name":"{name}","cluster":"default",{rest}}}"#);
        let cases = [
            ("empty", " ".to_owned(), "not a node record"),
            // Together, these may exceed the size of one etcd response.
            ("large", large.clone(), "the value has 1048576 bytes"),
            ("large2", large.clone(), "the value has 1048576 bytes"),
            ("large3", large.clone(), "the value has 1048576 bytes"),
            ("large4", large.clone(), "the value has 1048576 bytes"),
            ("large5", large, "the value has 1048576 bytes"),
            (
                "a/b",
                record("a/b", r#""addresses":["172.30.0.210"]"#),
                "a slash",
            ),
            (
                "bad",
                record("bad", r#""addresses":["172.30.0.256"]"#),
                "\"172.30.0.256\" is not an IP address",
            ),
            (
                "other",
                record("another", r#""addresses":["172.30.0.211"]"#),
                "it names node \"another\"",
            ),
            (
                "thief",
                record("thief", r#""addresses":["172.30.0.1"]"#),
                "address 172.30.0.1 is listed twice",
            ),
            (
                "wide",
                record(
                    "wide",
                    r#""addresses":["192.168.9.9"],"podCIDRs":["10.0.0.0/8"]"#,
                ),
                "overlaps 10.244.",
            ),
        ];
        for (name, value, _) in &cases {
            etcd.put(&format!("{PREFIX}nodes/{name}"), value)?;
        }
        // Overwrite a live node's own record: its agent repairs it.
        etcd.put(&format!("{PREFIX}nodes/hnode2"), "rubbish")?;
        wait_for("the overwritten record to be mended", PATIENCE, || {
            let record = etcd.ctl(&format!("get --print-value-only {PREFIX}nodes/hnode2"))?;
            Ok(record.success()?.contains("172.30.0.2").then_some(()))
        })?;
        news_arrive(bed.nodes(), &etcd, 205)?;
        // A restarted agent lists everything that the others were notified of one by one.
        bed.node(1).kill_agent(Signal::SIGTERM)?;
        bed.node(1).start_agent()?;
        wait_for_all(bed.nodes(), "news205")?;
        for node in bed.nodes() {
            let reported = node.cli("node list")?.stderr;
            for (name, _, reason) in &cases {
                let key = format!("{PREFIX}nodes/{name} ");
                let line = reported.lines().find(|line| line.contains(&key));
                assert!(
                    line.is_some_and(|line| line.contains(reason)),
                    "{} does not report {name}: {reported}",
                    node.name()
                );
            }
            assert_eq!(reported.lines().count(), cases.len(), "{reported}");
        }
        bed.wait_all_reachable(PATIENCE)
    })
}

#[test]
#[ignore = "needs root"]
fn a_stopped_agents_node_stays_until_cleanup() -> anyhow::Result<()> {
    let (etcd, bed) = three_nodes("")?;
    let leaving = bed.node(3);
    leaving.kill_agent(Signal::SIGTERM)?;
    // Each agent has one lease for its node and one for the identities that it uses.
    assert_eq!(etcd.revoke_leases()?, 6);
    news_arrive(&bed.nodes()[..2], &etcd, 206)?;
    assert!(bed.node(1).listed_nodes()?.contains(&leaving.full_name()));

    let removed = leaving.cli("cleanup")?.success()?;
    assert!(
        removed.contains("record of default/hnode3 in etcd:"),
        "{removed}"
    );
    assert!(etcd.keys(&format!("{PREFIX}nodes/hnode3"))?.is_empty());
    wait_for("the node to be gone", PATIENCE, || {
        let names = bed.node(1).listed_nodes()?;
        Ok((!names.contains(&leaving.full_name())).then_some(()))
    })
}

#[test]
#[ignore = "needs root"]
fn cleanup_waits_for_no_registry_that_never_answered() -> anyhow::Result<()> {
    let bed = Bed::builder()
        .nodes(1)
        .registry(flags)
        .without_agents()
        .start()?;
    let node = bed.node(1);
    let end = || -> anyhow::Result<tests::process::RunOutput> {
        node.kill_agent(Signal::SIGTERM)?;
        node.cli("cleanup")
    };
    node.take_over(None)?;
    end()?.success()?;

    // An etcd that has responded before may hold the record; the error says what to do without it.
    let mut etcd = Etcd::start(&bed, SERVER, "")?;
    node.take_over(None)?;
    wait_for("the registration", PATIENCE, || {
        let keys = etcd.keys(&format!("{PREFIX}presence/{}", node.name()))?;
        Ok((keys.len() == 1).then_some(()))
    })?;
    etcd.kill()?;
    let refused = end()?;
    assert_eq!(refused.code, Some(1), "{}", refused.stdout);
    let note = "registered.json to keep the record";
    assert!(refused.stderr.contains(note), "{}", refused.stderr);
    // Even an agent that never reaches etcd does not forget that an earlier one did.
    node.take_over(None)?;
    assert_eq!(end()?.code, Some(1));
    etcd.restart()?;
    let removed = node.cli("cleanup")?.success()?;
    assert!(removed.contains("record of default/"), "{removed}");
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn an_agent_whose_uplink_gets_another_address_ends_once_and_registers_that() -> anyhow::Result<()> {
    const OTHER: &str = "172.30.0.77";
    let bed = Bed::builder()
        .nodes(1)
        .registry(|index| {
            format!(
                "--registry etcd:http://{SERVER}:2379 --device eth0 --pod-cidr 10.244.{index}.0/24"
            )
        })
        .without_agents()
        .start()?;
    let node = bed.node(1);
    let etcd = Etcd::start(&bed, SERVER, "")?;
    node.take_over(None)?;
    node.exec(&format!("ip addr del {}/24 dev eth0", node.ipv4()))?;
    node.exec(&format!("ip addr add {OTHER}/24 dev eth0"))?;
    let ended = format!("now has addresses {OTHER} instead of {}", node.ipv4());
    wait_for("the agent to end", PATIENCE, || {
        let is_reported = !node.logged(&[&ended])?.is_empty();
        Ok((is_reported && node.check_agent().is_err()).then_some(()))
    })?;
    node.take_over(None)?;
    wait_for("the other address to be registered", PATIENCE, || {
        let record = etcd.ctl(&format!("get {PREFIX}nodes/{}", node.name()))?;
        Ok(record.stdout.contains(OTHER).then_some(()))
    })
}

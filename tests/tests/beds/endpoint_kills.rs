//! An agent that is killed at a random moment while it creates and deletes endpoints leaves no half-made endpoints, and
//! no traces of deleted ones.

use std::process::Child;
use std::time::{Duration, Instant};
use std::{fs, thread};

use anyhow::{Context as _, ensure};
use health_model::api::Endpoint;
use nix::sys::signal::Signal;
use serde_json::Value;
use tests::{Bed, Node, PATIENCE, Snapshot, is_long, seed, wait_for};

use crate::endpoint_report::{EndpointReport, Place, is_whole, rows, spawn};

/// How often the agent is killed.
fn kills() -> usize {
    if is_long() { 50 } else { 15 }
}

/// Number of endpoints that stay in place.
const RESIDENTS: usize = 2;

const POLICY: &str = r#"
apiVersion: "cilium.io/v2"
kind: CiliumNetworkPolicy
metadata:
  name: kills
spec:
  endpointSelector:
    matchLabels:
      app: web
  ingress:
  - fromEntities:
    - host
"#;

/// Whether the policy selects the endpoint.
fn is_protected(endpoint: &Endpoint) -> bool {
    endpoint.labels.contains(&"unspec:app=web".to_owned())
}

/// Starts creating one endpoint and deleting another at the same time.
fn begin(node: &Node, make: &Place, labels: &str, delete: &Place) -> anyhow::Result<[Child; 2]> {
    Ok([
        spawn(
            node,
            &format!("endpoint create --netns {}{labels}", make.path),
        )?,
        spawn(node, &format!("endpoint delete --netns {}", delete.path))?,
    ])
}

#[test]
#[ignore = "needs root"]
fn kills_while_endpoints_come_and_go_leave_nothing_half_there() -> anyhow::Result<()> {
    let seed = seed();
    println!("the moments of seed {seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    let bed = Bed::builder().nodes(1).ipv6(true).start()?;
    bed.wait_all_reachable(PATIENCE)?;
    let node = bed.node(1);
    let before = Snapshot::node(node)?;
    let folder = tempfile::tempdir()?;
    let document = folder.path().join("policy.yaml");
    fs::write(&document, POLICY)?;
    node.cli(&format!("policy import {}", document.display()))?
        .success()?;

    // Half of the endpoints have labels, and so an identity and a policy.
    let labels = |number: usize| ["", " --label app=web"][number % 2];
    let mut number = 0;
    let mut place = || {
        number += 1;
        Place::new(number).map(|place| (place, labels(number)))
    };
    let mut live = Vec::new();
    let make = |place: &Place, labels: &str| {
        node.cli(&format!("endpoint create --netns {}{labels}", place.path))?
            .success()
    };
    for _ in 0..RESIDENTS + 1 {
        let (next, labels) = place()?;
        make(&next, labels)?;
        live.push(next);
    }
    let residents = EndpointReport::by(node)?;
    let residents: Vec<Endpoint> = live[..RESIDENTS]
        .iter()
        .filter_map(|place| residents.at(place).cloned())
        .collect();
    ensure!(residents.len() == RESIDENTS, "{residents:?}");

    // How long an undisturbed change takes.
    let mut longest = Duration::ZERO;
    for _ in 0..3 {
        let (next, labels) = place()?;
        let gone = live.swap_remove(RESIDENTS);
        let begun = Instant::now();
        for mut one in begin(node, &next, labels, &gone)? {
            ensure!(one.wait()?.success(), "it fails by itself");
        }
        longest = longest.max(begun.elapsed());
        live.push(next);
    }
    println!("making one and deleting one takes {longest:?}");

    let (mut made, mut deleted) = (0, 0);
    for kill in 0..kills() {
        let (next, labels) = place()?;
        let gone = live.swap_remove(RESIDENTS);
        let moment = longest.mul_f64(random.f64() * 1.1);
        let [mut making, mut deleting] = begin(node, &next, labels, &gone)?;
        // The aim is to interrupt work at a random moment, so there is no condition to wait for.
        thread::sleep(moment);
        node.kill_agent(Signal::SIGKILL)?;
        let (was_made, was_deleted) = (making.wait()?.success(), deleting.wait()?.success());
        node.take_over(None)?;
        let reported = wait_for("all to be whole", PATIENCE, || {
            let reported = EndpointReport::by(node)?;
            reported.is_all_there_is(node, |one| [is_protected(one), false])?;
            Ok(Some(reported))
        })
        .with_context(|| format!("kill {kill} after {moment:?}"))?;
        ensure!(
            !was_made || reported.at(&next).is_some(),
            "what was made is gone"
        );
        ensure!(
            !was_deleted || reported.at(&gone).is_none(),
            "what was deleted is there"
        );
        for resident in &residents {
            ensure!(
                reported.endpoints.contains(resident),
                "{resident:?} has changed"
            );
        }
        for place in live.iter().chain([&next, &gone]) {
            is_whole(place, reported.at(place))?;
        }
        for address in reported.addresses() {
            ensure!(node.pings(address)?, "{address} does not answer");
        }
        made += usize::from(reported.at(&next).is_some());
        deleted += usize::from(reported.at(&gone).is_none());
        // One endpoint must remain for the next round to delete.
        match (reported.at(&next).is_some(), reported.at(&gone).is_some()) {
            (true, true) => {
                node.cli(&format!("endpoint delete --netns {}", gone.path))?
                    .success()?;
                live.push(next);
            }
            (true, false) => live.push(next),
            (false, true) => live.push(gone),
            (false, false) => {
                make(&next, labels)?;
                live.push(next);
            }
        }
    }
    println!(
        "of {} each, {made} were made and {deleted} deleted",
        kills()
    );
    for place in &live {
        node.cli(&format!("endpoint delete --netns {}", place.path))?
            .success()?;
    }
    wait_for("no identity to be referred to", PATIENCE, || {
        let listed = node.listing("identity list")?;
        let is_referred_to = |one: &Value| {
            one["references"]
                .as_array()
                .is_some_and(|nodes| !nodes.is_empty())
        };
        ensure!(!rows(&listed).any(is_referred_to), "{listed}");
        Ok(Some(()))
    })?;
    node.cli("policy delete --all")?.success()?;
    before.wait_nothing_left(node)
}

//! Selection of endpoints for new flows.

use std::thread;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use serde_json::{Value, json};
use tests::served::{Datagrams, ServiceManifest, curl};
use tests::{PATIENCE, wait_for};

use super::{EACH, Row, Stand, targets, wait_answered_by, wait_datagrams_answered_by};

pub(super) const ROWS: &[Row] = &[
    ("an_unready_endpoint_gets_no_new_flows", unready),
    ("a_client_stays_with_its_backend", affinity),
    ("internal_policy_local_stays_on_the_node", internal_local),
    ("hints_keep_traffic_in_its_zone", zone_hints),
    ("hints_keep_traffic_on_its_node", node_hints),
    ("endings_serve_when_no_other_is_ready", serving_terminating),
    (
        "local_endings_serve_when_no_local_one_is_ready",
        local_terminating,
    ),
    (
        "a_ready_endpoint_is_not_hidden_by_an_ending_one_with_its_address",
        reused_address,
    ),
    ("round_robin_takes_turns", round_robin),
    ("flows_are_shared_by_weight", weights),
    (
        "maglev_and_least_connection_use_all_backends",
        other_algorithms,
    ),
];

/// With IPVS, a client's affinity lasts as long as the kernel knows its connections, which is minutes after they end.
pub(super) const EBPF_ROWS: &[Row] =
    &[("a_client_may_go_elsewhere_after_the_timeout", affinity_ends)];

const ALL: [&str; 3] = ["web-1", "web-2", "web-3"];

fn unready(stand: &Stand, number: u8) -> anyhow::Result<()> {
    let mut service = stand.service("unready", number);
    let [client, _] = &stand.clients;
    for (is_ready, names) in [(true, &ALL[..]), (false, &ALL[1..]), (true, &ALL[..])] {
        service.endpoints[0].set_ready(is_ready);
        stand.write(&service)?;
        for target in targets(&service) {
            wait_answered_by(&client.name, target, names)?;
            wait_datagrams_answered_by(&client.name, target, names)?;
        }
    }
    Ok(())
}

fn with_affinity(stand: &Stand, name: &str, number: u8, seconds: u32) -> ServiceManifest {
    stand.service(name, number).spec(json!({
        "sessionAffinity": "ClientIP",
        "sessionAffinityConfig": { "clientIP": { "timeoutSeconds": seconds } },
    }))
}

/// All TCP connections of a client go to one backend while it is usable, and then to another one.
fn affinity(stand: &Stand, number: u8) -> anyhow::Result<()> {
    let mut service = with_affinity(stand, "affinity", number, 600);
    stand.write(&service)?;
    for target in targets(&service) {
        for client in &stand.clients {
            let first = wait_for("an answer", PATIENCE, || {
                let answers = curl(&client.name, target, 1)?;
                Ok(answers.backends.into_keys().next())
            })?;
            wait_answered_by(&client.name, target, &[&first])?;
            let answers = curl(&client.name, target, EACH)?;
            ensure!(answers.of(&first) == EACH, "{answers}, first by {first}");

            let of_first = ALL.iter().position(|name| *name == first);
            let endpoint = of_first.context("an unknown backend")?;
            service.endpoints[endpoint].set_ready(false);
            stand.write(&service)?;
            let second = wait_for("another one to answer", PATIENCE, || {
                let answers = curl(&client.name, target, 1)?;
                let other = answers.backends.into_keys().next();
                Ok(other.filter(|name| *name != first))
            })?;
            let answers = curl(&client.name, target, EACH)?;
            ensure!(answers.of(&second) == EACH, "{answers}, then by {second}");
            service.endpoints[endpoint].set_ready(true);
            stand.write(&service)?;
        }
    }
    Ok(())
}

fn affinity_ends(stand: &Stand, number: u8) -> anyhow::Result<()> {
    // The programs count ages in whole seconds.
    const PAUSE: Duration = Duration::from_millis(2100);
    let service = with_affinity(stand, "forgets", number, 1);
    stand.write(&service)?;
    let [client, _] = &stand.clients;
    let target = targets(&service)[0];
    let first = wait_for("an answer", PATIENCE, || {
        let answers = curl(&client.name, target, 1)?;
        Ok(answers.backends.into_keys().next())
    })?;
    wait_for("another one to answer", PATIENCE, || {
        thread::sleep(PAUSE);
        let answers = curl(&client.name, target, 1)?;
        Ok((answers.of(&first) == 0 && answers.failed.is_empty()).then_some(()))
    })
}

fn internal_local(stand: &Stand, number: u8) -> anyhow::Result<()> {
    let service = stand
        .service("stays", number)
        .spec(json!({ "internalTrafficPolicy": "Local" }));
    stand.write(&service)?;
    for target in targets(&service) {
        for (client, names) in stand.clients.iter().zip([&ALL[..1], &ALL[1..]]) {
            wait_answered_by(&client.name, target, names)?;
            wait_datagrams_answered_by(&client.name, target, names)?;
        }
    }
    Ok(())
}

/// Hints apply only if all ready endpoints have one; a single endpoint without a hint disables them.
fn zone_hints(stand: &Stand, number: u8) -> anyhow::Result<()> {
    let mut service = stand.service("zones", number);
    for (endpoint, zone) in service
        .endpoints
        .iter_mut()
        .zip(["zone-1", "zone-2", "zone-2"])
    {
        endpoint.zones = vec![zone];
    }
    stand.write(&service)?;
    for target in targets(&service) {
        for (client, names) in stand.clients.iter().zip([&ALL[..1], &ALL[1..]]) {
            wait_answered_by(&client.name, target, names)?;
        }
    }
    service.endpoints[2].zones.clear();
    stand.write(&service)?;
    for target in targets(&service) {
        for client in &stand.clients {
            wait_answered_by(&client.name, target, &ALL)?;
        }
    }
    Ok(())
}

fn node_hints(stand: &Stand, number: u8) -> anyhow::Result<()> {
    let mut service = stand.service("nodes", number);
    for (endpoint, node) in service
        .endpoints
        .iter_mut()
        .zip(["hnode1", "hnode2", "hnode2"])
    {
        endpoint.nodes = vec![node];
        // Node hints take precedence over zones.
        endpoint.zones = vec!["zone-1", "zone-2"];
    }
    stand.write(&service)?;
    for target in targets(&service) {
        for (client, names) in stand.clients.iter().zip([&ALL[..1], &ALL[1..]]) {
            wait_answered_by(&client.name, target, names)?;
        }
    }
    Ok(())
}

fn serving_terminating(stand: &Stand, number: u8) -> anyhow::Result<()> {
    let mut service = stand.service("ends", number);
    service.endpoints[0].set_ready(false);
    for endpoint in &mut service.endpoints {
        endpoint.ready = false;
        endpoint.terminating = true;
    }
    stand.write(&service)?;
    let [client, _] = &stand.clients;
    for target in targets(&service) {
        wait_answered_by(&client.name, target, &ALL[1..])?;
    }
    // Once there is a ready endpoint, it gets all traffic.
    service.endpoints[0].set_ready(true);
    service.endpoints[0].terminating = false;
    stand.write(&service)?;
    for target in targets(&service) {
        wait_answered_by(&client.name, target, &ALL[..1])?;
    }
    Ok(())
}

/// Each list falls back by itself: ready endpoints on other nodes do not matter for traffic that must stay on the node.
fn local_terminating(stand: &Stand, number: u8) -> anyhow::Result<()> {
    let mut service = stand
        .service("ends-here", number)
        .spec(json!({ "internalTrafficPolicy": "Local" }));
    service.endpoints[0].ready = false;
    service.endpoints[0].terminating = true;
    stand.write(&service)?;
    for target in targets(&service) {
        for (client, names) in stand.clients.iter().zip([&ALL[..1], &ALL[1..]]) {
            wait_answered_by(&client.name, target, names)?;
        }
    }
    Ok(())
}

/// A new pod has an address whose old entry still exists: in both orders, in one slice and in two.
fn reused_address(stand: &Stand, number: u8) -> anyhow::Result<()> {
    let [client, _] = &stand.clients;
    let service = stand.service("reused", number);
    let old = |new: &Value| {
        let mut old = new.clone();
        old["nodeName"] = "hnode1".into();
        old["conditions"] = json!({ "ready": false, "serving": false, "terminating": true });
        old
    };
    for is_old_first in [true, false] {
        for slices in [1, 2] {
            let mut manifest = service.json();
            let items = manifest["items"].as_array_mut().context("no list")?;
            for slice in items.split_off(1) {
                let new = slice["endpoints"].as_array().context("no endpoints")?;
                let mut groups = [new.iter().map(old).collect::<Vec<_>>(), new.clone()];
                if !is_old_first {
                    groups.reverse();
                }
                let groups = match slices {
                    1 => vec![groups.concat()],
                    _ => groups.to_vec(),
                };
                let name = slice["metadata"]["name"].as_str().unwrap_or_default();
                for (i, endpoints) in groups.into_iter().enumerate() {
                    let mut slice = slice.clone();
                    slice["metadata"]["name"] = format!("{name}-{i}").into();
                    slice["endpoints"] = endpoints.into();
                    items.push(slice);
                }
            }
            stand
                .manifests
                .write_file(&service.name, &manifest.to_string())?;
            for target in targets(&service) {
                wait_answered_by(&client.name, target, &ALL)
                    .with_context(|| format!("old first: {is_old_first}, slices: {slices}"))?;
            }
            // The service is removed so that the next order starts from scratch.
            stand.manifests.remove(&service.name)?;
            for target in targets(&service) {
                wait_for("the service to be gone", PATIENCE, || {
                    let answers = curl(&client.name, target, 1)?;
                    Ok(answers.backends.is_empty().then_some(()))
                })?;
            }
        }
    }
    Ok(())
}

fn with_algorithm(stand: &Stand, number: u8, algorithm: &str) -> ServiceManifest {
    ServiceManifest {
        annotations: json!({ "service.health-agent.io/algorithm": algorithm }),
        ..stand.service(algorithm, number)
    }
}

fn round_robin(stand: &Stand, number: u8) -> anyhow::Result<()> {
    let service = with_algorithm(stand, number, "round-robin");
    stand.write(&service)?;
    let [client, _] = &stand.clients;
    for target in targets(&service) {
        wait_answered_by(&client.name, target, &ALL)?;
        let (mut last, mut repeats) = (None, 0);
        for _ in 0..3 * EACH {
            let answer = Datagrams::open(&client.name, target)?.ask(PATIENCE)?;
            let backend = Some(answer.context("no answer")?.backend);
            repeats += usize::from(last == backend);
            last = backend;
        }
        // A reused source port belongs to a known flow, which keeps its backend. Random choice would repeat the last
        // backend for a third of the requests.
        ensure!(repeats <= EACH / 3, "{repeats} went where the last one did");
    }
    Ok(())
}

/// Weights apply to slices, so the heavy endpoints have their own slice.
fn weights(stand: &Stand, number: u8) -> anyhow::Result<()> {
    const WEIGHT: usize = 9;
    const REQUESTS: usize = 200;
    let service = stand.service("weighted", number);
    let mut manifest = service.json();
    let items = manifest["items"].as_array_mut().context("no list")?;
    for slice in items.split_off(1) {
        let name = slice["metadata"]["name"].as_str().unwrap_or_default();
        let (mut light, mut heavy) = (slice.clone(), slice.clone());
        heavy["metadata"]["name"] = format!("{name}-heavy").into();
        heavy["metadata"]["annotations"] =
            json!({ "service.health-agent.io/weight": WEIGHT.to_string() });
        light["endpoints"] = json!([slice["endpoints"][0]]);
        heavy["endpoints"] = json!([slice["endpoints"][1]]);
        items.extend([light, heavy]);
    }
    stand
        .manifests
        .write_file(&service.name, &manifest.to_string())?;
    let [client, _] = &stand.clients;
    for target in targets(&service) {
        wait_answered_by(&client.name, target, &ALL[..2])?;
        let answers = curl(&client.name, target, REQUESTS)?;
        // A tenth of the requests is 20, and random choice stays within these bounds.
        let light = answers.of("web-1");
        ensure!((2..=50).contains(&light), "{target}: {answers}");
        ensure!(answers.of("web-2") == REQUESTS - light, "{answers}");
    }
    Ok(())
}

fn other_algorithms(stand: &Stand, number: u8) -> anyhow::Result<()> {
    for (algorithm, number) in [("maglev", number), ("least-connection", number + 100)] {
        let service = with_algorithm(stand, number, algorithm);
        stand.write(&service)?;
        for client in &stand.clients {
            for target in targets(&service) {
                wait_answered_by(&client.name, target, &ALL).context(algorithm)?;
                let mut flow = Datagrams::open(&client.name, target)?;
                flow.ask(PATIENCE)?.context("no answer")?;
            }
        }
    }
    Ok(())
}

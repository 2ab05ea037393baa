//! A node with a thousand endpoints: the time to create one more and to list all of them, and how soon changes of
//! policy and identities take effect.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use anyhow::{Context as _, ensure};
use serde_json::{Value, json};

use super::stand::{Namespaces, Stand, Times, ptp};
use crate::bench::{Figure, Target};
use crate::plugin::Plugin;
use crate::process::{run, run_with_input};
use crate::{PATIENCE, wait_for};

const ENDPOINTS: u32 = 1_000;
/// Number of endpoints with the same label, by which policies select them.
const OF_A_KIND: u32 = 100;
/// Address of the agent's metrics endpoint.
const METRICS: &str = "127.0.0.1:9962";
const SAMPLES: usize = 100;
const LISTINGS: usize = 21;
/// Limits relative to `ptp` with the same number of endpoints.
const ADD_API_LIMIT: Target = Target::RatioAtMost(1.0);
const ADD_CNI_LIMIT: Target = Target::RatioAtMost(1.5);
/// Limit relative to `ip link show` of the same devices.
const LISTING_LIMIT: Target = Target::RatioAtMost(1.5);
const POLICY_CHANGES: u16 = 21;
/// Limit relative to `nft` with rules for the same number of devices.
const POLICY_LIMIT: Target = Target::RatioAtMost(3.0);
/// Limit relative to a policy change for all endpoints.
const IDENTITY_LIMIT: Target = Target::RatioAtMost(0.5);
/// Limit relative to the first endpoints: creating one more must not take longer because many exist.
const GROWTH_LIMIT: Target = Target::RatioAtMost(1.5);

pub(super) fn figures() -> anyhow::Result<Vec<Figure>> {
    let folder = tempfile::tempdir()?;
    let stand = Stand::new()?;
    let many = Namespaces::new("bench-many", 1)?;
    let many = many.paths().next().context("no namespace")?;
    let theirs = Theirs::new(folder.path())?;
    let [mut first, mut first_theirs] = [(); 2].map(|()| Times::default());
    for n in 0..SAMPLES {
        first.take_after_a_pause(|| create(&stand, many, u32::try_from(n)?))?;
        theirs.add(&stand, &mut first_theirs)?;
    }
    for n in u32::try_from(SAMPLES)?..ENDPOINTS {
        create(&stand, many, n)?;
    }
    let mut figures = Vec::new();
    figures.extend(first.figures(
        "ADD by the API, up to 100 endpoints (other: ptp)",
        Some(&first_theirs),
        Some(ADD_API_LIMIT),
    )?);
    figures.extend(one_more(&stand, &first, &theirs, folder.path())?);
    figures.push(listing(&stand)?);
    let changes = policy_changes(&stand)?;
    let change_ms = changes.ours;
    figures.push(changes);
    figures.extend(identity_change(&stand, change_ms)?);
    Ok(figures)
}

/// Containers of Debian's plugin on the same node.
struct Theirs {
    plugin: Plugin,
    namespaces: Namespaces,
}

impl Theirs {
    fn new(folder: &Path) -> anyhow::Result<Self> {
        Ok(Self {
            plugin: ptp(folder),
            namespaces: Namespaces::new("bench-ptp", 1)?,
        })
    }

    /// Adds a container after a pause, and deletes it again.
    fn add(&self, stand: &Stand, times: &mut Times) -> anyhow::Result<()> {
        let path = self.namespaces.paths().next();
        let path = path.context("no namespace")?.display().to_string();
        let call = |command| {
            // A plugin creates the host's end of the veth pair in the namespace in which it runs.
            let call = || self.plugin.call(command, "bench-ptp", &path);
            let answer = stand.node().run_in(call)??;
            ensure!(answer.is_success, "ptp, {command}: {}", answer.json);
            Ok(())
        };
        times.take_after_a_pause(|| call("ADD"))?;
        call("DEL")
    }
}

fn create(stand: &Stand, netns: &Path, n: u32) -> anyhow::Result<u64> {
    let labels = ["app=many".to_owned(), format!("kind=k{}", n / OF_A_KIND)];
    stand.create(netns, &format!("n{n}"), &labels)
}

/// Adds and deletes one more endpoint, through the API and through the plugin.
fn one_more(
    stand: &Stand,
    first: &Times,
    theirs: &Theirs,
    folder: &Path,
) -> anyhow::Result<Vec<Figure>> {
    let plugin = Plugin::of(stand.node(), folder)?;
    let netns = Namespaces::new("bench-one", 1)?;
    let netns = netns.paths().next().context("no namespace")?;
    let path = netns.display().to_string();
    let [mut added, mut called, mut beside, mut deleted] = [(); 4].map(|()| Times::default());
    for _ in 0..SAMPLES {
        let id = added.take_after_a_pause(|| create(stand, netns, 0))?;
        let delete = || stand.send("DELETE", &format!("/v1/endpoints/{id}"), &Value::Null);
        deleted.take_after_a_pause(delete)?;
        for command in ["ADD", "DEL"] {
            let call = || {
                let answer = plugin.call(command, "bench-one", &path)?;
                ensure!(answer.is_success, "{command}: {}", answer.json);
                Ok(())
            };
            match command {
                "ADD" => called.take_after_a_pause(call)?,
                _ => call()?,
            }
        }
        theirs.add(stand, &mut beside)?;
    }
    let at = |what: &str| format!("{what}, {ENDPOINTS} endpoints");
    let mut figures = Vec::new();
    let name = at("ADD by the API (other: up to 100)");
    figures.extend(added.figures(&name, Some(first), Some(GROWTH_LIMIT))?);
    let name = at("ADD by CNI (other: ptp)");
    figures.extend(called.figures(&name, Some(&beside), Some(ADD_CNI_LIMIT))?);
    figures.extend(deleted.figures(&at("DEL by the API"), None, None)?);
    Ok(figures)
}

/// Measures listing endpoints through the command line, including its process.
fn listing(stand: &Stand) -> anyhow::Result<Figure> {
    let [mut times, mut links] = [(); 2].map(|()| Times::default());
    for _ in 0..LISTINGS {
        let listed = times.take(|| stand.node().cli("endpoint list")?.success())?;
        let count = u32::try_from(listed.matches("ready").count())?;
        ensure!(count > ENDPOINTS, "{count} endpoints are ready");
        let show = || run(Command::new("ip").args(["-oneline", "link", "show"]));
        let shown = links.take(|| stand.node().run_in(show)??.success())?;
        let count = u32::try_from(shown.lines().count())?;
        ensure!(count > ENDPOINTS, "the node has {count} devices");
    }
    Ok(Figure {
        name: format!(
            "endpoint list, {ENDPOINTS} endpoints, median of {LISTINGS} (other: ip link show)"
        ),
        unit: "ms",
        ours: times.median_ms()?,
        other: Some(links.median_ms()?),
        target: Some(LISTING_LIMIT),
    })
}

/// Repeatedly changes a rule for all endpoints and waits until all of them enforce it.
fn policy_changes(stand: &Stand) -> anyhow::Result<Figure> {
    let [mut times, mut by_nft] = [(); 2].map(|()| Times::default());
    let netns = Namespaces::new("bench-nft", 1)?;
    let netns = netns.paths().next().context("no namespace")?;
    for port in 80..80 + POLICY_CHANGES {
        times.take(|| set_rule(stand, "app", "many", &json!({"kind": "k1"}), port))?;
        let rules = nft_rules(port);
        by_nft.take(|| {
            let mut nft = Command::new("nsenter");
            let nft = nft.arg(format!("--net={}", netns.display()));
            run_with_input(nft.args(["nft", "-f", "-"]), &rules)?.success()
        })?;
    }
    stand.send("DELETE", "/v1/policies?all=true", &Value::Null)?;
    Ok(Figure {
        name: format!(
            "a change of policy in force at {ENDPOINTS} endpoints, median of {POLICY_CHANGES} (other: nft)"
        ),
        unit: "ms",
        ours: times.median_ms()?,
        other: Some(by_nft.median_ms()?),
        target: Some(POLICY_LIMIT),
    })
}

/// nftables rules, one chain per device and as many devices as endpoints, that let one source range reach `port`. They
/// replace any previous rules.
fn nft_rules(port: u16) -> String {
    let mut rules = "table ip bench\ndelete table ip bench\ntable ip bench {\n".to_owned();
    let mut devices = Vec::new();
    for n in 0..ENDPOINTS {
        rules +=
            &format!("chain c{n} {{\nip saddr 10.244.0.0/24 tcp dport {port} accept\ndrop\n}}\n");
        devices.push(format!("\"n{n}\" : jump c{n}"));
    }
    let devices = devices.join(", ");
    rules
        + &format!(
            "map rules {{\ntype ifname : verdict\nelements = {{ {devices} }}\n}}\n\
             chain forward {{\ntype filter hook forward priority 0\noifname vmap @rules\n}}\n}}\n"
        )
}

/// Adds a label to an endpoint, so that a rule of other endpoints admits it. This changes their tables and its own.
/// `change_ms` is the time of a policy change for all endpoints.
fn identity_change(stand: &Stand, change_ms: f64) -> anyhow::Result<[Figure; 2]> {
    set_rule(stand, "kind", "k2", &json!({"role": "client"}), 80)?;
    let listed = stand.send("GET", "/v1/endpoints", &Value::Null)?;
    let all = listed.as_array().context("the list is not an array")?;
    let is_other = |one: &&Value| one["labels"].to_string().contains("kind=k7");
    let id = all.iter().find(is_other).and_then(|one| one["id"].as_u64());
    let id = id.context("no endpoint has the label")?;
    let touched = u64::from(OF_A_KIND) + 1;
    let before = regenerations(stand)?;
    let begun = Instant::now();
    let body = json!({"add": ["role=client"]});
    stand.send("PATCH", &format!("/v1/endpoints/{id}/labels"), &body)?;
    wait_for("all affected endpoints to be regenerated", PATIENCE, || {
        Ok((regenerations(stand)? - before >= touched).then_some(()))
    })?;
    let took = begun.elapsed();
    // Once this rule is in force, all regenerations requested earlier are done.
    set_rule(stand, "kind", "none", &json!({"kind": "none"}), 80)?;
    let count = (regenerations(stand)? - before) as f64;
    let figure = |name: &str, unit, ours, other, target| Figure {
        name: format!(
            "an identity that {OF_A_KIND} of {ENDPOINTS} endpoints have a rule for: {name}"
        ),
        unit,
        ours,
        other,
        target,
    };
    Ok([
        figure(
            "regenerations (other: those endpoints and itself)",
            "",
            count,
            Some(touched as f64),
            Some(Target::Equal),
        ),
        figure(
            "time until all are done (other: a change of policy at all endpoints)",
            "ms",
            took.as_secs_f64() * 1e3,
            Some(change_ms),
            Some(IDENTITY_LIMIT),
        ),
    ])
}

/// Lets only endpoints with the labels `from` reach this port of the endpoints with the label `key`. Returns when the
/// rule is in force.
fn set_rule(stand: &Stand, key: &str, value: &str, from: &Value, port: u16) -> anyhow::Result<()> {
    let rules = json!([{
        "labels": [format!("bench={value}")],
        "endpointSelector": {"matchLabels": {key: value}},
        "ingress": [{
            "fromEndpoints": [{"matchLabels": from}],
            "toPorts": [{"ports": [{"port": port.to_string(), "protocol": "TCP"}]}],
        }],
    }]);
    let imported = stand.send("POST", "/v1/policies", &rules)?;
    ensure!(imported["is-in-force"] == true, "{imported}");
    Ok(())
}

/// Number of endpoint regenerations since the agent started.
fn regenerations(stand: &Stand) -> anyhow::Result<u64> {
    const NAME: &str = "endpoint_regenerations_total{outcome=\"success\"} ";
    let metrics = stand.node().run_in(|| -> anyhow::Result<String> {
        let mut stream = TcpStream::connect(METRICS)?;
        write!(stream, "GET /metrics HTTP/1.0\r\nHost: agent\r\n\r\n")?;
        let mut text = String::new();
        stream.read_to_string(&mut text)?;
        Ok(text)
    })??;
    let count = metrics.lines().find_map(|line| line.split_once(NAME));
    let (_, count) = count.context("no metric counts regenerations")?;
    Ok(count.parse()?)
}

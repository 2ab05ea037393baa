//! `bpf lb list` for one service.

use std::collections::BTreeSet;

use anyhow::{Context as _, ensure};
use serde_json::Value;
use tests::Node;
use tests::served::Connection;

use super::{Row, Stand, targets, wait_answered_by};

pub(super) const ROWS: &[Row] = &[("maps_are_listed_of_one_service", of_one_service)];

/// One field of all rows, as strings.
fn column(node: &Node, words: &str, field: &str) -> anyhow::Result<Vec<String>> {
    let listed = node.listing(&format!("bpf lb list {words}"))?;
    let rows = listed.as_array().context("no list")?;
    Ok(rows.iter().map(|row| text(&row[field])).collect())
}

fn text(value: &Value) -> String {
    value
        .as_str()
        .map_or_else(|| value.to_string(), str::to_owned)
}

fn of_one_service(stand: &Stand, number: u8) -> anyhow::Result<()> {
    let service = stand.service("listed", number);
    stand.write(&service)?;
    let node = stand.bed.node(1);
    let [client, _] = &stand.clients;
    let mut connections = Vec::new();
    for target in targets(&service) {
        wait_answered_by(&client.name, target, &["web-1", "web-2", "web-3"])?;
        connections.push(Connection::open(&client.name, target)?);
    }
    let all: BTreeSet<String> = service
        .cluster_ips
        .iter()
        .map(|ip| ip.to_string())
        .collect();
    for (name, protocols) in [
        ("listed", vec!["TCP", "UDP"]),
        ("default/listed:80", vec!["TCP", "UDP"]),
        ("default/listed:datagrams", vec!["UDP"]),
    ] {
        let words = format!("--service {name}");
        let addresses = column(node, &words, "address")?;
        ensure!(
            addresses.len() == 2 * protocols.len(),
            "{name}: {addresses:?}"
        );
        ensure!(
            addresses.into_iter().collect::<BTreeSet<_>>() == all,
            "{name}"
        );
        let found: BTreeSet<_> = column(node, &words, "protocol")?.into_iter().collect();
        ensure!(
            found == protocols.into_iter().map(str::to_owned).collect(),
            "{name}: {found:?}"
        );
    }
    let of_http = "--service default/listed:http";
    let numbers: BTreeSet<_> = column(node, of_http, "service")?.into_iter().collect();
    let flows = column(node, &format!("{of_http} --flows"), "service")?;
    ensure!(flows.len() >= 2 * connections.len(), "{flows:?}");
    ensure!(
        flows.iter().all(|one| numbers.contains(one)),
        "{numbers:?}: {flows:?}"
    );

    for (name, problem) in [
        (
            "default/no-such",
            "no service \"default/no-such\"; `health-agent service list`",
        ),
        (
            "default/listed:81",
            "the maps have no frontend for service \"default/listed:81\"",
        ),
    ] {
        let ran = node.cli(&format!("bpf lb list --service {name}"))?;
        ensure!(
            ran.code == Some(1) && ran.stderr.contains(problem),
            "{}",
            ran.stderr
        );
    }
    Ok(())
}

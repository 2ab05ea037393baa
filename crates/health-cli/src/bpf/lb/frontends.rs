//! `bpf lb list`: frontends with their backends.

use std::collections::BTreeMap;
use std::net::IpAddr;

use health_api::frontend_names::{algorithm_name, kind_name};
use health_common::service::{FRONTEND_DIRECT, FRONTEND_RESTRICTED, Origin};
use health_datapath::dump::Pinned;
use health_datapath::services::{ListedBackend, ListedFrontend};
use health_model::flow::IpProtocol;
use ipnet::IpNet;
use serde::Serialize;

use super::selection::Selection;
use crate::output::{Cell, Format, comma_separated, table};

/// A frontend as JSON.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
struct FrontendRow {
    address: IpAddr,
    port: u16,
    protocol: IpProtocol,
    kind: String,
    service: u32,
    algorithm: String,
    affinity_seconds: u32,
    keeps_source: bool,
    /// Whether backends on other nodes reply to external clients directly.
    direct_return: bool,
    /// `null` if any source may use the frontend.
    source_ranges: Option<Vec<IpNet>>,
    inside: PoolView,
    outside: PoolView,
}

/// Where new flows go.
#[derive(Debug, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
struct PoolView {
    backends: Vec<BackendView>,
    /// What happens to new flows if there are no backends: `drop` or `reject`.
    otherwise: &'static str,
}

#[derive(Debug, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
struct BackendView {
    index: u32,
    address: IpAddr,
    port: u16,
    share: f64,
    flows: u32,
}

pub(super) fn print(pinned: &Pinned, selection: &Selection, format: Format) -> anyhow::Result<()> {
    let maps = pinned.services()?;
    let listed = maps.list()?;
    let ranges = maps.source_ranges()?;
    let rows: Vec<_> = listed
        .into_iter()
        .filter(|frontend| selection.has(frontend.entry.service))
        .map(|frontend| row(frontend, &ranges))
        .collect();
    format.print_rows(&rows, frontends_table)
}

fn row(frontend: ListedFrontend, ranges: &BTreeMap<u32, Vec<IpNet>>) -> FrontendRow {
    let entry = frontend.entry;
    let is_set = |flag| entry.flags & flag != 0;
    let of_service = || ranges.get(&entry.service).cloned().unwrap_or_default();
    let pool = |origin| PoolView {
        backends: frontend.pool(origin).iter().map(backend).collect(),
        otherwise: if entry.drops(origin) {
            "drop"
        } else {
            "reject"
        },
    };
    FrontendRow {
        address: frontend.address.ip(),
        port: frontend.address.port(),
        protocol: IpProtocol(frontend.protocol),
        kind: kind_name(entry.kind),
        service: entry.service,
        algorithm: algorithm_name(entry.algorithm),
        affinity_seconds: entry.affinity_secs,
        keeps_source: entry.keeps_source(),
        direct_return: is_set(FRONTEND_DIRECT),
        source_ranges: is_set(FRONTEND_RESTRICTED).then(of_service),
        inside: pool(Origin::Inside),
        outside: pool(Origin::Outside),
    }
}

fn backend(backend: &ListedBackend) -> BackendView {
    let address = backend.address();
    BackendView {
        index: backend.index,
        address: address.ip(),
        port: address.port(),
        share: backend.share,
        flows: backend.entry.flows,
    }
}

fn frontends_table(rows: &[FrontendRow]) -> String {
    let rows = rows.iter().map(|row| {
        let address = std::net::SocketAddr::new(row.address, row.port);
        [
            Cell::from(format!("{address}/{}", row.protocol)),
            row.kind.as_str().into(),
            row.service.to_string().into(),
            row.algorithm.as_str().into(),
            settings(row),
            pool_cell(&row.inside),
            if row.outside == row.inside {
                "=".into()
            } else {
                pool_cell(&row.outside)
            },
        ]
    });
    let header = [
        "FRONTEND", "TYPE", "NUMBER", "CHOICE", "SETTINGS", "INSIDE", "OUTSIDE",
    ];
    table(header, rows)
}

/// The frontend's settings that differ from the defaults.
fn settings(row: &FrontendRow) -> Cell {
    let mut settings = Vec::new();
    if row.affinity_seconds > 0 {
        settings.push(format!("affinity={}s", row.affinity_seconds));
    }
    if row.keeps_source {
        settings.push("keeps-source".to_owned());
    }
    if row.direct_return {
        settings.push("direct-return".to_owned());
    }
    if let Some(ranges) = &row.source_ranges {
        settings.push(format!("from={}", comma_separated(ranges)));
    }
    Cell::lines_or_none(settings)
}

fn pool_cell(pool: &PoolView) -> Cell {
    let lines = pool.backends.iter().map(|backend| {
        let address = std::net::SocketAddr::new(backend.address, backend.port);
        let percent = backend.share * 100.0;
        format!("{address} {percent:.1}% flows={}", backend.flows)
    });
    let lines: Vec<_> = lines.collect();
    if lines.is_empty() {
        return pool.otherwise.into();
    }
    Cell::of_lines(lines)
}

#[cfg(test)]
mod tests {
    use health_common::service::{
        ALGORITHM_MAGLEV, Backend, FRONTEND_DROPS_OUTSIDE, FRONTEND_KEEPS_SOURCE, Frontend,
        KIND_CLUSTER_IP, KIND_NODE_PORT,
    };

    use super::*;

    fn listed(address: &str, backends: &[&str]) -> ListedFrontend {
        let backends = (1..).zip(backends).map(|(index, address)| {
            let address: std::net::SocketAddr = address.parse().unwrap();
            ListedBackend {
                index,
                entry: Backend {
                    addr: address.ip().into(),
                    port_be: address.port().to_be(),
                    service: 3,
                    flows: 7,
                    ..Backend::default()
                },
                share: 0.5,
            }
        });
        let backends: Vec<_> = backends.collect();
        ListedFrontend {
            address: address.parse().unwrap(),
            protocol: 6,
            entry: Frontend {
                service: 3,
                kind: KIND_CLUSTER_IP,
                ..Frontend::default()
            },
            inside: backends.clone(),
            outside: backends,
        }
    }

    #[test]
    fn frontends_are_listed_with_their_backends() {
        let mut local = listed("[fd00::1]:30080", &["[fd00:1::1]:80"]);
        local.entry.kind = KIND_NODE_PORT;
        local.entry.flags = FRONTEND_KEEPS_SOURCE | FRONTEND_DROPS_OUTSIDE | FRONTEND_RESTRICTED;
        local.entry.affinity_secs = 60;
        local.entry.algorithm = ALGORITHM_MAGLEV;
        local.outside.clear();
        let ranges = BTreeMap::from([(3, vec!["192.0.2.0/24".parse().unwrap()])]);
        let mut cluster = listed("10.96.0.1:80", &["10.1.0.1:80", "10.1.0.2:80"]);
        cluster.entry.flags = FRONTEND_DIRECT;
        let rows = [cluster, local].map(|frontend| row(frontend, &ranges));
        assert_eq!(
            frontends_table(&rows),
            "\
FRONTEND              TYPE        NUMBER   CHOICE   SETTINGS            INSIDE                         OUTSIDE
10.96.0.1:80/TCP      ClusterIP   3        random   direct-return       10.1.0.1:80 50.0% flows=7      =
                                                                        10.1.0.2:80 50.0% flows=7
[fd00::1]:30080/TCP   NodePort    3        maglev   affinity=60s        [fd00:1::1]:80 50.0% flows=7   drop
                                                    keeps-source
                                                    from=192.0.2.0/24
"
        );
        let json = serde_json::to_value(&rows[1]).unwrap();
        assert_eq!(
            json["outside"],
            serde_json::json!({"backends": [], "otherwise": "drop"})
        );
        assert_eq!(json["inside"]["backends"][0]["address"], "fd00:1::1");
        assert_eq!(json["source-ranges"][0], "192.0.2.0/24");
    }
}

//! `bpf lb list --maglev`: Maglev tables.

use std::net::{IpAddr, SocketAddr};

use health_common::service::{ALGORITHM_MAGLEV, Origin, Pool};
use health_datapath::dump::Pinned;
use health_datapath::services::{ListedBackend, ListedFrontend};
use serde::Serialize;

use super::selection::Selection;
use crate::output::{Cell, Format, table};

/// A table as JSON.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
struct TableRow {
    service: u32,
    /// Index of the table's first entry in `HEALTH_MAGLEV`.
    at: u32,
    places: u32,
    backends: Vec<Share>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
struct Share {
    index: u32,
    address: IpAddr,
    port: u16,
    places: u32,
}

pub(super) fn print(pinned: &Pinned, selection: &Selection, format: Format) -> anyhow::Result<()> {
    let mut listed = pinned.services()?.list()?;
    listed.retain(|frontend| selection.has(frontend.entry.service));
    format.print_rows(&rows(&listed), tables_table)
}

/// Lists each table once, even if several frontends use it.
fn rows(listed: &[ListedFrontend]) -> Vec<TableRow> {
    let by_maglev = listed
        .iter()
        .filter(|frontend| frontend.entry.algorithm == ALGORITHM_MAGLEV);
    let tables = by_maglev.flat_map(|frontend| {
        let entry = &frontend.entry;
        [Origin::Inside, Origin::Outside]
            .map(|origin| (entry.service, entry.pool(origin), frontend.pool(origin)))
    });
    let mut rows: Vec<_> = tables
        .filter(|(_, pool, _)| pool.len > 0)
        .map(|(service, pool, backends)| row(service, pool, backends))
        .collect();
    rows.sort_by_key(|row| row.at);
    rows.dedup_by_key(|row| row.at);
    rows
}

fn row(service: u32, pool: Pool, backends: &[ListedBackend]) -> TableRow {
    let share = |backend: &ListedBackend| {
        let address = backend.address();
        Share {
            index: backend.index,
            address: address.ip(),
            port: address.port(),
            places: (backend.share * f64::from(pool.len)).round() as u32,
        }
    };
    TableRow {
        service,
        at: pool.at,
        places: pool.len,
        backends: backends.iter().map(share).collect(),
    }
}

fn tables_table(rows: &[TableRow]) -> String {
    let rows = rows.iter().map(|row| {
        let backends = row.backends.iter().map(|backend| {
            let address = SocketAddr::new(backend.address, backend.port);
            format!("{address} {}", backend.places)
        });
        [
            Cell::from(row.service.to_string()),
            row.at.to_string().into(),
            row.places.to_string().into(),
            Cell::of_lines(backends),
        ]
    });
    table(["NUMBER", "AT", "PLACES", "BACKENDS"], rows)
}

#[cfg(test)]
mod tests {
    use health_common::service::{Backend, Frontend};

    use super::*;

    #[test]
    fn a_table_that_several_frontends_name_is_listed_once() {
        let pool = Pool { at: 251, len: 251 };
        let backend = |index, share| ListedBackend {
            index,
            entry: Backend {
                addr: IpAddr::from([10, 1, 0, index as u8]).into(),
                port_be: 80_u16.to_be(),
                ..Backend::default()
            },
            share,
        };
        let frontend = ListedFrontend {
            address: "10.96.0.1:80".parse().unwrap(),
            protocol: 6,
            entry: Frontend {
                inside: pool,
                outside: pool,
                service: 5,
                algorithm: ALGORITHM_MAGLEV,
                ..Frontend::default()
            },
            inside: vec![backend(1, 126.0 / 251.0), backend(2, 125.0 / 251.0)],
            outside: Vec::new(),
        };
        let rows = rows(&[frontend.clone(), frontend]);
        assert_eq!(
            tables_table(&rows),
            "\
NUMBER   AT    PLACES   BACKENDS
5        251   251      10.1.0.1:80 126
                        10.1.0.2:80 125
"
        );
    }
}

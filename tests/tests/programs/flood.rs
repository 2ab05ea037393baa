//! Floods of flows beside open, idle TCP connections, and tables full of such connections: which entries get evicted.

use health_datapath::MapSizes;
use tests::conntrack::flood::{FloodKind, IdleBed};
use tests::{PATIENCE, wait_for};

/// Number of connections for each IP version.
const CONNECTIONS: u32 = 2_000;
/// Enough entries for those connections, and few more.
const SIZES: MapSizes = MapSizes {
    conntrack: 2_560,
    conntrack_any: 1_024,
    nat: 4_608,
    nat_any: 1_024,
    services: None,
    xdp_flows: 1,
};
/// Packets per CPU: for each kind and IP version, many times the capacity of the maps.
const PACKETS: u64 = 30_000;

#[test]
#[ignore = "needs root"]
fn no_flood_evicts_a_connection_that_was_answered_or_its_translation() -> anyhow::Result<()> {
    let bed = IdleBed::new(SIZES, CONNECTIONS)?;
    let before = bed.idle()?;
    for kind in [FloodKind::Echoes, FloodKind::Datagrams] {
        bed.flood(&[kind], |sent| sent >= PACKETS)?;
        assert_eq!(bed.idle()?, before, "{kind:?}");
        // The maps for such flows are nearly full.
        let others = bed.others()?;
        assert!(others > SIZES.conntrack_any as usize, "{others}");
    }
    for kind in [FloodKind::SynsIn, FloodKind::SynsOut, FloodKind::AcksIn] {
        bed.flood(&[kind], |sent| sent >= PACKETS)?;
        assert_eq!(bed.idle()?, before, "{kind:?}");
    }
    // The flood does not lock out other flows afterwards: a flow that found no space gets an entry with a later
    // segment.
    let others = CONNECTIONS..CONNECTIONS + 100;
    for _ in 0..3 {
        bed.open(others.clone())?;
    }
    assert_eq!(bed.known(others)?, 200);
    assert_eq!(bed.known(0..CONNECTIONS)?, 2 * CONNECTIONS as usize);
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn a_table_full_of_idle_connections_takes_new_ones_in_their_place() -> anyhow::Result<()> {
    let sizes = MapSizes {
        nat: 2 * SIZES.nat,
        ..SIZES
    };
    let bed = IdleBed::new(sizes, SIZES.conntrack)?;
    let room = 2 * SIZES.conntrack as usize;
    assert_eq!(bed.known(0..SIZES.conntrack)?, room);
    // Connections in use are spared for a moment, and all connections used in the same second count as equally old.
    let begun = SIZES.conntrack;
    wait_for("a new connection to find room", PATIENCE, || {
        bed.open(begun..begun + 1)?;
        Ok((bed.known(begun..begun + 1)? == 2).then_some(()))
    })?;
    let later = begun + 1..begun + 101;
    bed.open(later.clone())?;
    let all = 0..later.end;
    assert_eq!(bed.known(later)?, 200);
    assert_eq!(bed.known(all)?, room, "as many as before");
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn what_a_nearly_full_table_holds_can_be_evicted_though_its_keys_were_written_over()
-> anyhow::Result<()> {
    // The collector only estimates how full a table is.
    let sizes = MapSizes {
        conntrack: 2 * CONNECTIONS,
        nat: 8 * CONNECTIONS,
        ..SIZES
    };
    let bed = IdleBed::new(sizes, CONNECTIONS)?;
    assert_eq!(bed.keys()?, 2 * CONNECTIONS as usize);
    bed.forget_keys()?;
    bed.collect()?;
    assert_eq!(bed.keys()?, 0, "there is room: nobody needs to know");
    let nearly_all = sizes.conntrack * 95 / 100;
    bed.open(CONNECTIONS..nearly_all)?;
    bed.collect()?;
    assert_eq!(bed.keys()?, 2 * nearly_all as usize);
    Ok(())
}

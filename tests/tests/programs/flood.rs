//! Floods of flows beside TCP connections that are open and idle: which entries they evict.

use health_datapath::MapSizes;
use tests::conntrack::flood::{FloodKind, IdleBed};

/// Connections of each IP version.
const CONNECTIONS: u32 = 2_000;
/// There is room for those and not many more.
const SIZES: MapSizes = MapSizes {
    conntrack: 2_560,
    conntrack_any: 1_024,
    nat: 4_608,
    nat_any: 1_024,
    services: None,
    xdp_flows: 1,
};
/// Packets of each CPU: of each kind and IP version many times what the maps have room for.
const PACKETS: u64 = 30_000;

#[test]
#[ignore = "needs root"]
fn no_flood_of_echoes_or_datagrams_evicts_a_connection_or_its_translation() -> anyhow::Result<()> {
    let bed = IdleBed::new(SIZES, CONNECTIONS)?;
    let before = bed.idle()?;
    for kind in [FloodKind::Echoes, FloodKind::Datagrams] {
        bed.flood(&[kind], |sent| sent >= PACKETS)?;
        assert_eq!(bed.idle()?, before, "{kind:?}");
        // The maps for such flows are about full.
        let others = bed.others()?;
        assert!(others > SIZES.conntrack_any as usize, "{others}");
    }
    // As many flows in the same maps do evict them.
    bed.flood(&[FloodKind::SynsOut], |sent| sent >= PACKETS)?;
    let after = bed.idle()?;
    assert!(after.flows < before.flows, "{after:?}");
    assert!(after.translations < before.translations, "{after:?}");
    Ok(())
}

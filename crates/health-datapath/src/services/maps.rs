//! The service maps.

use std::collections::HashSet;
use std::io;
use std::path::Path;

use aya::Pod;
use aya::maps::{MapData, MapError};
use aya_obj::generated::{BPF_F_NO_PREALLOC, bpf_map_type};
use health_common::ct::{Tuple4, Tuple6};
use health_common::service::socket::{SocketFlow, SocketKey};
use health_common::service::xdp::XdpTimes;
use health_common::service::{
    Affinity, AffinityKey, Backend, Frontend, FrontendKey4, FrontendKey6, ServiceFlow4,
    ServiceFlow6, SourceRange,
};
use health_common::tuple::Tuple;

use super::{FrontendKey, ServicesError};
use crate::aya_io::map_io;
use crate::layout::{self, MapLayout};
use crate::maps::ServiceMapSizes;
use crate::sys;
use crate::table::Table;
use crate::trie::Trie;

/// The opened service maps.
#[derive(Debug)]
pub struct ServiceMaps {
    pub(super) frontends4: Table<FrontendKey4, Frontend>,
    pub(super) frontends6: Table<FrontendKey6, Frontend>,
    pub(super) backends: Table<u32, Backend>,
    pub(super) slots: Table<u32, u32>,
    pub(super) maglev: Table<u32, u32>,
    pub(super) source_ranges: Trie<SourceRange, u32>,
    pub(super) affinity: Table<AffinityKey, Affinity>,
    pub(super) flows4: [Table<Tuple4, ServiceFlow4>; 2],
    pub(super) flows6: [Table<Tuple6, ServiceFlow6>; 2],
    pub(super) sockets: Table<SocketKey, SocketFlow>,
    pub(super) xdp_times: Table<u32, XdpTimes>,
}

/// A flow in one direction.
pub(super) struct Flow {
    /// Direction of its tuple.
    pub(super) direction: u8,
    /// Index of its backend.
    pub(super) backend: u32,
    /// Number of the service's port.
    pub(super) service: u32,
}

fn for_each_flow_in<T: Tuple<ServiceFlow: Pod> + Pod>(
    maps: &[Table<T, T::ServiceFlow>; 2],
    layouts: [&MapLayout; 2],
    each: &mut impl FnMut(Flow),
) -> Result<(), ServicesError> {
    for (flows, layout) in maps.iter().zip(layouts) {
        let read = flows.for_each(|tuple, flow| {
            let parts = T::service_flow_parts(&flow);
            each(Flow {
                direction: tuple.direction(),
                backend: parts.backend,
                service: parts.service,
            });
        });
        read.map_err(|source| ServicesError::kernel("read", layout.name, source))?;
    }
    Ok(())
}

impl ServiceMaps {
    /// Opens the maps pinned in an instance's folder.
    pub fn from_pins(pins: &Path) -> Result<Self, ServicesError> {
        Self::open(|layout| {
            let map = MapData::from_pin(pins.join(layout.name));
            map.map_err(failed("open", layout.name))
        })
    }

    /// Creates maps that no program reads, for tests and benchmarks.
    pub fn unpinned(sizes: ServiceMapSizes) -> Result<Self, ServicesError> {
        Self::open(|layout| {
            let map = create(layout, sizes);
            map.map_err(|source| ServicesError::kernel("create", layout.name, source))
        })
    }

    /// Duplicates the maps' descriptors.
    pub fn try_clone(&self) -> Result<Self, ServicesError> {
        let clone = |name, map: io::Result<MapData>| {
            map.map_err(|source| ServicesError::kernel("open", name, source))
        };
        Self::open(|layout| {
            let name = layout.name;
            match *layout {
                layout::SVC4 => clone(name, self.frontends4.try_clone()),
                layout::SVC6 => clone(name, self.frontends6.try_clone()),
                layout::BACKENDS => clone(name, self.backends.try_clone()),
                layout::SLOTS => clone(name, self.slots.try_clone()),
                layout::MAGLEV => clone(name, self.maglev.try_clone()),
                layout::SOURCE_RANGES => clone(name, self.source_ranges.try_clone()),
                layout::AFFINITY => clone(name, self.affinity.try_clone()),
                layout::REVNAT4 => clone(name, self.flows4[0].try_clone()),
                layout::REVNAT_ANY4 => clone(name, self.flows4[1].try_clone()),
                layout::REVNAT6 => clone(name, self.flows6[0].try_clone()),
                layout::SOCKETS => clone(name, self.sockets.try_clone()),
                layout::XDP_TIMES => clone(name, self.xdp_times.try_clone()),
                _ => clone(name, self.flows6[1].try_clone()),
            }
        })
    }

    pub(crate) fn open<E>(
        mut open: impl FnMut(&MapLayout) -> Result<MapData, E>,
    ) -> Result<Self, E> {
        Ok(Self {
            frontends4: Table::new(open(&layout::SVC4)?),
            frontends6: Table::new(open(&layout::SVC6)?),
            backends: Table::new(open(&layout::BACKENDS)?),
            slots: Table::new(open(&layout::SLOTS)?),
            maglev: Table::new(open(&layout::MAGLEV)?),
            source_ranges: Trie::new(open(&layout::SOURCE_RANGES)?),
            affinity: Table::new(open(&layout::AFFINITY)?),
            flows4: [
                Table::new(open(&layout::REVNAT4)?),
                Table::new(open(&layout::REVNAT_ANY4)?),
            ],
            flows6: [
                Table::new(open(&layout::REVNAT6)?),
                Table::new(open(&layout::REVNAT_ANY6)?),
            ],
            sockets: Table::new(open(&layout::SOCKETS)?),
            xdp_times: Table::new(open(&layout::XDP_TIMES)?),
        })
    }

    /// Whether any flow through a service is known.
    pub fn has_flows(&self) -> Result<bool, ServicesError> {
        let mut has_any = false;
        self.for_each_flow(|_| has_any = true)?;
        Ok(has_any)
    }

    /// Calls `each` with every flow through a service, in both directions.
    pub(super) fn for_each_flow(&self, mut each: impl FnMut(Flow)) -> Result<(), ServicesError> {
        let layouts4 = [&layout::REVNAT4, &layout::REVNAT_ANY4];
        let layouts6 = [&layout::REVNAT6, &layout::REVNAT_ANY6];
        for_each_flow_in(&self.flows4, layouts4, &mut each)?;
        for_each_flow_in(&self.flows6, layouts6, &mut each)
    }

    /// Calls `each` with every frontend.
    pub(super) fn for_each_frontend(
        &self,
        mut each: impl FnMut(FrontendKey, Frontend),
    ) -> Result<(), ServicesError> {
        let fours = self
            .frontends4
            .for_each(|key, value| each(key.into(), value));
        fours.map_err(|source| ServicesError::kernel("read", layout::SVC4.name, source))?;
        let sixes = self
            .frontends6
            .for_each(|key, value| each(key.into(), value));
        sixes.map_err(|source| ServicesError::kernel("read", layout::SVC6.name, source))
    }

    /// Returns the port numbers that any entry refers to.
    pub(super) fn named_numbers(&self) -> io::Result<HashSet<u32>> {
        let mut named = self.numbers_of_flows()?;
        self.frontends4
            .for_each(|_, frontend| named.extend([frontend.service]))?;
        self.frontends6
            .for_each(|_, frontend| named.extend([frontend.service]))?;
        self.backends
            .for_each(|_, backend| named.extend([backend.service]))?;
        let ranges = self.source_ranges.entries()?.into_iter();
        named.extend(ranges.map(|((_, range), _)| u32::from_be(range.service_be)));
        Ok(named)
    }

    /// Returns the port numbers that flows, sockets and clients refer to.
    pub(super) fn numbers_of_flows(&self) -> io::Result<HashSet<u32>> {
        let mut named = HashSet::new();
        self.affinity
            .for_each(|client, _| named.extend([client.service]))?;
        for flows in &self.flows4 {
            flows.for_each(|_, flow| named.extend([flow.service]))?;
        }
        for flows in &self.flows6 {
            flows.for_each(|_, flow| named.extend([flow.service]))?;
        }
        self.sockets
            .for_each(|_, socket| named.extend([socket.service]))?;
        Ok(named)
    }
}

fn failed(what: &'static str, map: &'static str) -> impl FnOnce(MapError) -> ServicesError {
    move |error| ServicesError::kernel(what, map, map_io(error))
}

fn create(layout: &MapLayout, sizes: ServiceMapSizes) -> io::Result<MapData> {
    use bpf_map_type::{
        BPF_MAP_TYPE_ARRAY as ARRAY, BPF_MAP_TYPE_HASH as HASH, BPF_MAP_TYPE_LPM_TRIE as LPM_TRIE,
        BPF_MAP_TYPE_LRU_HASH as LRU_HASH,
    };
    let (kind, max_entries) = match *layout {
        layout::SVC4 | layout::SVC6 => (HASH, sizes.frontends),
        layout::BACKENDS => (ARRAY, sizes.backends),
        layout::SLOTS => (ARRAY, sizes.slots),
        layout::MAGLEV => (ARRAY, sizes.maglev),
        layout::SOURCE_RANGES => (LPM_TRIE, sizes.source_ranges),
        layout::XDP_TIMES => (ARRAY, 1),
        layout::AFFINITY => (LRU_HASH, sizes.affinity),
        layout::REVNAT4 | layout::REVNAT6 => (HASH, sizes.flows),
        layout::SOCKETS => (LRU_HASH, sizes.sockets),
        _ => (LRU_HASH, sizes.flows_any),
    };
    // Programs create flow entries.
    let is_of_flows = matches!(*layout, layout::REVNAT4 | layout::REVNAT6);
    let is_sparse = matches!(kind, HASH | LPM_TRIE) && !is_of_flows;
    let map = sys::create_map(sys::CreateAttr {
        kind: kind as u32,
        key_size: layout.key_size,
        value_size: layout.value_size,
        max_entries,
        flags: if is_sparse { BPF_F_NO_PREALLOC } else { 0 },
        ..sys::CreateAttr::default()
    })?;
    MapData::from_fd(map).map_err(map_io)
}

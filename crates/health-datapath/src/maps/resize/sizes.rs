//! Lists the maps with configurable sizes, and what happens to their contents.

use health_common::ct::{DEFAULT_ANY_ENTRIES, DEFAULT_ENTRIES};
use health_common::service::xdp::XDP_FLOWS;

use crate::layout::{
    BACKENDS, CT_ANY4, CT_ANY6, CT4, CT6, MAGLEV, MapLayout, NAT_ANY4, NAT_ANY6, NAT4, NAT6, SLOTS,
    SOURCE_RANGES, SVC4, SVC6, XDP_FLOWS4, XDP_FLOWS6, ring_of,
};
use crate::maps::ServiceMapSizes;

/// Maximum number of entries of the maps with configurable size, per IP version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MapSizes {
    /// Size of `HEALTH_CT4` and `HEALTH_CT6`.
    pub conntrack: u32,
    /// Size of `HEALTH_CT_ANY4` and `HEALTH_CT_ANY6`.
    pub conntrack_any: u32,
    /// Size of `HEALTH_NAT4` and `HEALTH_NAT6`.
    pub nat: u32,
    /// Size of `HEALTH_NAT_ANY4` and `HEALTH_NAT_ANY6`.
    pub nat_any: u32,
    /// Sizes of the service maps. `None` if services are off: the maps are as small as possible, and their contents are
    /// dropped.
    pub services: Option<ServiceMapSizes>,
    /// Size of `HEALTH_XDP_FLOWS4` and `HEALTH_XDP_FLOWS6`. Their contents are rebuilt.
    pub xdp_flows: u32,
}

impl Default for MapSizes {
    fn default() -> Self {
        Self {
            conntrack: DEFAULT_ENTRIES,
            conntrack_any: DEFAULT_ANY_ENTRIES,
            nat: DEFAULT_ENTRIES,
            nat_any: DEFAULT_ANY_ENTRIES,
            services: Some(ServiceMapSizes::default()),
            xdp_flows: XDP_FLOWS,
        }
    }
}

impl MapSizes {
    pub(super) fn all(self) -> impl Iterator<Item = SizedMap> {
        let sized = |contents| {
            move |(map, size)| SizedMap {
                map,
                size,
                contents,
                ring: ring_of(&map).map(|(_, ring)| ring),
            }
        };
        let flows = [
            (CT4, self.conntrack),
            (CT6, self.conntrack),
            (CT_ANY4, self.conntrack_any),
            (CT_ANY6, self.conntrack_any),
        ];
        let translations = [
            (NAT4, self.nat),
            (NAT6, self.nat),
            (NAT_ANY4, self.nat_any),
            (NAT_ANY6, self.nat_any),
        ];
        let services = self.services.unwrap_or(ServiceMapSizes::NONE);
        let services = services.all().map(move |(map, size)| {
            sized(match map {
                _ if self.services.is_none() => Contents::Unwanted,
                BACKENDS | SLOTS | MAGLEV => Contents::Slots,
                SVC4 | SVC6 | SOURCE_RANGES => Contents::Agent,
                _ => Contents::Programs,
            })((map, size))
        });
        let flows = flows.into_iter().map(sized(Contents::Conntrack));
        let translations = translations.into_iter().map(sized(Contents::Programs));
        let known = [(XDP_FLOWS4, self.xdp_flows), (XDP_FLOWS6, self.xdp_flows)];
        let known = known.into_iter().map(sized(Contents::Cache));
        let tables = flows.chain(translations).chain(services).chain(known);
        tables.flat_map(move |table| {
            let ring = table.ring.map(|ring| (ring, table.size));
            [table].into_iter().chain(ring.map(sized(Contents::Cache)))
        })
    }
}

/// A map and its wanted size.
#[derive(Clone, Copy, Debug)]
pub(super) struct SizedMap {
    pub(super) map: MapLayout,
    pub(super) size: u32,
    pub(super) contents: Contents,
    /// The ring of its keys. A table with such a ring is a hash map, and was not one in earlier versions.
    pub(super) ring: Option<MapLayout>,
}

/// The contents of a map, and what happens to them when it changes size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Contents {
    /// Conntrack flows: unexpired ones are copied, as many as fit.
    Conntrack,
    /// Other entries that programs write: copied, expired or not, as many as fit.
    Programs,
    /// Entries of the agent, by key: all are copied. A map keeps its size if they would not fit.
    Agent,
    /// Entries of the agent in array slots that other entries refer to: each is copied to the same slot.
    Slots,
    /// Entries that programs rebuild.
    Cache,
    /// Nothing worth keeping.
    Unwanted,
}

impl Contents {
    /// Whether programs write entries that are carried over.
    pub(super) fn is_of_programs(self) -> bool {
        matches!(self, Self::Conntrack | Self::Programs)
    }
}

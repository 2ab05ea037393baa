//! The sizes of the service maps.

use health_common::service::socket::SOCKET_ENTRIES;
use health_common::service::{
    DEFAULT_AFFINITY, DEFAULT_BACKENDS, DEFAULT_FRONTENDS, DEFAULT_MAGLEV, DEFAULT_SLOTS,
    DEFAULT_SOURCE_RANGES, REVNAT_ANY_ENTRIES, REVNAT_ENTRIES,
};

use crate::layout::{self, MapLayout};

/// Maximum number of entries of each service map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServiceMapSizes {
    /// Size of `HEALTH_SVC4` and `HEALTH_SVC6`, each.
    pub frontends: u32,
    /// Size of `HEALTH_BACKENDS`, whose first entry is unused.
    pub backends: u32,
    /// Size of `HEALTH_SLOTS`.
    pub slots: u32,
    /// Size of `HEALTH_MAGLEV`.
    pub maglev: u32,
    /// Size of `HEALTH_SOURCE_RANGES`.
    pub source_ranges: u32,
    /// Size of `HEALTH_AFFINITY`.
    pub affinity: u32,
    /// Size of `HEALTH_REVNAT4` and `HEALTH_REVNAT6`, each.
    pub flows: u32,
    /// Size of `HEALTH_REVNAT_ANY4` and `HEALTH_REVNAT_ANY6`, each.
    pub flows_any: u32,
    /// Size of `HEALTH_SOCKETS`.
    pub sockets: u32,
}

impl Default for ServiceMapSizes {
    fn default() -> Self {
        Self {
            frontends: DEFAULT_FRONTENDS,
            backends: DEFAULT_BACKENDS,
            slots: DEFAULT_SLOTS,
            maglev: DEFAULT_MAGLEV,
            source_ranges: DEFAULT_SOURCE_RANGES,
            affinity: DEFAULT_AFFINITY,
            flows: REVNAT_ENTRIES,
            flows_any: REVNAT_ANY_ENTRIES,
            sockets: SOCKET_ENTRIES,
        }
    }
}

impl ServiceMapSizes {
    /// Sizes if services are off.
    pub(super) const NONE: Self = Self {
        frontends: 1,
        backends: 1,
        slots: 1,
        maglev: 1,
        source_ranges: 1,
        affinity: 1,
        flows: 1,
        flows_any: 1,
        sockets: 1,
    };

    /// Each map with its size.
    pub(super) fn all(self) -> impl Iterator<Item = (MapLayout, u32)> {
        let all = [
            (layout::SVC4, self.frontends),
            (layout::SVC6, self.frontends),
            (layout::BACKENDS, self.backends),
            (layout::SLOTS, self.slots),
            (layout::MAGLEV, self.maglev),
            (layout::SOURCE_RANGES, self.source_ranges),
            (layout::AFFINITY, self.affinity),
            (layout::REVNAT4, self.flows),
            (layout::REVNAT6, self.flows),
            (layout::REVNAT_ANY4, self.flows_any),
            (layout::REVNAT_ANY6, self.flows_any),
            (layout::SOCKETS, self.sockets),
        ];
        all.into_iter()
    }
}

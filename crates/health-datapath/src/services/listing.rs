//! Lists the contents of the service maps.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::SocketAddr;

use health_common::service::{
    ALGORITHM_MAGLEV, Backend, FRONTEND_WEIGHTED, Frontend, Origin, Pool,
};
use ipnet::IpNet;

use super::free::{Extent, Store};
use super::keys::{FrontendKey, read_source_range, socket_addr};
use super::lookup::reading;
use super::pool::Range;
use super::snapshot::Snapshot;
use super::{ServiceMaps, ServicesError};
use crate::layout;

/// A frontend with its backends.
#[derive(Clone, Debug, PartialEq)]
pub struct ListedFrontend {
    /// The address.
    pub address: SocketAddr,
    /// IP protocol number.
    pub protocol: u8,
    /// The frontend's entry.
    pub entry: Frontend,
    /// The backends of flows from this node and its endpoints.
    pub inside: Vec<ListedBackend>,
    /// The backends of all other flows.
    pub outside: Vec<ListedBackend>,
}

impl ListedFrontend {
    /// The backends for flows from that origin.
    pub fn pool(&self, origin: Origin) -> &[ListedBackend] {
        origin.pick(&self.inside, &self.outside)
    }
}

/// A backend of a pool.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ListedBackend {
    /// Its index in `HEALTH_BACKENDS`.
    pub index: u32,
    /// The backend's entry; all zero if it does not exist.
    pub entry: Backend,
    /// Its share of new flows, from 0 to 1.
    pub share: f64,
}

impl ListedBackend {
    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        socket_addr((self.entry.addr, self.entry.port_be))
    }
}

/// The slots and backends that pools refer to, read within a short time of each other.
struct Arrays {
    slots: Snapshot,
    backends: BTreeMap<u32, Backend>,
}

impl ServiceMaps {
    /// Returns all frontends in order, each with its backends. Anything that changes during the listing is shown as it
    /// was at some moment.
    pub fn list(&self) -> Result<Vec<ListedFrontend>, ServicesError> {
        // Reads frontends first: pools and backends remain for seconds after the last frontend has stopped using them.
        let mut frontends = BTreeMap::new();
        self.for_each_frontend(|key, frontend| {
            frontends.insert(key, frontend);
        })?;
        let arrays = Arrays {
            slots: Snapshot::read(self, frontends.values().flat_map(extents))?,
            backends: self.backends()?,
        };
        let listed = frontends.into_iter().map(|(key, entry)| ListedFrontend {
            address: key.address(),
            protocol: key.protocol,
            entry,
            inside: arrays.pool(&entry, entry.inside),
            outside: arrays.pool(&entry, entry.outside),
        });
        Ok(listed.collect())
    }

    /// All backends, by index.
    pub fn backends(&self) -> Result<BTreeMap<u32, Backend>, ServicesError> {
        let mut backends = BTreeMap::new();
        let read = self.backends.for_each(|index, backend| {
            if backend.service != 0 {
                backends.insert(index, backend);
            }
        });
        read.map_err(|source| ServicesError::kernel("read", layout::BACKENDS.name, source))?;
        Ok(backends)
    }

    /// The source ranges of restricted ports, by number.
    pub fn source_ranges(&self) -> Result<BTreeMap<u32, Vec<IpNet>>, ServicesError> {
        let entries = self.source_ranges.entries();
        let entries = entries
            .map_err(|source| ServicesError::kernel("read", layout::SOURCE_RANGES.name, source))?;
        let mut ranges: BTreeMap<u32, Vec<IpNet>> = BTreeMap::new();
        for (number, sources) in entries.iter().filter_map(|(key, _)| read_source_range(key)) {
            ranges.entry(number).or_default().push(sources);
        }
        ranges.values_mut().for_each(|nets| nets.sort_unstable());
        Ok(ranges)
    }

    /// Returns one address and protocol per port, by number: its ClusterIP, if it has one.
    pub fn addresses(&self) -> Result<HashMap<u32, (SocketAddr, u8)>, ServicesError> {
        let mut first: HashMap<u32, (u8, FrontendKey)> = HashMap::new();
        self.for_each_frontend(|key, frontend| {
            let order = (frontend.kind, key);
            let known = first.entry(frontend.service).or_insert(order);
            *known = order.min(*known);
        })?;
        let first = first.into_iter();
        Ok(first
            .map(|(number, (_, key))| (number, (key.address(), key.protocol)))
            .collect())
    }

    /// The frontend at an address, with its backends.
    pub fn find(
        &self,
        address: SocketAddr,
        protocol: u8,
    ) -> Result<Option<ListedFrontend>, ServicesError> {
        let Some(entry) = self.frontend(FrontendKey::new(address, protocol))? else {
            return Ok(None);
        };
        let mut arrays = Arrays {
            slots: Snapshot::read(self, extents(&entry))?,
            backends: BTreeMap::new(),
        };
        // Most slots of a Maglev table repeat a backend.
        let pools = [entry.inside, entry.outside];
        let indexes = pools.iter().flat_map(|pool| arrays.indexes(&entry, *pool));
        let indexes: BTreeSet<u32> = indexes.copied().collect();
        for index in indexes {
            if let Some(backend) = reading(layout::BACKENDS.name, self.backends.get(&index))? {
                arrays.backends.insert(index, backend);
            }
        }
        Ok(Some(ListedFrontend {
            address,
            protocol,
            entry,
            inside: arrays.pool(&entry, entry.inside),
            outside: arrays.pool(&entry, entry.outside),
        }))
    }
}

/// Returns the ranges that hold a frontend's pools.
fn extents(frontend: &Frontend) -> impl Iterator<Item = Extent> {
    let pools = [frontend.inside, frontend.outside];
    let ranges = pools.map(|pool| Range::of_frontend(frontend, pool));
    ranges.into_iter().flatten().map(|range| range.extent)
}

/// Whether a frontend's pools have weights.
fn is_weighted(frontend: &Frontend) -> bool {
    frontend.flags & FRONTEND_WEIGHTED != 0
}

/// Whether a frontend's pools are Maglev tables.
fn has_table(frontend: &Frontend) -> bool {
    frontend.algorithm == ALGORITHM_MAGLEV
}

impl Arrays {
    /// Returns the backend indexes in a pool's slots.
    fn indexes(&self, frontend: &Frontend, pool: Pool) -> &[u32] {
        let values = match has_table(frontend) {
            true => self.slots.get(Store::Maglev, pool.at, pool.len),
            false => self.behind_counter(pool, 0),
        };
        values.unwrap_or_default()
    }

    /// Returns one part of a pool, with one value per backend. All parts follow the counter.
    fn behind_counter(&self, pool: Pool, part: u32) -> Option<&[u32]> {
        let at = pool.len.checked_mul(part)?.checked_add(1)?;
        self.slots
            .get(Store::Slots, pool.at.checked_add(at)?, pool.len)
    }

    /// Returns the backends of a pool in slot order; for a Maglev table, by index.
    fn pool(&self, frontend: &Frontend, pool: Pool) -> Vec<ListedBackend> {
        let indexes = self.indexes(frontend, pool);
        let even = 1.0 / f64::from(pool.len);
        if has_table(frontend) {
            let mut counts: BTreeMap<u32, f64> = BTreeMap::new();
            for index in indexes {
                *counts.entry(*index).or_default() += even;
            }
            let counts = counts.into_iter();
            return counts
                .map(|(index, share)| self.backend(index, share))
                .collect();
        }
        let mut shares = vec![even; indexes.len()];
        if is_weighted(frontend) {
            // The indexes are followed by thresholds, then aliases.
            let behind = |part| self.behind_counter(pool, part).unwrap_or_default();
            shares.fill(0.0);
            for (index, (threshold, alias)) in behind(1).iter().zip(behind(2)).enumerate() {
                let kept = f64::from(*threshold) / f64::from(u32::MAX);
                shares[index] += even * kept;
                if let Some(share) = shares.get_mut(*alias as usize) {
                    *share += even * (1.0 - kept);
                }
            }
        }
        let backends = indexes.iter().zip(shares);
        backends
            .map(|(index, share)| self.backend(*index, share))
            .collect()
    }

    fn backend(&self, index: u32, share: f64) -> ListedBackend {
        let entry = self.backends.get(&index);
        ListedBackend {
            index,
            entry: entry.copied().unwrap_or_default(),
            share,
        }
    }
}

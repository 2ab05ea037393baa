//! Lists the contents of the maps of services.

use std::collections::{BTreeMap, HashMap};
use std::net::SocketAddr;

use health_common::service::{
    ALGORITHM_MAGLEV, Backend, FRONTEND_WEIGHTED, Frontend, Origin, Pool,
};
use ipnet::IpNet;

use super::maps::values;
use super::place::{Place, read_source_range, socket_addr};
use super::{ServiceMaps, ServicesError};
use crate::layout;

/// A frontend with its backends.
#[derive(Clone, Debug, PartialEq)]
pub struct ListedFrontend {
    /// The address.
    pub address: SocketAddr,
    /// IP protocol number.
    pub protocol: u8,
    /// Its entry.
    pub entry: Frontend,
    /// The backends of flows from this node and its endpoints.
    pub inside: Vec<ListedBackend>,
    /// The backends of all other flows.
    pub outside: Vec<ListedBackend>,
}

impl ListedFrontend {
    /// The backends of flows from there.
    pub fn pool(&self, origin: Origin) -> &[ListedBackend] {
        match origin {
            Origin::Inside => &self.inside,
            Origin::Outside => &self.outside,
        }
    }
}

/// A backend of a pool.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ListedBackend {
    /// Its index in `HEALTH_BACKENDS`.
    pub index: u32,
    /// Its entry; all zero if none is there.
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

/// The contents of the arrays, read within a short time.
struct Arrays {
    backends: Vec<Backend>,
    slots: Vec<u32>,
    maglev: Vec<u32>,
}

impl ServiceMaps {
    /// All frontends in order, each with its backends. What changes during the listing is shown as it was at some moment.
    pub fn list(&self) -> Result<Vec<ListedFrontend>, ServicesError> {
        // First the frontends: pools and backends stay for seconds after no frontend refers to them any more.
        let mut frontends = BTreeMap::new();
        self.for_each_frontend(|place, frontend| {
            frontends.insert(place, frontend);
        })?;
        let arrays = self.arrays()?;
        let listed = frontends.into_iter().map(|(place, entry)| ListedFrontend {
            address: place.address(),
            protocol: place.protocol,
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

    /// One address and protocol of each port, by number: its ClusterIP, if it has one.
    pub fn addresses(&self) -> Result<HashMap<u32, (SocketAddr, u8)>, ServicesError> {
        let mut first: HashMap<u32, (u8, Place)> = HashMap::new();
        self.for_each_frontend(|place, frontend| {
            let order = (frontend.kind, place);
            let known = first.entry(frontend.service).or_insert(order);
            *known = order.min(*known);
        })?;
        let first = first.into_iter();
        Ok(first
            .map(|(number, (_, place))| (number, (place.address(), place.protocol)))
            .collect())
    }

    /// The frontend at an address, with where it leads.
    pub fn find(
        &self,
        address: SocketAddr,
        protocol: u8,
    ) -> Result<Option<ListedFrontend>, ServicesError> {
        let Some(entry) = self.frontend(Place::new(address, protocol))? else {
            return Ok(None);
        };
        let arrays = self.arrays()?;
        Ok(Some(ListedFrontend {
            address,
            protocol,
            entry,
            inside: arrays.pool(&entry, entry.inside),
            outside: arrays.pool(&entry, entry.outside),
        }))
    }

    fn arrays(&self) -> Result<Arrays, ServicesError> {
        let reading = |map| move |source| ServicesError::kernel("read", map, source);
        Ok(Arrays {
            slots: values(&self.slots).map_err(reading(layout::SLOTS.name))?,
            maglev: values(&self.maglev).map_err(reading(layout::MAGLEV.name))?,
            backends: values(&self.backends).map_err(reading(layout::BACKENDS.name))?,
        })
    }
}

impl Arrays {
    /// The backends of a pool in the order of its slots; those of a Maglev table by index.
    fn pool(&self, frontend: &Frontend, pool: Pool) -> Vec<ListedBackend> {
        let (at, len) = (pool.at as usize, pool.len as usize);
        let slots = |part: usize| {
            let first = at + 1 + part * len;
            self.slots.get(first..first + len).unwrap_or_default()
        };
        let even = 1.0 / f64::from(pool.len);
        if frontend.algorithm == ALGORITHM_MAGLEV {
            let places = self.maglev.get(at..at + len).unwrap_or_default();
            let mut counts: BTreeMap<u32, f64> = BTreeMap::new();
            for index in places {
                *counts.entry(*index).or_default() += even;
            }
            let counts = counts.into_iter();
            return counts
                .map(|(index, share)| self.backend(index, share))
                .collect();
        }
        let mut shares = vec![even; slots(0).len()];
        if frontend.flags & FRONTEND_WEIGHTED != 0 {
            shares.fill(0.0);
            for (index, (threshold, alias)) in slots(1).iter().zip(slots(2)).enumerate() {
                let kept = f64::from(*threshold) / f64::from(u32::MAX);
                shares[index] += even * kept;
                if let Some(share) = shares.get_mut(*alias as usize) {
                    *share += even * (1.0 - kept);
                }
            }
        }
        let backends = slots(0).iter().zip(shares);
        backends
            .map(|(index, share)| self.backend(*index, share))
            .collect()
    }

    fn backend(&self, index: u32, share: f64) -> ListedBackend {
        let entry = self.backends.get(index as usize);
        ListedBackend {
            index,
            entry: entry.copied().unwrap_or_default(),
            share,
        }
    }
}

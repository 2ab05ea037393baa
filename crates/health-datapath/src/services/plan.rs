//! Plans which entries the maps must hold for one port, and in which slots.

use std::collections::{BTreeMap, BTreeSet};

use health_common::service::{
    ALGORITHM_ROUND_ROBIN, BACKEND_LINGERS, Backend, FRONTEND_DIRECT, FRONTEND_DROPS_INSIDE,
    FRONTEND_DROPS_OUTSIDE, FRONTEND_HOST_ONLY, FRONTEND_KEEPS_SOURCE, FRONTEND_LOCAL_INSIDE,
    FRONTEND_LOCAL_OUTSIDE, FRONTEND_RESTRICTED, FRONTEND_WEIGHTED, Frontend, Pool, SourceRange,
};

use super::free::{Extent, Store};
use super::pool::{self, Contents, Range};
use super::shares::{Common, Entries};
use super::{
    BackendSpec, Change, FillMaglev, FrontendKey, FrontendSpec, Known, MaglevBackend, Port,
    PortSpec, ServicesError, Socket, Target, family, frontend_map, socket, source_range,
};
use crate::layout;
use crate::trie::Prefix;

/// The change of one port.
#[derive(Clone, Copy)]
struct PortChange<'a> {
    number: u32,
    former: &'a Port,
    spec: &'a PortSpec,
}

/// The future entries of a port, and the entries that must be written for them.
#[derive(Default)]
pub(super) struct Plan {
    pub(super) port: Port,
    pub(super) frontends: Vec<(FrontendKey, Frontend)>,
    pub(super) backends: Vec<(u32, Backend)>,
    pub(super) backends_gone: Vec<u32>,
    pub(super) slots: Vec<(u32, u32)>,
    pub(super) maglev: Vec<(u32, u32)>,
    pub(super) retired: Vec<Extent>,
    /// Whether the port had exactly one pool and keeps exactly one.
    has_one_pool: bool,
    /// Pools whose slots must be filled.
    pub(super) fills: Vec<(Extent, Contents)>,
    /// Values for the counters in the first slots of these pools, where pools have counters.
    pub(super) counters: Vec<(u32, u32)>,
}

impl Plan {
    /// Computes the contents of the pools' slots.
    fn fill(&mut self, maglev: &mut dyn FillMaglev) {
        self.slots.append(&mut self.counters);
        for (extent, contents) in std::mem::take(&mut self.fills) {
            let slots = contents.slots(maglev);
            match extent.store {
                Store::Maglev => self.maglev.extend((extent.at..).zip(slots)),
                _ => self.slots.extend((extent.at + 1..).zip(slots)),
            }
        }
    }

    /// Retires the former pools that the port no longer has.
    fn retire(&mut self, former: &Port) {
        let is_kept = |range: &&Range| {
            let mut kept = self.port.ranges.iter();
            kept.any(|kept| kept.extent == range.extent)
        };
        let retired = former.ranges.iter().filter(|range| !is_kept(range));
        self.retired = retired.map(|range| range.extent).collect();
    }
}

impl Change<'_> {
    pub(super) fn plan(
        &mut self,
        number: u32,
        former: &Port,
        spec: &PortSpec,
        maglev: &mut dyn FillMaglev,
    ) -> Result<Plan, ServicesError> {
        let mut allocated = Vec::new();
        let change = PortChange {
            number,
            former,
            spec,
        };
        let plan = self.try_plan(change, maglev, &mut allocated);
        if plan.is_err() {
            for extent in allocated {
                self.tables.arrays.release(extent);
            }
        }
        plan
    }

    /// Plans a change. Adds each allocated extent to `allocated`, even if an error follows.
    fn try_plan(
        &mut self,
        change: PortChange<'_>,
        maglev: &mut dyn FillMaglev,
        allocated: &mut Vec<Extent>,
    ) -> Result<Plan, ServicesError> {
        let PortChange { former, spec, .. } = change;
        let keys = self.keys(change)?;
        let source_ranges = self.source_ranges(change)?;

        let backends = self.backends(change, allocated)?;
        let gone = former
            .backends
            .iter()
            .filter(|backend| find(&backends, backend.at).is_none());
        let mut plan = Plan {
            backends: self.entries(change, &backends)?,
            backends_gone: gone.map(|backend| backend.index).collect(),
            port: Port {
                frontends: keys.keys().copied().collect(),
                backends: backends.clone(),
                ranges: Vec::new(),
                source_ranges,
            },
            ..Plan::default()
        };

        let lists = [
            (Target::Cluster, &spec.cluster),
            (Target::Local, &spec.local),
        ]
        .map(|(target, list)| match is_used(target, &keys) {
            true => members(list, &backends),
            false => Vec::new(),
        });
        let is_weighted = spec.algorithm != health_common::service::ALGORITHM_MAGLEV
            && !lists.iter().all(|list| pool::are_equal(list));
        let [cluster, local] = lists.map(|members| {
            let contents = Contents::new(members, spec.algorithm, is_weighted, maglev.size());
            (!contents.members.is_empty()).then_some(contents)
        });
        plan.has_one_pool = cluster.is_some() != local.is_some() && former.ranges.len() == 1;
        let cluster = self.pool(cluster, change, &mut plan, maglev, allocated)?;
        let local = self.pool(local, change, &mut plan, maglev, allocated)?;
        self.admit(change, &plan.port, maglev.size())?;
        plan.fill(maglev);
        plan.retire(former);

        let value = |frontend: &FrontendSpec| Frontend {
            inside: pool_of(frontend.inside, cluster, local),
            outside: pool_of(frontend.outside, cluster, local),
            service: change.number,
            affinity_secs: spec.affinity_secs,
            flags: flags(frontend, is_weighted),
            algorithm: spec.algorithm,
            kind: frontend.kind,
            pad: 0,
        };
        plan.frontends = keys
            .iter()
            .map(|(key, frontend)| (*key, value(frontend)))
            .collect();
        Ok(plan)
    }

    /// Returns the frontends of a port, sorted by key. Fails if they do not fit.
    fn keys<'s>(
        &self,
        change: PortChange<'s>,
    ) -> Result<BTreeMap<FrontendKey, &'s FrontendSpec>, ServicesError> {
        let PortChange {
            number,
            former,
            spec,
        } = change;
        let mut keys = BTreeMap::new();
        for frontend in &spec.frontends {
            let key = FrontendKey::new(frontend.address, spec.protocol);
            keys.entry(key).or_insert(frontend);
        }
        let tables = &*self.tables;
        for of_family in [0, 1] {
            let is_ours = |key: &&FrontendKey| family(key) == of_family;
            let new = keys.keys().filter(is_ours);
            let new = new
                .filter(|key| !tables.frontends.contains_key(key))
                .count() as u32;
            let gone = former.frontends.iter().filter(is_ours);
            let gone = gone.filter(|key| !keys.contains_key(key));
            let gone = gone.filter(|key| tables.owns(number, key)).count() as u32;
            let (used, size) = (
                tables.frontend_counts[of_family],
                tables.sizes.frontends[of_family],
            );
            if new > 0 && used - gone + new > size {
                return Err(ServicesError::Full {
                    map: frontend_map(of_family),
                    wanted: new,
                    used: used - gone,
                    size,
                    longest: size - (used - gone).min(size),
                });
            }
        }
        Ok(keys)
    }

    /// Returns the source ranges of a port, sorted. Fails if they do not fit.
    fn source_ranges(
        &self,
        change: PortChange<'_>,
    ) -> Result<Vec<Prefix<SourceRange>>, ServicesError> {
        let PortChange {
            number,
            former,
            spec,
        } = change;
        let ranges = spec.source_ranges.iter();
        let ranges: BTreeSet<_> = ranges.map(|net| source_range(number, *net)).collect();
        let (size, count) = (
            self.tables.sizes.source_ranges,
            self.tables.source_range_count,
        );
        let used = count - former.source_ranges.len() as u32;
        let wanted = ranges.len() as u32;
        if wanted > 0 && used + wanted > size {
            return Err(ServicesError::Full {
                map: layout::SOURCE_RANGES.name,
                wanted,
                used,
                size,
                longest: size - used.min(size),
            });
        }
        Ok(ranges.into_iter().collect())
    }

    /// Returns the backends of a port, sorted. Allocates indexes for new ones.
    fn backends(
        &mut self,
        change: PortChange<'_>,
        allocated: &mut Vec<Extent>,
    ) -> Result<Vec<Known>, ServicesError> {
        let PortChange { former, spec, .. } = change;
        let lingering = spec.lingering.iter().map(|address| socket(*address));
        let lingering = lingering.filter(|at| find(&former.backends, *at).is_some());
        let mut wanted: BTreeMap<Socket, bool> = lingering.map(|at| (at, true)).collect();
        let used = spec.cluster.iter().chain(&spec.local);
        wanted.extend(used.map(|backend| (socket(backend.address), false)));
        let is_new = |at: &&Socket| find(&former.backends, **at).is_none();
        let new = wanted.keys().filter(is_new).count() as u32;
        let mut backends = Vec::with_capacity(wanted.len());
        for (at, lingers) in wanted {
            let index = match find(&former.backends, at) {
                Some(known) => known.index,
                None => self.new_index(new, allocated)?,
            };
            backends.push(Known { at, index, lingers });
        }
        Ok(backends)
    }

    /// Allocates an index for one of `new` backends.
    fn new_index(&mut self, new: u32, allocated: &mut Vec<Extent>) -> Result<u32, ServicesError> {
        let arrays = &mut self.tables.arrays;
        let extent = arrays.allocate(Store::Backends, 1, self.now_ns);
        let extent = extent.map_err(|error| match error {
            ServicesError::Full { .. } => {
                allocated
                    .drain(..)
                    .for_each(|extent| arrays.release(extent));
                arrays.full(Store::Backends, new)
            }
            other => other,
        })?;
        allocated.push(extent);
        Ok(extent.at)
    }

    /// Returns the backend entries that must be written. A backend whose flag alone changes keeps its flow count.
    fn entries(
        &self,
        change: PortChange<'_>,
        backends: &[Known],
    ) -> Result<Vec<(u32, Backend)>, ServicesError> {
        let mut entries = Vec::new();
        for backend in backends {
            let known = find(&change.former.backends, backend.at);
            if known == Some(backend) {
                continue;
            }
            let map = &self.tables.maps.backends;
            let entry = known.map(|known| map.get(&known.index)).transpose();
            let entry = entry
                .map_err(|source| ServicesError::kernel("read", layout::BACKENDS.name, source))?;
            let (addr, port_be) = backend.at;
            let entry = Backend {
                addr,
                service: change.number,
                port_be,
                flags: if backend.lingers { BACKEND_LINGERS } else { 0 },
                flows: entry.flatten().map_or(0, |entry| entry.flows),
                pad: 0,
            };
            entries.push((backend.index, entry));
        }
        Ok(entries)
    }

    /// Fails if the port's owner would exceed its share.
    fn admit(
        &self,
        change: PortChange<'_>,
        port: &Port,
        maglev_size: u32,
    ) -> Result<(), ServicesError> {
        let PortChange {
            number,
            former,
            spec,
        } = change;
        let tables = &*self.tables;
        let mut sizes = Entries::default();
        let [frontends4, frontends6] = tables.sizes.frontends;
        for (table, size) in [
            (Common::Frontends4, frontends4),
            (Common::Frontends6, frontends6),
            (Common::SourceRanges, tables.sizes.source_ranges),
            // The first slot is never used.
            (
                Common::Backends,
                tables.arrays.size(Store::Backends).saturating_sub(1),
            ),
            (Common::Slots, tables.arrays.size(Store::Slots)),
            (Common::Maglev, tables.arrays.size(Store::Maglev)),
        ] {
            *sizes.at(table) = size;
        }
        let (was, is) = (Entries::of_port(former), Entries::of_port(port));
        let shares = &tables.shares;
        shares.admit(number, &spec.owner, (&was, &is), &sizes, maglev_size)
    }

    /// Finds or allocates a pool with these contents. If no other pool fits, the port's only pool gets the new contents
    /// in place, provided that its length is the same: each slot refers to a backend of the port before and after the
    /// change.
    fn pool(
        &mut self,
        contents: Option<Contents>,
        change: PortChange<'_>,
        plan: &mut Plan,
        maglev: &mut dyn FillMaglev,
        allocated: &mut Vec<Extent>,
    ) -> Result<Pool, ServicesError> {
        let Some(contents) = contents else {
            return Ok(Pool::default());
        };
        let known = plan.port.ranges.iter().chain(&change.former.ranges);
        let snapshot = self.tables.snapshot.as_ref();
        let mut known = known.filter(|range| range.has(&contents, snapshot, maglev));
        if let Some(range) = known.next().map(|range| range.with(&contents)) {
            let pool = range.pool();
            plan.port.ranges.push(range);
            return Ok(pool);
        }
        let arrays = &mut self.tables.arrays;
        let extent = match arrays.allocate(contents.store, contents.size(), self.now_ns) {
            Ok(extent) => {
                allocated.push(extent);
                if contents.store == Store::Slots {
                    plan.counters.push((extent.at, self.counter(change)?));
                }
                extent
            }
            Err(error @ ServicesError::Full { .. }) => {
                let own = change.former.ranges.first().filter(|_| plan.has_one_pool);
                own.filter(|own| own.can_become(&contents))
                    .ok_or(error)?
                    .extent
            }
            Err(error) => return Err(error),
        };
        plan.fills.push((extent, contents.clone()));
        let range = contents.into_range(extent);
        let pool = range.pool();
        plan.port.ranges.push(range);
        Ok(pool)
    }

    /// Returns the round-robin counter of a port's former pool. The new pool continues this counter: counters that keep
    /// restarting at 0 would favour the first backend.
    fn counter(&self, change: PortChange<'_>) -> Result<u32, ServicesError> {
        let PortChange { former, spec, .. } = change;
        let mut ranges = former.ranges.iter();
        let range = ranges.find(|range| range.extent.store == Store::Slots);
        let Some(range) = range.filter(|_| spec.algorithm == ALGORITHM_ROUND_ROBIN) else {
            return Ok(0);
        };
        let counter = self.tables.maps.slots.get(&range.extent.at);
        let counter =
            counter.map_err(|source| ServicesError::kernel("read", layout::SLOTS.name, source))?;
        Ok(counter.unwrap_or_default())
    }
}

/// Finds a backend in a sorted list.
fn find(backends: &[Known], at: Socket) -> Option<&Known> {
    let found = backends.binary_search_by_key(&at, |backend| backend.at);
    Some(&backends[found.ok()?])
}

/// Whether any frontend sends flows to this target.
fn is_used(target: Target, keys: &BTreeMap<FrontendKey, &FrontendSpec>) -> bool {
    let mut frontends = keys.values();
    frontends.any(|frontend| frontend.inside == target || frontend.outside == target)
}

/// Returns the backends of a list, with their indexes.
fn members(list: &[BackendSpec], backends: &[Known]) -> Vec<MaglevBackend> {
    let member = |backend: &BackendSpec| {
        Some(MaglevBackend {
            index: find(backends, socket(backend.address))?.index,
            address: backend.address,
            weight: backend.weight.max(1),
        })
    };
    list.iter().filter_map(member).collect()
}

fn pool_of(target: Target, cluster: Pool, local: Pool) -> Pool {
    match target {
        Target::Cluster => cluster,
        Target::Local => local,
        Target::Drop | Target::Reject => Pool::default(),
    }
}

fn flags(frontend: &FrontendSpec, is_weighted: bool) -> u16 {
    let of_spec = FRONTEND_RESTRICTED | FRONTEND_KEEPS_SOURCE | FRONTEND_DIRECT;
    let mut flags = frontend.flags & of_spec;
    let drops_inside = frontend.inside == Target::Drop;
    let drops_outside = frontend.outside == Target::Drop;
    let is_loopback = frontend.address.ip().to_canonical().is_loopback();
    for (is_set, flag) in [
        (is_weighted, FRONTEND_WEIGHTED),
        (drops_inside, FRONTEND_DROPS_INSIDE),
        (drops_outside, FRONTEND_DROPS_OUTSIDE),
        (is_loopback, FRONTEND_HOST_ONLY),
        (frontend.inside == Target::Local, FRONTEND_LOCAL_INSIDE),
        (frontend.outside == Target::Local, FRONTEND_LOCAL_OUTSIDE),
    ] {
        flags |= if is_set { flag } else { 0 };
    }
    flags
}

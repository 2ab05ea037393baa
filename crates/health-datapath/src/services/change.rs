//! Changes of ports: planned one by one, written together.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use health_common::service::{
    ALGORITHM_ROUND_ROBIN, BACKEND_LINGERS, Backend, FRONTEND_DIRECT, FRONTEND_DROPS_INSIDE,
    FRONTEND_DROPS_OUTSIDE, FRONTEND_HOST_ONLY, FRONTEND_KEEPS_SOURCE, FRONTEND_LOCAL_INSIDE,
    FRONTEND_LOCAL_OUTSIDE, FRONTEND_RESTRICTED, FRONTEND_WEIGHTED, Frontend, Pool, SourceRange,
};

use super::free::{Extent, Store};
use super::pool::{self, Contents, Range};
use super::{
    BackendSpec, FillMaglev, FrontendKey, FrontendSpec, Known, MaglevBackend, Port, PortSpec,
    ServiceTables, ServicesError, Socket, Target, family, frontend_map, socket, source_range,
};
use crate::layout;
use crate::trie::Prefix;

/// How many entries a change wrote and removed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Written {
    /// Frontends that were written.
    pub frontends: usize,
    /// Frontends that were removed.
    pub frontends_removed: usize,
    /// Backends that were written.
    pub backends: usize,
    /// Backends that were removed.
    pub backends_removed: usize,
    /// Places of `HEALTH_SLOTS` and `HEALTH_MAGLEV` that were written.
    pub places: usize,
    /// Source ranges that were written or removed.
    pub source_ranges: usize,
}

/// A change of ports. If it is dropped, the maps stay as they are, and the tables must be
/// [read](ServiceTables::read) again.
#[derive(Debug)]
pub struct Change<'a> {
    pub(super) tables: &'a mut ServiceTables,
    pub(super) now_ns: u64,
    /// How many frontends of each family, and how many source ranges, were in the maps before.
    pub(super) before: ([u32; 2], u32),
    /// Ports that were set or kept, or whose change failed.
    pub(super) seen: HashSet<u32>,
    pub(super) backends: Vec<(u32, Backend)>,
    pub(super) slots: Vec<(u32, u32)>,
    pub(super) maglev: Vec<(u32, u32)>,
    pub(super) source_ranges: Vec<Prefix<SourceRange>>,
    pub(super) source_ranges_gone: Vec<Prefix<SourceRange>>,
    pub(super) frontends: BTreeMap<FrontendKey, Frontend>,
    /// Those of them that are not in the maps yet.
    pub(super) frontends_new: BTreeSet<FrontendKey>,
    pub(super) frontends_gone: BTreeSet<FrontendKey>,
    pub(super) backends_gone: Vec<u32>,
    pub(super) retired: Vec<Extent>,
}

/// The future entries of a port, and what must be written for them.
struct Plan {
    port: Port,
    frontends: Vec<(FrontendKey, Frontend)>,
    backends: Vec<(u32, Backend)>,
    backends_gone: Vec<u32>,
    slots: Vec<(u32, u32)>,
    maglev: Vec<(u32, u32)>,
    retired: Vec<Extent>,
}

impl<'a> Change<'a> {
    pub(super) fn new(tables: &'a mut ServiceTables, now_ns: u64) -> Self {
        let before = (tables.frontend_counts, tables.source_range_count);
        let is_current = std::mem::replace(&mut tables.is_current, false);
        debug_assert!(is_current, "tables that were not read");
        let backends_gone = std::mem::take(&mut tables.strays);
        Self {
            tables,
            now_ns,
            before,
            seen: HashSet::new(),
            backends: Vec::new(),
            slots: Vec::new(),
            maglev: Vec::new(),
            source_ranges: Vec::new(),
            source_ranges_gone: Vec::new(),
            frontends: BTreeMap::new(),
            frontends_new: BTreeSet::new(),
            frontends_gone: BTreeSet::new(),
            retired: backends_gone.iter().copied().map(Extent::backend).collect(),
            backends_gone,
        }
    }

    /// Sets the entries of a port. Returns its number: `known`, if an earlier call returned one, else the one that a former
    /// agent gave it, or a new one. After an error the port keeps what it had.
    pub fn set(
        &mut self,
        known: Option<u32>,
        spec: &PortSpec,
        maglev: &mut dyn FillMaglev,
    ) -> Result<u32, ServicesError> {
        let number = self.number(known, spec)?;
        self.seen.insert(number);
        let former = self.tables.ports.remove(&number).unwrap_or_default();
        match self.plan(number, &former, spec, maglev) {
            Ok(plan) => {
                self.tables.claimed.insert(number);
                self.take(number, former, plan);
                Ok(number)
            }
            Err(error) => {
                self.tables.ports.insert(number, former);
                Err(error)
            }
        }
    }

    /// Keeps the entries of a port.
    pub fn keep(&mut self, number: u32) {
        self.seen.insert(number);
    }

    /// Removes a port. Its number must not be used again.
    pub fn remove(&mut self, number: u32) {
        self.tables.claimed.remove(&number);
        let Some(port) = self.tables.ports.remove(&number) else {
            return;
        };
        for key in &port.frontends {
            self.remove_frontend(number, key);
        }
        for backend in port.backends {
            self.backends_gone.push(backend.index);
            self.retired.push(Extent::backend(backend.index));
        }
        self.retired
            .extend(port.ranges.iter().map(|range| range.extent));
        self.tables.source_range_count -= port.source_ranges.len() as u32;
        self.source_ranges_gone.extend(port.source_ranges);
    }

    /// Removes all ports that were neither set nor kept.
    pub fn remove_others(&mut self) {
        let ports = self.tables.ports.keys();
        let others = ports.filter(|number| !self.seen.contains(number));
        for number in others.copied().collect::<Vec<_>>() {
            self.remove(number);
        }
    }

    /// The number of a port: the known one, the one of a former agent, or a new one.
    fn number(&mut self, known: Option<u32>, spec: &PortSpec) -> Result<u32, ServicesError> {
        if let Some(known) = known {
            return Ok(known);
        }
        let tables = &mut *self.tables;
        let adopted = spec.frontends.iter().find_map(|frontend| {
            let key = FrontendKey::new(frontend.address, spec.protocol);
            let number = tables.frontends.get(&key)?.service;
            let is_free =
                number != 0 && !tables.claimed.contains(&number) && !self.seen.contains(&number);
            is_free.then_some(number)
        });
        if let Some(adopted) = adopted {
            return Ok(adopted);
        }
        let ServiceTables {
            numbers,
            ports,
            claimed,
            maps,
            ..
        } = tables;
        let is_taken = |number| ports.contains_key(&number) || claimed.contains(&number);
        let number = numbers.allocate(is_taken, || maps.named_numbers());
        number.map_err(|source| ServicesError::kernel("read", "the maps of services", source))
    }

    fn plan(
        &mut self,
        number: u32,
        former: &Port,
        spec: &PortSpec,
        maglev: &mut dyn FillMaglev,
    ) -> Result<Plan, ServicesError> {
        let mut allocated = Vec::new();
        let plan = self.try_plan(number, former, spec, maglev, &mut allocated);
        if plan.is_err() {
            for extent in allocated {
                self.tables.arrays.release(extent);
            }
        }
        plan
    }

    /// Adds each allocated extent to `allocated`, even if an error follows.
    fn try_plan(
        &mut self,
        number: u32,
        former: &Port,
        spec: &PortSpec,
        maglev: &mut dyn FillMaglev,
        allocated: &mut Vec<Extent>,
    ) -> Result<Plan, ServicesError> {
        let keys = self.keys(former, number, spec)?;
        let source_ranges = self.source_ranges(number, former, spec)?;

        let backends = self.backends(former, spec, allocated)?;
        let gone = former
            .backends
            .iter()
            .filter(|backend| find(&backends, backend.at).is_none());
        let mut plan = Plan {
            frontends: Vec::new(),
            backends: self.entries(number, former, &backends)?,
            backends_gone: gone.map(|backend| backend.index).collect(),
            slots: Vec::new(),
            maglev: Vec::new(),
            retired: Vec::new(),
            port: Port {
                frontends: keys.keys().copied().collect(),
                backends: backends.clone(),
                ranges: Vec::new(),
                source_ranges,
            },
        };

        let is_used = |target| {
            let mut keys = keys.iter();
            keys.any(|(_, frontend)| frontend.inside == target || frontend.outside == target)
        };
        let members = |target, list: &[BackendSpec]| -> Vec<MaglevBackend> {
            let list = list.iter().filter(|_| is_used(target));
            let member = |backend: &BackendSpec| {
                Some(MaglevBackend {
                    index: find(&backends, socket(backend.address))?.index,
                    address: backend.address,
                    weight: backend.weight.max(1),
                })
            };
            list.filter_map(member).collect()
        };
        let lists = [
            members(Target::Cluster, &spec.cluster),
            members(Target::Local, &spec.local),
        ];
        let is_weighted = spec.algorithm != health_common::service::ALGORITHM_MAGLEV
            && !lists.iter().all(|list| pool::are_equal(list));
        let [cluster, local] = lists.map(|members| {
            let contents = Contents::new(members, spec.algorithm, is_weighted, maglev.size());
            (!contents.members.is_empty()).then_some(contents)
        });
        let cluster = self.pool(cluster, former, &mut plan, spec, maglev, allocated)?;
        let local = self.pool(local, former, &mut plan, spec, maglev, allocated)?;
        let is_kept = |range: &&Range| {
            let mut kept = plan.port.ranges.iter();
            kept.any(|kept| kept.extent == range.extent)
        };
        let retired = former.ranges.iter().filter(|range| !is_kept(range));
        plan.retired = retired.map(|range| range.extent).collect();

        let value = |frontend: &FrontendSpec| Frontend {
            inside: pool_of(frontend.inside, cluster, local),
            outside: pool_of(frontend.outside, cluster, local),
            service: number,
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

    /// The frontends of a port, sorted by key. Fails if there is no room for them.
    fn keys<'s>(
        &self,
        former: &Port,
        number: u32,
        spec: &'s PortSpec,
    ) -> Result<BTreeMap<FrontendKey, &'s FrontendSpec>, ServicesError> {
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

    /// The source ranges of a port, sorted. Fails if there is no room for them.
    fn source_ranges(
        &self,
        number: u32,
        former: &Port,
        spec: &PortSpec,
    ) -> Result<Vec<Prefix<SourceRange>>, ServicesError> {
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

    /// The backends of a port, sorted. Allocates indexes for new ones.
    fn backends(
        &mut self,
        former: &Port,
        spec: &PortSpec,
        allocated: &mut Vec<Extent>,
    ) -> Result<Vec<Known>, ServicesError> {
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

    /// The entries of backends that must be written. A backend whose flag alone changes keeps its count of flows.
    fn entries(
        &self,
        number: u32,
        former: &Port,
        backends: &[Known],
    ) -> Result<Vec<(u32, Backend)>, ServicesError> {
        let mut entries = Vec::new();
        for backend in backends {
            let known = find(&former.backends, backend.at);
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
                service: number,
                port_be,
                flags: if backend.lingers { BACKEND_LINGERS } else { 0 },
                flows: entry.flatten().map_or(0, |entry| entry.flows),
                pad: 0,
            };
            entries.push((backend.index, entry));
        }
        Ok(entries)
    }

    /// A pool with these contents: one that the port has already, or a new one.
    fn pool(
        &mut self,
        contents: Option<Contents>,
        former: &Port,
        plan: &mut Plan,
        spec: &PortSpec,
        maglev: &mut dyn FillMaglev,
        allocated: &mut Vec<Extent>,
    ) -> Result<Pool, ServicesError> {
        let Some(contents) = contents else {
            return Ok(Pool::default());
        };
        let known = plan.port.ranges.iter().chain(&former.ranges);
        let snapshot = self.tables.snapshot.as_ref();
        let mut known = known.filter(|range| range.has(&contents, snapshot, maglev));
        if let Some(range) = known.next().map(|range| range.with(&contents)) {
            let pool = range.pool();
            plan.port.ranges.push(range);
            return Ok(pool);
        }
        let arrays = &mut self.tables.arrays;
        let extent = arrays.allocate(contents.store, contents.size(), self.now_ns)?;
        allocated.push(extent);
        let places = contents.places(maglev);
        match contents.store {
            Store::Maglev => plan.maglev.extend((extent.at..).zip(places)),
            _ => {
                let counter = self.counter(former, spec)?;
                plan.slots.push((extent.at, counter));
                plan.slots.extend((extent.at + 1..).zip(places));
            }
        }
        let range = contents.into_range(extent);
        let pool = range.pool();
        plan.port.ranges.push(range);
        Ok(pool)
    }

    /// The round-robin counter of a port's former pool. The new pool continues it: counters that start at 0 again and again
    /// would favour the first backend.
    fn counter(&self, former: &Port, spec: &PortSpec) -> Result<u32, ServicesError> {
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

    /// Adds a plan to the change.
    fn take(&mut self, number: u32, former: Port, plan: Plan) {
        let kept = &plan.port.source_ranges;
        let source_ranges = kept
            .iter()
            .filter(|range| !former.source_ranges.contains(range));
        self.source_ranges.extend(source_ranges.copied());
        let gone = former
            .source_ranges
            .iter()
            .filter(|range| !kept.contains(range));
        self.source_ranges_gone.extend(gone.copied());
        let count = &mut self.tables.source_range_count;
        *count = *count + kept.len() as u32 - former.source_ranges.len() as u32;

        self.backends.extend(plan.backends);
        self.slots.extend(plan.slots);
        self.maglev.extend(plan.maglev);
        for (key, frontend) in plan.frontends {
            self.write_frontend(key, frontend);
        }
        let kept: HashSet<_> = plan.port.frontends.iter().collect();
        for key in former.frontends.iter().filter(|key| !kept.contains(key)) {
            self.remove_frontend(number, key);
        }
        let backends = plan.backends_gone.iter().copied().map(Extent::backend);
        self.retired.extend(backends);
        self.retired.extend(plan.retired);
        self.backends_gone.extend(plan.backends_gone);
        self.tables.ports.insert(number, plan.port);
    }

    fn write_frontend(&mut self, key: FrontendKey, frontend: Frontend) {
        let tables = &mut *self.tables;
        let known = tables.frontends.insert(key, frontend);
        if known.is_none() {
            tables.frontend_counts[family(&key)] += 1;
            // Otherwise another port has just given it up.
            if !self.frontends_gone.remove(&key) {
                self.frontends_new.insert(key);
            }
        }
        if known != Some(frontend) {
            self.frontends.insert(key, frontend);
        }
    }

    /// Removes a frontend, unless another port owns its key by now.
    fn remove_frontend(&mut self, number: u32, key: &FrontendKey) {
        let tables = &mut *self.tables;
        if !tables.owns(number, key) {
            return;
        }
        tables.frontends.remove(key);
        tables.frontend_counts[family(key)] -= 1;
        self.frontends.remove(key);
        if !self.frontends_new.remove(key) {
            self.frontends_gone.insert(*key);
        }
    }
}

impl ServiceTables {
    /// Whether a port has a frontend at this key.
    fn owns(&self, number: u32, key: &FrontendKey) -> bool {
        let frontend = self.frontends.get(key);
        frontend.is_some_and(|frontend| frontend.service == number)
    }
}

/// Finds a backend in a sorted list.
fn find(backends: &[Known], at: Socket) -> Option<&Known> {
    let found = backends.binary_search_by_key(&at, |backend| backend.at);
    Some(&backends[found.ok()?])
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

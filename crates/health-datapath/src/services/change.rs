//! Changes of ports: planned one by one, written together.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use health_common::service::{ALGORITHM_RANDOM, Backend, Frontend, SourceRange};

use super::free::Extent;
use super::plan::Plan;
use super::shares::Entries;
use super::{FillMaglev, FrontendKey, Port, PortSpec, ServiceTables, ServicesError, family};
use crate::layout;
use crate::trie::Prefix;

/// The number of entries that a change wrote and removed.
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
    /// Slots of `HEALTH_SLOTS` and `HEALTH_MAGLEV` that were written.
    pub slots: usize,
    /// Source ranges that were written or removed.
    pub source_ranges: usize,
}

/// A change of ports. If it is dropped without being committed, the maps stay unchanged, and the tables must be
/// [read](ServiceTables::read) again.
#[derive(Debug)]
pub struct Change<'a> {
    pub(super) tables: &'a mut ServiceTables,
    pub(super) now_ns: u64,
    /// Number of frontends per family, and number of source ranges, in the maps before the change.
    pub(super) before: ([u32; 2], u32),
    /// Ports that were set or kept, or whose change failed.
    pub(super) seen: HashSet<u32>,
    /// Ports that were set without the Maglev tables that they want, with the reason.
    without_maglev: HashMap<u32, ServicesError>,
    pub(super) backends: Vec<(u32, Backend)>,
    pub(super) slots: Vec<(u32, u32)>,
    pub(super) maglev: Vec<(u32, u32)>,
    pub(super) source_ranges: Vec<Prefix<SourceRange>>,
    pub(super) source_ranges_gone: Vec<Prefix<SourceRange>>,
    pub(super) frontends: BTreeMap<FrontendKey, Frontend>,
    /// The frontends among them that are not in the maps yet.
    pub(super) frontends_new: BTreeSet<FrontendKey>,
    pub(super) frontends_gone: BTreeSet<FrontendKey>,
    pub(super) backends_gone: Vec<u32>,
    pub(super) retired: Vec<Extent>,
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
            without_maglev: HashMap::new(),
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

    /// Sets the entries of a port. Returns the port's number: `known`, if an earlier call returned one; otherwise the
    /// number from a former agent, or a new one. After an error the port keeps its former entries. If no Maglev table
    /// fits, the port chooses backends at random: [`Change::without_maglev`].
    pub fn set(
        &mut self,
        known: Option<u32>,
        spec: &PortSpec,
        maglev: &mut dyn FillMaglev,
    ) -> Result<u32, ServicesError> {
        let number = self.number(known, spec)?;
        self.seen.insert(number);
        let former = self.tables.ports.remove(&number).unwrap_or_default();
        let mut plan = self.plan(number, &former, spec, maglev);
        if let Err(error) = &plan
            && error.full_map() == Some(layout::MAGLEV.name)
        {
            let random = PortSpec {
                algorithm: ALGORITHM_RANDOM,
                ..spec.clone()
            };
            let instead = self.plan(number, &former, &random, maglev);
            if let Err(error) = std::mem::replace(&mut plan, instead) {
                self.without_maglev.insert(number, error);
            }
        }
        match plan {
            Ok(plan) => {
                let tables = &mut *self.tables;
                tables.claimed.insert(number);
                let (was, is) = (Entries::of_port(&former), Entries::of_port(&plan.port));
                tables.shares.set(number, &spec.owner, &was, &is);
                self.take(number, former, plan);
                Ok(number)
            }
            Err(error) => {
                self.tables.ports.insert(number, former);
                Err(error)
            }
        }
    }

    /// Why a port was last set without the Maglev tables that it wants; `None` if it has them.
    pub fn without_maglev(&mut self, number: u32) -> Option<ServicesError> {
        self.without_maglev.remove(&number)
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
        self.tables.shares.remove(number, &Entries::of_port(&port));
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

    /// Returns the number of a port: the known one, a former agent's, or a new one.
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
        number.map_err(|source| ServicesError::kernel("read", "the service maps", source))
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
            // Otherwise another port has just given the key up.
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
    /// Whether a port owns the frontend at this key.
    pub(super) fn owns(&self, number: u32, key: &FrontendKey) -> bool {
        let frontend = self.frontends.get(key);
        frontend.is_some_and(|frontend| frontend.service == number)
    }
}

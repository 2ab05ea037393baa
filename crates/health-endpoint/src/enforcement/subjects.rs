//! The tables of this node's endpoints. Endpoints with the same identity and settings share one, because the same policy
//! applies to them.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use health_datapath::policy::{PolicyError, PolicyMatch};
use health_model::identity::Identity;
use health_model::labels::LabelSet;
use health_model::policy::{Direction, PolicyMode};
use health_policy::{CompiledPolicy, PolicySettings, Repository};
use tracing::debug;

use super::backends::Tables;
use crate::regenerate::RealizedPolicy;

/// Everything that verdicts depend on.
#[derive(Clone)]
pub(super) struct Generation {
    /// Increases with each generation.
    pub(super) number: u64,
    pub(super) repository: Arc<Repository>,
    pub(super) settings: PolicySettings,
    pub(super) identities: Arc<BTreeMap<Identity, Arc<LabelSet>>>,
}

impl Generation {
    pub(super) fn is_same(&self, other: &Self) -> bool {
        self.repository.revision() == other.repository.revision()
            && self.settings == other.settings
            && Arc::ptr_eq(&self.identities, &other.identities)
    }

    fn compile(&self, subject: Subject, labels: &LabelSet) -> CompiledPolicy {
        let mut settings = settings_of(self.settings, subject.enforcement);
        if subject.fails_closed && settings.mode == PolicyMode::Default {
            // Perhaps no rule selects the subject now, although a rule would select its actual labels.
            settings.mode = PolicyMode::Always;
        }
        let resolved = self.repository.resolve(labels, settings);
        resolved.compile(&self.identities)
    }
}

/// Returns the policy settings of an endpoint, given those of the node.
pub(super) fn settings_of(node: PolicySettings, enforcement: PolicyMode) -> PolicySettings {
    match enforcement {
        PolicyMode::Default => node,
        mode => PolicySettings { mode, ..node },
    }
}

/// The owner of a table: all endpoints of one subject share it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Subject {
    pub(super) identity: Identity,
    /// Whether policy is enforced even if no rule selects the subject, because the labels of its identity are unknown.
    pub(super) fails_closed: bool,
    /// When policy is enforced for the endpoints.
    pub(super) enforcement: PolicyMode,
}

impl From<Identity> for Subject {
    fn from(identity: Identity) -> Self {
        Self {
            identity,
            fails_closed: false,
            enforcement: PolicyMode::Default,
        }
    }
}

/// The policy in force for an identity.
struct InForce {
    labels: LabelSet,
    /// `None` while the subject is closed, to make space for its next policy.
    policy: Option<Arc<CompiledPolicy>>,
    /// The latest generation for which the policy was compiled.
    generation: Generation,
    realized: RealizedPolicy,
    /// The policy of a later generation, until an endpoint is built with it.
    next: Option<(Generation, Arc<CompiledPolicy>)>,
}

impl InForce {
    /// Whether the policy is up to date with this generation, or a later one.
    fn is_of(&self, generation: &Generation) -> bool {
        self.generation.is_same(generation) || self.generation.number > generation.number
    }

    /// Returns the policy for these labels and this generation, if it is already prepared.
    fn prepared(&self, labels: &LabelSet, generation: &Generation) -> Option<Arc<CompiledPolicy>> {
        let (of, policy) = self.next.as_ref()?;
        (self.labels == *labels && of.is_same(generation)).then(|| policy.clone())
    }

    /// Prepares the policy of a generation if it differs from the current one.
    fn look_ahead(&mut self, subject: Subject, generation: &Generation) {
        let is_known = self.is_of(generation)
            || self
                .next
                .as_ref()
                .is_some_and(|(of, _)| of.is_same(generation));
        if is_known {
            return;
        }
        let policy = generation.compile(subject, &self.labels);
        if self.policy.as_deref() == Some(&policy) {
            (self.generation, self.next) = (generation.clone(), None);
        } else {
            self.next = Some((generation.clone(), Arc::new(policy)));
        }
    }
}

/// Why an endpoint still uses its old table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct BuildFailure {
    /// Number of the generation with which the endpoint was built.
    pub(super) generation: u64,
    /// Whether there was no space for its table.
    pub(super) lacks_room: bool,
    /// The reason, in words.
    pub(super) reason: String,
}

/// The endpoints that do not use their current tables yet.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Behind {
    /// Endpoints that must be built or are being built.
    pub(super) pending: BTreeSet<u16>,
    /// Endpoints whose build failed, and that will be rebuilt, and endpoints that cannot be deleted; each with the
    /// reason.
    pub(super) failed: BTreeMap<u16, String>,
    /// Endpoints that are being deleted. These are neither built nor waited for.
    pub(super) leaving: BTreeSet<u16>,
}

impl Behind {
    /// Whether there is no endpoint left to build, because the remaining ones cannot be deleted.
    pub(super) fn are_all_leaving(&self) -> bool {
        self.pending.is_empty() && self.failed.keys().all(|id| self.leaving.contains(id))
    }
}

/// The table in use by an endpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
struct NamedByEndpoint {
    /// `None` for an endpoint that was taken over and has not been built since.
    subject: Option<Subject>,
    table: u32,
    addresses: Vec<IpAddr>,
}

/// The tables, and the endpoints that use them.
pub(super) struct Subjects {
    tables: Box<dyn Tables>,
    last: u32,
    in_force: BTreeMap<Subject, InForce>,
    named: BTreeMap<u16, NamedByEndpoint>,
    /// The tables that endpoints will use once their current build is complete.
    planned: BTreeMap<u16, (Subject, u32)>,
    /// Endpoints whose last build failed.
    failures: BTreeMap<u16, BuildFailure>,
    /// Endpoints that are being deleted, with the reason if the deletion failed.
    leaving: BTreeMap<u16, Option<String>>,
}

impl Subjects {
    /// Takes over the tables that endpoints currently use (`named`).
    pub(super) fn new(
        tables: Box<dyn Tables>,
        named: impl IntoIterator<Item = (u16, u32)>,
    ) -> Self {
        let named = named.into_iter().map(|(id, table)| {
            let one = NamedByEndpoint {
                subject: None,
                table,
                addresses: Vec::new(),
            };
            (id, one)
        });
        Self {
            // Conntrack entries name the table that allowed them. With a random start, a number of an earlier agent is
            // unlikely to be reused.
            last: rand::random(),
            tables,
            in_force: BTreeMap::new(),
            named: named.collect(),
            planned: BTreeMap::new(),
            failures: BTreeMap::new(),
            leaving: BTreeMap::new(),
        }
    }

    /// Records which endpoints are being deleted now.
    pub(super) fn note_leaving(&mut self, leaving: BTreeMap<u16, Option<String>>) {
        self.leaving = leaving;
    }

    /// Plans the table for an endpoint with this subject and these labels. Writes the table if it differs from the
    /// existing one. Afterwards, even if this fails, the caller must either [settle](Self::settle) the plan or mark it
    /// as [failed](Self::fail).
    pub(super) fn plan(
        &mut self,
        id: u16,
        subject: Subject,
        labels: &LabelSet,
        generation: &Generation,
    ) -> Result<RealizedPolicy, PolicyError> {
        let known = self.in_force.get(&subject);
        let current = known.filter(|known| known.labels == *labels && known.is_of(generation));
        let realized = match current {
            Some(known) => known.realized,
            None => self.renew(subject, labels, generation)?,
        };
        self.planned.insert(id, (subject, realized.policy));
        Ok(realized)
    }

    /// Updates the policy of a subject to a generation.
    fn renew(
        &mut self,
        subject: Subject,
        labels: &LabelSet,
        generation: &Generation,
    ) -> Result<RealizedPolicy, PolicyError> {
        let known = self.in_force.get(&subject);
        let prepared = known.and_then(|known| known.prepared(labels, generation));
        let policy = prepared.unwrap_or_else(|| Arc::new(generation.compile(subject, labels)));
        let same = known.filter(|known| known.policy.as_ref() == Some(&policy));
        let realized = match same.map(|known| known.realized) {
            Some(realized) => realized,
            None => self.install(subject.identity, &policy)?,
        };
        let in_force = InForce {
            labels: labels.clone(),
            policy: Some(policy),
            generation: generation.clone(),
            realized,
            next: None,
        };
        self.in_force.insert(subject, in_force);
        Ok(realized)
    }

    fn install(
        &mut self,
        identity: Identity,
        policy: &CompiledPolicy,
    ) -> Result<RealizedPolicy, PolicyError> {
        let [ingress, egress] = [Direction::Ingress, Direction::Egress];
        let enforces = |direction| policy.direction(direction).is_enforced();
        let mut realized = RealizedPolicy {
            policy: 0,
            enforces_ingress: enforces(ingress),
            enforces_egress: enforces(egress),
        };
        if realized.enforces_ingress || realized.enforces_egress {
            let table = self.free_table();
            let entries = [ingress, egress].into_iter().flat_map(|direction| {
                let entries = policy.direction(direction).entries().iter();
                entries.map(move |(key, verdict)| {
                    let of_table = key.in_table(table, direction);
                    let what = PolicyMatch {
                        direction: of_table.direction,
                        identity: of_table.identity,
                        protocol: of_table.protocol,
                        port_be: of_table.port_be,
                        prefix_len: key.prefix_len,
                    };
                    (what, verdict.number())
                })
            });
            let entries: Vec<_> = entries.collect();
            match self.tables.install(table, identity.0, &entries) {
                Err(PolicyError::Full { .. }) => {
                    self.sweep()?;
                    self.tables.install(table, identity.0, &entries)?;
                }
                installed => installed?,
            }
            self.last = table;
            realized.policy = table;
        }
        Ok(realized)
    }

    /// Returns an unused table number. Numbers only repeat after wrapping around, so none is reused soon.
    fn free_table(&self) -> u32 {
        let taken = self.tables.numbers();
        let after = self.last.checked_add(1).unwrap_or(1);
        (after..=u32::MAX)
            .chain(1..after)
            .find(|table| !taken.contains(table))
            .unwrap_or(after)
    }

    /// Records that an endpoint uses its planned table. Returns the endpoint's former addresses.
    pub(super) fn settle(&mut self, id: u16, addresses: &[IpAddr]) -> Vec<IpAddr> {
        self.failures.remove(&id);
        let Some((subject, table)) = self.planned.remove(&id) else {
            return Vec::new();
        };
        let named = NamedByEndpoint {
            subject: Some(subject),
            table,
            addresses: addresses.to_vec(),
        };
        let former = self.named.insert(id, named);
        former.map(|former| former.addresses).unwrap_or_default()
    }

    /// Records that an endpoint keeps its old table.
    pub(super) fn fail(&mut self, id: u16, failure: BuildFailure) {
        self.planned.remove(&id);
        self.failures.insert(id, failure);
    }

    /// Records that an endpoint no longer exists. Returns its former addresses.
    pub(super) fn forget(&mut self, id: u16) -> Vec<IpAddr> {
        self.planned.remove(&id);
        self.failures.remove(&id);
        let former = self.named.remove(&id);
        former.map(|former| former.addresses).unwrap_or_default()
    }

    /// Returns the endpoints that do not use the tables of a generation, regardless of how earlier builds ended.
    /// Endpoints that were taken over and not built since are not included.
    pub(super) fn behind(&mut self, generation: &Generation) -> Behind {
        let behind = self.behind_tables(generation);
        let staying = behind
            .into_iter()
            .filter(|id| !self.leaving.contains_key(id));
        let has_failed = |id: &u16| {
            let failure = self.failures.get(id);
            failure.is_some_and(|failure| failure.generation >= generation.number)
        };
        let pending: BTreeSet<u16> = staying.filter(|id| !has_failed(id)).collect();
        let stuck = self.leaving.iter().filter_map(|(id, problem)| {
            let problem = problem.as_ref()?;
            Some((*id, format!("endpoint {id} cannot be deleted: {problem}")))
        });
        let failed = self.failures.iter();
        let failed =
            failed.filter(|(id, _)| !pending.contains(id) && !self.leaving.contains_key(id));
        let failed = failed.map(|(id, failure)| (*id, failure.reason.clone()));
        Behind {
            failed: failed.chain(stuck).collect(),
            pending,
            leaving: self.leaving.keys().copied().collect(),
        }
    }

    /// Whether all endpoints use the tables of a generation, even if later builds of them failed. Endpoints that are
    /// being deleted do not count.
    pub(super) fn name_their_tables(&mut self, generation: &Generation) -> bool {
        let behind = self.behind_tables(generation);
        behind.iter().all(|id| self.leaving.contains_key(id))
    }

    /// Returns the endpoints that use, or are about to use, tables other than those of this generation.
    fn behind_tables(&mut self, generation: &Generation) -> BTreeSet<u16> {
        for (subject, known) in &mut self.in_force {
            known.look_ahead(*subject, generation);
        }
        let is_behind = |(subject, table): (Subject, u32)| {
            let known = self.in_force.get(&subject);
            known.is_none_or(|known| known.next.is_some() || known.realized.policy != table)
        };
        let named = self.named.iter();
        let named = named.filter_map(|(id, named)| Some((*id, (named.subject?, named.table))));
        let planned = self.planned.iter().map(|(id, planned)| (*id, *planned));
        named
            .chain(planned)
            .filter(|(_, what)| is_behind(*what))
            .map(|(id, _)| id)
            .collect()
    }

    /// Returns the endpoints whose tables did not fit when they were built.
    pub(super) fn cramped(&self) -> BTreeSet<u16> {
        let failures = self.failures.iter();
        let cramped =
            failures.filter(|(id, failure)| failure.lacks_room && !self.leaving.contains_key(id));
        cramped.map(|(id, _)| *id).collect()
    }

    /// Marks these endpoints as not built yet.
    pub(super) fn retry(&mut self, ids: &BTreeSet<u16>) {
        self.failures.retain(|id, _| !ids.contains(id));
    }

    /// Returns a subject whose next table fits only if the tables that its endpoints use now are removed.
    pub(super) fn to_close(&self) -> Option<Subject> {
        let cramped = self.cramped();
        let fits = |(subject, known): &(&Subject, &InForce)| {
            let Some((_, next)) = &known.next else {
                return false;
            };
            let named = self.of_subject(**subject);
            let is_cramped = named.clone().any(|(id, _)| cramped.contains(&id));
            let tables = named.map(|(_, table)| table);
            let tables = tables.chain([known.realized.policy]).collect();
            is_cramped && self.tables.has_room(next.len(), &tables)
        };
        let fit = self.in_force.iter().find(fits);
        fit.map(|(subject, _)| *subject)
    }

    /// Drops all traffic of a subject, so that the tables of its endpoints can be removed. Returns the table that the
    /// endpoints must use until they are built, and the endpoints that still use another one; each of those must be
    /// [moved](Self::moved).
    pub(super) fn close(&mut self, subject: Subject) -> Result<(u32, BTreeSet<u16>), PolicyError> {
        let Some(known) = self.in_force.get(&subject) else {
            return Ok((0, BTreeSet::new()));
        };
        let closed = match known.policy {
            None => known.realized.policy,
            Some(_) => self.install_empty(subject.identity)?,
        };
        if let Some(known) = self.in_force.get_mut(&subject) {
            (known.policy, known.realized.policy) = (None, closed);
        }
        let others = self.of_subject(subject);
        let others = others.filter(|(_, table)| ![0, closed].contains(table));
        Ok((closed, others.map(|(id, _)| id).collect()))
    }

    /// Writes an empty table, which drops everything, for a single endpoint. The endpoint must then be
    /// [moved](Self::moved) to it. Returns `None` if the endpoint uses no table.
    pub(super) fn empty_table(&mut self, id: u16) -> Result<Option<u32>, PolicyError> {
        let Some(named) = self.named.get(&id) else {
            return Ok(None);
        };
        let subject = named.subject;
        let identity = subject.map_or(Identity::INIT, |subject| subject.identity);
        self.install_empty(identity).map(Some)
    }

    fn install_empty(&mut self, identity: Identity) -> Result<u32, PolicyError> {
        let table = self.free_table();
        self.tables.install(table, identity.0, &[])?;
        self.last = table;
        Ok(table)
    }

    /// Records that an endpoint uses this table.
    pub(super) fn moved(&mut self, id: u16, table: u32) {
        if let Some(named) = self.named.get_mut(&id) {
            named.table = table;
        }
    }

    /// Returns the endpoints of a subject and the tables that they use.
    fn of_subject(&self, subject: Subject) -> impl Iterator<Item = (u16, u32)> + Clone {
        let named = self.named.iter();
        let named = named.filter(move |(_, named)| named.subject == Some(subject));
        named.map(|(id, named)| (*id, named.table))
    }

    /// Whether any endpoint was taken over from the previous agent and still has to be built.
    pub(super) fn has_former(&self) -> bool {
        let mut named = self.named.iter();
        named.any(|(id, named)| named.subject.is_none() && !self.leaving.contains_key(id))
    }

    /// Returns the identity of each endpoint address.
    pub(super) fn addresses(&self) -> BTreeMap<IpAddr, Identity> {
        let known = self.named.values();
        known
            .filter_map(|named| Some((named.subject?.identity, &named.addresses)))
            .flat_map(|(identity, addresses)| addresses.iter().map(move |ip| (*ip, identity)))
            .collect()
    }

    /// Removes unused tables, and forgets identities that no endpoint has. Returns whether any table was removed.
    pub(super) fn sweep(&mut self) -> Result<bool, PolicyError> {
        let planned = self.planned.values().map(|(subject, _)| *subject);
        let subjects: BTreeSet<Subject> = self
            .named
            .values()
            .filter_map(|named| named.subject)
            .chain(planned)
            .collect();
        self.in_force
            .retain(|subject, _| subjects.contains(subject));
        let in_force = self.in_force.values().map(|known| known.realized.policy);
        let planned = self.planned.values().map(|(_, table)| *table);
        let used: BTreeSet<u32> = self
            .named
            .values()
            .map(|named| named.table)
            .chain(in_force)
            .chain(planned)
            .collect();
        let unused: Vec<u32> = self.tables.numbers().difference(&used).copied().collect();
        if !unused.is_empty() {
            debug!(tables = ?unused, "removing unused policy tables");
        }
        self.tables.remove(&unused)?;
        Ok(!unused.is_empty())
    }
}

#[cfg(test)]
mod tests;

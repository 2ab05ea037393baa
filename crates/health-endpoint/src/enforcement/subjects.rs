//! The tables of this node's endpoints. Endpoints of one identity share one: what holds for them is the same.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use health_datapath::policy::{PolicyError, PolicyMatch, PolicyTables};
use health_model::identity::Identity;
use health_model::labels::LabelSet;
use health_model::policy::Direction;
use health_policy::{CompiledPolicy, PolicySettings, Repository};
use tracing::debug;

use crate::regenerate::RealizedPolicy;

/// All that verdicts follow from.
#[derive(Clone)]
pub(super) struct Generation {
    /// Counts up.
    pub(super) number: u64,
    pub(super) repository: Arc<Repository>,
    pub(super) settings: PolicySettings,
    pub(super) identities: Arc<BTreeMap<Identity, Arc<LabelSet>>>,
}

impl Generation {
    pub(super) fn is_same(&self, other: &Self) -> bool {
        self.repository.revision() == other.repository.revision()
            && Arc::ptr_eq(&self.identities, &other.identities)
    }

    fn compile(&self, labels: &LabelSet) -> CompiledPolicy {
        let resolved = self.repository.resolve(labels, self.settings);
        resolved.compile(&self.identities)
    }
}

/// What holds for an identity.
struct InForce {
    labels: LabelSet,
    policy: CompiledPolicy,
    /// By what it was compiled last.
    generation: Generation,
    realized: RealizedPolicy,
    /// What it is by a later generation, until an endpoint is built by that.
    next: Option<(Generation, CompiledPolicy)>,
}

impl InForce {
    /// What is known already of the policy of these labels by a generation.
    fn take_next(&mut self, labels: &LabelSet, generation: &Generation) -> Option<CompiledPolicy> {
        let (of, policy) = self.next.take()?;
        (self.labels == *labels && of.is_same(generation)).then_some(policy)
    }
}

/// What an endpoint names.
#[derive(Clone, Debug, PartialEq, Eq)]
struct NamedByEndpoint {
    /// Not known of one that was taken over and not built since.
    identity: Option<Identity>,
    table: u32,
    addresses: Vec<IpAddr>,
}

/// The tables, and who names which.
pub(super) struct Subjects {
    tables: PolicyTables,
    last: u32,
    in_force: BTreeMap<Identity, InForce>,
    named: BTreeMap<u16, NamedByEndpoint>,
    /// What endpoints that are being built will name.
    planned: BTreeMap<u16, (Identity, u32)>,
}

impl Subjects {
    /// `named` are the tables that endpoints name by now.
    pub(super) fn new(tables: PolicyTables, named: impl IntoIterator<Item = (u16, u32)>) -> Self {
        let named = named.into_iter().map(|(id, table)| {
            let one = NamedByEndpoint {
                identity: None,
                table,
                addresses: Vec::new(),
            };
            (id, one)
        });
        Self {
            // Conntrack entries name the table that allowed them. A random start makes it unlikely that a number of
            // an earlier agent is used again.
            last: rand::random(),
            tables,
            in_force: BTreeMap::new(),
            named: named.collect(),
            planned: BTreeMap::new(),
        }
    }

    /// What an endpoint of this identity and these labels is to name. Its table is written, if it needs another than
    /// there is. To be [settled](Self::settle) or [abandoned](Self::abandon).
    pub(super) fn plan(
        &mut self,
        id: u16,
        identity: Identity,
        labels: &LabelSet,
        generation: &Generation,
    ) -> Result<RealizedPolicy, PolicyError> {
        let known = self.in_force.get_mut(&identity);
        let is_current = known
            .as_ref()
            .is_some_and(|known| known.labels == *labels && known.generation.is_same(generation));
        if !is_current {
            let (prepared, former) = match known {
                Some(known) => (known.take_next(labels, generation), Some(&*known)),
                None => (None, None),
            };
            let policy = prepared.unwrap_or_else(|| generation.compile(labels));
            let realized = match former {
                Some(former) if former.policy == policy => former.realized,
                _ => self.install(identity, &policy)?,
            };
            let in_force = InForce {
                labels: labels.clone(),
                policy,
                generation: generation.clone(),
                realized,
                next: None,
            };
            self.in_force.insert(identity, in_force);
        }
        let realized = self.in_force.get(&identity).map(|known| known.realized);
        let realized = realized.unwrap_or_default();
        self.planned.insert(id, (identity, realized.policy));
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
            self.tables.install(table, identity.0, entries)?;
            self.last = table;
            realized.policy = table;
        }
        Ok(realized)
    }

    /// A number that no table has. Numbers wrap around, so one is not reused soon.
    fn free_table(&self) -> u32 {
        let taken: BTreeSet<u32> = self.tables.tables().collect();
        let after = self.last.checked_add(1).unwrap_or(1);
        (after..=u32::MAX)
            .chain(1..after)
            .find(|table| !taken.contains(table))
            .unwrap_or(after)
    }

    /// An endpoint names what was planned. Returns the addresses that it had.
    pub(super) fn settle(&mut self, id: u16, addresses: &[IpAddr]) -> Vec<IpAddr> {
        let Some((identity, table)) = self.planned.remove(&id) else {
            return Vec::new();
        };
        let named = NamedByEndpoint {
            identity: Some(identity),
            table,
            addresses: addresses.to_vec(),
        };
        let former = self.named.insert(id, named);
        former.map(|former| former.addresses).unwrap_or_default()
    }

    /// An endpoint goes on naming what it named.
    pub(super) fn abandon(&mut self, id: u16) {
        self.planned.remove(&id);
    }

    /// An endpoint is no more. Returns the addresses that it had.
    pub(super) fn forget(&mut self, id: u16) -> Vec<IpAddr> {
        self.planned.remove(&id);
        let former = self.named.remove(&id);
        former.map(|former| former.addresses).unwrap_or_default()
    }

    /// The endpoints for which something else holds by this generation.
    pub(super) fn touched(&mut self, generation: &Generation) -> BTreeSet<u16> {
        let mut touched = BTreeSet::new();
        for (identity, known) in &mut self.in_force {
            if known.generation.is_same(generation) {
                continue;
            }
            let policy = generation.compile(&known.labels);
            if policy == known.policy {
                (known.generation, known.next) = (generation.clone(), None);
                continue;
            }
            known.next = Some((generation.clone(), policy));
            let of_identity = |named: &NamedByEndpoint| named.identity == Some(*identity);
            let ids = self.named.iter().filter(|(_, named)| of_identity(named));
            touched.extend(ids.map(|(id, _)| *id));
            let building = self.planned.iter();
            let building = building.filter(|(_, (planned, _))| planned == identity);
            touched.extend(building.map(|(id, _)| *id));
        }
        touched
    }

    /// Whether these endpoints, as far as they still exist, follow this generation.
    pub(super) fn follow(&self, ids: &BTreeSet<u16>, generation: &Generation) -> bool {
        ids.iter().filter_map(|id| self.named.get(id)).all(|named| {
            let known = named
                .identity
                .and_then(|identity| self.in_force.get(&identity));
            known.is_some_and(|known| {
                known.generation.number >= generation.number && known.realized.policy == named.table
            })
        })
    }

    /// Whether an endpoint was taken over from the agent before this one, and not built since.
    pub(super) fn has_former(&self) -> bool {
        self.named.values().any(|named| named.identity.is_none())
    }

    /// Whose each address of an endpoint is.
    pub(super) fn addresses(&self) -> BTreeMap<IpAddr, Identity> {
        let known = self.named.values();
        known
            .filter_map(|named| Some((named.identity?, &named.addresses)))
            .flat_map(|(identity, addresses)| addresses.iter().map(move |ip| (*ip, identity)))
            .collect()
    }

    /// Removes the tables that nobody names any more, and forgets the identities that no endpoint has.
    pub(super) fn sweep(&mut self) -> Result<(), PolicyError> {
        let planned = self.planned.values().map(|(identity, _)| *identity);
        let identities: BTreeSet<Identity> = self
            .named
            .values()
            .filter_map(|named| named.identity)
            .chain(planned)
            .collect();
        self.in_force
            .retain(|identity, _| identities.contains(identity));
        let in_force = self.in_force.values().map(|known| known.realized.policy);
        let planned = self.planned.values().map(|(_, table)| *table);
        let used: BTreeSet<u32> = self
            .named
            .values()
            .map(|named| named.table)
            .chain(in_force)
            .chain(planned)
            .collect();
        let unused: Vec<u32> = self
            .tables
            .tables()
            .filter(|table| !used.contains(table))
            .collect();
        if !unused.is_empty() {
            debug!(tables = ?unused, "removing tables that no endpoint names");
        }
        self.tables.remove(&unused)
    }
}

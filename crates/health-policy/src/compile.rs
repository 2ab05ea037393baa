//! Compiles a resolved policy to the fewest possible entries of `HEALTH_POLICY`. The result is deterministic.
//!
//! First finds each identity's verdicts for all protocols and ports. Where these equal the verdicts for any identity,
//! no entry is needed; the rest is covered with as few prefixes as possible.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use health_common::policy::{
    ANY_IDENTITY, POLICY_EGRESS, POLICY_INGRESS, PREFIX_ALL, PREFIX_PORT, PREFIX_PROTOCOL,
    PolicyKey,
};
use health_model::identity::Identity;
use health_model::labels::LabelSet;
use health_model::policy::{Direction, L4, Protocol};

use super::cover::{self, Cover, WantedRange};
use super::peer::Peer;
use super::resolve::{ResolvedDirection, ResolvedPolicy, Verdict};
use super::rule::{Action, Entry};
use crate::ports::{PortRange, Traffic};

/// The packets to which an entry applies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EntryKey {
    /// The peer; [`Identity::UNKNOWN`] means any peer that has no matching entry of its own.
    pub identity: Identity,
    /// Length of the prefix in bits of a [`PolicyKey`]: [`PREFIX_ALL`], or [`PREFIX_PROTOCOL`] to [`PREFIX_PORT`].
    pub prefix_len: u32,
    /// The protocol; 0 for an entry for all protocols.
    pub protocol: u8,
    /// The lowest port; 0 for an entry for all ports.
    pub port: u16,
}

impl EntryKey {
    /// Returns the key of this prefix length that matches the packet.
    fn matching(identity: Identity, l4: L4, prefix_len: u32) -> Self {
        let all_protocols = prefix_len < PREFIX_PROTOCOL;
        let free_bits = PREFIX_PORT - prefix_len.max(PREFIX_PROTOCOL);
        let mask = u16::MAX.checked_shl(free_bits).unwrap_or(0);
        Self {
            identity,
            prefix_len,
            protocol: if all_protocols { 0 } else { l4.protocol.0 },
            port: if all_protocols { 0 } else { l4.port & mask },
        }
    }

    /// Returns the key in `HEALTH_POLICY`, without its prefix length.
    pub fn in_table(self, table: u32, direction: Direction) -> PolicyKey {
        PolicyKey {
            table,
            direction: match direction {
                Direction::Ingress => POLICY_INGRESS,
                Direction::Egress => POLICY_EGRESS,
            },
            identity: self.identity.0,
            protocol: self.protocol,
            port_be: self.port.to_be(),
            ..PolicyKey::default()
        }
    }
}

/// Entries that give the same verdicts as a [`ResolvedPolicy`]. Equal policies have equal entries.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CompiledPolicy {
    ingress: CompiledDirection,
    egress: CompiledDirection,
}

/// The entries of one direction.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CompiledDirection {
    enforced: bool,
    entries: BTreeMap<EntryKey, Verdict>,
}

impl CompiledDirection {
    /// Whether packets must be looked up. If not, all packets pass and there are no entries.
    pub const fn is_enforced(&self) -> bool {
        self.enforced
    }

    /// Returns the entries in order.
    pub const fn entries(&self) -> &BTreeMap<EntryKey, Verdict> {
        &self.entries
    }

    /// Decides a packet as the kernel does: by the longest matching prefix of the peer's identity or, if there is none,
    /// of any identity.
    pub fn lookup(&self, identity: Identity, l4: L4) -> Verdict {
        if !self.enforced {
            return Verdict::Allow;
        }
        let lengths = || (PREFIX_PROTOCOL..=PREFIX_PORT).rev().chain([PREFIX_ALL]);
        [identity, Identity(ANY_IDENTITY)]
            .into_iter()
            .flat_map(|identity| {
                lengths().map(move |length| EntryKey::matching(identity, l4, length))
            })
            .find_map(|key| self.entries.get(&key).copied())
            .unwrap_or(Verdict::None)
    }
}

/// The difference between the entries of two policies.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PolicyDiff {
    /// Entries that are new or have another verdict.
    pub set: BTreeMap<(Direction, EntryKey), Verdict>,
    /// Removed entries.
    pub removed: BTreeSet<(Direction, EntryKey)>,
    /// Directions whose enforcement changed, with whether they are enforced now.
    pub enforced: BTreeMap<Direction, bool>,
}

impl PolicyDiff {
    /// Whether nothing changed.
    pub fn is_empty(&self) -> bool {
        self.set.is_empty() && self.removed.is_empty() && self.enforced.is_empty()
    }
}

impl CompiledPolicy {
    /// Returns the policy of one direction.
    pub const fn direction(&self, direction: Direction) -> &CompiledDirection {
        match direction {
            Direction::Ingress => &self.ingress,
            Direction::Egress => &self.egress,
        }
    }

    /// Returns the number of entries.
    pub fn len(&self) -> usize {
        self.ingress.entries.len() + self.egress.entries.len()
    }

    /// Whether there are no entries.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the changes since `old`.
    pub fn diff(&self, old: &Self) -> PolicyDiff {
        let mut diff = PolicyDiff::default();
        for direction in Direction::ALL {
            let (old, new) = (old.direction(direction), self.direction(direction));
            if old.enforced != new.enforced {
                diff.enforced.insert(direction, new.enforced);
            }
            let changed = new
                .entries
                .iter()
                .filter(|(key, verdict)| old.entries.get(key) != Some(verdict));
            diff.set
                .extend(changed.map(|(key, verdict)| ((direction, *key), *verdict)));
            let removed = old.entries.keys();
            let removed = removed.filter(|key| !new.entries.contains_key(key));
            diff.removed.extend(removed.map(|key| (direction, *key)));
        }
        diff
    }
}

impl ResolvedPolicy {
    /// Compiles the policy for these identities. Until the next compilation, peers with any other identity get the
    /// verdicts that apply to every peer.
    pub fn compile(&self, identities: &BTreeMap<Identity, Arc<LabelSet>>) -> CompiledPolicy {
        let peers: Vec<_> = identities
            .iter()
            .filter(|(identity, _)| **identity != Identity::UNKNOWN)
            .map(|(identity, labels)| Peer::new(*identity, labels))
            .collect();
        let compile = |direction| compile_direction(self.direction(direction), &peers);
        CompiledPolicy {
            ingress: compile(Direction::Ingress),
            egress: compile(Direction::Egress),
        }
    }
}

fn compile_direction(resolved: &ResolvedDirection, peers: &[Peer<'_>]) -> CompiledDirection {
    if !resolved.enforcement().is_on() {
        return CompiledDirection::default();
    }
    let compiler = Compiler {
        resolved,
        entries: resolved.entries().collect(),
    };
    let unknown = LabelSet::default();
    let any = compiler.verdicts(&compiler.matching(&Peer::new(Identity::UNKNOWN, &unknown)));
    let mut entries = BTreeMap::new();
    let mut set = |identity: Identity, found: &[CompiledEntry]| {
        entries.extend(
            found
                .iter()
                .map(|found| (found.of(identity), found.verdict)),
        );
    };
    set(Identity(ANY_IDENTITY), &any.cover(&Verdicts::default()));

    // The same entries match many identities.
    let mut known: HashMap<MatchingEntries, Vec<CompiledEntry>> = HashMap::new();
    for peer in peers {
        let found = known
            .entry(compiler.matching(peer))
            .or_insert_with_key(|matching| compiler.verdicts(matching).cover(&any));
        set(peer.identity(), found);
    }
    CompiledDirection {
        enforced: true,
        entries,
    }
}

struct Compiler<'a> {
    resolved: &'a ResolvedDirection,
    entries: Vec<&'a Entry>,
}

/// The inputs to a peer's verdicts.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct MatchingEntries {
    /// The matching entries of the rules, by index.
    entries: Vec<usize>,
    /// The ports that these entries name, as the destination numbers them, each with the index of its entry.
    named_ports: Vec<(usize, PortRange)>,
    /// Whether the peer is the local host.
    is_localhost: bool,
}

impl Compiler<'_> {
    fn matching(&self, peer: &Peer<'_>) -> MatchingEntries {
        let destination = self.resolved.destination(peer);
        let mut matching = MatchingEntries {
            entries: Vec::new(),
            named_ports: Vec::new(),
            is_localhost: self.resolved.allows_as_localhost(peer),
        };
        for (at, entry) in self.entries.iter().enumerate() {
            if entry.peers.contains(peer) {
                matching.entries.push(at);
                let named = entry.traffic.named().iter();
                let ports = named.flat_map(|port| port.resolve(destination));
                matching.named_ports.extend(ports.map(|port| (at, port)));
            }
        }
        matching
    }

    fn verdicts(&self, matching: &MatchingEntries) -> Verdicts {
        let mut rest = if matching.is_localhost || self.resolved.allows_by_default() {
            Verdict::Allow
        } else {
            Verdict::None
        };
        let mut ranges: BTreeMap<Protocol, Vec<(PortRange, Action)>> = BTreeMap::new();
        let mut add = |range: PortRange, action: Action| {
            let of_protocol = ranges.entry(range.protocol).or_default();
            of_protocol.push((range, action));
        };
        for &at in &matching.entries {
            let entry = self.entries[at];
            match (&entry.traffic, entry.action) {
                (Traffic::All, Action::Deny) => {
                    return Verdicts {
                        rest: Verdict::Deny,
                        protocols: BTreeMap::new(),
                    };
                }
                (Traffic::All, Action::Allow) => rest = Verdict::Allow,
                (Traffic::Ports(ports), action) => {
                    for range in &ports.ranges {
                        add(*range, action);
                    }
                }
            }
        }
        for (at, port) in &matching.named_ports {
            add(*port, self.entries[*at].action);
        }
        let protocols = ranges
            .into_iter()
            .map(|(protocol, ranges)| (protocol, steps(&ranges, rest)))
            .collect();
        Verdicts { rest, protocols }
    }
}

/// The verdicts on all traffic with a peer.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Verdicts {
    /// Verdict on the protocols that are not listed.
    rest: Verdict,
    /// Verdicts on each listed protocol: the first ports of ranges, starting at port 0, and the verdict on each range.
    protocols: BTreeMap<Protocol, Vec<(u16, Verdict)>>,
}

impl Default for Verdicts {
    /// Returns the verdicts on a peer without entries.
    fn default() -> Self {
        Self {
            rest: Verdict::None,
            protocols: BTreeMap::new(),
        }
    }
}

/// Flattens the ranges of a protocol, in order from port 0: denied where any range denies, else allowed where any range
/// allows, else `rest`.
fn steps(ranges: &[(PortRange, Action)], rest: Verdict) -> Vec<(u16, Verdict)> {
    // By how much the number of active ranges changes at each port, per action.
    let mut changes: BTreeMap<u32, [i32; 2]> = BTreeMap::from([(0, [0, 0])]);
    for (range, action) in ranges {
        let of_action = usize::from(*action == Action::Deny);
        changes.entry(range.first.into()).or_default()[of_action] += 1;
        changes.entry(u32::from(range.last) + 1).or_default()[of_action] -= 1;
    }
    let mut steps: Vec<(u16, Verdict)> = Vec::new();
    let (mut allowing, mut denying) = (0, 0);
    for (port, [allow, deny]) in changes {
        allowing += allow;
        denying += deny;
        let verdict = match (denying > 0, allowing > 0) {
            (true, _) => Verdict::Deny,
            (false, true) => Verdict::Allow,
            (false, false) => rest,
        };
        let is_new = steps.last().is_none_or(|(_, last)| *last != verdict);
        if let (Ok(port), true) = (u16::try_from(port), is_new) {
            steps.push((port, verdict));
        }
    }
    steps
}

impl Verdicts {
    /// Returns entries that give these verdicts, assuming that traffic without an entry gets the `default` verdicts.
    fn cover(&self, default: &Self) -> Vec<CompiledEntry> {
        let named: BTreeSet<Protocol> = self
            .protocols
            .keys()
            .chain(default.protocols.keys())
            .copied()
            .collect();
        let covers: Vec<_> = named
            .into_iter()
            .map(|protocol| (protocol, Cover::new(&self.wanted(protocol, default))))
            .collect();
        let others = WantedRange {
            first: 0,
            verdict: self.rest,
            is_default: self.rest == default.rest,
        };
        let for_all = cover::entry_for_all(others, covers.iter().map(|(_, cover)| cover));
        let mut found: Vec<CompiledEntry> = for_all
            .map(|verdict| CompiledEntry {
                protocol: 0,
                port: 0,
                prefix_len: PREFIX_ALL,
                verdict,
            })
            .into_iter()
            .collect();
        for (protocol, cover) in &covers {
            let prefixes = cover.prefixes(for_all).into_iter();
            found.extend(prefixes.map(|prefix| CompiledEntry {
                protocol: protocol.0,
                port: prefix.port,
                prefix_len: PREFIX_PROTOCOL + prefix.bits,
                verdict: prefix.verdict,
            }));
        }
        found
    }

    fn of_protocol(&self, protocol: Protocol) -> BTreeMap<u16, Verdict> {
        match self.protocols.get(&protocol) {
            Some(steps) => steps.iter().copied().collect(),
            None => BTreeMap::from([(0, self.rest)]),
        }
    }

    /// Returns the verdicts required on the ports of a protocol, assuming that ports without an entry get the `default`
    /// verdicts.
    fn wanted(&self, protocol: Protocol, default: &Self) -> Vec<WantedRange> {
        let (own, default) = (self.of_protocol(protocol), default.of_protocol(protocol));
        let at = |steps: &BTreeMap<u16, Verdict>, port: u16| {
            let step = steps.range(..=port).next_back();
            step.map_or(Verdict::None, |(_, verdict)| *verdict)
        };
        let ports: BTreeSet<u16> = own.keys().chain(default.keys()).copied().collect();
        let mut wanted: Vec<WantedRange> = Vec::with_capacity(ports.len());
        for first in ports {
            let verdict = at(&own, first);
            let is_default = verdict == at(&default, first);
            let is_new = wanted
                .last()
                .is_none_or(|last| (last.verdict, last.is_default) != (verdict, is_default));
            if is_new {
                wanted.push(WantedRange {
                    first,
                    verdict,
                    is_default,
                });
            }
        }
        wanted
    }
}

/// An entry, without its identity.
#[derive(Clone, Copy, Debug)]
struct CompiledEntry {
    protocol: u8,
    port: u16,
    prefix_len: u32,
    verdict: Verdict,
}

impl CompiledEntry {
    const fn of(&self, identity: Identity) -> EntryKey {
        EntryKey {
            identity,
            prefix_len: self.prefix_len,
            protocol: self.protocol,
            port: self.port,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{PolicySettings, Repository};

    fn compile(ingress: &str, others: &[&[&str]]) -> CompiledPolicy {
        let rules =
            format!(r#"[{{"labels": ["r"], "endpointSelector": {{}}, "ingress": {ingress}}}]"#);
        let mut repository = Repository::default();
        repository.import(&rules).unwrap();
        let set = |labels: &[&str]| {
            LabelSet::new(labels.iter().map(|label| label.parse().unwrap())).unwrap()
        };
        let identities = (300..)
            .zip(others)
            .map(|(number, labels)| (Identity(number), Arc::new(set(labels))))
            .collect();
        let subject = set(&["app=subject"]);
        let resolved = repository.resolve(&subject, PolicySettings::default());
        resolved.compile(&identities)
    }

    fn entries(policy: &CompiledPolicy) -> Vec<(u32, u32, u8, u16, Verdict)> {
        let entries = policy.direction(Direction::Ingress).entries().iter();
        entries
            .map(|(key, verdict)| {
                let EntryKey {
                    identity,
                    prefix_len,
                    protocol,
                    port,
                } = *key;
                (identity.0, prefix_len, protocol, port, *verdict)
            })
            .collect()
    }

    #[test]
    fn identities_that_get_what_all_get_have_no_entries() {
        let rules = r#"[
            {"toPorts": [{"ports": [{"port": "80", "protocol": "TCP"}]}]},
            {"fromEndpoints": [{"matchLabels": {"app": "a"}}],
             "toPorts": [{"ports": [{"port": "80", "protocol": "TCP"}, {"port": "443", "protocol": "TCP"}]}]}
        ]"#;
        let policy = compile(rules, &[&["app=a"], &["app=b"], &["app=c"]]);
        assert_eq!(
            entries(&policy),
            [
                (0, 128, 6, 80, Verdict::Allow),
                (300, 128, 6, 443, Verdict::Allow)
            ]
        );
        assert!(!policy.direction(Direction::Egress).is_enforced());
        assert_eq!(policy.len(), 2);
    }

    #[test]
    fn rules_without_ports_are_one_entry_for_all_protocols() {
        let rules = r#"[{"fromEndpoints": [{"matchLabels": {"app": "a"}}]}]"#;
        let policy = compile(rules, &[&["app=a"], &["app=b"]]);
        assert_eq!(entries(&policy), [(300, 96, 0, 0, Verdict::Allow)]);
    }

    #[test]
    fn policies_that_decide_alike_are_equal_however_they_are_written() {
        let ports = |ports: &str| {
            format!(
                r#"{{"fromEndpoints": [{{"matchLabels": {{"app": "a"}}}}], "toPorts": [{{"ports": [{ports}]}}]}}"#
            )
        };
        let whole = ports(r#"{"port": "80", "endPort": 89, "protocol": "TCP"}"#);
        let low = ports(r#"{"port": "80", "endPort": 85, "protocol": "TCP"}"#);
        let high = ports(r#"{"port": "84", "endPort": 89, "protocol": "TCP"}"#);
        let others: &[&[&str]] = &[&["app=a"], &["app=b"]];
        let policy = compile(&format!("[{whole}]"), others);
        assert_eq!(policy, compile(&format!("[{low}, {high}]"), others));
        assert_eq!(
            policy,
            compile(&format!("[{high}, {whole}, {low}]"), others)
        );
        assert!(policy.diff(&policy).is_empty());
        assert_ne!(policy, compile(&format!("[{low}]"), others));
    }

    #[test]
    fn a_named_port_of_egress_has_entries_for_the_identities_that_number_it() {
        let rules = r#"[{"labels": ["r"], "endpointSelector": {}, "egress": [
            {"toPorts": [{"ports": [{"port": "web", "protocol": "TCP"}]}]}
        ]}]"#;
        let mut repository = Repository::default();
        repository.import(rules).unwrap();
        let set = |labels: &[&str]| {
            LabelSet::new(labels.iter().map(|label| label.parse().unwrap())).unwrap()
        };
        let identities = [
            (300, &["app=a", "port:web=80/TCP"][..]),
            (301, &["app=a", "port:web=81/TCP+82/UDP"]),
            (302, &["app=a", "port:web=80/UDP", "port:db=5432/TCP"]),
            (303, &["app=a"]),
        ];
        let identities = identities.map(|(id, labels)| (Identity(id), Arc::new(set(labels))));
        let resolved = repository.resolve(&set(&["app=b"]), PolicySettings::default());
        let policy = resolved.compile(&identities.into());
        let egress = policy.direction(Direction::Egress);
        let allowed: Vec<_> = egress
            .entries()
            .iter()
            .map(|(key, verdict)| (key.identity.0, key.protocol, key.port, *verdict))
            .collect();
        assert_eq!(
            allowed,
            [(300, 6, 80, Verdict::Allow), (301, 6, 81, Verdict::Allow)]
        );
        assert!(egress.is_enforced());
    }

    #[test]
    fn keys_are_laid_out_as_the_map_has_them() {
        let key = EntryKey {
            identity: Identity(300),
            prefix_len: PREFIX_PORT,
            protocol: 6,
            port: 80,
        };
        let in_table = key.in_table(7, Direction::Egress);
        assert_eq!(
            in_table,
            PolicyKey {
                table: 7,
                direction: POLICY_EGRESS,
                pad: [0; 3],
                identity: 300,
                protocol: 6,
                pad2: 0,
                port_be: 80_u16.to_be(),
            }
        );
    }
}

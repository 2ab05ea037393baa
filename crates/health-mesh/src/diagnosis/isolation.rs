//! Detects whether this node is cut off: most peers fail alike, through no fault of their own.

use health_common::probe::Path;

use super::reason::Reason;
use super::{Cause, Context, Diagnosis, PeerFacts, TargetFacts, Verdict};
use crate::failure::Failure;
use crate::target::{Protocol, TargetKey};

/// The node is isolated if it fails to reach at least this many of its peers, and at least this fraction of them.
const ISOLATED_PEERS: u32 = 3;
const ISOLATED_PART: (u32, u32) = (4, 5);

/// The subset of all peers' targets that fails alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scope {
    /// All targets.
    Everything,
    /// Targets of one family.
    Ipv4,
    /// Targets of one family.
    Ipv6,
    /// Targets of one protocol.
    Icmp,
    /// Targets of one protocol.
    Http,
    /// The health endpoints.
    Endpoints,
}

impl Scope {
    /// From the widest to the narrowest: the first match is reported.
    const ALL: [Self; 6] = [
        Self::Everything,
        Self::Ipv4,
        Self::Ipv6,
        Self::Endpoints,
        Self::Icmp,
        Self::Http,
    ];

    fn holds(self, key: TargetKey) -> bool {
        match self {
            Self::Everything => true,
            Self::Ipv4 => key.address.is_ipv4(),
            Self::Ipv6 => key.address.is_ipv6(),
            Self::Icmp => key.protocol == Protocol::Icmp,
            Self::Http => key.protocol == Protocol::Http,
            Self::Endpoints => key.path == Path::Endpoint,
        }
    }

    /// The peer's probed targets in this scope.
    fn probed<'p, 'a>(self, peer: &'p PeerFacts<'a>) -> impl Iterator<Item = &'p TargetFacts<'a>> {
        let probed =
            move |t: &&TargetFacts<'_>| self.holds(t.key) && !matches!(t.verdict, Verdict::Off);
        peer.targets.iter().filter(probed)
    }

    /// Whether the peer's targets in this scope all fail, and why; `None` if the peer has no such targets.
    fn fails(self, context: &Context<'_>, peer: &PeerFacts<'_>) -> Option<Option<(Why, Failure)>> {
        let mut targets = self.probed(peer).peekable();
        targets.peek()?;
        let mut strongest: Option<(Why, &Failure)> = None;
        for target in targets {
            let Verdict::Unreachable(failure) = target.verdict else {
                return Some(None);
            };
            let reason = Reason::new(context, target.key, failure);
            let from_peer = reason.sender().is_some_and(|s| peer.has(s));
            if from_peer || reason.is_heard(target.key.address) {
                return Some(None);
            }
            let why = Why::from(reason);
            if strongest.is_none_or(|(other, _)| why > other) {
                strongest = Some((why, failure));
            }
        }
        Some(strongest.map(|(why, failure)| (why, failure.clone())))
    }

    /// Whether all failures of the peer lie in this scope, and the scope fails as a whole.
    pub(super) fn explains(self, context: &Context<'_>, peer: &PeerFacts<'_>) -> bool {
        let outside = |t: &TargetFacts<'_>| {
            !self.holds(t.key) && matches!(t.verdict, Verdict::Unreachable(_))
        };
        !peer.local
            && !peer.targets.iter().any(outside)
            && matches!(self.fails(context, peer), Some(Some(_)))
    }
}

/// Why a peer is unreachable, weakest reason first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Why {
    Silent,
    Unreachable,
    NextHopSilent,
    RouterError,
    NoRoute,
    Rejected,
    LocalError,
}

impl Why {
    const ALL: [Self; 7] = [
        Self::Silent,
        Self::Unreachable,
        Self::NextHopSilent,
        Self::RouterError,
        Self::NoRoute,
        Self::Rejected,
        Self::LocalError,
    ];
}

impl From<Reason> for Why {
    fn from(reason: Reason) -> Self {
        match reason {
            Reason::Silent
            | Reason::Refused
            | Reason::Hung
            | Reason::BadAnswer
            | Reason::Unproven => Self::Silent,
            Reason::Unreachable => Self::Unreachable,
            Reason::NextHopSilent => Self::NextHopSilent,
            Reason::NoRoute(Some(_)) | Reason::Rejected(Some(_)) => Self::RouterError,
            Reason::NoRoute(None) => Self::NoRoute,
            Reason::Rejected(None) => Self::Rejected,
            Reason::LocalError => Self::LocalError,
        }
    }
}

/// A fault of this node that most peers report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum OwnFault {
    /// Its clock differs from theirs.
    Clock,
    /// They refuse its mesh key.
    Key,
}

impl OwnFault {
    const ALL: [Self; 2] = [Self::Clock, Self::Key];

    /// The fault that all HTTP probes of this peer agree on, and one of their failures.
    fn of<'a>(peer: &PeerFacts<'a>) -> Option<(Self, &'a Failure)> {
        let mut own_faults = Scope::Http.probed(peer).map(|target| {
            let Verdict::Unreachable(failure) = target.verdict else {
                return None;
            };
            match failure {
                Failure::ClockDiffers { .. } => Some((Self::Clock, failure)),
                Failure::KeyRefused => Some((Self::Key, failure)),
                _ => None,
            }
        });
        let first = own_faults.next()??;
        own_faults
            .all(|other| other.is_some_and(|(own_fault, _)| own_fault == first.0))
            .then_some(first)
    }

    fn cause(self) -> Cause {
        match self {
            Self::Clock => Cause::ClockDiffers,
            Self::Key => Cause::WrongKey,
        }
    }
}

/// Surveys all peers to find out whether this node itself is cut off.
#[derive(Clone, Debug, Default)]
pub(crate) struct Survey {
    /// In the order of [`Scope::ALL`].
    scopes: [Tally; Scope::ALL.len()],
    /// In the order of [`OwnFault::ALL`]: the number of peers, and the first peer's failure.
    own_faults: [(u32, Option<Failure>); OwnFault::ALL.len()],
}

#[derive(Clone, Debug, Default)]
struct Tally {
    /// Remote peers with targets in this scope.
    peers: u32,
    /// Those peers whose targets in this scope fail.
    failing: u32,
    /// In the order of [`Why::ALL`]: the number of peers, and the first peer's failure.
    why: [(u32, Option<Failure>); Why::ALL.len()],
}

/// What cuts this node off.
#[derive(Clone, Debug)]
pub(crate) struct Isolation {
    /// What it is cut off from.
    pub(crate) scope: Scope,
    /// The diagnosis of this node.
    pub(crate) diagnosis: Diagnosis,
}

impl Survey {
    /// Adds a peer.
    pub(crate) fn add(&mut self, context: &Context<'_>, peer: &PeerFacts<'_>) {
        if peer.local {
            return;
        }
        let reported = OwnFault::of(peer);
        for (own_fault, (count, first)) in OwnFault::ALL.into_iter().zip(&mut self.own_faults) {
            if let Some((_, failure)) = reported.filter(|(reported, _)| *reported == own_fault) {
                *count += 1;
                first.get_or_insert_with(|| failure.clone());
            }
        }
        let unknown = |t: &TargetFacts<'_>| matches!(t.verdict, Verdict::Unknown);
        // A peer with an unknown verdict does not count as failing in any scope. A peer that fails in the widest scope
        // counts only there.
        let mut counts = !peer.targets.iter().any(unknown);
        for (scope, tally) in Scope::ALL.into_iter().zip(&mut self.scopes) {
            let Some(fails) = scope.fails(context, peer) else {
                continue;
            };
            tally.peers += 1;
            if let Some((why, failure)) = fails.filter(|_| counts) {
                counts = scope != Scope::Everything;
                tally.failing += 1;
                let (count, first) = &mut tally.why[why as usize];
                *count += 1;
                first.get_or_insert(failure);
            }
        }
    }

    /// Whether this node, called `name`, is cut off. `without_carrier` lists its uplinks without a carrier.
    pub(crate) fn diagnose(
        &self,
        context: &Context<'_>,
        name: &str,
        without_carrier: &[&str],
    ) -> Option<Isolation> {
        let isolated = |tally: &Tally| are_most(tally.failing, tally.peers);
        let Some((scope, tally)) = Scope::ALL
            .into_iter()
            .zip(&self.scopes)
            .find(|(_, tally)| isolated(tally))
        else {
            return self.diagnose_own_fault(name);
        };
        let (main, (_, first)) = Why::ALL
            .into_iter()
            .zip(&tally.why)
            .max_by_key(|(_, (count, _))| *count)?;
        let says = first.as_ref().map(ToString::to_string).unwrap_or_default();
        let Tally { peers, failing, .. } = *tally;
        let port = context.port;
        let what = match scope {
            Scope::Everything => format!("no answer from {failing} of {peers} peers"),
            Scope::Ipv4 => format!("no answer from {failing} of {peers} peers over IPv4"),
            Scope::Ipv6 => format!("no answer from {failing} of {peers} peers over IPv6"),
            Scope::Endpoints => {
                format!("{failing} of {peers} peers are up, but their health endpoints are silent")
            }
            Scope::Icmp => format!("{failing} of {peers} peers are up, but silent to ICMP"),
            Scope::Http => {
                format!("{failing} of {peers} peers are up, but silent to HTTP on port {port}")
            }
        };
        let carrier = scope == Scope::Everything && !without_carrier.is_empty();
        let links = without_carrier.join(", ");
        let check = match scope {
            Scope::Everything | Scope::Ipv4 | Scope::Ipv6 => "check its uplink and firewall",
            Scope::Endpoints => "check its routes to their pod CIDRs, and its firewall",
            Scope::Icmp | Scope::Http => "check its firewall, then the firewalls in the network",
        };
        let check = match main {
            _ if carrier => format!("no carrier on {links}; check the cable and the switch port"),
            Why::Silent => check.to_owned(),
            Why::Unreachable | Why::RouterError => format!("{says}; {check}"),
            Why::NextHopSilent => {
                format!("{says}: its next hop does not answer; check its link and gateway")
            }
            Why::NoRoute => format!("{says}; check its routes"),
            Why::Rejected => format!("{says}; check its own firewall and prohibit routes"),
            Why::LocalError => format!("its probes fail locally: {says}"),
        };
        let by_reason = tally.why.iter().filter_map(|(count, first)| {
            let first = first.as_ref()?;
            Some(format!("{count} of {failing}: {first}"))
        });
        let mut evidence = vec![what.clone()];
        evidence.extend(by_reason);
        if carrier {
            evidence.push(format!("no carrier: {links}"));
        }
        Some(Isolation {
            scope,
            diagnosis: Diagnosis {
                cause: Cause::ThisNodeIsolated,
                message: format!("this node isolated: {name}: {what}: {check}"),
                evidence,
            },
        })
    }

    /// The fault of this node that most peers report. The peers keep their own diagnoses.
    fn diagnose_own_fault(&self, name: &str) -> Option<Isolation> {
        let scope = Scope::Http;
        let mut tallies = Scope::ALL.into_iter().zip(&self.scopes);
        let peers = tallies.find_map(|(s, tally)| (s == scope).then_some(tally.peers))?;
        let (own_fault, count, failure) = OwnFault::ALL
            .into_iter()
            .zip(&self.own_faults)
            .find_map(|(own_fault, (count, first))| {
                are_most(*count, peers).then_some((own_fault, *count, first.as_ref()?))
            })?;
        let message = match own_fault {
            OwnFault::Clock => format!(
                "clock differs: {name}: its clock differs from the clocks of {count} of {peers} peers; set it"
            ),
            OwnFault::Key => format!(
                "wrong key: {name}: {count} of {peers} peers refuse its mesh key; compare its \
                 --mesh-key-file with theirs"
            ),
        };
        Some(Isolation {
            scope,
            diagnosis: Diagnosis {
                cause: own_fault.cause(),
                message,
                evidence: vec![format!("{count} of {peers}: {failure}")],
            },
        })
    }
}

/// Whether `some` out of `all` peers are enough to blame this node.
fn are_most(some: u32, all: u32) -> bool {
    let (part, whole) = ISOLATED_PART;
    some >= ISOLATED_PEERS && u64::from(some) * u64::from(whole) >= u64::from(all) * u64::from(part)
}

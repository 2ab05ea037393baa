//! Whether this node is cut off: most peers fail alike, and that is not their doing.

use health_common::probe::Path;

use super::reason::Reason;
use super::{Cause, Context, Diagnosis, PeerFacts, TargetFacts, Verdict};
use crate::failure::Failure;
use crate::target::{Protocol, TargetKey};

/// The node is isolated when it fails to reach so many of its peers, and such a part of them.
const ISOLATED_PEERS: u32 = 3;
const ISOLATED_PART: (u32, u32) = (4, 5);

/// The part of all peers' targets that fails alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scope {
    /// All of them.
    Everything,
    /// Those of a family.
    Ipv4,
    /// Those of a family.
    Ipv6,
    /// Those of a protocol.
    Icmp,
    /// Those of a protocol.
    Http,
    /// The health endpoints.
    Endpoints,
}

impl Scope {
    /// From the widest to the narrowest: the first that holds is told.
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

    /// Whether this part of the peer's targets fails, and why; `None` if the peer has no such targets.
    fn fails(self, context: &Context<'_>, peer: &PeerFacts<'_>) -> Option<Option<(Why, Failure)>> {
        let probed = |t: &&TargetFacts<'_>| self.holds(t.key) && !matches!(t.verdict, Verdict::Off);
        let mut targets = peer.targets.iter().filter(probed).peekable();
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

    /// Whether all failures of the peer lie in this part, which fails as a whole.
    pub(super) fn explains(self, context: &Context<'_>, peer: &PeerFacts<'_>) -> bool {
        let outside = |t: &TargetFacts<'_>| {
            !self.holds(t.key) && matches!(t.verdict, Verdict::Unreachable(_))
        };
        !peer.local
            && !peer.targets.iter().any(outside)
            && matches!(self.fails(context, peer), Some(Some(_)))
    }
}

/// Why a peer is not reached, the weakest reason first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Why {
    Silent,
    Unreachable,
    NextHopSilent,
    Told,
    NoRoute,
    Rejected,
    LocalError,
}

impl Why {
    const ALL: [Self; 7] = [
        Self::Silent,
        Self::Unreachable,
        Self::NextHopSilent,
        Self::Told,
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
            Reason::NoRoute(Some(_)) | Reason::Rejected(Some(_)) => Self::Told,
            Reason::NoRoute(None) => Self::NoRoute,
            Reason::Rejected(None) => Self::Rejected,
            Reason::LocalError => Self::LocalError,
        }
    }
}

/// What answers of HTTP say of this node, if most peers give them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Doubt {
    /// Its clock differs from theirs.
    Clock,
    /// They refuse its mesh key.
    Key,
}

impl Doubt {
    const ALL: [Self; 2] = [Self::Clock, Self::Key];

    /// What all HTTP probes of this peer agree in, and how one of them fails.
    fn of<'a>(peer: &PeerFacts<'a>) -> Option<(Self, &'a Failure)> {
        let probed =
            |t: &&TargetFacts<'_>| Scope::Http.holds(t.key) && !matches!(t.verdict, Verdict::Off);
        let mut doubts = peer.targets.iter().filter(probed).map(|target| {
            let Verdict::Unreachable(failure) = target.verdict else {
                return None;
            };
            match failure {
                Failure::ClockDiffers { .. } => Some((Self::Clock, failure)),
                Failure::KeyRefused => Some((Self::Key, failure)),
                _ => None,
            }
        });
        let first = doubts.next()??;
        doubts
            .all(|other| other.is_some_and(|(doubt, _)| doubt == first.0))
            .then_some(first)
    }

    fn cause(self) -> Cause {
        match self {
            Self::Clock => Cause::ClockDiffers,
            Self::Key => Cause::WrongKey,
        }
    }
}

/// Looks at all peers, to tell whether it is this node that is cut off.
#[derive(Clone, Debug, Default)]
pub(crate) struct Survey {
    /// In the order of [`Scope::ALL`].
    scopes: [Tally; Scope::ALL.len()],
    /// In the order of [`Doubt::ALL`]: how many peers, and how the first of them fails.
    doubts: [(u32, Option<Failure>); Doubt::ALL.len()],
}

#[derive(Clone, Debug, Default)]
struct Tally {
    /// Remote peers that have such targets.
    peers: u32,
    /// Those of them that fail.
    failing: u32,
    /// In the order of [`Why::ALL`]: how many peers, and how the first of them fails.
    why: [(u32, Option<Failure>); Why::ALL.len()],
}

/// What cuts this node off.
#[derive(Clone, Debug)]
pub(crate) struct Isolation {
    /// From what.
    pub(crate) scope: Scope,
    /// What there is to say of this node.
    pub(crate) diagnosis: Diagnosis,
}

impl Survey {
    /// Takes in a peer.
    pub(crate) fn add(&mut self, context: &Context<'_>, peer: &PeerFacts<'_>) {
        if peer.local {
            return;
        }
        if let Some((doubt, failure)) = Doubt::of(peer) {
            let (count, first) = &mut self.doubts[doubt as usize];
            *count += 1;
            first.get_or_insert_with(|| failure.clone());
        }
        let unknown = |t: &TargetFacts<'_>| matches!(t.verdict, Verdict::Unknown);
        // Of one that is not known as a whole, or of which nothing at all is heard, no part shows
        // anything.
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

    /// Whether it is this node, called `name`, that is cut off. `without_carrier` are its uplinks that
    /// have no carrier.
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
            return self.diagnose_doubt(name);
        };
        let (main, (_, first)) = Why::ALL
            .into_iter()
            .zip(&tally.why)
            .max_by_key(|(_, (count, _))| *count)?;
        let says = first.as_ref().map(ToString::to_string).unwrap_or_default();
        let Tally { peers, failing, .. } = *tally;
        let port = context.port;
        let what = match scope {
            Scope::Everything => format!("nothing is heard of {failing} of {peers} peers"),
            Scope::Ipv4 => format!("nothing is heard of {failing} of {peers} peers over IPv4"),
            Scope::Ipv6 => format!("nothing is heard of {failing} of {peers} peers over IPv6"),
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
            Scope::Icmp | Scope::Http => "check its firewall, then those of the network",
        };
        let check = match main {
            _ if carrier => format!("no carrier on {links}; check the cable and the switch port"),
            Why::Silent => check.to_owned(),
            Why::Unreachable | Why::Told => format!("{says}; {check}"),
            Why::NextHopSilent => {
                format!("{says}: its next hop does not answer; check its link and gateway")
            }
            Why::NoRoute => format!("{says}; check its routes"),
            Why::Rejected => format!("{says}; check its own firewall and prohibit routes"),
            Why::LocalError => format!("it fails to probe: {says}"),
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

    /// Whether most peers doubt this node alike. They are reached, and keep their own diagnoses.
    fn diagnose_doubt(&self, name: &str) -> Option<Isolation> {
        let scope = Scope::Http;
        let peers = self.scopes[Scope::ALL.iter().position(|s| *s == scope)?].peers;
        let (doubt, count, failure) =
            Doubt::ALL
                .into_iter()
                .zip(&self.doubts)
                .find_map(|(doubt, (count, first))| {
                    are_most(*count, peers).then_some((doubt, *count, first.as_ref()?))
                })?;
        let message = match doubt {
            Doubt::Clock => format!(
                "clock differs: {name}: its clock differs from those of {count} of {peers} peers; set it"
            ),
            Doubt::Key => format!(
                "wrong key: {name}: {count} of {peers} peers refuse its mesh key; compare its \
                 --mesh-key-file with theirs"
            ),
        };
        Some(Isolation {
            scope,
            diagnosis: Diagnosis {
                cause: doubt.cause(),
                message,
                evidence: vec![format!("{count} of {peers}: {failure}")],
            },
        })
    }
}

/// Whether so many of all peers tell something of this node.
fn are_most(some: u32, all: u32) -> bool {
    let (part, whole) = ISOLATED_PART;
    some >= ISOLATED_PEERS && u64::from(some) * u64::from(whole) >= u64::from(all) * u64::from(part)
}

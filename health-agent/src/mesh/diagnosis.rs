//! What is wrong with a peer, in one sentence, from the results of all its targets; and whether it
//! is this node that is cut off. Pure.
//!
//! A diagnosis is made of confirmed verdicts. While any probed target of a peer has none, the peer
//! has no diagnosis: what is missing might tell otherwise. The first row that holds is the diagnosis.
//! An address is *silent* when nothing came back for any of its probes, *heard* when anything did that
//! only the address itself sends: an answer, a refusal, an ICMP error of its own.
//!
//! | cause | when |
//! | --- | --- |
//! | `this-node-isolated` | the peer fails as at least three and four fifths of all remote peers do ([`Survey`]) |
//! | `local-error` | all failures are this host's own: no sockets of the family, no descriptors |
//! | `rejected` | nothing heard; an ICMP error or the local kernel says that it is prohibited |
//! | `no-route` | nothing heard; the local kernel or a router says that there is no route |
//! | `node-down` | nothing heard, and a host address silent |
//! | `one-family-only` | one family silent, the other up |
//! | `rejected` | as above, for some targets; also a TCP connection that is unreachable where ICMP is answered |
//! | `agent-down` | no HTTP answered, and refused or left hanging where the host or the endpoint is heard |
//! | `no-route` | as above, for some targets |
//! | `endpoint-datapath-down` | endpoint silent, or reported unreachable by its own host, which is up |
//! | `address-unreachable` | a host address silent, others heard |
//! | `port-refused` | HTTP refused on some addresses, answered on others |
//! | `bad-answer` | HTTP answered, but not by a healthy agent |
//! | `port-filtered` | ICMP answered, HTTP silently dropped; if on all addresses, the agent may hang instead |
//! | `icmp-filtered` | HTTP heard, ICMP silently dropped |
//! | `loss` | all reachable; losses above the threshold, and not by chance |
//! | `latency-shift` | all reachable; round trips well above those of the hour before |
//! | `endpoint-address-unknown` | host up, and nobody told the addresses of its endpoint |
//!
//! A family that is silent as a whole, when the other is not up either, is left out of the rows below
//! `one-family-only`; the evidence names it.

use std::fmt;
use std::net::IpAddr;
use std::time::Duration;

use health_common::probe::Path;
use nix::errno::Errno;
use serde::{Deserialize, Serialize};

use super::failure::{Failure, IcmpError};
use super::history::{Loss, Trend};
use super::target::{Protocol, TargetKey};

/// A latency has shifted when this many times the usual one.
const SHIFT_FACTOR: u32 = 2;
/// Fewest round trips on either side that tell a shift.
const SHIFT_SAMPLES: (u32, u32) = (8, 20);
/// Probability below which losses are not taken for chance. Ten thousand peers with four targets
/// each are 40 000 trials every few minutes; at half the threshold, the real probability is lower by
/// orders of magnitude.
const LOSS_CHANCE: f64 = 1e-4;
/// The node is isolated when it fails to reach so many of its peers, and such a part of them.
const ISOLATED_PEERS: u32 = 3;
const ISOLATED_PART: (u32, u32) = (4, 5);
/// Most addresses that a message lists.
const LISTED: usize = 4;

/// What is wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Cause {
    /// Most peers fail alike: it is this node, not they.
    ThisNodeIsolated,
    /// This host could not probe.
    LocalError,
    /// Nothing is heard of the node.
    NodeDown,
    /// The host is up, its agent is not.
    AgentDown,
    /// The host is up, its health endpoint is not.
    EndpointDatapathDown,
    /// Some addresses of a host that is up are silent.
    AddressUnreachable,
    /// One of IPv4 and IPv6 does not get through.
    OneFamilyOnly,
    /// A router or this host has no route.
    NoRoute,
    /// A firewall or policy says no.
    Rejected,
    /// ICMP is dropped silently.
    IcmpFiltered,
    /// HTTP is dropped silently.
    PortFiltered,
    /// HTTP is refused on some addresses.
    PortRefused,
    /// HTTP is answered by something that is no healthy agent.
    BadAnswer,
    /// Too many probes are lost.
    Loss,
    /// Answers take longer than they used to.
    LatencyShift,
    /// It is not known where the health endpoint is.
    EndpointAddressUnknown,
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::ThisNodeIsolated => "this-node-isolated",
            Self::LocalError => "local-error",
            Self::NodeDown => "node-down",
            Self::AgentDown => "agent-down",
            Self::EndpointDatapathDown => "endpoint-datapath-down",
            Self::AddressUnreachable => "address-unreachable",
            Self::OneFamilyOnly => "one-family-only",
            Self::NoRoute => "no-route",
            Self::Rejected => "rejected",
            Self::IcmpFiltered => "icmp-filtered",
            Self::PortFiltered => "port-filtered",
            Self::PortRefused => "port-refused",
            Self::BadAnswer => "bad-answer",
            Self::Loss => "loss",
            Self::LatencyShift => "latency-shift",
            Self::EndpointAddressUnknown => "endpoint-address-unknown",
        })
    }
}

/// What is wrong, and how that is known.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Diagnosis {
    /// What is wrong.
    pub(super) cause: Cause,
    /// One line: what is wrong with whom, and where to look.
    pub(super) message: String,
    /// The facts it rests on, one line each.
    pub(super) evidence: Vec<String>,
}

/// Why a reachable target is degraded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Degraded {
    /// More losses than the threshold, and more than chance makes of it.
    Loss(Loss),
    /// Longer round trips than before.
    LatencyShift {
        /// Median of the newest.
        recent: Duration,
        /// Median of those before.
        usual: Duration,
    },
}

impl fmt::Display for Degraded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Loss(loss) => write!(f, "lost {}", Losses(loss)),
            Self::LatencyShift { recent, usual } => {
                write!(f, "takes {recent:.1?} now, {usual:.1?} before")
            }
        }
    }
}

/// What is the same for all peers.
#[derive(Clone, Debug)]
pub(super) struct Context<'a> {
    /// TCP port of the responders.
    pub(super) port: u16,
    /// This node's own addresses.
    pub(super) local_addresses: &'a [IpAddr],
    /// When a target is degraded.
    pub(super) thresholds: Thresholds,
}

/// When a target is degraded.
#[derive(Clone, Copy, Debug)]
pub(super) struct Thresholds {
    /// Highest part of the probes, 0 to 1, that may be lost.
    pub(super) loss: f64,
    /// A shift of ICMP round trips that is less than this does not count.
    pub(super) icmp_shift: Duration,
    /// The same for HTTP, whose round trips hold the scheduling of both agents.
    pub(super) http_shift: Duration,
}

impl Default for Thresholds {
    fn default() -> Self {
        Self {
            loss: 0.05,
            icmp_shift: Duration::from_millis(1),
            http_shift: Duration::from_millis(20),
        }
    }
}

/// What is known of a peer.
#[derive(Clone, Copy, Debug)]
pub(super) struct PeerFacts<'a> {
    /// `cluster/node`.
    pub(super) name: &'a str,
    /// Whether it is this node.
    pub(super) local: bool,
    /// Whether it should have a health endpoint, known or not.
    pub(super) endpoint_expected: bool,
    /// All that there is to probe, in the order of the report.
    pub(super) targets: &'a [TargetFacts<'a>],
}

/// What is known of a target.
#[derive(Clone, Copy, Debug)]
pub(super) struct TargetFacts<'a> {
    /// Which one.
    pub(super) key: TargetKey,
    /// Its verdict.
    pub(super) verdict: Verdict<'a>,
    /// Looked at when it is reachable.
    pub(super) trend: Trend,
}

/// The confirmed verdict on a target.
#[derive(Clone, Copy, Debug)]
pub(super) enum Verdict<'a> {
    /// Its probes are switched off.
    Off,
    /// No result yet.
    Unknown,
    /// It answers.
    Reachable,
    /// It does not; why the last probe failed.
    Unreachable(&'a Failure),
}

impl Context<'_> {
    /// Whether and why a reachable target is degraded.
    pub(super) fn degraded(&self, target: &TargetFacts<'_>) -> Option<Degraded> {
        if !matches!(target.verdict, Verdict::Reachable) {
            return None;
        }
        let threshold = self.thresholds.loss;
        let loss = target.trend.loss.iter().find(|l| exceeds(l, threshold));
        if let Some(&loss) = loss {
            return Some(Degraded::Loss(loss));
        }
        let (recent, usual) = (target.trend.recent?, target.trend.usual?);
        let least = match target.key.protocol {
            Protocol::Icmp => self.thresholds.icmp_shift,
            Protocol::Http => self.thresholds.http_shift,
        };
        let enough = recent.samples >= SHIFT_SAMPLES.0 && usual.samples >= SHIFT_SAMPLES.1;
        let higher = recent.p50 >= usual.p50 * SHIFT_FACTOR && recent.p50 >= usual.p50 + least;
        // Of two latencies that alternate, the higher is no shift.
        let apart = recent.p25 > usual.p90;
        (enough && higher && apart).then_some(Degraded::LatencyShift {
            recent: recent.p50,
            usual: usual.p50,
        })
    }

    /// What is wrong with a peer; `None` if nothing is, or if it is not known yet. Given what is wrong
    /// with this node, no peer is blamed for it.
    pub(super) fn diagnose(
        &self,
        peer: &PeerFacts<'_>,
        isolation: Option<&Isolation>,
    ) -> Option<Diagnosis> {
        let mut down = false;
        for target in peer.targets {
            match target.verdict {
                Verdict::Unknown => return None,
                Verdict::Unreachable(_) => down = true,
                Verdict::Off | Verdict::Reachable => {}
            }
        }
        if !down {
            return self
                .diagnose_degraded(peer)
                .or_else(|| self.diagnose_unknown_endpoint(peer));
        }
        let picture = Picture::new(self, peer);
        if let Some(isolation) = isolation
            && isolation.scope.explains(self, peer)
        {
            return Some(picture.diagnosis(
                Cause::ThisNodeIsolated,
                format!(
                    "{} is not judged: {}",
                    peer.name, isolation.diagnosis.message
                ),
            ));
        }
        Some(picture.diagnose())
    }

    fn diagnose_degraded(&self, peer: &PeerFacts<'_>) -> Option<Diagnosis> {
        let all = || {
            let degraded = |target| Some((target, self.degraded(target)?));
            peer.targets.iter().filter_map(degraded)
        };
        let lossy = |(_, degraded): &(_, _)| matches!(degraded, Degraded::Loss(_));
        let (target, worst) = all().find(lossy).or_else(|| all().next())?;
        let on = self.label(target.key);
        let name = peer.display();
        let (cause, message) = match worst {
            Degraded::Loss(loss) => (
                Cause::Loss,
                format!("loss: {name} lost {} of {on}", Losses(&loss)),
            ),
            Degraded::LatencyShift { recent, usual } => (
                Cause::LatencyShift,
                format!("latency shift: {on} of {name} takes {recent:.1?} now, {usual:.1?} before"),
            ),
        };
        let others = all().count() - 1;
        let others = match others {
            0 => String::new(),
            1 => "; 1 other target is degraded as well".to_owned(),
            n => format!("; {n} other targets are degraded as well"),
        };
        let evidence = all().map(|(target, degraded)| {
            let on = self.label(target.key);
            match degraded {
                Degraded::Loss(loss) => format!("{on}: lost {}", Losses(&loss)),
                Degraded::LatencyShift { recent, usual } => {
                    format!("{on}: median {recent:.1?} now, {usual:.1?} in the hour before")
                }
            }
        });
        Some(Diagnosis {
            cause,
            message: message + &others,
            evidence: evidence.collect(),
        })
    }

    fn diagnose_unknown_endpoint(&self, peer: &PeerFacts<'_>) -> Option<Diagnosis> {
        let of_endpoint = |target: &TargetFacts<'_>| target.key.path == Path::Endpoint;
        if !peer.endpoint_expected || peer.targets.iter().any(of_endpoint) {
            return None;
        }
        let agent = peer.targets.iter().find(|target| {
            target.key.protocol == Protocol::Http && matches!(target.verdict, Verdict::Reachable)
        })?;
        Some(Diagnosis {
            cause: Cause::EndpointAddressUnknown,
            message: format!(
                "endpoint address unknown: {} answers on {}, but tells no health endpoint; it is \
                 starting, or cannot make one: see its log",
                peer.display(),
                agent.key.address
            ),
            evidence: vec![
                format!("{}: answered", self.label(agent.key)),
                "neither the registry nor the agent tells a health endpoint".to_owned(),
            ],
        })
    }

    /// `HTTP to 10.244.3.7 port 4240 (endpoint)`.
    fn label(&self, key: TargetKey) -> String {
        let path = match key.path {
            Path::Host => "host",
            Path::Endpoint => "endpoint",
        };
        match key.protocol {
            Protocol::Icmp => format!("ICMP to {} ({path})", key.address),
            Protocol::Http => format!("HTTP to {} port {} ({path})", key.address, self.port),
        }
    }
}

impl PeerFacts<'_> {
    /// Its name as a message has it.
    fn display(&self) -> String {
        if self.local {
            format!("this node ({})", self.name)
        } else {
            self.name.to_owned()
        }
    }

    fn has(&self, address: IpAddr) -> bool {
        self.targets
            .iter()
            .any(|target| target.key.address == address)
    }
}

/// What a failed probe says, seen by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Reason {
    /// Nothing came back.
    Silent,
    /// A connection attempt was unreachable: no route, no answer of the next hop, or a firewall.
    Unreachable,
    /// This host got no answer when it resolved the next hop's hardware address.
    NextHopSilent,
    /// No route; who says so, if not this host's kernel.
    NoRoute(Option<IpAddr>),
    /// Prohibited; who says so, if it is known.
    Rejected(Option<IpAddr>),
    /// The port is closed.
    Refused,
    /// A connection, and no response.
    Hung,
    /// A connection, and a wrong response.
    BadAnswer,
    /// This host could not probe.
    LocalError,
}

impl Reason {
    fn new(context: &Context<'_>, key: TargetKey, failure: &Failure) -> Self {
        let icmp = key.protocol == Protocol::Icmp;
        match failure {
            Failure::TimedOut => Self::Silent,
            Failure::ResponseTimedOut => Self::Hung,
            Failure::UnexpectedStatus(_) | Failure::Closed | Failure::Malformed => Self::BadAnswer,
            Failure::NoFamily => Self::LocalError,
            Failure::Os(errno) => match errno {
                Errno::ECONNREFUSED => Self::Refused,
                Errno::ECONNRESET | Errno::ECONNABORTED | Errno::EPIPE => Self::BadAnswer,
                // To a connection, also what routers and firewalls say.
                Errno::EHOSTUNREACH | Errno::ENETUNREACH if !icmp => Self::Unreachable,
                // EINVAL: a route of the kind `blackhole`.
                Errno::EHOSTUNREACH | Errno::ENETUNREACH | Errno::ENETDOWN | Errno::EINVAL => {
                    Self::NoRoute(None)
                }
                Errno::EACCES | Errno::EPERM => Self::Rejected(None),
                _ => Self::LocalError,
            },
            Failure::Icmp(error) => Self::of_icmp(context, icmp, error),
        }
    }

    /// RFC 792 and RFC 1812 section 5.2.7.1; RFC 4443 section 3.
    fn of_icmp(context: &Context<'_>, echo: bool, error: &IcmpError) -> Self {
        let from = error.from;
        match (from.is_ipv4(), error.kind, error.code) {
            (true, 3, 1) | (false, 1, 3) if context.local_addresses.contains(&from) => {
                Self::NextHopSilent
            }
            (true, 3, 0 | 1 | 6 | 7 | 11 | 12) | (false, 1, 0 | 2 | 3) => Self::NoRoute(Some(from)),
            // Packets in a loop.
            (true, 11, _) | (false, 3, _) => Self::NoRoute(Some(from)),
            (true, 3, 9 | 10 | 13) | (false, 1, 1 | 5 | 6) => Self::Rejected(Some(from)),
            // An echo has neither port nor protocol that could be missing: a firewall's `reject`.
            (true, 3, 2 | 3) | (false, 1, 4) if echo => Self::Rejected(Some(from)),
            (true, 3, 2 | 3) | (false, 1, 4) => Self::Refused,
            _ => Self::Silent,
        }
    }

    /// Who says so.
    fn sender(self) -> Option<IpAddr> {
        match self {
            Self::NoRoute(sender) | Self::Rejected(sender) => sender,
            _ => None,
        }
    }

    /// Whether it takes the address itself to bring this about.
    fn is_heard(self, address: IpAddr) -> bool {
        match self {
            Self::Refused | Self::Hung | Self::BadAnswer => true,
            _ => self.sender() == Some(address),
        }
    }
}

/// What one protocol says of an address.
#[derive(Clone, Copy, Debug)]
enum Finding<'a> {
    /// Nothing: switched off, or this host could not probe.
    None,
    Up,
    Down(Reason, &'a Failure),
}

impl Finding<'_> {
    fn is_up(self) -> bool {
        matches!(self, Self::Up)
    }

    fn is_some(self) -> bool {
        !matches!(self, Self::None)
    }

    fn reason(self) -> Option<Reason> {
        match self {
            Self::Down(reason, _) => Some(reason),
            _ => None,
        }
    }

    fn is(self, reasons: &[Reason]) -> bool {
        self.reason()
            .is_some_and(|reason| reasons.contains(&reason))
    }
}

/// What both protocols say of an address.
#[derive(Clone, Copy, Debug)]
struct Address<'a> {
    address: IpAddr,
    path: Path,
    icmp: Finding<'a>,
    http: Finding<'a>,
}

impl<'a> Address<'a> {
    /// Lets one protocol shed light on the other.
    fn resolve(&mut self) {
        let Finding::Down(reason, failure) = self.http else {
            return;
        };
        let resolved = match (reason, self.icmp) {
            (Reason::Unreachable, Finding::Up) => Reason::Rejected(None),
            (Reason::Unreachable, Finding::Down(Reason::Silent | Reason::NextHopSilent, _)) => {
                Reason::Silent
            }
            (Reason::Unreachable, Finding::Down(of_icmp @ Reason::NoRoute(_), _)) => of_icmp,
            (Reason::Unreachable, Finding::None | Finding::Down(..)) => Reason::NoRoute(None),
            // A firewall that rejects all: Linux makes a refusal of its port unreachable.
            (Reason::Refused, Finding::Down(of_icmp @ Reason::Rejected(_), _)) => of_icmp,
            _ => reason,
        };
        self.http = Finding::Down(resolved, failure);
    }

    fn findings(&self) -> [(Protocol, Finding<'a>); 2] {
        [(Protocol::Icmp, self.icmp), (Protocol::Http, self.http)]
    }

    fn reasons(&self) -> impl Iterator<Item = Reason> {
        self.findings()
            .into_iter()
            .filter_map(|(_, finding)| finding.reason())
    }

    fn is_up(&self) -> bool {
        self.reasons().next().is_none()
    }

    /// Whether nothing at all came from it.
    fn is_unheard(&self) -> bool {
        !self.icmp.is_up()
            && !self.http.is_up()
            && !self.reasons().any(|reason| reason.is_heard(self.address))
    }

    /// Whether nothing at all came back, from it or of it.
    fn is_silent(&self) -> bool {
        let silent = |reason| matches!(reason, Reason::Silent | Reason::NextHopSilent);
        self.is_unheard() && self.reasons().all(silent)
    }
}

/// All there is to know of a peer that has failures.
struct Picture<'a> {
    context: &'a Context<'a>,
    peer: &'a PeerFacts<'a>,
    /// Those that any protocol says something of.
    addresses: Vec<Address<'a>>,
}

impl<'a> Picture<'a> {
    fn new(context: &'a Context<'a>, peer: &'a PeerFacts<'a>) -> Self {
        let mut addresses: Vec<Address<'a>> = Vec::new();
        for target in peer.targets {
            let key = target.key;
            let finding = match target.verdict {
                Verdict::Off | Verdict::Unknown => continue,
                Verdict::Reachable => Finding::Up,
                Verdict::Unreachable(failure) => match Reason::new(context, key, failure) {
                    Reason::LocalError => continue,
                    reason => Finding::Down(reason, failure),
                },
            };
            let same = |a: &&mut Address<'_>| (a.address, a.path) == (key.address, key.path);
            let known = addresses.iter_mut().find(same);
            let (icmp, http) = match key.protocol {
                Protocol::Icmp => (finding, Finding::None),
                Protocol::Http => (Finding::None, finding),
            };
            match (known, key.protocol) {
                (Some(known), Protocol::Icmp) => known.icmp = finding,
                (Some(known), Protocol::Http) => known.http = finding,
                (None, _) => addresses.push(Address {
                    address: key.address,
                    path: key.path,
                    icmp,
                    http,
                }),
            }
        }
        addresses.iter_mut().for_each(Address::resolve);
        Self {
            context,
            peer,
            addresses,
        }
    }

    fn diagnosis(&self, cause: Cause, message: String) -> Diagnosis {
        let line = |target: &TargetFacts<'_>| {
            let text = match target.verdict {
                Verdict::Off | Verdict::Unknown => return None,
                Verdict::Reachable => "answered".to_owned(),
                Verdict::Unreachable(failure) => {
                    let next_hop = match Reason::new(self.context, target.key, failure) {
                        Reason::NextHopSilent if target.key.address.is_ipv4() => {
                            ", this host: ARP is not answered"
                        }
                        Reason::NextHopSilent => ", this host: neighbor discovery is not answered",
                        _ => "",
                    };
                    format!("{failure}{next_hop}")
                }
            };
            Some(format!("{}: {text}", self.context.label(target.key)))
        };
        Diagnosis {
            cause,
            message,
            evidence: self.peer.targets.iter().filter_map(line).collect(),
        }
    }

    /// The rows of the table from `local-error` to `icmp-filtered`.
    fn diagnose(&self) -> Diagnosis {
        let all = &self.addresses;
        if all.iter().all(Address::is_up) {
            return self.local_error();
        }
        // What comes from the node itself, even if it tells of another of its addresses.
        let own = |reason: Reason| reason.sender().is_some_and(|s| self.peer.has(s));
        if all.iter().all(|a| a.is_unheard() && !a.reasons().any(own)) {
            return self.unheard(all);
        }
        let (family, rest) = without_silent_family(all);
        if !family.is_empty() && rest.iter().all(Address::is_up) {
            return self.one_family(&family, &rest);
        }
        self.rejected(&rest)
            .or_else(|| self.agent_down(&rest))
            .or_else(|| self.no_route(&rest))
            .or_else(|| self.endpoint_down(&rest))
            .or_else(|| self.address_unreachable(&rest))
            .or_else(|| self.http_trouble(&rest))
            .or_else(|| self.icmp_filtered(&rest))
            .unwrap_or_else(|| self.some_unreachable(&rest))
    }

    fn local_error(&self) -> Diagnosis {
        let name = self.name();
        let failure = |target: &TargetFacts<'a>| match target.verdict {
            Verdict::Unreachable(failure) => Some((target.key, failure)),
            _ => None,
        };
        let message = match self.peer.targets.iter().find_map(failure) {
            Some((key, failure)) => format!(
                "local error: this host fails to probe {name}: {}: {failure}",
                self.context.label(key)
            ),
            None => format!("local error: this host fails to probe {name}"),
        };
        self.diagnosis(Cause::LocalError, message)
    }

    /// Nothing is heard of the peer.
    fn unheard(&self, all: &[Address<'a>]) -> Diagnosis {
        let hosts = pick(all, |a| a.path == Path::Host);
        if !hosts.iter().any(Address::is_silent) {
            return [&hosts, all]
                .into_iter()
                .find_map(|part| self.rejected(part).or_else(|| self.no_route(part)))
                .unwrap_or_else(|| self.some_unreachable(all));
        }
        if self.peer.local {
            return self.some_unreachable(all);
        }
        let name = self.name();
        let on = list(&pick(all, Address::is_silent));
        let resolution = hosts.iter().any(|a| a.icmp.is(&[Reason::NextHopSilent]));
        let icmp = all.iter().any(|a| a.icmp.is_some());
        let http = all.iter().any(|a| a.http.is_some());
        let message = match (icmp, http) {
            (true, true) if resolution => format!(
                "node down: {name} answers neither ICMP nor HTTP on {on}, and the next hop on the way \
                 to it does not answer ARP or neighbor discovery; check its power and its link"
            ),
            (true, true) => format!(
                "node down: {name} answers neither ICMP nor HTTP on {on}; check its power, its kernel \
                 and its link"
            ),
            (true, false) => format!(
                "node down: {name} does not answer ICMP on {on}; HTTP is not probed, so a filter of \
                 ICMP would look the same"
            ),
            (false, _) => format!(
                "node down: {name} does not answer HTTP on {on}; ICMP is not probed, so a filter of \
                 port {} would look the same",
                self.context.port
            ),
        };
        self.diagnosis(Cause::NodeDown, message)
    }

    fn one_family(&self, family: &[Address<'a>], rest: &[Address<'a>]) -> Diagnosis {
        let (down, up) = match family.first() {
            Some(address) if address.address.is_ipv4() => ("IPv4", "IPv6"),
            _ => ("IPv6", "IPv4"),
        };
        let message = format!(
            "one family only: {} answers over {up} on {}, but not over {down} on {}; check its {down} \
             addresses, and {down} routes and firewalls on the way",
            self.name(),
            list(rest),
            list(family),
        );
        self.diagnosis(Cause::OneFamilyOnly, message)
    }

    fn rejected(&self, addresses: &[Address<'a>]) -> Option<Diagnosis> {
        let told = self.told(addresses, |reason| matches!(reason, Reason::Rejected(_)))?;
        let Told { failure, what, .. } = &told;
        let message = match told.sender {
            Some(sender) => format!(
                "rejected: {} rejects {what} ({failure}); check its firewall and policies",
                self.who(sender)
            ),
            None if matches!(failure, Failure::Os(Errno::EPERM | Errno::EACCES)) => format!(
                "rejected: this host refuses to send {what} ({failure}); check its own firewall and \
                 prohibit routes"
            ),
            None => format!(
                "rejected: a firewall rejects {what} ({failure}) on port {}, while ICMP is answered",
                self.context.port
            ),
        };
        Some(self.diagnosis(Cause::Rejected, message))
    }

    fn agent_down(&self, addresses: &[Address<'a>]) -> Option<Diagnosis> {
        let asked = pick(addresses, |a| a.http.is_some());
        let up = asked.iter().any(|a| a.http.is_up());
        let no_agent = |a: &Address<'_>| a.http.is(&[Reason::Refused, Reason::Hung]);
        if up || !asked.iter().any(no_agent) {
            return None;
        }
        let icmp = pick(addresses, |a| a.icmp.is_up());
        // Then the addresses need not be named twice.
        let same = icmp.len() == addresses.len() && asked.len() == addresses.len();
        let parts: Vec<String> = [
            ("refused", &[Reason::Refused][..]),
            ("accepted and never answered", &[Reason::Hung]),
            ("answered wrongly", &[Reason::BadAnswer]),
            ("dropped silently", &[Reason::Silent]),
        ]
        .into_iter()
        .filter_map(|(what, reasons)| {
            let part = pick(&asked, |a| a.http.is(reasons));
            match part.len() {
                0 => None,
                1 if same && asked.len() == 1 => Some(what.to_owned()),
                2 if same && asked.len() == 2 => Some(format!("{what} on both")),
                n if same && asked.len() == n => Some(format!("{what} on all")),
                _ => Some(format!("{what} on {}", list(&part))),
            }
        })
        .collect();
        let name = self.name();
        let alive = match icmp.is_empty() {
            true => "is up".to_owned(),
            false => format!("answers ICMP on {}", list(&icmp)),
        };
        let message = format!(
            "agent down: {name} {alive}, but HTTP on port {} is {}",
            self.context.port,
            join(&parts)
        );
        Some(self.diagnosis(Cause::AgentDown, message))
    }

    fn no_route(&self, addresses: &[Address<'a>]) -> Option<Diagnosis> {
        // A node that has no route to its own endpoint tells of its endpoint.
        let others = |reason| match reason {
            Reason::NoRoute(Some(sender)) => !self.peer.has(sender),
            reason => reason == Reason::NoRoute(None),
        };
        let told = self.told(addresses, others)?;
        let Told { failure, what, .. } = &told;
        let message = match told.sender {
            Some(sender) if is_loop(failure) => format!(
                "no route: {what} goes in a circle ({failure}); check the routes of {} and its \
                 neighbors",
                self.who(sender)
            ),
            Some(sender) => format!(
                "no route: {} cannot deliver {what} ({failure}); check its routes and its link to that \
                 address",
                self.who(sender)
            ),
            None => format!(
                "no route: this host has no route for {what} ({failure}); check `ip route get`"
            ),
        };
        Some(self.diagnosis(Cause::NoRoute, message))
    }

    fn endpoint_down(&self, addresses: &[Address<'a>]) -> Option<Diagnosis> {
        let unheard = pick(addresses, Address::is_unheard);
        let up = pick(addresses, |a| {
            a.path == Path::Host && (a.http.is_up() || a.is_up())
        });
        if unheard.is_empty() || up.is_empty() || unheard.iter().any(|a| a.path == Path::Host) {
            return None;
        }
        let sender = unheard
            .iter()
            .flat_map(Address::reasons)
            .find_map(Reason::sender);
        let says = match sender {
            None => "is silent".to_owned(),
            Some(sender) => format!("is unreachable, says {}", self.who(sender)),
        };
        let message = format!(
            "endpoint datapath down: the host of {} answers on {}, but its health endpoint on {} \
             {says}; check lxc_health and its programs there, and the routes to its pod CIDRs",
            self.name(),
            list(&up),
            list(&unheard),
        );
        Some(self.diagnosis(Cause::EndpointDatapathDown, message))
    }

    fn address_unreachable(&self, addresses: &[Address<'a>]) -> Option<Diagnosis> {
        let silent = |a: &Address<'_>| a.path == Path::Host && a.is_unheard();
        let any = addresses.iter().any(silent);
        any.then(|| self.some_unreachable(addresses))
    }

    /// What is left when nothing more can be said.
    fn some_unreachable(&self, addresses: &[Address<'a>]) -> Diagnosis {
        let unheard = pick(addresses, Address::is_unheard);
        let heard = pick(addresses, |a| !a.is_unheard());
        let down = match unheard.is_empty() {
            true => pick(addresses, |a| !a.is_up()),
            false => unheard,
        };
        let but = match heard.is_empty() {
            true => String::new(),
            false => format!(", though it is up on {}", list(&heard)),
        };
        let message = format!(
            "address unreachable: {} does not answer on {}{but}; check whether it has the address, and \
             the routes and firewalls on the way",
            self.name(),
            list(&down),
        );
        self.diagnosis(Cause::AddressUnreachable, message)
    }

    /// HTTP fails where ICMP is answered, or by a wrong answer.
    fn http_trouble(&self, addresses: &[Address<'a>]) -> Option<Diagnosis> {
        let name = self.name();
        let port = self.context.port;
        let up = pick(addresses, |a| a.http.is_up());
        let though = match up.is_empty() {
            true => String::new(),
            false => format!(", though answered on {}", list(&up)),
        };
        let refused = pick(addresses, |a| a.http.is(&[Reason::Refused]));
        if !refused.is_empty() {
            let message = format!(
                "port refused: HTTP on port {port} of {name} is refused on {}{though}; its listener is \
                 missing there, or a firewall rejects",
                list(&refused)
            );
            return Some(self.diagnosis(Cause::PortRefused, message));
        }
        let wrong = pick(addresses, |a| a.http.is(&[Reason::BadAnswer, Reason::Hung]));
        if let Some(Finding::Down(_, failure)) = wrong.first().map(|a| a.http) {
            let message = format!(
                "bad answer: HTTP on port {port} of {name} is not answered by a healthy agent on {} \
                 ({failure}){though}; check its log, and what listens there",
                list(&wrong)
            );
            return Some(self.diagnosis(Cause::BadAnswer, message));
        }
        let filtered = pick(addresses, |a| {
            a.http.is(&[Reason::Silent]) && a.icmp.is_up()
        });
        if filtered.is_empty() {
            return None;
        }
        let message = if up.is_empty() {
            format!(
                "port filtered: {name} answers ICMP on {}, but HTTP to port {port} is dropped silently; \
                 check the firewalls on the way, and whether its agent hangs",
                list(&filtered)
            )
        } else {
            format!(
                "port filtered: HTTP to port {port} of {name} is dropped silently on {}{though}; check \
                 the firewalls and policies on the way",
                list(&filtered)
            )
        };
        Some(self.diagnosis(Cause::PortFiltered, message))
    }

    fn icmp_filtered(&self, addresses: &[Address<'a>]) -> Option<Diagnosis> {
        let filtered = pick(addresses, |a| a.icmp.reason().is_some() && !a.is_unheard());
        if filtered.is_empty() {
            return None;
        }
        let message = format!(
            "ICMP filtered: {} answers HTTP on {}, but not ICMP on {}; check for firewalls that drop \
             echo requests or replies",
            self.name(),
            list(&pick(addresses, |a| a.http.is_up())),
            list(&filtered),
        );
        Some(self.diagnosis(Cause::IcmpFiltered, message))
    }

    /// What one sender says of targets of this peer: the failures that `is` holds for, of the first
    /// that names its sender, or of this host if none does.
    fn told(&self, addresses: &[Address<'a>], is: impl Fn(Reason) -> bool) -> Option<Told<'a>> {
        let such = |finding: Finding<'a>| match finding {
            Finding::Down(reason, failure) if is(reason) => Some((reason.sender(), failure)),
            _ => None,
        };
        let findings = || addresses.iter().flat_map(|a| [a.icmp, a.http]);
        let named = findings()
            .filter_map(such)
            .find(|(sender, _)| sender.is_some());
        let (sender, failure) = named.or_else(|| findings().find_map(such))?;
        let same = |finding| such(finding).is_some_and(|(other, _)| other == sender);
        let protocols = match (
            addresses.iter().any(|a| same(a.icmp)),
            addresses.iter().any(|a| same(a.http)),
        ) {
            (true, true) => "ICMP and HTTP",
            (true, false) => "ICMP",
            (false, _) => "HTTP",
        };
        let on = list(&pick(addresses, |a| same(a.icmp) || same(a.http)));
        Some(Told {
            sender,
            failure,
            what: format!("{protocols} to {on} of {}", self.name()),
        })
    }

    fn name(&self) -> String {
        self.peer.display()
    }

    /// An address in the words of an operator.
    fn who(&self, address: IpAddr) -> String {
        if self.context.local_addresses.contains(&address) {
            format!("this host ({address})")
        } else if self.peer.has(address) {
            format!("the node itself ({address})")
        } else {
            address.to_string()
        }
    }
}

/// See [`Picture::told`].
struct Told<'a> {
    sender: Option<IpAddr>,
    failure: &'a Failure,
    /// The protocols, addresses and node.
    what: String,
}

/// The addresses of a family that is silent while the other is heard, and the others.
fn without_silent_family<'a>(all: &[Address<'a>]) -> (Vec<Address<'a>>, Vec<Address<'a>>) {
    for ipv4 in [true, false] {
        let (family, rest): (Vec<_>, Vec<_>) =
            all.iter().partition(|a| a.address.is_ipv4() == ipv4);
        let silent = !family.is_empty() && family.iter().all(Address::is_silent);
        // Where an endpoint alone has the family, it is the endpoint's trouble, unless it is heard by
        // the other family.
        let host = family.iter().any(|a| a.path == Path::Host);
        let path = if host { Path::Host } else { Path::Endpoint };
        if silent && rest.iter().any(|a| a.path == path && !a.is_unheard()) {
            return (family, rest);
        }
    }
    (Vec::new(), all.to_vec())
}

/// Whether packets ran out of hops.
fn is_loop(failure: &Failure) -> bool {
    matches!(
        failure,
        Failure::Icmp(
            IcmpError {
                kind: 11,
                from: IpAddr::V4(_),
                ..
            } | IcmpError {
                kind: 3,
                from: IpAddr::V6(_),
                ..
            }
        )
    )
}

fn pick<'a>(addresses: &[Address<'a>], is: impl Fn(&Address<'a>) -> bool) -> Vec<Address<'a>> {
    addresses.iter().filter(|a| is(a)).copied().collect()
}

/// `a, b and c`, or `a, b, c, d and 7 more`.
fn list(addresses: &[Address<'_>]) -> String {
    let shown = addresses.len().min(LISTED);
    let mut items: Vec<String> = addresses[..shown]
        .iter()
        .map(|a| a.address.to_string())
        .collect();
    if addresses.len() > shown {
        items.push(format!("{} more", addresses.len() - shown));
    }
    join(&items)
}

/// `a, b and c`.
fn join(items: &[String]) -> String {
    match items {
        [] => String::new(),
        [item] => item.clone(),
        [items @ .., last] => format!("{} and {last}", items.join(", ")),
    }
}

/// `14 of 60 probes in the last 10 min (23 %)`.
struct Losses<'a>(&'a Loss);

impl fmt::Display for Losses<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Loss {
            probes,
            lost,
            window,
        } = *self.0;
        let percent = 100.0 * f64::from(lost) / f64::from(probes.max(1));
        let minutes = window.as_secs() / 60;
        write!(
            f,
            "{lost} of {probes} probes in the last {minutes} min ({percent:.0} %)"
        )
    }
}

/// Whether the losses are above the threshold, and not by chance: with the threshold's probability,
/// so many of so many probes are lost but once in ten thousand times (an exact binomial test).
fn exceeds(loss: &Loss, threshold: f64) -> bool {
    let (n, lost) = (f64::from(loss.probes), f64::from(loss.lost));
    if loss.lost == 0 || lost <= n * threshold {
        return false;
    }
    if threshold <= 0.0 {
        return true;
    }
    // Up from the probability of none, as a logarithm: it may be too small for a number.
    let odds = (threshold / (1.0 - threshold)).ln();
    let mut log = n * (1.0 - threshold).ln();
    let mut fewer = 0.0;
    for k in 0..loss.lost {
        fewer += log.exp();
        let k = f64::from(k);
        log += odds + ((n - k) / (k + 1.0)).ln();
    }
    1.0 - fewer < LOSS_CHANCE
}

/// The part of all peers' targets that fails alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Scope {
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
    fn explains(self, context: &Context<'_>, peer: &PeerFacts<'_>) -> bool {
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
    NextHopSilent,
    Told,
    NoRoute,
    Rejected,
    LocalError,
}

impl From<Reason> for Why {
    fn from(reason: Reason) -> Self {
        match reason {
            Reason::Silent | Reason::Refused | Reason::Hung | Reason::BadAnswer => Self::Silent,
            Reason::Unreachable | Reason::NextHopSilent => Self::NextHopSilent,
            Reason::NoRoute(Some(_)) | Reason::Rejected(Some(_)) => Self::Told,
            Reason::NoRoute(None) => Self::NoRoute,
            Reason::Rejected(None) => Self::Rejected,
            Reason::LocalError => Self::LocalError,
        }
    }
}

/// Looks at all peers, to tell whether it is this node that is cut off.
#[derive(Clone, Debug, Default)]
pub(super) struct Survey {
    /// In the order of [`Scope::ALL`].
    scopes: [Tally; Scope::ALL.len()],
}

#[derive(Clone, Debug, Default)]
struct Tally {
    /// Remote peers that have such targets.
    peers: u32,
    /// Those of them that fail.
    failing: u32,
    /// By `Why`: how many peers, and how the first of them fails.
    why: [(u32, Option<Failure>); Why::LocalError as usize + 1],
}

/// What cuts this node off.
#[derive(Clone, Debug)]
pub(super) struct Isolation {
    /// From what.
    pub(super) scope: Scope,
    /// What there is to say of this node.
    pub(super) diagnosis: Diagnosis,
}

impl Survey {
    /// Takes in a peer.
    pub(super) fn add(&mut self, context: &Context<'_>, peer: &PeerFacts<'_>) {
        if peer.local {
            return;
        }
        for (scope, tally) in Scope::ALL.into_iter().zip(&mut self.scopes) {
            let Some(fails) = scope.fails(context, peer) else {
                continue;
            };
            tally.peers += 1;
            if let Some((why, failure)) = fails {
                tally.failing += 1;
                let (count, first) = &mut tally.why[why as usize];
                *count += 1;
                first.get_or_insert(failure);
            }
        }
    }

    /// Whether it is this node, called `name`, that is cut off. `without_carrier` are its uplinks that
    /// have no carrier.
    pub(super) fn diagnose(
        &self,
        context: &Context<'_>,
        name: &str,
        without_carrier: &[&str],
    ) -> Option<Isolation> {
        let (part, whole) = ISOLATED_PART;
        let isolated = |tally: &Tally| {
            tally.failing >= ISOLATED_PEERS
                && u64::from(tally.failing) * u64::from(whole)
                    >= u64::from(tally.peers) * u64::from(part)
        };
        let (scope, tally) = Scope::ALL
            .into_iter()
            .zip(&self.scopes)
            .find(|(_, tally)| isolated(tally))?;
        let (index, (count, first)) = tally
            .why
            .iter()
            .enumerate()
            .max_by_key(|(_, (count, _))| *count)?;
        let says = first.as_ref().map(ToString::to_string).unwrap_or_default();
        let Tally { peers, failing, .. } = *tally;
        let port = context.port;
        let what = match scope {
            Scope::Everything => format!("nothing is heard of {failing} of {peers} peers"),
            Scope::Ipv4 => format!("nothing is heard of {failing} of {peers} peers over IPv4"),
            Scope::Ipv6 => format!("nothing is heard of {failing} of {peers} peers over IPv6"),
            Scope::Endpoints => {
                format!(
                    "no health endpoint of {failing} of {peers} peers is heard, but their hosts are"
                )
            }
            Scope::Icmp => format!("{failing} of {peers} peers do not answer ICMP, but HTTP"),
            Scope::Http => {
                format!("{failing} of {peers} peers do not answer HTTP on port {port}, but ICMP")
            }
        };
        let carrier = scope == Scope::Everything && !without_carrier.is_empty();
        let links = without_carrier.join(", ");
        let check = if carrier {
            format!("no carrier on {links}; check its cable and switch port")
        } else {
            let silent = match scope {
                Scope::Everything | Scope::Ipv4 | Scope::Ipv6 => "check its uplink and firewall",
                Scope::Endpoints => "check its routes to pod CIDRs, and its firewall",
                Scope::Icmp | Scope::Http => "check its firewall, then those of the network",
            };
            match index {
                i if i == Why::NextHopSilent as usize => {
                    format!("{says}; check its link and gateway")
                }
                i if i == Why::Told as usize => format!("{says}; check that router, and {silent}"),
                i if i == Why::NoRoute as usize => format!("{says}; check its routes"),
                i if i == Why::Rejected as usize => {
                    format!("{says}; check its firewall and prohibit routes")
                }
                i if i == Why::LocalError as usize => format!("it fails to probe: {says}"),
                _ => silent.to_owned(),
            }
        };
        let mut evidence = vec![what.clone(), format!("{count} of {failing}: {says}")];
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
}

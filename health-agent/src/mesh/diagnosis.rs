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
                Errno::ECONNREFUSED if !icmp => Self::Refused,
                Errno::ECONNRESET | Errno::ECONNABORTED | Errno::EPIPE if !icmp => Self::BadAnswer,
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
            // The host's trouble is that of the node.
            let rejected = |a: &Address<'_>| a.reasons().any(|r| matches!(r, Reason::Rejected(_)));
            let told = if hosts.iter().any(rejected) {
                self.rejected(all)
            } else {
                self.no_route(all).or_else(|| self.rejected(all))
            };
            return told.unwrap_or_else(|| self.some_unreachable(all));
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
        let filtered = pick(addresses, |a| a.icmp.reason().is_some() && a.http.is_up());
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
            Reason::Silent | Reason::Refused | Reason::Hung | Reason::BadAnswer => Self::Silent,
            Reason::Unreachable => Self::Unreachable,
            Reason::NextHopSilent => Self::NextHopSilent,
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
    /// In the order of [`Why::ALL`]: how many peers, and how the first of them fails.
    why: [(u32, Option<Failure>); Why::ALL.len()],
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
                format!(
                    "the health endpoints of {failing} of {peers} peers are silent, their hosts are not"
                )
            }
            Scope::Icmp => format!("{failing} of {peers} peers do not answer ICMP, but HTTP"),
            Scope::Http => {
                format!("{failing} of {peers} peers do not answer HTTP on port {port}, but ICMP")
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
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::history::Latency;
    use super::*;

    const HOST4: &str = "172.30.0.3";
    const ENDPOINT4: &str = "10.244.3.7";
    const HOST6: &str = "fd00:30::3";
    const ENDPOINT6: &str = "fd00:10:244:3::7";
    const ROUTER: &str = "192.0.2.1";
    const SELF4: &str = "172.30.0.1";
    const SELF6: &str = "fd00:30::1";

    #[derive(Clone, Debug)]
    enum Given {
        Off,
        Unknown,
        Up,
        Down(Failure),
    }
    use Given::{Off, Unknown, Up};

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    fn silent() -> Given {
        Given::Down(Failure::TimedOut)
    }

    fn os(errno: Errno) -> Given {
        Given::Down(Failure::Os(errno))
    }

    fn refused() -> Given {
        os(Errno::ECONNREFUSED)
    }

    fn hung() -> Given {
        Given::Down(Failure::ResponseTimedOut)
    }

    fn icmp(kind: u8, code: u8, from: &str) -> Given {
        let from = ip(from);
        Given::Down(Failure::Icmp(IcmpError { kind, code, from }))
    }

    /// What each address of a peer gives by ICMP and by HTTP. An endpoint is an address of 10/8 or
    /// fd00:10::/32.
    type Row<'a> = (&'a str, Given, Given);

    fn targets<'a>(rows: &'a [Row<'a>]) -> Vec<TargetFacts<'a>> {
        let mut targets = Vec::new();
        for (address, icmp, http) in rows {
            let endpoint = address.starts_with("10.") || address.starts_with("fd00:10:");
            let path = if endpoint { Path::Endpoint } else { Path::Host };
            for (protocol, given) in [(Protocol::Icmp, icmp), (Protocol::Http, http)] {
                targets.push(TargetFacts {
                    key: TargetKey {
                        address: ip(address),
                        path,
                        protocol,
                    },
                    verdict: match given {
                        Off => Verdict::Off,
                        Unknown => Verdict::Unknown,
                        Up => Verdict::Reachable,
                        Given::Down(failure) => Verdict::Unreachable(failure),
                    },
                    trend: Trend::default(),
                });
            }
        }
        targets
    }

    fn with_context<T>(use_it: impl FnOnce(&Context<'_>) -> T) -> T {
        use_it(&Context {
            port: 4240,
            local_addresses: &[ip(SELF4), ip(SELF6)],
            thresholds: Thresholds::default(),
        })
    }

    fn peer<'a>(targets: &'a [TargetFacts<'a>]) -> PeerFacts<'a> {
        PeerFacts {
            name: "default/n3",
            local: false,
            endpoint_expected: true,
            targets,
        }
    }

    fn diagnose(rows: &[Row<'_>]) -> Option<Diagnosis> {
        with_context(|context| context.diagnose(&peer(&targets(rows)), None))
    }

    #[track_caller]
    fn says(rows: &[Row<'_>], cause: Cause, message: &str) -> Diagnosis {
        let diagnosis = diagnose(rows).expect("a diagnosis");
        assert_eq!(
            (diagnosis.cause, diagnosis.message.as_str()),
            (cause, message)
        );
        diagnosis
    }

    #[track_caller]
    fn is(rows: &[Row<'_>], cause: Cause, part: &str) {
        let diagnosis = diagnose(rows).expect("a diagnosis");
        assert_eq!(diagnosis.cause, cause, "{diagnosis:#?}");
        assert!(diagnosis.message.contains(part), "{}", diagnosis.message);
    }

    #[test]
    fn a_healthy_peer_has_no_diagnosis() {
        assert_eq!(diagnose(&[(HOST4, Up, Up), (ENDPOINT4, Up, Up)]), None);
        assert_eq!(diagnose(&[(HOST4, Up, Off), (ENDPOINT4, Off, Up)]), None);
    }

    #[test]
    fn while_anything_is_unknown_nothing_is_said() {
        for rows in [
            [(HOST4, Unknown, Unknown), (ENDPOINT4, Unknown, Unknown)],
            [(HOST4, silent(), Unknown), (ENDPOINT4, silent(), silent())],
            [(HOST4, Up, refused()), (ENDPOINT4, Up, Unknown)],
            [(HOST4, Up, Up), (ENDPOINT4, Up, Unknown)],
        ] {
            assert_eq!(diagnose(&rows), None, "{rows:?}");
        }
    }

    #[test]
    fn a_node_is_down_when_nothing_is_heard_of_it() {
        let diagnosis = says(
            &[(HOST4, silent(), silent()), (ENDPOINT4, silent(), silent())],
            Cause::NodeDown,
            "node down: default/n3 answers neither ICMP nor HTTP on 172.30.0.3 and 10.244.3.7; check \
             its power, its kernel and its link",
        );
        assert_eq!(
            diagnosis.evidence,
            [
                "ICMP to 172.30.0.3 (host): Connection timed out",
                "HTTP to 172.30.0.3 port 4240 (host): Connection timed out",
                "ICMP to 10.244.3.7 (endpoint): Connection timed out",
                "HTTP to 10.244.3.7 port 4240 (endpoint): Connection timed out",
            ]
        );
        // Its endpoint is not known.
        is(
            &[(HOST4, silent(), silent())],
            Cause::NodeDown,
            "on 172.30.0.3;",
        );
        // The neighbor does not answer ARP; connections say that there is no route.
        let no_arp = || icmp(3, 1, SELF4);
        let unreachable = || os(Errno::EHOSTUNREACH);
        let rows = [
            (HOST4, no_arp(), unreachable()),
            (ENDPOINT4, silent(), unreachable()),
        ];
        is(
            &rows,
            Cause::NodeDown,
            "does not answer ARP or neighbor discovery",
        );
        assert_eq!(
            diagnose(&rows).unwrap().evidence[0],
            "ICMP to 172.30.0.3 (host): No route to host (from 172.30.0.1), this host: ARP is not \
             answered"
        );
        is(
            &[
                (HOST4, silent(), silent()),
                (HOST6, icmp(1, 3, SELF6), os(Errno::EHOSTUNREACH)),
                (ENDPOINT4, silent(), silent()),
            ],
            Cause::NodeDown,
            "on 172.30.0.3, fd00:30::3 and 10.244.3.7",
        );
        // The only family that has a route is silent.
        is(
            &[
                (HOST4, silent(), silent()),
                (HOST6, os(Errno::ENETUNREACH), os(Errno::ENETUNREACH)),
            ],
            Cause::NodeDown,
            "on 172.30.0.3;",
        );
    }

    #[test]
    fn with_one_protocol_a_silent_node_may_be_a_filter() {
        is(
            &[(HOST4, silent(), Off), (ENDPOINT4, silent(), Off)],
            Cause::NodeDown,
            "HTTP is not probed, so a filter of ICMP would look the same",
        );
        is(
            &[(HOST4, Off, silent()), (ENDPOINT4, Off, silent())],
            Cause::NodeDown,
            "ICMP is not probed, so a filter of port 4240 would look the same",
        );
        // Without a host address that is probed, the host may be well.
        is(
            &[(ENDPOINT4, silent(), silent())],
            Cause::AddressUnreachable,
            "does not answer on 10.244.3.7;",
        );
    }

    #[test]
    fn an_agent_is_down_when_its_host_is_up_and_no_http_is_answered() {
        says(
            &[(HOST4, Up, refused()), (ENDPOINT4, Up, refused())],
            Cause::AgentDown,
            "agent down: default/n3 answers ICMP on 172.30.0.3 and 10.244.3.7, but HTTP on port 4240 \
             is refused on both",
        );
        says(
            &[(HOST4, Up, refused())],
            Cause::AgentDown,
            "agent down: default/n3 answers ICMP on 172.30.0.3, but HTTP on port 4240 is refused",
        );
        is(
            &[(HOST4, Off, refused()), (ENDPOINT4, Off, refused())],
            Cause::AgentDown,
            "default/n3 is up, but HTTP on port 4240 is refused on 172.30.0.3 and 10.244.3.7",
        );
        is(
            &[(HOST4, Up, hung()), (ENDPOINT4, Up, silent())],
            Cause::AgentDown,
            "accepted and never answered on 172.30.0.3 and dropped silently on 10.244.3.7",
        );
        // The endpoint went with its agent.
        is(
            &[(HOST4, Up, refused()), (ENDPOINT4, silent(), silent())],
            Cause::AgentDown,
            "answers ICMP on 172.30.0.3, but",
        );
        is(
            &[
                (HOST4, Up, refused()),
                (HOST6, Up, refused()),
                (ENDPOINT4, Up, refused()),
                (ENDPOINT6, Up, refused()),
            ],
            Cause::AgentDown,
            "is refused on all",
        );
        // One family does not get through at all.
        is(
            &[
                (HOST4, Up, refused()),
                (HOST6, silent(), silent()),
                (ENDPOINT4, Up, refused()),
                (ENDPOINT6, silent(), silent()),
            ],
            Cause::AgentDown,
            "answers ICMP on 172.30.0.3 and 10.244.3.7, but HTTP on port 4240 is refused on both",
        );
    }

    #[test]
    fn an_endpoint_is_down_when_its_host_is_up() {
        says(
            &[(HOST4, Up, Up), (ENDPOINT4, silent(), silent())],
            Cause::EndpointDatapathDown,
            "endpoint datapath down: the host of default/n3 answers on 172.30.0.3, but its health \
             endpoint on 10.244.3.7 is silent; check lxc_health and its programs there, and the \
             routes to its pod CIDRs",
        );
        is(
            &[
                (HOST4, Up, Up),
                (ENDPOINT4, icmp(3, 1, HOST4), os(Errno::EHOSTUNREACH)),
            ],
            Cause::EndpointDatapathDown,
            "is unreachable, says the node itself (172.30.0.3)",
        );
        is(
            &[(HOST4, silent(), Up), (ENDPOINT4, silent(), silent())],
            Cause::EndpointDatapathDown,
            "answers on 172.30.0.3",
        );
        // By one family alone.
        is(
            &[
                (HOST4, Up, Up),
                (HOST6, Up, Up),
                (ENDPOINT4, silent(), silent()),
                (ENDPOINT6, Up, Up),
            ],
            Cause::EndpointDatapathDown,
            "endpoint on 10.244.3.7 is silent",
        );
        is(
            &[
                (HOST4, Up, Up),
                (HOST6, silent(), silent()),
                (ENDPOINT4, silent(), silent()),
                (ENDPOINT6, silent(), silent()),
            ],
            Cause::EndpointDatapathDown,
            "endpoint on 10.244.3.7 is silent",
        );
        is(
            &[(HOST4, Up, Off), (ENDPOINT4, silent(), Off)],
            Cause::EndpointDatapathDown,
            "answers on 172.30.0.3",
        );
    }

    #[test]
    fn icmp_is_filtered_where_http_is_answered() {
        says(
            &[(HOST4, silent(), Up), (ENDPOINT4, silent(), Up)],
            Cause::IcmpFiltered,
            "ICMP filtered: default/n3 answers HTTP on 172.30.0.3 and 10.244.3.7, but not ICMP on \
             172.30.0.3 and 10.244.3.7; check for firewalls that drop echo requests or replies",
        );
        is(
            &[(HOST4, silent(), Up), (ENDPOINT4, Up, Up)],
            Cause::IcmpFiltered,
            "but not ICMP on 172.30.0.3;",
        );
    }

    #[test]
    fn a_port_is_filtered_where_icmp_is_answered() {
        says(
            &[(HOST4, Up, silent()), (ENDPOINT4, Up, silent())],
            Cause::PortFiltered,
            "port filtered: default/n3 answers ICMP on 172.30.0.3 and 10.244.3.7, but HTTP to port \
             4240 is dropped silently; check the firewalls on the way, and whether its agent hangs",
        );
        says(
            &[(HOST4, Up, silent()), (ENDPOINT4, Up, Up)],
            Cause::PortFiltered,
            "port filtered: HTTP to port 4240 of default/n3 is dropped silently on 172.30.0.3, though \
             answered on 10.244.3.7; check the firewalls and policies on the way",
        );
    }

    #[test]
    fn a_port_is_refused_on_one_address() {
        says(
            &[(HOST4, Up, Up), (ENDPOINT4, Up, refused())],
            Cause::PortRefused,
            "port refused: HTTP on port 4240 of default/n3 is refused on 10.244.3.7, though answered \
             on 172.30.0.3; its listener is missing there, or a firewall rejects",
        );
        is(
            &[(HOST4, silent(), refused()), (ENDPOINT4, Up, Up)],
            Cause::PortRefused,
            "is refused on 172.30.0.3",
        );
    }

    #[test]
    fn a_wrong_answer_is_told() {
        let status = || Given::Down(Failure::UnexpectedStatus(503));
        is(
            &[(HOST4, Up, status()), (ENDPOINT4, Up, status())],
            Cause::BadAnswer,
            "(Unexpected status 503); check its log",
        );
        is(
            &[(HOST4, Up, hung()), (ENDPOINT4, Up, Up)],
            Cause::BadAnswer,
            "(Response timed out), though answered on 10.244.3.7",
        );
        is(
            &[(HOST4, Up, os(Errno::ECONNRESET)), (ENDPOINT4, Up, Up)],
            Cause::BadAnswer,
            "(Connection reset by peer)",
        );
    }

    #[test]
    fn a_missing_route_is_told_with_its_sender() {
        let local = || os(Errno::ENETUNREACH);
        says(
            &[(HOST4, local(), local()), (ENDPOINT4, local(), local())],
            Cause::NoRoute,
            "no route: this host has no route for ICMP and HTTP to 172.30.0.3 and 10.244.3.7 of \
             default/n3 (Network is unreachable); check `ip route get`",
        );
        let router = || icmp(3, 0, ROUTER);
        says(
            &[(HOST4, router(), silent()), (ENDPOINT4, silent(), silent())],
            Cause::NoRoute,
            "no route: 192.0.2.1 cannot deliver ICMP to 172.30.0.3 of default/n3 (Network is \
             unreachable (from 192.0.2.1)); check its routes and its link to that address",
        );
        is(
            &[(HOST4, Up, Up), (ENDPOINT4, local(), local())],
            Cause::NoRoute,
            "this host has no route for ICMP and HTTP to 10.244.3.7",
        );
        is(
            &[(HOST4, icmp(11, 0, ROUTER), silent())],
            Cause::NoRoute,
            "goes in a circle",
        );
        is(
            &[(HOST6, icmp(3, 0, "2001:db8::1"), silent())],
            Cause::NoRoute,
            "goes in a circle",
        );
        // Without ICMP, a connection's error is taken as it stands.
        is(
            &[(HOST4, Off, os(Errno::EHOSTUNREACH))],
            Cause::NoRoute,
            "No route to host",
        );
        is(
            &[(HOST4, os(Errno::EINVAL), os(Errno::EINVAL))],
            Cause::NoRoute,
            "blackhole route",
        );
    }

    #[test]
    fn a_rejection_is_told_with_its_sender() {
        says(
            &[
                (HOST4, icmp(3, 13, ROUTER), silent()),
                (ENDPOINT4, icmp(3, 13, ROUTER), silent()),
            ],
            Cause::Rejected,
            "rejected: 192.0.2.1 rejects ICMP to 172.30.0.3 and 10.244.3.7 of default/n3 \
             (Communication prohibited (from 192.0.2.1)); check its firewall and policies",
        );
        // What Linux makes of a firewall's default `reject`.
        is(
            &[
                (HOST4, icmp(3, 3, HOST4), refused()),
                (ENDPOINT4, icmp(3, 3, HOST4), refused()),
            ],
            Cause::Rejected,
            "the node itself (172.30.0.3) rejects ICMP and HTTP to 172.30.0.3 and 10.244.3.7",
        );
        is(
            &[(HOST4, Up, os(Errno::EHOSTUNREACH)), (ENDPOINT4, Up, Up)],
            Cause::Rejected,
            "a firewall rejects HTTP to 172.30.0.3 of default/n3 (No route to host) on port 4240",
        );
        let prohibit = || os(Errno::EACCES);
        is(
            &[(HOST4, prohibit(), prohibit()), (ENDPOINT4, Up, Up)],
            Cause::Rejected,
            "this host refuses to send ICMP and HTTP to 172.30.0.3",
        );
        is(
            &[
                (HOST4, Up, Up),
                (HOST6, icmp(1, 1, SELF6), os(Errno::EACCES)),
            ],
            Cause::Rejected,
            "this host (fd00:30::1) rejects ICMP to fd00:30::3",
        );
    }

    #[test]
    fn one_family_may_fail() {
        let rows = [
            (HOST4, Up, Up),
            (HOST6, icmp(1, 3, SELF6), os(Errno::EHOSTUNREACH)),
            (ENDPOINT4, Up, Up),
            (ENDPOINT6, silent(), silent()),
        ];
        says(
            &rows,
            Cause::OneFamilyOnly,
            "one family only: default/n3 answers over IPv4 on 172.30.0.3 and 10.244.3.7, but not over \
             IPv6 on fd00:30::3 and fd00:10:244:3::7; check its IPv6 addresses, and IPv6 routes and \
             firewalls on the way",
        );
        is(
            &[(HOST4, silent(), silent()), (HOST6, Up, Up)],
            Cause::OneFamilyOnly,
            "over IPv6 on fd00:30::3, but not over IPv4 on 172.30.0.3",
        );
        // That it has no route is more than that it fails.
        is(
            &[
                (HOST4, Up, Up),
                (HOST6, os(Errno::ENETUNREACH), os(Errno::ENETUNREACH)),
            ],
            Cause::NoRoute,
            "fd00:30::3",
        );
    }

    #[test]
    fn a_secondary_address_may_fail() {
        is(
            &[
                (HOST4, Up, Up),
                ("172.31.0.3", silent(), silent()),
                (ENDPOINT4, Up, Up),
            ],
            Cause::AddressUnreachable,
            "does not answer on 172.31.0.3, though it is up on 172.30.0.3 and 10.244.3.7",
        );
        is(
            &[(HOST4, silent(), silent()), (ENDPOINT4, Up, Up)],
            Cause::AddressUnreachable,
            "does not answer on 172.30.0.3, though it is up on 10.244.3.7",
        );
    }

    #[test]
    fn this_node_is_never_called_down_by_itself() {
        let rows = [(HOST4, silent(), silent())];
        let targets = targets(&rows);
        let own = PeerFacts {
            local: true,
            ..peer(&targets)
        };
        let diagnosis = with_context(|context| context.diagnose(&own, None)).unwrap();
        assert_eq!(diagnosis.cause, Cause::AddressUnreachable);
        assert!(diagnosis.message.contains("this node (default/n3)"));
    }

    #[test]
    fn what_this_host_cannot_do_is_no_evidence() {
        let none = || Given::Down(Failure::NoFamily);
        is(
            &[(HOST4, Up, Up), (HOST6, none(), none())],
            Cause::LocalError,
            "ICMP to fd00:30::3 (host): Address family not supported on this host",
        );
        is(
            &[
                (HOST4, Up, os(Errno::EMFILE)),
                (ENDPOINT4, Up, os(Errno::EMFILE)),
            ],
            Cause::LocalError,
            "HTTP to 172.30.0.3 port 4240 (host): Too many open files",
        );
        is(
            &[
                (HOST4, Up, Up),
                (HOST6, none(), none()),
                (ENDPOINT4, silent(), silent()),
            ],
            Cause::EndpointDatapathDown,
            "10.244.3.7",
        );
    }

    #[test]
    fn an_endpoint_that_nobody_tells_is_asked_for() {
        is(
            &[(HOST4, Up, Up)],
            Cause::EndpointAddressUnknown,
            "172.30.0.3",
        );
        assert_eq!(diagnose(&[(HOST4, Up, Off)]), None);
        let rows = [(HOST4, Up, Up)];
        let targets = targets(&rows);
        let without = PeerFacts {
            endpoint_expected: false,
            ..peer(&targets)
        };
        assert_eq!(
            with_context(|context| context.diagnose(&without, None)),
            None
        );
    }

    fn lost(lost: u32, probes: u32) -> Trend {
        let window = Duration::from_secs(600);
        Trend {
            loss: [Loss {
                probes,
                lost,
                window,
            }; 2],
            ..Trend::default()
        }
    }

    fn shifted(recent_us: u64, usual_us: u64) -> Trend {
        let latency = |us, samples| Latency {
            samples,
            p25: Duration::from_micros(us * 9 / 10),
            p50: Duration::from_micros(us),
            p90: Duration::from_micros(us * 11 / 10),
        };
        Trend {
            recent: Some(latency(recent_us, 8)),
            usual: Some(latency(usual_us, 60)),
            ..Trend::default()
        }
    }

    #[test]
    fn a_degraded_target_is_told() {
        let rows = [(HOST4, Up, Up), (ENDPOINT4, Up, Up)];
        let mut facts = targets(&rows);
        facts[2].trend = shifted(4000, 1200);
        with_context(|context| {
            let diagnosis = context.diagnose(&peer(&facts), None).unwrap();
            assert_eq!(diagnosis.cause, Cause::LatencyShift);
            assert_eq!(
                diagnosis.message,
                "latency shift: ICMP to 10.244.3.7 (endpoint) of default/n3 takes 4.0ms now, 1.2ms \
                 before"
            );
            facts[3].trend = lost(14, 60);
            let diagnosis = context.diagnose(&peer(&facts), None).unwrap();
            assert_eq!(diagnosis.cause, Cause::Loss);
            assert_eq!(
                diagnosis.message,
                "loss: default/n3 lost 14 of 60 probes in the last 10 min (23 %) of HTTP to \
                 10.244.3.7 port 4240 (endpoint); 1 other target is degraded as well"
            );
            assert_eq!(diagnosis.evidence.len(), 2);
        });
    }

    #[test]
    fn a_shift_is_a_multiple_and_more_than_noise() {
        let rows = [(HOST4, Up, Up)];
        let degraded = |index: usize, trend| {
            let mut facts = targets(&rows);
            facts[index].trend = trend;
            with_context(|context| context.degraded(&facts[index])).is_some()
        };
        assert!(degraded(0, shifted(2400, 1200)));
        assert!(!degraded(0, shifted(2300, 1200)));
        assert!(!degraded(0, shifted(900, 100)));
        assert!(!degraded(1, shifted(15_000, 1000)));
        assert!(degraded(1, shifted(30_000, 1000)));
        let mut few = shifted(9000, 1000);
        few.usual.as_mut().unwrap().samples = 19;
        assert!(!degraded(0, few));
        let mut alternating = shifted(9000, 1000);
        alternating.usual.as_mut().unwrap().p90 = Duration::from_millis(9);
        assert!(!degraded(0, alternating));
    }

    #[test]
    fn chance_is_no_loss() {
        let exceeds = |lost, probes, threshold| {
            let window = Duration::from_secs(600);
            exceeds(
                &Loss {
                    probes,
                    lost,
                    window,
                },
                threshold,
            )
        };
        // Right after a start: a first probe lost and those that confirm it.
        assert!(!exceeds(0, 0, 0.05));
        assert!(!exceeds(1, 1, 0.05));
        assert!(!exceeds(3, 4, 0.05));
        // R: pbinom(c(10, 11), 60, 0.05, lower = F) is 1.9e-4 and 4.5e-5.
        assert!(!exceeds(11, 60, 0.05));
        assert!(exceeds(12, 60, 0.05));
        assert!(exceeds(60, 60, 0.05));
        assert!(exceeds(2000, 4000, 0.05));
        assert!(!exceeds(200, 4000, 0.05));
        assert!(exceeds(1, 60, 0.0));
        assert!(!exceeds(60, 60, 1.0));
    }

    /// `failing` of `peers` peers give this row, the others are up.
    fn survey(failing: usize, peers: usize, row: &[Row<'_>]) -> Option<Isolation> {
        let up: Vec<Row<'_>> = row.iter().map(|r| (r.0, Up, Up)).collect();
        let (failed, up) = (targets(row), targets(&up));
        with_context(|context| {
            let mut survey = Survey::default();
            for number in 0..peers {
                let targets = if number < failing { &failed } else { &up };
                survey.add(context, &peer(targets));
            }
            survey.diagnose(context, "default/n1", &[])
        })
    }

    #[test]
    fn when_most_peers_fail_it_is_this_node() {
        let down = [(HOST4, silent(), silent()), (ENDPOINT4, silent(), silent())];
        let isolation = survey(9, 10, &down).unwrap();
        assert_eq!(isolation.scope, Scope::Everything);
        assert_eq!(isolation.diagnosis.cause, Cause::ThisNodeIsolated);
        assert_eq!(
            isolation.diagnosis.message,
            "this node isolated: default/n1: nothing is heard of 9 of 10 peers: check its uplink and \
             firewall"
        );
        assert!(survey(7, 10, &down).is_none());
        assert!(survey(2, 2, &down).is_none());
        assert!(survey(3, 3, &down).is_some());

        let no_route = || os(Errno::ENETUNREACH);
        let isolation = survey(4, 4, &[(HOST4, no_route(), no_route())]).unwrap();
        assert_eq!(
            isolation.diagnosis.message,
            "this node isolated: default/n1: nothing is heard of 4 of 4 peers: Network is unreachable; \
             check its routes"
        );
        let no_arp = [(HOST4, icmp(3, 1, SELF4), os(Errno::EHOSTUNREACH))];
        let isolation = survey(4, 4, &no_arp).unwrap();
        assert!(
            isolation
                .diagnosis
                .message
                .ends_with("check its link and gateway"),
            "{isolation:?}"
        );
    }

    #[test]
    fn agents_that_are_down_are_not_this_nodes_fault() {
        assert!(survey(9, 9, &[(HOST4, Up, refused()), (ENDPOINT4, Up, refused())]).is_none());
        assert!(
            survey(9, 9, &[(HOST4, silent(), refused())])
                .is_none_or(|isolation| { isolation.scope == Scope::Icmp })
        );
        assert!(survey(9, 9, &[(HOST4, silent(), Unknown)]).is_none());
    }

    #[test]
    fn this_node_may_be_cut_off_in_part() {
        for (row, scope) in [
            (
                [(HOST4, silent(), Up), (ENDPOINT4, silent(), Up)],
                Scope::Icmp,
            ),
            (
                [(HOST4, Up, silent()), (ENDPOINT4, Up, silent())],
                Scope::Http,
            ),
            (
                [(HOST4, Up, Up), (ENDPOINT4, silent(), silent())],
                Scope::Endpoints,
            ),
            ([(HOST4, Up, Up), (HOST6, silent(), silent())], Scope::Ipv6),
            ([(HOST4, silent(), silent()), (HOST6, Up, Up)], Scope::Ipv4),
        ] {
            let isolation = survey(8, 10, &row).unwrap();
            assert_eq!(isolation.scope, scope, "{isolation:?}");
            with_context(|context| {
                let blamed = context
                    .diagnose(&peer(&targets(&row)), Some(&isolation))
                    .unwrap();
                assert_eq!(blamed.cause, Cause::ThisNodeIsolated);
                assert!(
                    blamed
                        .message
                        .starts_with("default/n3 is not judged: this node isolated")
                );
                // One with a trouble of its own keeps it.
                let mut own = row.clone();
                for (_, icmp, http) in &mut own {
                    (*icmp, *http) = (Up, refused());
                }
                let own = context
                    .diagnose(&peer(&targets(&own)), Some(&isolation))
                    .unwrap();
                assert_eq!(own.cause, Cause::AgentDown);
            });
        }
    }

    #[test]
    fn a_lost_carrier_is_named() {
        let row = [(HOST4, os(Errno::ENETDOWN), os(Errno::ENETDOWN))];
        let facts = targets(&row);
        with_context(|context| {
            let mut survey = Survey::default();
            for _ in 0..3 {
                survey.add(context, &peer(&facts));
            }
            let isolation = survey.diagnose(context, "default/n1", &["eth0"]).unwrap();
            assert!(isolation.diagnosis.message.contains("no carrier on eth0"));
        });
    }

    #[test]
    fn causes_are_kebab_case() {
        let json = serde_json::to_string(&Cause::EndpointDatapathDown).unwrap();
        assert_eq!(json, "\"endpoint-datapath-down\"");
    }

    fn any_failure() -> impl Strategy<Value = Failure> {
        let from = prop::sample::select(vec![
            HOST4,
            ENDPOINT4,
            ROUTER,
            SELF4,
            HOST6,
            ENDPOINT6,
            SELF6,
            "2001:db8::1",
        ]);
        prop_oneof![
            Just(Failure::TimedOut),
            Just(Failure::ResponseTimedOut),
            Just(Failure::Closed),
            Just(Failure::NoFamily),
            (1..134).prop_map(|errno| Failure::Os(Errno::from_raw(errno))),
            (0_u8..16, 0_u8..16, from).prop_map(|(kind, code, from)| {
                let from = ip(from);
                Failure::Icmp(IcmpError { kind, code, from })
            }),
        ]
    }

    fn any_given() -> impl Strategy<Value = Given> {
        prop_oneof![
            1 => Just(Off),
            3 => Just(Up),
            2 => Just(silent()),
            1 => Just(refused()),
            3 => any_failure().prop_map(Given::Down),
        ]
    }

    proptest! {
        #[test]
        fn every_failure_has_a_diagnosis_of_one_line(
            given in prop::collection::vec((any_given(), any_given()), 1..=5),
        ) {
            let addresses = [HOST4, ENDPOINT4, HOST6, ENDPOINT6, "172.31.0.3"];
            let rows: Vec<Row<'_>> = addresses
                .into_iter()
                .zip(given)
                .map(|(address, (icmp, http))| (address, icmp, http))
                .collect();
            let down: fn(&Given) -> bool = |given| matches!(given, Given::Down(_));
            let up: fn(&Given) -> bool = |given| matches!(given, Up);
            let any = |is: fn(&Given) -> bool| rows.iter().any(|r| is(&r.1) || is(&r.2));
            let diagnosis = diagnose(&rows);
            if any(down) {
                let diagnosis = diagnosis.unwrap();
                let probed = rows.iter().flat_map(|r| [&r.1, &r.2]);
                let probed = probed.filter(|given| !matches!(given, Off)).count();
                prop_assert_eq!(diagnosis.evidence.len(), probed);
                let mut lines = diagnosis.evidence.iter().chain([&diagnosis.message]);
                prop_assert!(lines.all(|line| !line.contains('\n') && !line.contains("  ")));
                prop_assert!(!diagnosis.message.contains(" on ,"), "{}", diagnosis.message);
                prop_assert!(!diagnosis.message.contains(" on ;"), "{}", diagnosis.message);
                if diagnosis.cause == Cause::NodeDown {
                    prop_assert!(!any(up), "{rows:?}");
                }
            } else {
                prop_assert!(diagnosis.is_none_or(|d| d.cause == Cause::EndpointAddressUnknown));
            }
            let unknown: Vec<Row<'_>> =
                rows.iter().map(|r| (r.0, r.1.clone(), Unknown)).collect();
            prop_assert_eq!(self::diagnose(&unknown), None);
        }
    }
}

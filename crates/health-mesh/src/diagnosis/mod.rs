//! Diagnoses what is wrong with a peer, in one sentence, from the results of all its targets, and whether this node
//! itself is cut off. Pure.
//!
//! A diagnosis is based on confirmed verdicts. While any probed target of a peer has none, the peer has no diagnosis,
//! because the missing verdict might change it. Verdicts from before and after a change are not combined: the caller
//! waits until all are known again. An address is *heard* if something arrived that only the address itself can send:
//! an answer, a refusal, or its own ICMP error. It is *silent* if nothing came back for any probe to it, or if this
//! host could not even resolve the next hop. A peer is unheard if none of its addresses is heard or sends an error
//! about another one.
//!
//! The first matching row is the diagnosis; the evidence lists all verdicts.
//!
//! | cause | when |
//! | --- | --- |
//! | `this-node-isolated` | the peer fails just as at least three remote peers and four fifths of all do ([`Survey`]) |
//! | `local-error` | all failures are this host's own: no sockets of the family, no descriptors left |
//! | `node-down` | unheard, and a host address is silent |
//! | `rejected` | unheard, and a host address is rejected: by an ICMP error, a firewall or a route of this host |
//! | `no-route` | unheard, and a router or this host has no route to a host address |
//! | `one-family-only` | all addresses of one family are silent, those of the other all answer |
//! | `rejected` | a target is rejected; also a connection that this host calls unreachable where ICMP is answered |
//! | `agent-down` | no address answers HTTP; some refuse it, or accept the connection but do not answer |
//! | `no-route` | a target has no route |
//! | `endpoint-datapath-down` | a host address is up, an endpoint address unheard or reported unreachable by its host |
//! | `address-unreachable` | a host address is unheard, another address heard |
//! | `port-refused` | HTTP is refused on some addresses, answered on others |
//! | `wrong-key` | HTTP is refused, or answered with a wrong proof, as by another mesh key |
//! | `no-key` | HTTP is answered without a proof of the mesh key |
//! | `replayed-answer` | the HTTP answer was made for another request |
//! | `wrong-node` | HTTP is answered by another node of the mesh |
//! | `clock-differs` | the node refuses HTTP because the clocks differ |
//! | `bad-answer` | HTTP is answered by something that is not a healthy agent |
//! | `port-filtered` | ICMP is answered, HTTP dropped silently; if so on all addresses, the agent may hang instead |
//! | `icmp-filtered` | HTTP is answered, ICMP is not |
//! | `loss` | all answer; the losses exceed the threshold, and not by chance |
//! | `path-mtu` | all answer; packets larger than the path's MTU vanish |
//! | `latency-shift` | all answer; round trips take much longer than before |
//! | `path-mtu` | all answer; a router reports an MTU that is lower than this host's |
//! | `old-key` | all answer; this node or the peer still signs with the previous key |
//! | `endpoint-address-unknown` | all answer; the addresses of the endpoint are not reported |
//!
//! Below `one-family-only`, a family that is entirely silent is left out.

mod address;
pub(super) mod isolation;
mod loss_location;
mod path_mtu;
mod peer;
mod reason;
mod shift;
#[cfg(test)]
mod tests;

use std::fmt;
use std::net::IpAddr;
use std::time::Duration;

use health_common::probe::Path;
use serde::{Deserialize, Serialize};

use super::direction::{self, Passage};
use super::failure::Failure;
use super::history::{Loss, Trend};
use super::path_mtu::PathMtu;
use super::proof::KeyAge;
use super::target::{Protocol, TargetKey};
use isolation::Isolation;
use loss_location::LossLocation;
use path_mtu::TooBigNotice;
use peer::Picture;
pub(super) use shift::{Shift, ShiftWatch};

/// A latency has shifted if it is at least this many times the usual one.
const SHIFT_FACTOR: u32 = 2;
/// Minimum number of recent and of usual round trips that indicate a shift.
const SHIFT_SAMPLES: (u32, u32) = (8, 20);
/// Probability below which losses are not attributed to chance. Ten thousand peers with four targets each are 40 000
/// trials every few minutes; at half the threshold, the real probability is lower by orders of magnitude.
const LOSS_CHANCE: f64 = 1e-4;

/// What is wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Cause {
    /// Most peers fail alike: the problem is this node, not the peers.
    ThisNodeIsolated,
    /// This host could not probe.
    LocalError,
    /// Nothing is heard from the node.
    NodeDown,
    /// The host is up, but its agent is not.
    AgentDown,
    /// The host is up, but its health endpoint is not.
    EndpointDatapathDown,
    /// Some addresses of a host that is up are silent.
    AddressUnreachable,
    /// Either IPv4 or IPv6 does not get through.
    OneFamilyOnly,
    /// A router or this host has no route.
    NoRoute,
    /// A firewall or policy rejects the probes.
    Rejected,
    /// ICMP is dropped silently.
    IcmpFiltered,
    /// HTTP is dropped silently.
    PortFiltered,
    /// HTTP is refused on some addresses.
    PortRefused,
    /// The HTTP answer comes from a holder of another mesh key, or such a holder refuses the request.
    WrongKey,
    /// The HTTP answer has no proof.
    NoKey,
    /// The HTTP answer is a replay of a recorded one.
    ReplayedAnswer,
    /// The HTTP answer comes from another node.
    WrongNode,
    /// The clocks of the two nodes differ by more than is allowed.
    ClockDiffers,
    /// The HTTP answer comes from something that is not a healthy agent.
    BadAnswer,
    /// Too many probes are lost.
    Loss,
    /// Packets of the size that this host sends do not get through.
    PathMtu,
    /// Answers take longer than they used to.
    LatencyShift,
    /// One of the two nodes signs with an older mesh key than the other.
    OldKey,
    /// The address of the health endpoint is unknown.
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
            Self::WrongKey => "wrong-key",
            Self::NoKey => "no-key",
            Self::ReplayedAnswer => "replayed-answer",
            Self::WrongNode => "wrong-node",
            Self::ClockDiffers => "clock-differs",
            Self::BadAnswer => "bad-answer",
            Self::Loss => "loss",
            Self::PathMtu => "path-mtu",
            Self::LatencyShift => "latency-shift",
            Self::OldKey => "old-key",
            Self::EndpointAddressUnknown => "endpoint-address-unknown",
        })
    }
}

/// What is wrong, and how that is known.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Diagnosis {
    /// What is wrong.
    pub(super) cause: Cause,
    /// One line: what is wrong with which node, and where to look.
    pub(super) message: String,
    /// The supporting facts, one line each.
    pub(super) evidence: Vec<String>,
}

/// Why a reachable target is degraded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Degradation {
    /// More losses than the threshold, and more than chance would explain.
    Loss(Loss),
    /// Longer round trips than before.
    LatencyShift {
        /// Median of the newest round trips.
        recent: Duration,
        /// Median of the earlier round trips.
        usual: Duration,
    },
}

impl fmt::Display for Degradation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Loss(loss) => write!(f, "lost {}", Losses(loss)),
            Self::LatencyShift { recent, usual } => {
                write!(f, "takes {recent:.1?} now, {usual:.1?} before")
            }
        }
    }
}

/// Facts that are the same for all peers.
#[derive(Clone, Debug)]
pub(super) struct Context<'a> {
    /// TCP port of the responders.
    pub(super) port: u16,
    /// This node's own addresses.
    pub(super) local_addresses: &'a [IpAddr],
    /// When a target counts as degraded.
    pub(super) thresholds: Thresholds,
}

/// When a target counts as degraded.
#[derive(Clone, Copy, Debug)]
pub(super) struct Thresholds {
    /// Highest tolerated fraction of lost probes, 0 to 1.
    pub(super) loss: f64,
    /// Smaller shifts of ICMP round trips are ignored.
    pub(super) icmp_shift: Duration,
    /// The same limit for HTTP, whose round trips include the scheduling delays of both agents.
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

/// What is known about a peer.
#[derive(Clone, Copy, Debug)]
pub(super) struct PeerFacts<'a> {
    /// `cluster/node`.
    pub(super) name: &'a str,
    /// Whether it is this node.
    pub(super) local: bool,
    /// Whether it should have a health endpoint, known or not.
    pub(super) endpoint_expected: bool,
    /// All possible targets, in report order.
    pub(super) targets: &'a [TargetFacts<'a>],
}

/// What is known about a target.
#[derive(Clone, Copy, Debug)]
pub(super) struct TargetFacts<'a> {
    /// Its key.
    pub(super) key: TargetKey,
    /// Its verdict.
    pub(super) verdict: Verdict<'a>,
    /// Which of the peer's keys this node signs with, from the peer's point of view; used if it is reachable by HTTP.
    pub(super) mesh_key: KeyAge,
    /// Losses and latency compared with the past; used if the target is reachable.
    pub(super) trend: Trend,
    /// What happened to its echo probes in [`direction::WINDOWS`], if the peer reported it.
    pub(super) passages: [Option<Passage>; direction::WINDOWS.len()],
    /// What is known about a latency shift.
    pub(super) shift: Option<Shift>,
    /// The MTU of the path to it, if it was measured.
    pub(super) path_mtu: Option<&'a PathMtu>,
}

/// The confirmed verdict on a target.
#[derive(Clone, Copy, Debug)]
pub(super) enum Verdict<'a> {
    /// Its probes are disabled.
    Off,
    /// No result yet.
    Unknown,
    /// It answers.
    Reachable,
    /// It does not answer; holds the reason why the last probe failed.
    Unreachable(&'a Failure),
}

impl Context<'_> {
    /// Whether and why a reachable target is degraded.
    pub(super) fn degraded(&self, target: &TargetFacts<'_>) -> Option<Degradation> {
        if !matches!(target.verdict, Verdict::Reachable) {
            return None;
        }
        let threshold = self.thresholds.loss;
        let loss = target
            .trend
            .loss
            .iter()
            .find(|l| exceeds_loss_threshold(l, threshold));
        if let Some(&loss) = loss {
            return Some(Degradation::Loss(loss));
        }
        let (recent, usual) = self.shifted(target)?;
        Some(Degradation::LatencyShift {
            recent: recent.p50,
            usual: usual.p50,
        })
    }

    /// Diagnoses a peer; `None` if nothing is wrong, or if that is not known yet. If `isolation` explains the failures,
    /// the peer is not blamed for them.
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
            let (loss, shift) = match self.diagnose_degraded(peer) {
                Some(diagnosis) if diagnosis.cause == Cause::Loss => (Some(diagnosis), None),
                other => (None, other),
            };
            return loss
                .or_else(|| path_mtu::diagnose(peer, TooBigNotice::ByNobody))
                .or(shift)
                .or_else(|| path_mtu::diagnose(peer, TooBigNotice::ByRouter))
                .or_else(|| self.diagnose_old_key(peer))
                .or_else(|| self.diagnose_unknown_endpoint(peer));
        }
        let picture = Picture::new(self, peer);
        if let Some(isolation) = isolation
            && isolation.scope.explains(self, peer)
        {
            return Some(picture.diagnosis(
                Cause::ThisNodeIsolated,
                format!("{} is not diagnosed: this node is isolated", peer.name),
            ));
        }
        Some(picture.diagnose())
    }

    fn diagnose_degraded(&self, peer: &PeerFacts<'_>) -> Option<Diagnosis> {
        let all = || {
            let degraded = |target| Some((target, self.degraded(target)?));
            peer.targets.iter().filter_map(degraded)
        };
        let lossy = |(_, degraded): &(_, _)| matches!(degraded, Degradation::Loss(_));
        let (target, worst) = all().find(lossy).or_else(|| all().next())?;
        let on = self.label(target.key);
        let name = peer.display();
        let (cause, message) = match worst {
            Degradation::Loss(loss) => {
                let place = self
                    .loss_location(target)
                    .map_or_else(String::new, |place| format!(", {}", place.of_losses()));
                (
                    Cause::Loss,
                    format!("loss: {name} lost {} of {on}{place}", Losses(&loss)),
                )
            }
            Degradation::LatencyShift { recent, usual } => (
                Cause::LatencyShift,
                format!(
                    "latency shift: {on} of {name} takes {recent:.1?} now, {usual:.1?} before{}",
                    self.shift_text(peer, target)
                ),
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
                Degradation::Loss(loss) => {
                    let counts = self
                        .loss_location(target)
                        .map_or_else(String::new, |place| format!("; {}", place.evidence()));
                    format!("{on}: lost {}{counts}", Losses(&loss))
                }
                Degradation::LatencyShift { recent, usual } => format!(
                    "{on}: median {recent:.1?} now, {usual:.1?} before{}",
                    target
                        .shift
                        .map_or_else(String::new, |shift| shift.evidence())
                ),
            }
        });
        Some(Diagnosis {
            cause,
            message: message + &others,
            evidence: evidence.collect(),
        })
    }

    fn diagnose_old_key(&self, peer: &PeerFacts<'_>) -> Option<Diagnosis> {
        let mut targets = peer.targets.iter();
        let target = targets.find(|target| target.mesh_key != KeyAge::Current)?;
        let name = peer.display();
        let (message, word) = match target.mesh_key {
            KeyAge::Current => return None,
            KeyAge::Next => (
                format!(
                    "old key: {name} still signs with an older mesh key than this node; give it \
                     the new --mesh-key-file and restart its agent"
                ),
                "next",
            ),
            KeyAge::Previous => (
                format!(
                    "old key: this node still signs with an older mesh key than {name}; give this \
                     node the new --mesh-key-file and restart its agent"
                ),
                "previous",
            ),
        };
        Some(Diagnosis {
            cause: Cause::OldKey,
            message,
            evidence: vec![format!(
                "{}: answered; this node signs with the {word} key of the peer",
                self.label(target.key)
            )],
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
                "endpoint address unknown: {} answers on {}, but reports no health endpoint; it is \
                 starting, or cannot create one: see its log",
                peer.display(),
                agent.key.address
            ),
            evidence: vec![
                format!("{}: answered", self.label(agent.key)),
                "neither the registry nor the agent reports a health endpoint".to_owned(),
            ],
        })
    }

    /// Where a target's echo probes got lost.
    fn loss_location(&self, target: &TargetFacts<'_>) -> Option<LossLocation> {
        LossLocation::of(&target.passages, self.thresholds.loss)
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
    /// Its name in messages.
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

/// Whether the losses exceed the threshold, and not by chance: at the threshold's loss probability, this many losses or
/// more among this many probes occur less than once in ten thousand times (an exact binomial test).
fn exceeds_loss_threshold(loss: &Loss, threshold: f64) -> bool {
    let (n, lost) = (f64::from(loss.probes), f64::from(loss.lost));
    if loss.lost == 0 || lost <= n * threshold {
        return false;
    }
    if threshold <= 0.0 {
        return true;
    }
    // Starts from the probability of zero losses, as a logarithm: the probability itself may be too small for a float.
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

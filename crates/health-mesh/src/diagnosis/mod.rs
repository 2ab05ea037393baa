//! What is wrong with a peer, in one sentence, from the results of all its targets; and whether it
//! is this node that is cut off. Pure.
//!
//! A diagnosis is based on confirmed verdicts. While any probed target of a peer has none, the peer has no
//! diagnosis, because the missing verdict might change it. Verdicts from before and after a change are not
//! combined: the caller waits until all are known again. An address is *heard* when something arrived that
//! only the address itself can send: an answer, a refusal, an ICMP error of its own. It is *silent* when
//! nothing came back for any probe to it, or this host could not even resolve the next hop. A peer is unheard
//! when none of its addresses is heard, or sends an error for another.
//!
//! The first row that holds is the diagnosis; the evidence names all verdicts.
//!
//! | cause | when |
//! | --- | --- |
//! | `this-node-isolated` | the peer fails just as three remote peers or more do, and four fifths of all ([`Survey`]) |
//! | `local-error` | all failures are this host's own: no sockets of the family, no descriptors left |
//! | `node-down` | unheard, and a host address is silent |
//! | `rejected` | unheard, and a host address is rejected: by an ICMP error, a firewall or a route of this host |
//! | `no-route` | unheard, and a router or this host has no route to a host address |
//! | `one-family-only` | all addresses of one family are silent, those of the other all answer |
//! | `rejected` | a target is; also a connection that this host calls unreachable where ICMP is answered |
//! | `agent-down` | HTTP is answered nowhere, and refused or accepted without an answer somewhere |
//! | `no-route` | a target has none |
//! | `endpoint-datapath-down` | a host address is up, an endpoint address unheard or reported unreachable by its host |
//! | `address-unreachable` | a host address is unheard, another address heard |
//! | `port-refused` | HTTP is refused on some addresses, answered on others |
//! | `wrong-key` | HTTP is refused, or answered with a wrong proof, as by another mesh key |
//! | `no-key` | HTTP is answered without a proof of the mesh key |
//! | `replayed-answer` | HTTP is answered by what was said to another request |
//! | `wrong-node` | HTTP is answered by another node of the mesh |
//! | `clock-differs` | the node refuses HTTP because the clocks differ |
//! | `bad-answer` | HTTP is answered by something that is no healthy agent |
//! | `port-filtered` | ICMP is answered, HTTP dropped silently; if it is so everywhere, the agent may hang instead |
//! | `icmp-filtered` | HTTP is answered, ICMP is not |
//! | `loss` | all answer; more losses than the threshold, and than chance makes of it |
//! | `path-mtu` | all answer; packets larger than the path's MTU vanish |
//! | `latency-shift` | all answer; round trips are well above those before |
//! | `path-mtu` | all answer; a router reports an MTU that is lower than this host's |
//! | `old-key` | all answer; the node or this one still signs with the key before |
//! | `endpoint-address-unknown` | all answer; the addresses of the endpoint are not reported |
//!
//! Below `one-family-only`, a family that is silent as a whole is left out.

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

/// A latency has shifted when this many times the usual one.
const SHIFT_FACTOR: u32 = 2;
/// Fewest round trips on either side that tell a shift.
const SHIFT_SAMPLES: (u32, u32) = (8, 20);
/// Probability below which losses are not taken for chance. Ten thousand peers with four targets
/// each are 40 000 trials every few minutes; at half the threshold, the real probability is lower by
/// orders of magnitude.
const LOSS_CHANCE: f64 = 1e-4;

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
    /// HTTP is answered by somebody with another mesh key, or refused by them.
    WrongKey,
    /// HTTP is answered by somebody who proves nothing.
    NoKey,
    /// HTTP is answered by a recorded answer.
    ReplayedAnswer,
    /// HTTP is answered by another node.
    WrongNode,
    /// The clocks of both nodes differ by more than an answer allows.
    ClockDiffers,
    /// HTTP is answered by something that is no healthy agent.
    BadAnswer,
    /// Too many probes are lost.
    Loss,
    /// Packets as large as this host sends them do not get through.
    PathMtu,
    /// Answers take longer than they used to.
    LatencyShift,
    /// One of both nodes signs with the mesh key before the other's.
    OldKey,
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
    /// One line: what is wrong with whom, and where to look.
    pub(super) message: String,
    /// The facts it rests on, one line each.
    pub(super) evidence: Vec<String>,
}

/// Why a reachable target is degraded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Degradation {
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
    /// Which of the peer's keys it takes this node's for; looked at when it is reachable by HTTP.
    pub(super) mesh_key: KeyAge,
    /// Looked at when it is reachable.
    pub(super) trend: Trend,
    /// What became of its echo probes in [`direction::WINDOWS`], where the peer told.
    pub(super) passages: [Option<Passage>; direction::WINDOWS.len()],
    /// What is known of a latency shift.
    pub(super) shift: Option<Shift>,
    /// The MTU of the path to it, where that was looked for.
    pub(super) path_mtu: Option<&'a PathMtu>,
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
    pub(super) fn degraded(&self, target: &TargetFacts<'_>) -> Option<Degradation> {
        if !matches!(target.verdict, Verdict::Reachable) {
            return None;
        }
        let threshold = self.thresholds.loss;
        let loss = target.trend.loss.iter().find(|l| exceeds(l, threshold));
        if let Some(&loss) = loss {
            return Some(Degradation::Loss(loss));
        }
        let (recent, usual) = self.shifted(target)?;
        Some(Degradation::LatencyShift {
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
                format!("{} is not judged: this node is isolated", peer.name),
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
                    self.shift_told(peer, target)
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
                    "old key: {name} still signs with the mesh key before this node's; give it the new \
                     --mesh-key-file and restart its agent"
                ),
                "next",
            ),
            KeyAge::Previous => (
                format!(
                    "old key: this node still signs with the mesh key before that of {name}; give this \
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

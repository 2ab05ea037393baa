//! ICMP echo probes: one raw socket per family, and the probes that wait for answers on it.

mod filter;
mod inflight;
pub(super) mod sized;
mod socket;
mod wire;

use std::io;
use std::sync::Arc;
use std::time::Duration;

use health_common::probe::ProbeId;
use nix::errno::Errno;

use self::inflight::Inflight;
use self::socket::{IcmpSocket, Request};
pub(super) use self::wire::Mark;
use self::wire::{Family, Message};
use super::counters::IgnoredReplies;
use super::failure::Failure;
use super::target::{TargetId, TargetKey};

/// A probe in flight. Times are relative to the mesh's start unless noted otherwise.
#[derive(Clone, Copy, Debug)]
pub(super) struct Probe {
    pub(super) id: TargetId,
    pub(super) key: TargetKey,
    pub(super) sent: Duration,
    /// `CLOCK_REALTIME` right before sending; received packets are timestamped with the same clock.
    sent_realtime: Duration,
    expires: Duration,
    /// Identifies this probe within the agent; all zero until it is about to be sent.
    pub(super) number: ProbeId,
}

impl Probe {
    /// A probe to send `now`.
    pub(super) fn new(id: TargetId, key: TargetKey, now: Duration, expires: Duration) -> Self {
        Self {
            id,
            key,
            sent: now,
            sent_realtime: Duration::ZERO,
            expires,
            number: ProbeId::default(),
        }
    }
}

/// Outcome of a probe.
#[derive(Clone, Debug)]
pub(super) enum IcmpEvent {
    /// The reply arrived.
    Answered {
        probe: Probe,
        /// Measured at the socket.
        rtt: Duration,
    },
    /// It failed.
    Failed { probe: Probe, failure: Failure },
    /// It could not be sent for lack of space; this says nothing about the target.
    Deferred { probe: Probe, errno: Errno },
}

/// The echo prober. Events are returned in the order in which they are discovered.
#[derive(Debug)]
pub(super) struct IcmpProber {
    v4: Option<FamilyProber>,
    v6: Option<FamilyProber>,
    ignored: Arc<IgnoredReplies>,
}

/// One socket and the probes sent on it.
#[derive(Debug)]
struct FamilyProber {
    socket: IcmpSocket,
    inflight: Inflight,
    /// Requests that are stored but not sent yet.
    unsent: Vec<Request>,
}

impl IcmpProber {
    /// Opens the sockets for probes with this mark. A family that this host lacks is left out. Received messages that
    /// no probe waits for are counted in `ignored`.
    pub(super) fn open(
        mark: Mark,
        first_sequence: u16,
        ignored: Arc<IgnoredReplies>,
    ) -> io::Result<Self> {
        let open = |family| match IcmpSocket::open(family, mark) {
            Ok(socket) => Ok(Some(FamilyProber {
                socket,
                inflight: Inflight::new(mark.session, first_sequence),
                unsent: Vec::new(),
            })),
            Err(error) if error.raw_os_error() == Some(libc::EAFNOSUPPORT) => Ok(None),
            Err(error) => Err(error),
        };
        Ok(Self {
            v4: open(Family::V4)?,
            v6: open(Family::V6)?,
            ignored,
        })
    }

    /// Queues a probe for the next [`Self::flush`].
    pub(super) fn push(&mut self, probe: Probe, events: &mut Vec<IcmpEvent>) {
        let family = match Family::of(probe.key.address) {
            Family::V4 => &mut self.v4,
            Family::V6 => &mut self.v6,
        };
        let Some(family) = family else {
            events.push(IcmpEvent::Failed {
                probe,
                failure: Failure::NoFamily,
            });
            return;
        };
        match family.inflight.insert(probe) {
            Some(number) => family.unsent.push(Request {
                address: probe.key.address,
                number,
                path: probe.key.path,
            }),
            // All numbers are in use.
            None => events.push(IcmpEvent::Deferred {
                probe,
                errno: Errno::ENOBUFS,
            }),
        }
    }

    /// Sends the queued probes.
    pub(super) fn flush(&mut self, events: &mut Vec<IcmpEvent>) {
        for family in self.families() {
            family.flush(events);
        }
    }

    /// Waits for packets that arrived after the previous wait. The caller must then call [`Self::receive`].
    pub(super) async fn readable(&self) -> io::Result<()> {
        let wait = async |family: &Option<FamilyProber>| match family {
            Some(family) => family.socket.readable().await,
            None => std::future::pending().await,
        };
        tokio::select! {
            ready = wait(&self.v4) => ready,
            ready = wait(&self.v6) => ready,
        }
    }

    /// Receives all pending packets.
    pub(super) fn receive(&mut self, now: Duration, events: &mut Vec<IcmpEvent>) -> io::Result<()> {
        let ignored = self.ignored.clone();
        self.families()
            .try_for_each(|family| family.receive(now, events, &ignored))
    }

    /// Gives up expired probes.
    pub(super) fn expire(&mut self, now: Duration, events: &mut Vec<IcmpEvent>) {
        for family in self.families() {
            while let Some(probe) = family.inflight.take_expired(now) {
                events.push(IcmpEvent::Failed {
                    probe,
                    failure: Failure::TimedOut,
                });
            }
        }
    }

    /// When the next probe expires.
    pub(super) fn next_expiry(&mut self) -> Option<Duration> {
        self.families()
            .filter_map(|family| family.inflight.next_expiry())
            .min()
    }

    /// Drops the probes of targets that `keep` rejects, without an event.
    pub(super) fn retain(&mut self, keep: impl Fn(TargetId) -> bool) {
        for family in self.families() {
            family.inflight.retain(|probe| keep(probe.id));
        }
    }

    /// Number of an address's probes that wait for an answer.
    pub(super) fn waiting(&self, key: &TargetKey) -> usize {
        let family = match Family::of(key.address) {
            Family::V4 => &self.v4,
            Family::V6 => &self.v6,
        };
        family
            .as_ref()
            .map_or(0, |family| family.inflight.count(key))
    }

    fn families(&mut self) -> impl Iterator<Item = &mut FamilyProber> {
        [&mut self.v4, &mut self.v6].into_iter().flatten()
    }
}

impl FamilyProber {
    fn flush(&mut self, events: &mut Vec<IcmpEvent>) {
        let mut from = 0;
        while from < self.unsent.len() {
            match self.socket.send(&self.unsent[from..]) {
                Ok((sent, realtime)) => {
                    for request in &self.unsent[from..from + sent] {
                        if let Some(probe) = self.inflight.get_mut(request.number) {
                            probe.sent_realtime = realtime;
                        }
                    }
                    from += sent;
                }
                Err(Errno::EINTR) => {}
                Err(errno) => {
                    let sequence = self.unsent[from].number.sequence;
                    from += 1;
                    let Some(probe) = self.inflight.take(sequence, |_| true) else {
                        continue;
                    };
                    events.push(match errno {
                        Errno::EAGAIN | Errno::ENOBUFS | Errno::ENOMEM => {
                            IcmpEvent::Deferred { probe, errno }
                        }
                        _ => IcmpEvent::Failed {
                            probe,
                            failure: Failure::Os(errno),
                        },
                    });
                }
            }
        }
        self.unsent.clear();
    }

    fn receive(
        &mut self,
        now: Duration,
        events: &mut Vec<IcmpEvent>,
        ignored: &IgnoredReplies,
    ) -> io::Result<()> {
        let Self {
            socket, inflight, ..
        } = self;
        socket.drain(|received| match received.message {
            Message::Reply { number } => {
                let from = received.from;
                let sequence = number.sequence;
                let to_it = |probe: &Probe| probe.key.address == from && probe.number == number;
                match inflight.take(sequence, to_it) {
                    Some(probe) => events.push(IcmpEvent::Answered {
                        probe,
                        rtt: round_trip(&probe, received.at, now),
                    }),
                    None if inflight.get_mut(number).is_some() => {
                        ignored.wrong_source();
                        tracing::debug!(%from, sequence, "echo reply from another address");
                    }
                    None => {
                        ignored.unexpected();
                        tracing::debug!(%from, sequence, "late, duplicate or forged echo reply");
                    }
                }
            }
            Message::Unmarked => {
                ignored.wrong_payload();
                tracing::debug!(from = %received.from, "echo reply without a probe payload");
            }
            Message::Error {
                sequence,
                destination,
                error,
                next_hop_mtu: _,
            } => {
                let to_it = |probe: &Probe| probe.key.address == destination;
                if let Some(probe) = inflight.take(sequence, to_it) {
                    events.push(IcmpEvent::Failed {
                        probe,
                        failure: Failure::Icmp(error),
                    });
                } else {
                    ignored.unmatched_error();
                }
            }
        })
    }
}

/// The time between the socket's timestamps, unless the clock was set in between: then the time until now, which
/// includes the agent's own delay.
fn round_trip(probe: &Probe, received_realtime: Duration, now: Duration) -> Duration {
    // `now` and `sent` may each have been read earlier than the timestamps, by at most this much.
    const SLACK: Duration = Duration::from_millis(100);
    let elapsed = now.saturating_sub(probe.sent);
    received_realtime
        .checked_sub(probe.sent_realtime)
        .filter(|rtt| !rtt.is_zero() && *rtt <= elapsed + SLACK)
        .unwrap_or(elapsed)
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use health_common::probe::Path;

    use super::*;
    use crate::target::Protocol;
    use crate::testing::Namespace;

    fn probe(sent: Duration) -> Probe {
        let key = TargetKey {
            address: IpAddr::from([127, 0, 0, 1]),
            path: Path::Host,
            protocol: Protocol::Icmp,
        };
        Probe::new(
            TargetId::default(),
            key,
            sent,
            sent + Duration::from_secs(1),
        )
    }

    #[test]
    fn a_late_reply_does_not_answer_the_next_probe_with_its_sequence_number() {
        let Some(namespace) = Namespace::new() else {
            return;
        };
        namespace.block_on(async || {
            let mark = Mark {
                icmp_id: 1,
                session: 7,
                key: [1, 2],
                one_way: false,
            };
            let ignored = Arc::new(IgnoredReplies::default());
            let mut prober = IcmpProber::open(mark, 9, ignored).unwrap();
            let mut events = Vec::new();
            prober.push(probe(Duration::ZERO), &mut events);
            prober.flush(&mut events);
            prober.readable().await.unwrap();
            // It expires before anyone reads the reply, and all other numbers are used up.
            let now = Duration::from_secs(2);
            prober.expire(now, &mut events);
            let inflight = &mut prober.v4.as_mut().unwrap().inflight;
            for _ in 0..u16::MAX {
                let number = inflight.insert(probe(now)).unwrap();
                inflight.take(number.sequence, |_| true);
            }
            events.clear();
            prober.push(probe(now), &mut events);
            prober.receive(now, &mut events).unwrap();
            assert!(events.is_empty(), "{events:?}");
            prober.flush(&mut events);
            prober.readable().await.unwrap();
            prober.receive(now, &mut events).unwrap();
            let [IcmpEvent::Answered { probe, .. }] = &events[..] else {
                panic!("{events:?}");
            };
            let expected = ProbeId {
                session: 7,
                round: 1,
                sequence: 9,
            };
            assert_eq!(probe.number, expected);
        });
    }

    #[test]
    fn a_clock_that_is_set_between_a_probe_and_its_reply_does_no_harm() {
        let [sent, took, heard] = [10_000, 3, 5].map(Duration::from_millis);
        let clock = Duration::from_secs(1_000_000);
        let probe = Probe {
            sent_realtime: clock,
            ..probe(sent)
        };
        let rtt = |received| round_trip(&probe, received, sent + heard);
        assert_eq!(rtt(clock + took), took);
        let hour = Duration::from_secs(3600);
        for set in [clock + hour, clock - hour] {
            assert_eq!(rtt(set + took), heard);
        }
    }
}

//! Interprets a single failed probe, before the others are considered.

use std::net::IpAddr;

use nix::errno::Errno;

use super::Context;
use crate::failure::{Failure, IcmpError};
use crate::target::{Protocol, TargetKey};

/// What a failed probe means by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Reason {
    /// Nothing came back.
    Silent,
    /// A connection attempt failed as unreachable: no route, no answer from the next hop, or a firewall.
    Unreachable,
    /// The next hop did not answer this host's request for its hardware address.
    NextHopSilent,
    /// No route; holds the sender of the error, if it is not this host's kernel.
    NoRoute(Option<IpAddr>),
    /// Prohibited; holds the sender of the error, if known.
    Rejected(Option<IpAddr>),
    /// The port is closed.
    Refused,
    /// Connected, but got no response.
    Hung,
    /// Connected, but got a wrong response.
    BadAnswer,
    /// Connected, but the response is not proven to be a good answer from the asked node.
    Unproven,
    /// This host could not probe.
    LocalError,
}

impl Reason {
    pub(super) fn new(context: &Context<'_>, key: TargetKey, failure: &Failure) -> Self {
        let icmp = key.protocol == Protocol::Icmp;
        match failure {
            Failure::TimedOut => Self::Silent,
            Failure::ResponseTimedOut => Self::Hung,
            Failure::UnexpectedStatus(_) | Failure::Closed | Failure::Malformed => Self::BadAnswer,
            Failure::NoProof
            | Failure::KeyRefused
            | Failure::WrongProof
            | Failure::Replayed
            | Failure::WrongNode(_)
            | Failure::ClockDiffers { .. } => Self::Unproven,
            Failure::NoFamily => Self::LocalError,
            Failure::Os(errno) => match errno {
                Errno::ECONNREFUSED if !icmp => Self::Refused,
                Errno::ECONNRESET | Errno::ECONNABORTED | Errno::EPIPE if !icmp => Self::BadAnswer,
                // For a connection, this also covers errors from routers and firewalls, if the kernel does not report
                // their sender.
                Errno::EHOSTUNREACH | Errno::ENETUNREACH if !icmp => Self::Unreachable,
                // EINVAL: a `blackhole` route.
                Errno::EHOSTUNREACH | Errno::ENETUNREACH | Errno::ENETDOWN | Errno::EINVAL => {
                    Self::NoRoute(None)
                }
                Errno::EACCES | Errno::EPERM => Self::Rejected(None),
                _ => Self::LocalError,
            },
            Failure::Icmp(error) => Self::of_icmp(context, error),
        }
    }

    /// RFC 792 and RFC 1812 section 5.2.7.1; RFC 4443 section 3.
    fn of_icmp(context: &Context<'_>, error: &IcmpError) -> Self {
        let from = error.from;
        match (from.is_ipv4(), error.kind, error.code) {
            (true, 3, 1) | (false, 1, 3) if context.local_addresses.contains(&from) => {
                Self::NextHopSilent
            }
            (true, 3, 0 | 1 | 6 | 7 | 11 | 12) | (false, 1, 0 | 2 | 3) => Self::NoRoute(Some(from)),
            // The hop limit was exceeded: a routing loop.
            (true, 11, _) | (false, 3, _) => Self::NoRoute(Some(from)),
            (true, 3, 9 | 10 | 13) | (false, 1, 1 | 5 | 6) => Self::Rejected(Some(from)),
            // A firewall's `reject`: an echo has no port or protocol that could be missing, and TCP answers with a
            // reset if no port is listening.
            (true, 3, 2 | 3) | (false, 1, 4) => Self::Rejected(Some(from)),
            _ => Self::Silent,
        }
    }

    /// The sender of the error.
    pub(super) fn sender(self) -> Option<IpAddr> {
        match self {
            Self::NoRoute(sender) | Self::Rejected(sender) => sender,
            _ => None,
        }
    }

    /// Whether only the address itself can cause this.
    pub(super) fn is_heard(self, address: IpAddr) -> bool {
        match self {
            Self::Refused | Self::Hung | Self::BadAnswer | Self::Unproven => true,
            _ => self.sender() == Some(address),
        }
    }
}

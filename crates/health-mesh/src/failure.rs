//! Reasons why a probe failed, worded as in the status.

use std::fmt;
use std::io;
use std::net::IpAddr;
use std::time::Duration;

use health_model::duration::duration_text;
use nix::errno::Errno;

/// Why a probe failed. Its text is the `status` in reports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Failure {
    /// No answer, or no connection, in time.
    TimedOut,
    /// A connection, but no response in time.
    ResponseTimedOut,
    /// The kernel refused to send or to connect.
    Os(Errno),
    /// An ICMP error was received for the probe.
    Icmp(IcmpError),
    /// An HTTP response other than 200.
    UnexpectedStatus(u16),
    /// The peer closed the connection before its response was complete.
    Closed,
    /// Not an HTTP response, or its head is too long.
    Malformed,
    /// This host has no sockets for the address family.
    NoFamily,
    /// A good HTTP response without a proof of the mesh key.
    NoProof,
    /// The answering side rejects this node's key, without a proof of its own.
    KeyRefused,
    /// A proof made with a key that is not the mesh's, or for another response.
    WrongProof,
    /// An authentic answer to another request.
    Replayed,
    /// An authentic answer from the node with this full name, which is not the node that was asked.
    WrongNode(Box<str>),
    /// The node refuses the request because the clocks differ.
    ClockDiffers {
        /// Seconds by which its clock is ahead of this host's; negative if behind.
        ahead: i64,
    },
}

/// An ICMP error message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct IcmpError {
    /// Its type; the address family tells whether it is ICMP or ICMPv6.
    pub(super) kind: u8,
    /// Its code.
    pub(super) code: u8,
    /// The sender's address.
    pub(super) from: IpAddr,
}

impl Failure {
    /// Whether no packet left this host for the probe.
    pub(super) fn is_unsent(&self) -> bool {
        matches!(self, Self::Os(_) | Self::NoFamily)
    }

    /// Whether nothing was received: an answer that is merely late looks the same.
    pub(super) fn is_silence(&self) -> bool {
        matches!(self, Self::TimedOut | Self::ResponseTimedOut)
    }
}

impl Failure {
    /// Whether this failure remains more informative than the later failure `next`. Hosts and routers rate-limit ICMP
    /// errors so strictly that probes between two errors get no reply at all.
    pub(super) fn outlives(&self, next: &Self) -> bool {
        let rationed = matches!(
            self,
            Self::Icmp(_) | Self::Os(Errno::EHOSTUNREACH | Errno::ENETUNREACH)
        );
        rationed && *next == Self::TimedOut
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        match error.raw_os_error() {
            Some(libc::ETIMEDOUT) => Self::TimedOut,
            Some(errno) => Self::Os(Errno::from_raw(errno)),
            None => Self::Closed,
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TimedOut => f.write_str("Connection timed out"),
            Self::ResponseTimedOut => f.write_str("Response timed out"),
            // Errors caused by `prohibit` and `blackhole` routes.
            Self::Os(errno @ (Errno::EACCES | Errno::EPERM)) => {
                write!(f, "{} (by a local route or firewall)", errno.desc())
            }
            Self::Os(errno @ Errno::EINVAL) => {
                write!(f, "{} (is there a blackhole route?)", errno.desc())
            }
            Self::Os(errno) => f.write_str(errno.desc()),
            Self::Icmp(error) => error.fmt(f),
            Self::UnexpectedStatus(status) => write!(f, "Unexpected status {status}"),
            Self::Closed => f.write_str("Connection closed without a response"),
            Self::Malformed => f.write_str("Malformed response"),
            Self::NoFamily => f.write_str("Address family not supported on this host"),
            Self::NoProof => f.write_str("Response without proof of the mesh key"),
            Self::KeyRefused => f.write_str("Mesh key refused"),
            Self::WrongProof => f.write_str("Response with a wrong proof of the mesh key"),
            Self::Replayed => f.write_str("Replayed response to another request"),
            Self::WrongNode(node) => write!(f, "Response from {node}"),
            Self::ClockDiffers { ahead } => {
                let apart = duration_text(Duration::from_secs(ahead.unsigned_abs()));
                let side = if *ahead < 0 { "behind" } else { "ahead of" };
                write!(f, "Refused: clock is {apart} {side} this host's")
            }
        }
    }
}

impl fmt::Display for IcmpError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // RFC 792 and RFC 1812 section 5.2.7.1; RFC 4443 section 3.
        let text = match (self.from.is_ipv4(), self.kind, self.code) {
            (true, 3, 0 | 6 | 11) => "Network is unreachable",
            (true, 3, 1 | 7 | 12) | (false, 1, 0 | 3) => "No route to host",
            (true, 3, 2) => "Protocol unreachable",
            (true, 3, 3) | (false, 1, 4) => "Port unreachable",
            (true, 3, 4) | (false, 2, _) => "Packet too big",
            (true, 3, 9 | 10 | 13) | (false, 1, 1 | 5) => "Communication prohibited",
            (false, 1, 6) => "Route rejected",
            (true, 11, _) | (false, 3, _) => "Time to live exceeded",
            (true, 12, _) | (false, 4, _) => "Parameter problem",
            _ => "Destination unreachable",
        };
        write!(f, "{text} (from {})", self.from)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_name_the_cause() {
        let icmp = |kind, code, from: &str| {
            let from = from.parse().unwrap();
            Failure::Icmp(IcmpError { kind, code, from }).to_string()
        };
        assert_eq!(icmp(3, 1, "10.0.0.1"), "No route to host (from 10.0.0.1)");
        assert_eq!(icmp(1, 3, "fd00::1"), "No route to host (from fd00::1)");
        assert_eq!(
            icmp(3, 13, "10.0.0.1"),
            "Communication prohibited (from 10.0.0.1)"
        );
        for (errno, text) in [
            (libc::ECONNREFUSED, "Connection refused"),
            (libc::ETIMEDOUT, "Connection timed out"),
            (libc::EHOSTUNREACH, "No route to host"),
            (libc::ENETUNREACH, "Network is unreachable"),
        ] {
            assert_eq!(
                Failure::from(io::Error::from_raw_os_error(errno)).to_string(),
                text
            );
        }
        assert_eq!(
            Failure::UnexpectedStatus(503).to_string(),
            "Unexpected status 503"
        );
        for (ahead, text) in [
            (86_400, "Refused: clock is 24h0m0s ahead of this host's"),
            (-301, "Refused: clock is 5m1s behind this host's"),
        ] {
            assert_eq!(Failure::ClockDiffers { ahead }.to_string(), text);
        }
    }
}

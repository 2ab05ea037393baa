//! The payload of an echo probe: how a prober marks its packets.
//!
//! The first [`PROBE_LEN`] bytes after the ICMP header. A ping of anybody else lacks the magic and is
//! never touched.

/// Length of the marked part of the payload, bytes.
pub const PROBE_LEN: usize = 32;

/// Which address of a peer a probe goes to.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Path {
    /// The node's own address.
    Host = 1,
    /// The node's health endpoint.
    Endpoint = 2,
}

impl Path {
    /// The path that a byte stands for.
    pub const fn from_u8(value: u8) -> Option<Self> {
        match value {
            1 => Some(Self::Host),
            2 => Some(Self::Endpoint),
            _ => None,
        }
    }
}

/// How an address is probed; the value is that of IP's protocol field.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Protocol {
    /// ICMP or ICMPv6 echo.
    Icmp = 1,
    /// HTTP `GET /hello` over TCP.
    Http = 6,
}

/// The marked part of a probe's payload.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProbePayload {
    /// The sender's magic, from its `HEALTH_CONFIG`.
    pub magic: u64,
    /// [`Path`] as a byte.
    pub path: u8,
    /// Explicit padding, zero.
    pub pad: [u8; 7],
    /// Reserved for the responder's receive-to-transmit time.
    pub turnround_ns: u64,
    /// Reserved, zero.
    pub reserved: u64,
}

const _: () = assert!(core::mem::size_of::<ProbePayload>() == PROBE_LEN);

impl ProbePayload {
    /// The payload of a probe along `path`, as it goes on the wire.
    pub fn encode(magic: u64, path: Path) -> [u8; PROBE_LEN] {
        let mut bytes = [0; PROBE_LEN];
        bytes[..8].copy_from_slice(&magic.to_ne_bytes());
        bytes[8] = path as u8;
        bytes
    }
}

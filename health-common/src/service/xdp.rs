//! Services in XDP: the devices on which it forwards packets, `HEALTH_XDP_DEVICES`, and how it forwards those of each
//! recently looked-up flow, `HEALTH_XDP_FLOWS4` and `HEALTH_XDP_FLOWS6`.

/// Maximum number of devices supported.
pub const XDP_DEVICES: u32 = 256;

/// Entries of `HEALTH_XDP_FLOWS4` and `HEALTH_XDP_FLOWS6`, unless the agent asks for another size; each flow has two.
pub const XDP_FLOWS: u32 = 1;

/// How long a way is valid before everything is looked up again, nanoseconds. Conntrack and the service flows count
/// in seconds, so nothing expires there meanwhile; the agent checks for faults at the same interval, and routes
/// change far less often.
pub const XDP_WAY_NS: u64 = 500_000_000;

/// One packet of each way passes through the host's stack per this many times [`XDP_WAY_NS`], which is 32 s: only
/// packets that the stack sends make the kernel check that the next hop is still there, and keep its neighbour entry.
pub const XDP_STACK_PERIOD: u64 = 64;

/// How long ways are valid: the single value of `HEALTH_XDP_TIMES`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct XdpTimes {
    /// When the agent last changed anything that ways depend on: nanoseconds of `CLOCK_MONOTONIC`. Older ways are
    /// invalid.
    pub changed_ns: u64,
    /// [`XDP_WAY_NS`] in kernel ticks (`jiffies`), which a program can read at no cost.
    pub way_ticks: u64,
}

impl XdpTimes {
    /// Whether the stack's turn came for a way between the time when the way expired and the present, in ticks.
    /// `offset` staggers the turns of different ways.
    #[inline(always)]
    pub const fn is_turn_of_stack(&self, until_ticks: u64, now_ticks: u64, offset: u16) -> bool {
        let (Some(until), Some(now)) = (
            until_ticks.checked_div(self.way_ticks),
            now_ticks.checked_div(self.way_ticks),
        ) else {
            return false;
        };
        let offset = offset as u64;
        (until + offset) / XDP_STACK_PERIOD != (now + offset) / XDP_STACK_PERIOD
    }
}

/// A device on which XDP handles services; the key is its interface index.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct XdpDevice {
    /// Its hardware address. Frames to other addresses are not for this host.
    pub mac: [u8; 6],
    /// [`XDP_RETURNS`] and [`XDP_SENDS`].
    pub flags: u16,
}

/// Flag: the device sends back packets that its program returns (`XDP_TX`).
pub const XDP_RETURNS: u16 = 1;
/// Flag: the device sends packets that programs redirect to it.
pub const XDP_SENDS: u16 = 2;

/// Look-up results for one direction of a flow's packets. The key is the packets' tuple as received, with direction
/// in. `A` is an address.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct XdpFlow<A> {
    /// When everything below was looked up: nanoseconds of `CLOCK_MONOTONIC`.
    pub made_ns: u64,
    /// When it must be looked up again: kernel ticks.
    pub until_ticks: u64,
    /// What has not been reported to conntrack yet: see [`Pending`].
    pub pending: u64,
    /// What happens to the packets.
    pub way: XdpWay<A>,
}

/// How packets are forwarded, and which packets of a flow qualify.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct XdpWay<A> {
    /// New source address.
    pub source_be: A,
    /// New destination address.
    pub destination_be: A,
    /// New source and destination port.
    pub ports_be: [u16; 2],
    /// New destination and source hardware addresses, as they lie in a frame.
    pub macs: [u32; 3],
    /// The hardware address that the packets must be sent to, as it lies in a frame.
    pub mac: [u16; 3],
    /// The longest packet that can be forwarded, bytes from the IP header on.
    pub mtu: u16,
    /// The device that they must come in on.
    pub from: u32,
    /// The device that they are redirected to; 0: the receiving device sends them back.
    pub to: u32,
    /// Traffic class, and flow label with IPv6, as used in route look-ups, without the ECN bits (RFC 3168).
    pub class: u32,
    /// The change in the sum under the IP header checksum, from its addresses and the time to live:
    /// [`crate::nat::Difference::folded`].
    pub ip_change: u16,
    /// The same for the transport header.
    pub transport_change: u16,
}

/// Packets and bytes in one word, so that one instruction can add to both: bytes in the low 40 bits. It is flushed at
/// least every [`XDP_WAY_NS`], before the 16,777,216 packets that fit could have arrived.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pending(pub u64);

/// Number of bits for the byte count.
const BYTES_BITS: u32 = 40;

impl Pending {
    /// One packet of this length, bytes from the IP header on.
    #[inline(always)]
    pub const fn packet(len: u32) -> Self {
        Self(1 << BYTES_BITS | len as u64)
    }

    /// Number of packets.
    #[inline(always)]
    pub const fn packets(self) -> u64 {
        self.0 >> BYTES_BITS
    }

    /// Number of bytes.
    #[inline(always)]
    pub const fn bytes(self) -> u64 {
        self.0 & ((1 << BYTES_BITS) - 1)
    }
}

crate::map_types!(
    XdpDevice = 8,
    XdpTimes = 16,
    XdpFlow<u32> = 72,
    XdpFlow<[u32; 4]> = 96,
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_and_bytes_are_added_in_one_word() {
        let sum = Pending(Pending::packet(1_500).0 + Pending::packet(65_575).0);
        assert_eq!((sum.packets(), sum.bytes()), (2, 67_075));
        assert_eq!(Pending::default().packets(), 0);
    }

    #[test]
    fn the_stack_has_one_turn_in_each_period_and_those_of_ways_are_spread() {
        let times = XdpTimes {
            changed_ns: 0,
            way_ticks: 125,
        };
        let period = XDP_STACK_PERIOD * times.way_ticks;
        let turn = |offset| {
            let mut turns =
                (period..2 * period).filter(|&now| times.is_turn_of_stack(now - 1, now, offset));
            let (first, second) = (turns.next(), turns.next());
            assert_eq!(second, None, "{offset}");
            first
        };
        assert_eq!(turn(0), Some(period));
        assert_eq!(turn(1), Some(2 * period - times.way_ticks));
        assert_eq!(turn(u16::MAX), Some(period + times.way_ticks));
        assert!(
            times.is_turn_of_stack(0, 10 * period, 7),
            "after a long silence"
        );
        assert!(!XdpTimes::default().is_turn_of_stack(0, u64::MAX, 7));
    }
}

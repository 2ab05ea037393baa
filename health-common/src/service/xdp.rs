//! Services in XDP: the devices on which XDP forwards packets, `HEALTH_XDP_DEVICES`, and the cached look-up results for
//! each flow, `HEALTH_XDP_FLOWS4` and `HEALTH_XDP_FLOWS6`.

/// Maximum number of devices supported.
pub const XDP_DEVICES: u32 = 256;

/// Entries of `HEALTH_XDP_FLOWS4` and `HEALTH_XDP_FLOWS6`, unless the agent asks for another size; each flow has two.
pub const XDP_FLOWS: u32 = 1;

/// How long a way ([`XdpWay`]) stays valid before everything is looked up again, in nanoseconds. Conntrack and the
/// service flows count in seconds, so nothing expires there in the meantime; the agent checks for faults at the same
/// interval, and routes change far less often.
pub const XDP_WAY_NS: u64 = 500_000_000;

/// Every 32 s, this many times [`XDP_WAY_NS`], one packet of each way passes through the host's stack: the kernel
/// checks that the next hop is reachable and keeps its neighbour entry only if the stack itself sends packets there.
pub const XDP_STACK_PERIOD: u64 = 64;

/// The validity of ways: the single value of `HEALTH_XDP_TIMES`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct XdpTimes {
    /// When the agent last changed anything that ways depend on: `CLOCK_MONOTONIC`, in nanoseconds. Older ways are
    /// invalid.
    pub changed_ns: u64,
    /// [`XDP_WAY_NS`] in kernel ticks (`jiffies`), which a program can read at no cost.
    pub way_ticks: u64,
}

impl XdpTimes {
    /// Whether the stack's turn for a way came between the way's expiry and the present, both in ticks. `offset`
    /// staggers the turns of different ways.
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

/// A device on which XDP handles services; the key is its ifindex.
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
    /// When everything below was looked up: `CLOCK_MONOTONIC`, in nanoseconds.
    pub made_ns: u64,
    /// When everything must be looked up again: kernel ticks.
    pub until_ticks: u64,
    /// Packets and bytes not yet reported to conntrack: see [`Pending`].
    pub pending: u64,
    /// How the packets are forwarded.
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
    /// New destination and source hardware addresses, in frame order.
    pub macs: [u32; 3],
    /// The hardware address that the packets must be sent to, in frame order.
    pub mac: [u16; 3],
    /// Length in bytes of the longest packet that can be forwarded, from the IP header on.
    pub mtu: u16,
    /// Ifindex of the device on which the packets must arrive.
    pub from: u32,
    /// Ifindex of the device to which the packets are redirected; 0: the receiving device sends them back.
    pub to: u32,
    /// Traffic class, and flow label with IPv6, as used in route look-ups, without the ECN bits (RFC 3168).
    pub class: u32,
    /// The change in the sum underlying the IP header checksum, caused by the new addresses and time to live:
    /// [`crate::nat::Difference::folded`].
    pub ip_change: u16,
    /// As `ip_change`, for the transport checksum.
    pub transport_change: u16,
}

/// Packet and byte counts in one word, so that one instruction can add to both; the low 40 bits count bytes. Flushed at
/// least every [`XDP_WAY_NS`], before the 16,777,216 packets that fit can have arrived.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pending(pub u64);

/// Number of bits for the byte count.
const BYTES_BITS: u32 = 40;

impl Pending {
    /// The counts for one packet of this length in bytes, from the IP header on.
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

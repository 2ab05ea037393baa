//! Services by XDP: the devices on which it sends packets on, `HEALTH_XDP_DEVICES`, and how it does so with those of each
//! flow that it has looked up a moment ago, `HEALTH_XDP_FLOWS4` and `HEALTH_XDP_FLOWS6`.

/// Most devices.
pub const XDP_DEVICES: u32 = 256;

/// Entries of `HEALTH_XDP_FLOWS4` and `HEALTH_XDP_FLOWS6`, unless the agent asks for another size; each flow has two.
pub const XDP_FLOWS: u32 = 1;

/// How long a way serves before all is looked up again, nanoseconds. Conntrack and the flows of services count in seconds,
/// so nothing expires there meanwhile; the agent looks for faults as often, and routes change far more seldom.
pub const XDP_WAY_NS: u64 = 500_000_000;

/// One packet of each way goes through the host's stack in so many times of [`XDP_WAY_NS`], which are 32 s: only what the
/// stack sends has the kernel ask whether the next hop is still there, and keep it among its neighbours.
pub const XDP_STACK_PERIOD: u64 = 64;

/// How long ways serve, the one value of `HEALTH_XDP_TIMES`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct XdpTimes {
    /// When the agent last changed what ways follow from: nanoseconds of `CLOCK_MONOTONIC`. Ways that are older serve no
    /// more.
    pub changed_ns: u64,
    /// [`XDP_WAY_NS`] in ticks of the kernel (`jiffies`), which cost a program nothing to read.
    pub way_ticks: u64,
}

impl XdpTimes {
    /// Whether the stack's turn has come for a way, from the time until which it served to the present one, in ticks.
    /// `offset` has the turns of different ways not come at once.
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

/// A device on which XDP serves, by its number.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct XdpDevice {
    /// Its hardware address. Frames for others are none of this host's business.
    pub mac: [u8; 6],
    /// [`XDP_RETURNS`] and [`XDP_SENDS`].
    pub flags: u16,
}

/// Flag: the device sends back what its program returns (`XDP_TX`).
pub const XDP_RETURNS: u16 = 1;
/// Flag: the device sends what programs redirect to it.
pub const XDP_SENDS: u16 = 2;

/// What was found out about the packets of a flow that go one way. Its key is the tuple that they come with, of direction
/// in. `A` is an address.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct XdpFlow<A> {
    /// When all that follows was looked up: nanoseconds of `CLOCK_MONOTONIC`.
    pub made_ns: u64,
    /// When it is to be looked up again: ticks of the kernel.
    pub until_ticks: u64,
    /// What conntrack has not been told of yet: see [`Pending`].
    pub pending: u64,
    /// What becomes of the packets.
    pub way: XdpWay<A>,
}

/// How packets are sent on, and which of a flow are.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct XdpWay<A> {
    /// Source address that they get.
    pub source_be: A,
    /// Destination address that they get.
    pub destination_be: A,
    /// Source and destination port that they get.
    pub ports_be: [u16; 2],
    /// Hardware addresses of receiver and sender that they get, as they lie in a frame.
    pub macs: [u32; 3],
    /// The hardware address that they are sent to, as it lies in a frame.
    pub mac: [u16; 3],
    /// The longest packet that can be sent on, bytes from the IP header on.
    pub mtu: u16,
    /// The device that they come by.
    pub from: u32,
    /// The device that they are handed to; 0: the one that they came by sends them back.
    pub to: u32,
    /// Traffic class, and flow label with IPv6, as the look-up of routes takes them, without the bits of ECN (RFC 3168).
    pub class: u32,
    /// By how much the sum under the checksum of the IP header changes with its addresses and the time to live:
    /// [`crate::nat::Difference::folded`].
    pub ip_change: u16,
    /// The same of the transport header.
    pub transport_change: u16,
}

/// Packets and bytes in one word, which one instruction adds to: bytes in the low 40 bits. It is taken away at least each
/// [`XDP_WAY_NS`], when not even the 16,777,216 packets have come for which there is room.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pending(pub u64);

/// Bits of the bytes.
const BYTES_BITS: u32 = 40;

impl Pending {
    /// One packet of this length, bytes from the IP header on.
    #[inline(always)]
    pub const fn packet(len: u32) -> Self {
        Self(1 << BYTES_BITS | len as u64)
    }

    /// How many packets.
    #[inline(always)]
    pub const fn packets(self) -> u64 {
        self.0 >> BYTES_BITS
    }

    /// How many bytes.
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

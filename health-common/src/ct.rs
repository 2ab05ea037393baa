//! Conntrack: `HEALTH_CT4` and `HEALTH_CT6`.

/// Direction bit of a tuple: the flow was opened towards a local endpoint.
pub const TUPLE_IN: u8 = 1;
/// Direction bit of a tuple: the flow was opened by this host.
pub const TUPLE_OUT: u8 = 0;

/// IPv4 conntrack and NAT tuple, in the flow's original direction.
///
/// For ICMP echo the identifier stands in `sport_be` and `dport_be` is 0.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Tuple4 {
    /// Source address of the first packet.
    pub saddr_be: u32,
    /// Destination address of the first packet.
    pub daddr_be: u32,
    /// Source port, or the ICMP identifier.
    pub sport_be: u16,
    /// Destination port, or 0.
    pub dport_be: u16,
    /// IP protocol number.
    pub protocol: u8,
    /// [`TUPLE_IN`] or [`TUPLE_OUT`].
    pub direction: u8,
    /// Explicit padding, zero.
    pub pad: u16,
}

/// IPv6 conntrack and NAT tuple; as [`Tuple4`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Tuple6 {
    /// Source address of the first packet.
    pub saddr_be: [u32; 4],
    /// Destination address of the first packet.
    pub daddr_be: [u32; 4],
    /// Source port, or the ICMP identifier.
    pub sport_be: u16,
    /// Destination port, or 0.
    pub dport_be: u16,
    /// IP protocol number.
    pub protocol: u8,
    /// [`TUPLE_IN`] or [`TUPLE_OUT`].
    pub direction: u8,
    /// Explicit padding, zero.
    pub pad: u16,
}

/// State of one flow. "rx" is what came towards the local side, "tx" what left it; bytes count from
/// the IP header on.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CtEntry {
    /// Packets received.
    pub rx_packets: u64,
    /// Bytes received.
    pub rx_bytes: u64,
    /// Packets sent.
    pub tx_packets: u64,
    /// Bytes sent.
    pub tx_bytes: u64,
    /// When the entry may be collected: seconds of `CLOCK_MONOTONIC`.
    pub expires: u32,
    /// Flag bits, of [`CtState`].
    pub flags: u16,
    /// Union of the TCP flags received.
    pub rx_flags_seen: u8,
    /// Union of the TCP flags sent.
    pub tx_flags_seen: u8,
    /// When the last packet was received: seconds of `CLOCK_MONOTONIC`, 0 for never.
    pub last_rx: u32,
    /// When the last packet was sent: seconds of `CLOCK_MONOTONIC`, 0 for never.
    pub last_tx: u32,
    /// Identity of the side that opened the flow.
    pub source_identity: u32,
    /// Interface on which the flow was opened.
    pub ifindex: u32,
}

/// The three fields of an entry that change together, `flags`, `rx_flags_seen` and `tx_flags_seen`, as
/// the one aligned word that they are in memory. Any CPU may change it, by compare-and-swap.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CtState(u32);

/// Where [`CtState`] stands in an entry, bytes.
pub const CT_STATE_OFFSET: usize = core::mem::offset_of!(CtEntry, flags);

const _: () = {
    assert!(CT_STATE_OFFSET % 4 == 0);
    assert!(core::mem::offset_of!(CtEntry, rx_flags_seen) == CT_STATE_OFFSET + 2);
    assert!(core::mem::offset_of!(CtEntry, tx_flags_seen) == CT_STATE_OFFSET + 3);
};

impl CtState {
    /// From the word in memory.
    #[inline(always)]
    pub const fn from_word(word: u32) -> Self {
        Self(word)
    }

    /// The word in memory.
    #[inline(always)]
    pub const fn word(self) -> u32 {
        self.0
    }

    /// From the fields of an entry.
    #[inline(always)]
    pub const fn new(flags: u16, rx_flags_seen: u8, tx_flags_seen: u8) -> Self {
        let [a, b] = flags.to_ne_bytes();
        Self(u32::from_ne_bytes([a, b, rx_flags_seen, tx_flags_seen]))
    }

    /// The flag bits.
    #[inline(always)]
    pub const fn flags(self) -> u16 {
        let [a, b, _, _] = self.0.to_ne_bytes();
        u16::from_ne_bytes([a, b])
    }

    /// Union of the TCP flags received.
    #[inline(always)]
    pub const fn rx_flags_seen(self) -> u8 {
        self.0.to_ne_bytes()[2]
    }

    /// Union of the TCP flags sent.
    #[inline(always)]
    pub const fn tx_flags_seen(self) -> u8 {
        self.0.to_ne_bytes()[3]
    }
}

impl CtEntry {
    /// The entry's flags as one word.
    #[inline(always)]
    pub const fn state(&self) -> CtState {
        CtState::new(self.flags, self.rx_flags_seen, self.tx_flags_seen)
    }

    /// Sets the entry's flags.
    #[inline(always)]
    pub const fn set_state(&mut self, state: CtState) {
        self.flags = state.flags();
        self.rx_flags_seen = state.rx_flags_seen();
        self.tx_flags_seen = state.tx_flags_seen();
    }
}

crate::map_types!(Tuple4 = 16, Tuple6 = 40, CtEntry = 56);

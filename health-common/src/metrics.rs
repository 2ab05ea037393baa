//! Packet counters: `HEALTH_METRICS`, a per-CPU array indexed by (reason, direction).
//!
//! An array rather than a hash: the kernel inlines the look-up, and all keys are known.

/// Number of entries: 256 reasons, four directions.
pub const METRICS_ENTRIES: u32 = 256 * 4;

/// A packet's direction, seen from the host.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the network or from an endpoint.
    Ingress = 1,
    /// To the network or to an endpoint.
    Egress = 2,
}

/// What happened to a packet. Values from 128 on are drops; where Cilium has the same reason, the number is Cilium's.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// Passed on to its destination.
    Forwarded = 0,
    /// ICMP echo request answered in the kernel.
    EchoAnswered = 1,
    /// ARP request or neighbour solicitation answered in the kernel.
    NeighbourAnswered = 2,
    /// Left to the endpoint's own stack because the program cannot handle it: any packet to the health endpoint's
    /// addresses that is neither answered nor dropped.
    LeftToStack = 3,
    /// A probe of this agent, stamped as it left.
    ProbeStamped = 4,
    /// A reply matched to a probe of this agent.
    ProbeMatched = 5,
    /// A reply to a probe that is not, or no longer, in flight.
    ProbeUnmatched = 6,
    /// An echo request was answered, but conntrack had no space for its entry.
    CtFull = 7,
    /// A probe of a peer's agent arrived.
    ProbeArrived = 8,
    /// The reply to a peer's probe left, carrying the time that the probe spent in this host.
    ProbeReturned = 9,
    /// A reply to a probe of this agent with a wrong checksum.
    ProbeDamaged = 10,
    /// A packet of an endpoint that neither belongs to a flow nor starts one.
    CtInvalid = 11,
    /// An ICMP error about a flow of an endpoint.
    CtRelated = 12,
    /// A packet of a service's flow between an outside client and another node, forwarded by XDP.
    ForwardedByXdp = 13,
    /// A fragment that waits for its packet's first fragment, or that first fragment when it arrives. Both then pass
    /// through the device a second time.
    FragmentHeld = 14,
    /// A monitored event was lost: the ring buffer was full.
    EventLost = 127,
    /// Dropped: the source address cannot be answered or does not belong to the sender.
    InvalidSource = 132,
    /// Dropped: a packet to a service whose backend could not be found.
    ServiceNoBackend = 158,
    /// Dropped: a packet to a service without backends, or without a backend to which the packet's ports are free. An
    /// ICMP error notifies the sender.
    ServiceRejected = 240,
    /// Dropped: a packet to a service that has only remote backends although its traffic policy requires a local one.
    ServiceNoLocal = 241,
    /// Dropped: a packet to a service from outside its source ranges.
    ServiceSourceRange = 177,
    /// Dropped: a packet that would start a flow while the flow maps are being replaced. TCP retransmits it.
    FlowsHeld = 242,
    /// Dropped: a packet that claims to belong to a flow forwarded here by another node, but lacks the tag that only
    /// nodes of the mesh can produce.
    DirectInvalid = 243,
    /// Dropped: no rule of the endpoint's policy allows it.
    PolicyDenied = 133,
    /// Dropped: an endpoint's packet with a truncated IP header; or a packet to which policy cannot be applied because
    /// it is truncated or has too many extension headers.
    InvalidPacket = 134,
    /// Dropped: the IPv4 header checksum is wrong.
    InvalidHeaderChecksum = 154,
    /// Dropped: the packet could not be rewritten for its translation.
    WriteFailed = 141,
    /// Dropped: a frame of an endpoint with a VLAN tag, or of a protocol other than ARP, IPv4 and IPv6.
    UnsupportedL2 = 166,
    /// Dropped: no port was free to masquerade a new flow, or its translation did not fit into the map.
    NatNoMapping = 167,
    /// Dropped: a packet that needs masquerading but neither belongs to a flow nor starts one.
    NatUnsupported = 168,
    /// Dropped: a rule of the endpoint's policy denies it.
    PolicyDeniedByRule = 181,
    /// Dropped: a fragment that needs masquerading or a policy check, but whose packet's first fragment was not seen.
    FragmentUnknown = 187,
}

impl Reason {
    /// All reasons, for listings.
    pub const ALL: [Self; 32] = [
        Self::Forwarded,
        Self::EchoAnswered,
        Self::NeighbourAnswered,
        Self::LeftToStack,
        Self::ProbeStamped,
        Self::ProbeMatched,
        Self::ProbeUnmatched,
        Self::CtFull,
        Self::ProbeArrived,
        Self::ProbeReturned,
        Self::ProbeDamaged,
        Self::CtInvalid,
        Self::CtRelated,
        Self::ForwardedByXdp,
        Self::FragmentHeld,
        Self::EventLost,
        Self::InvalidSource,
        Self::PolicyDenied,
        Self::InvalidPacket,
        Self::InvalidHeaderChecksum,
        Self::WriteFailed,
        Self::UnsupportedL2,
        Self::NatNoMapping,
        Self::NatUnsupported,
        Self::PolicyDeniedByRule,
        Self::FragmentUnknown,
        Self::ServiceNoBackend,
        Self::ServiceRejected,
        Self::ServiceNoLocal,
        Self::ServiceSourceRange,
        Self::FlowsHeld,
        Self::DirectInvalid,
    ];

    /// Whether this reason is a drop.
    pub const fn is_drop(self) -> bool {
        self as u8 >= 128
    }

    /// Description of the reason, for listings and metrics.
    pub const fn text(self) -> &'static str {
        match self {
            Self::Forwarded => "Forwarded",
            Self::EchoAnswered => "Echo answered",
            Self::NeighbourAnswered => "Neighbour answered",
            Self::LeftToStack => "Left to stack",
            Self::ProbeStamped => "Probe stamped",
            Self::ProbeMatched => "Probe matched",
            Self::ProbeUnmatched => "Probe reply unmatched",
            Self::ProbeArrived => "Peer's probe arrived",
            Self::ProbeReturned => "Peer's probe returned",
            Self::ProbeDamaged => "Probe reply damaged",
            Self::InvalidSource => "Invalid source IP",
            Self::PolicyDenied => "Policy denied",
            Self::InvalidPacket => "Invalid packet",
            Self::InvalidHeaderChecksum => "Invalid IP header checksum",
            Self::CtFull => "Conntrack full",
            Self::CtInvalid => "Of no flow",
            Self::CtRelated => "Error about a flow",
            Self::ForwardedByXdp => "Forwarded by XDP",
            Self::FragmentHeld => "Fragment held",
            Self::WriteFailed => "Error writing to packet",
            Self::UnsupportedL2 => "Unsupported L2 protocol",
            Self::NatNoMapping => "No mapping for NAT masquerade",
            Self::NatUnsupported => "Unsupported for NAT masquerade",
            Self::PolicyDeniedByRule => "Policy denied by denylist",
            Self::FragmentUnknown => "Fragment of an unknown packet",
            Self::ServiceNoBackend => "Service backend not found",
            Self::ServiceRejected => "Service without endpoints",
            Self::ServiceNoLocal => "Service without local endpoints",
            Self::ServiceSourceRange => "Not in the service's source ranges",
            Self::FlowsHeld => "Held while maps are replaced",
            Self::DirectInvalid => "Invalid tag of direct return",
            Self::EventLost => "Event lost",
        }
    }
}

/// The index of a counter in `HEALTH_METRICS`.
#[inline(always)]
pub const fn metrics_index(reason: Reason, direction: Direction) -> u32 {
    (reason as u32) << 2 | direction as u32
}

/// One counter on one CPU.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counter {
    /// Packets.
    pub packets: u64,
    /// Bytes, from the Ethernet header on.
    pub bytes: u64,
}

crate::map_types!(Counter = 16);

//! The maps. They are pinned by name, so they outlive the agent; layouts are in `health-common`.

use aya_ebpf::bindings::BPF_F_NO_PREALLOC;
use aya_ebpf::macros::map;
use aya_ebpf::maps::{Array, HashMap, LpmTrie, LruHashMap, PerCpuArray, ProgramArray, RingBuf};
use health_common::addr::Addr;
use health_common::arrivals::{ARRIVALS_ENTRIES, Arrivals, Prober};
use health_common::calls::CALLS_ENTRIES;
use health_common::config::DatapathConfig;
use health_common::ct::{CtEntry, DEFAULT_ANY_ENTRIES, DEFAULT_ENTRIES, Tuple4, Tuple6};
use health_common::endpoint::EndpointInfo;
use health_common::events::{EVENTS_BYTES, Event, MonitorFilter};
use health_common::fragment::{FragmentKey4, FragmentKey6, FragmentPorts};
use health_common::inflight::{INFLIGHT_SLOTS, Inflight};
use health_common::ipcache::{IPCACHE_ENTRIES, IpcacheEntry};
use health_common::masquerade::MasqueradeConfig;
use health_common::metrics::{Counter, METRICS_ENTRIES};
use health_common::nat::{NatEntry4, NatEntry6};
use health_common::own::{OWN_ENTRIES, OwnPrefix};
use health_common::policy::{POLICY_COUNTERS, POLICY_ENTRIES, PolicyEntry, PolicyKey};
use health_common::ring::{Hand, RINGS};
use health_common::rtt::{RttKey, RttRow};
use health_common::service::direct::DirectConfig;
use health_common::service::socket::{SOCKET_ENTRIES, SocketFlow, SocketKey, TURN_ENTRIES, Turns};
use health_common::service::xdp::{XDP_DEVICES, XDP_FLOWS, XdpDevice, XdpFlow, XdpTimes};
use health_common::service::{
    Affinity, AffinityKey, Backend, DEFAULT_AFFINITY, DEFAULT_BACKENDS, DEFAULT_FRONTENDS,
    DEFAULT_MAGLEV, DEFAULT_SLOTS, DEFAULT_SOURCE_RANGES, Frontend, FrontendKey4, FrontendKey6,
    REVNAT_ANY_ENTRIES, REVNAT_ENTRIES, ServiceFlow4, ServiceFlow6, SourceRange,
};
use health_common::tcp::{Flow, FlowKey, Peer};

use crate::early::{
    EARLY_PACKETS, EARLY_SOURCES, EarlyDraft, EarlyFrame, EarlyPacket, EarlySource, FrameKey,
    HELD_FRAGMENTS, PacketKey,
};
use crate::service::SentErrors;
use crate::xdp::Draft;

const FRAGMENTS: u32 = 8_192;
const PEER_PATHS: u32 = 262_144;
const ENDPOINTS: u32 = 16_384;
const PEERS: u32 = 131_072;
const TCP_FLOWS: u32 = 32_768;

/// IPv4 TCP flows.
#[map]
pub static HEALTH_CT4: HashMap<Tuple4, CtEntry> = HashMap::pinned(DEFAULT_ENTRIES, 0);

/// Keys of [`HEALTH_CT4`], in insertion order.
#[map]
pub static HEALTH_CT4_RING: Array<Tuple4> = Array::pinned(DEFAULT_ENTRIES, 0);

/// IPv6 TCP flows.
#[map]
pub static HEALTH_CT6: HashMap<Tuple6, CtEntry> = HashMap::pinned(DEFAULT_ENTRIES, 0);

/// Keys of [`HEALTH_CT6`], in insertion order.
#[map]
pub static HEALTH_CT6_RING: Array<Tuple6> = Array::pinned(DEFAULT_ENTRIES, 0);

/// IPv4 flows of other protocols.
#[map]
pub static HEALTH_CT_ANY4: LruHashMap<Tuple4, CtEntry> = LruHashMap::pinned(DEFAULT_ANY_ENTRIES, 0);

/// IPv6 flows of other protocols.
#[map]
pub static HEALTH_CT_ANY6: LruHashMap<Tuple6, CtEntry> = LruHashMap::pinned(DEFAULT_ANY_ENTRIES, 0);

/// Ports of fragmented IPv4 packets.
#[map]
pub static HEALTH_FRAGMENTS4: LruHashMap<FragmentKey4, FragmentPorts> =
    LruHashMap::pinned(FRAGMENTS, 0);

/// Ports of fragmented IPv6 packets.
#[map]
pub static HEALTH_FRAGMENTS6: LruHashMap<FragmentKey6, FragmentPorts> =
    LruHashMap::pinned(FRAGMENTS, 0);

/// Packets with early fragments, or whose first fragment was seen. Only the programs use this map and the next three,
/// so they are not pinned.
#[map]
pub static HEALTH_EARLY: LruHashMap<PacketKey, EarlyPacket> =
    LruHashMap::with_max_entries(EARLY_PACKETS, 0);

/// The held fragments of these packets.
#[map]
pub static HEALTH_EARLY_FRAMES: LruHashMap<FrameKey, EarlyFrame> =
    LruHashMap::with_max_entries(HELD_FRAGMENTS, 0);

/// Sources of these fragments.
#[map]
pub static HEALTH_EARLY_SOURCES: LruHashMap<Addr, EarlySource> =
    LruHashMap::with_max_entries(EARLY_SOURCES, 0);

/// Per-CPU scratch space for building an entry of these maps.
#[map]
pub static HEALTH_EARLY_DRAFT: PerCpuArray<EarlyDraft> = PerCpuArray::with_max_entries(1, 0);

/// IPv4 TCP translations.
#[map]
pub static HEALTH_NAT4: HashMap<Tuple4, NatEntry4> = HashMap::pinned(DEFAULT_ENTRIES, 0);

/// Keys of [`HEALTH_NAT4`], in insertion order.
#[map]
pub static HEALTH_NAT4_RING: Array<Tuple4> = Array::pinned(DEFAULT_ENTRIES, 0);

/// IPv6 TCP translations.
#[map]
pub static HEALTH_NAT6: HashMap<Tuple6, NatEntry6> = HashMap::pinned(DEFAULT_ENTRIES, 0);

/// Keys of [`HEALTH_NAT6`], in insertion order.
#[map]
pub static HEALTH_NAT6_RING: Array<Tuple6> = Array::pinned(DEFAULT_ENTRIES, 0);

/// IPv4 translations of other protocols.
#[map]
pub static HEALTH_NAT_ANY4: LruHashMap<Tuple4, NatEntry4> =
    LruHashMap::pinned(DEFAULT_ANY_ENTRIES, 0);

/// IPv6 translations of other protocols.
#[map]
pub static HEALTH_NAT_ANY6: LruHashMap<Tuple6, NatEntry6> =
    LruHashMap::pinned(DEFAULT_ANY_ENTRIES, 0);

/// Round-trip times per peer. Rows are large and created by the agent, so memory is allocated on demand.
#[map]
pub static HEALTH_RTT: HashMap<RttKey, RttRow> = HashMap::pinned(PEER_PATHS, BPF_F_NO_PREALLOC);

/// Probes by IP version and sequence number.
#[map]
pub static HEALTH_INFLIGHT: Array<Inflight> = Array::pinned(INFLIGHT_SLOTS, 0);

/// Probes of other agents that arrived here.
#[map]
pub static HEALTH_ARRIVALS: LruHashMap<Prober, Arrivals> = LruHashMap::pinned(ARRIVALS_ENTRIES, 0);

/// Addresses whose TCP connections are timed.
#[map]
pub static HEALTH_PEERS: HashMap<Addr, Peer> = HashMap::pinned(PEERS, BPF_F_NO_PREALLOC);

/// Timed TCP connections: those to peers, and the probes' own.
#[map]
pub static HEALTH_TCP: LruHashMap<FlowKey, Flow> = LruHashMap::pinned(TCP_FLOWS, 0);

/// Endpoints of this node, by address.
#[map]
pub static HEALTH_ENDPOINTS: HashMap<Addr, EndpointInfo> =
    HashMap::pinned(ENDPOINTS, BPF_F_NO_PREALLOC);

/// Policy verdicts on packets of endpoints.
#[map]
pub static HEALTH_POLICY: LpmTrie<PolicyKey, PolicyEntry> = LpmTrie::pinned(POLICY_ENTRIES, 0);

/// Counters of the packets that the verdicts applied to.
#[map]
pub static HEALTH_POLICY_COUNTERS: PerCpuArray<Counter> = PerCpuArray::pinned(POLICY_COUNTERS, 0);

/// Identities by address.
#[map]
pub static HEALTH_IPCACHE: LpmTrie<Addr, IpcacheEntry> = LpmTrie::pinned(IPCACHE_ENTRIES, 0);

/// The host's own addresses. The value has no meaning.
#[map]
pub static HEALTH_OWN: LpmTrie<OwnPrefix, u32> = LpmTrie::pinned(OWN_ENTRIES, 0);

/// IDs of this node's endpoints, by the ifindex of the host's end of their veth pairs.
#[map]
pub static HEALTH_DEVICES: HashMap<u32, u32> = HashMap::pinned(ENDPOINTS, BPF_F_NO_PREALLOC);

/// Frontends of IPv4 services.
#[map]
pub static HEALTH_SVC4: HashMap<FrontendKey4, Frontend> =
    HashMap::pinned(DEFAULT_FRONTENDS, BPF_F_NO_PREALLOC);

/// Frontends of IPv6 services.
#[map]
pub static HEALTH_SVC6: HashMap<FrontendKey6, Frontend> =
    HashMap::pinned(DEFAULT_FRONTENDS, BPF_F_NO_PREALLOC);

/// Backends that frontends select from.
#[map]
pub static HEALTH_SLOTS: Array<u32> = Array::pinned(DEFAULT_SLOTS, 0);

/// Like [`HEALTH_SLOTS`], for Maglev.
#[map]
pub static HEALTH_MAGLEV: Array<u32> = Array::pinned(DEFAULT_MAGLEV, 0);

/// Backends of services.
#[map]
pub static HEALTH_BACKENDS: Array<Backend> = Array::pinned(DEFAULT_BACKENDS, 0);

/// Clients with affinity to a backend.
#[map]
pub static HEALTH_AFFINITY: LruHashMap<AffinityKey, Affinity> =
    LruHashMap::pinned(DEFAULT_AFFINITY, 0);

/// Sources that may use a service.
#[map]
pub static HEALTH_SOURCE_RANGES: LpmTrie<SourceRange, u32> =
    LpmTrie::pinned(DEFAULT_SOURCE_RANGES, 0);

/// IPv4 TCP flows through services.
#[map]
pub static HEALTH_REVNAT4: HashMap<Tuple4, ServiceFlow4> = HashMap::pinned(REVNAT_ENTRIES, 0);

/// Keys of [`HEALTH_REVNAT4`], in insertion order.
#[map]
pub static HEALTH_REVNAT4_RING: Array<Tuple4> = Array::pinned(REVNAT_ENTRIES, 0);

/// IPv6 TCP flows through services.
#[map]
pub static HEALTH_REVNAT6: HashMap<Tuple6, ServiceFlow6> = HashMap::pinned(REVNAT_ENTRIES, 0);

/// Keys of [`HEALTH_REVNAT6`], in insertion order.
#[map]
pub static HEALTH_REVNAT6_RING: Array<Tuple6> = Array::pinned(REVNAT_ENTRIES, 0);

/// IPv4 flows of other protocols through services.
#[map]
pub static HEALTH_REVNAT_ANY4: LruHashMap<Tuple4, ServiceFlow4> =
    LruHashMap::pinned(REVNAT_ANY_ENTRIES, 0);

/// IPv6 flows of other protocols through services.
#[map]
pub static HEALTH_REVNAT_ANY6: LruHashMap<Tuple6, ServiceFlow6> =
    LruHashMap::pinned(REVNAT_ANY_ENTRIES, 0);

/// Destinations to which the host's own sockets were redirected.
#[map]
pub static HEALTH_SOCKETS: LruHashMap<SocketKey, SocketFlow> =
    LruHashMap::pinned(SOCKET_ENTRIES, 0);

/// Unconnected sockets of the host that reach the same backend through several addresses, by the key of the backend's
/// answers. Not pinned: the next programs have no use for it.
#[map]
pub static HEALTH_TURNS: LruHashMap<SocketKey, Turns> =
    LruHashMap::with_max_entries(TURN_ENTRIES, 0);

/// Devices on which XDP forwards packets of services.
#[map]
pub static HEALTH_XDP_DEVICES: HashMap<u32, XdpDevice> =
    HashMap::pinned(XDP_DEVICES, BPF_F_NO_PREALLOC);

/// How XDP forwards packets of IPv4 flows.
#[map]
pub static HEALTH_XDP_FLOWS4: LruHashMap<Tuple4, XdpFlow<u32>> = LruHashMap::pinned(XDP_FLOWS, 0);

/// How XDP forwards packets of IPv6 flows.
#[map]
pub static HEALTH_XDP_FLOWS6: LruHashMap<Tuple6, XdpFlow<[u32; 4]>> =
    LruHashMap::pinned(XDP_FLOWS, 0);

/// Scratch space for building an entry of [`HEALTH_XDP_FLOWS4`], which does not fit on the stack. Not pinned, because
/// only the programs use it.
#[map]
pub static HEALTH_XDP_DRAFT4: PerCpuArray<Draft<Tuple4>> = PerCpuArray::with_max_entries(1, 0);

/// Like [`HEALTH_XDP_DRAFT4`].
#[map]
pub static HEALTH_XDP_DRAFT6: PerCpuArray<Draft<Tuple6>> = PerCpuArray::with_max_entries(1, 0);

/// How long entries of [`HEALTH_XDP_FLOWS4`] and [`HEALTH_XDP_FLOWS6`] are valid.
#[map]
pub static HEALTH_XDP_TIMES: Array<XdpTimes> = Array::pinned(1, 0);

/// Packet counters.
#[map]
pub static HEALTH_METRICS: PerCpuArray<Counter> = PerCpuArray::pinned(METRICS_ENTRIES, 0);

/// Tail-call targets.
#[map]
pub static HEALTH_CALLS: ProgramArray = ProgramArray::pinned(CALLS_ENTRIES, 0);

/// Which packets are masqueraded.
#[map]
pub static HEALTH_MASQUERADE: Array<MasqueradeConfig> = Array::pinned(1, 0);

/// Packet and flow events for monitors.
#[map]
pub static HEALTH_EVENTS: RingBuf = RingBuf::pinned(EVENTS_BYTES, 0);

/// Which events monitors want.
#[map]
pub static HEALTH_MONITOR: Array<MonitorFilter> = Array::pinned(1, 0);

/// Scratch space for building a record, which does not fit on the stack, before it is known to be wanted. Not pinned,
/// because only the programs use it.
#[map]
pub static HEALTH_DRAFT: PerCpuArray<Event> = PerCpuArray::with_max_entries(1, 0);

/// Number of ICMP errors recently sent to outside clients. Not pinned, as above.
#[map]
pub static HEALTH_SENT_ERRORS: PerCpuArray<SentErrors> = PerCpuArray::with_max_entries(1, 0);

/// Keys with which nodes recognise packets that other nodes forward to their backends.
#[map]
pub static HEALTH_DIRECT: Array<DirectConfig> = Array::pinned(1, 0);

/// Where each ring of keys is written next.
#[map]
pub static HEALTH_HANDS: Array<Hand> = Array::pinned(RINGS, 0);

/// Settings of the datapath.
#[map]
pub static HEALTH_CONFIG: Array<DatapathConfig> = Array::pinned(1, 0);

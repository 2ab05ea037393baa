//! The maps by name, with the layouts that `health-common` defines.

use aya::maps::lpm_trie::Key;
use health_common::LAYOUT_VERSION;
use health_common::addr::Addr;
use health_common::arrivals::{Arrivals, Prober};
use health_common::config::DatapathConfig;
use health_common::ct::{CtEntry, Tuple4, Tuple6};
use health_common::endpoint::EndpointInfo;
use health_common::events::MonitorFilter;
use health_common::fragment::{FragmentKey4, FragmentKey6, FragmentPorts};
use health_common::inflight::Inflight;
use health_common::ipcache::IpcacheEntry;
use health_common::masquerade::MasqueradeConfig;
use health_common::metrics::Counter;
use health_common::nat::{NatEntry4, NatEntry6};
use health_common::own::OwnPrefix;
use health_common::policy::{PolicyEntry, PolicyKey};
use health_common::ring::{
    Hand, RING_CT6, RING_NAT4, RING_NAT6, RING_REVNAT4, RING_REVNAT6, RINGS,
};
use health_common::rtt::{RttKey, RttRow};
use health_common::service::direct::DirectConfig;
use health_common::service::socket::{SocketFlow, SocketKey};
use health_common::service::xdp::{XdpDevice, XdpFlow, XdpTimes};
use health_common::service::{
    Affinity, AffinityKey, Backend, Frontend, FrontendKey4, FrontendKey6, ServiceFlow4,
    ServiceFlow6, SourceRange,
};
use health_common::tcp::{Flow, FlowKey, Peer};

/// The properties of a map that are known before it is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MapLayout {
    /// Name of the map and of its pin.
    pub name: &'static str,
    /// Size of a key in bytes.
    pub key_size: u32,
    /// Size of a value (of one CPU's value for per-CPU maps), in bytes.
    pub value_size: u32,
    /// The [`LAYOUT_VERSION`] in which its kind, keys, values or their meaning last changed.
    pub since: u32,
}

const fn map<K, V>(name: &'static str, since: u32) -> MapLayout {
    assert!(since <= LAYOUT_VERSION);
    MapLayout {
        name,
        key_size: size_of::<K>() as u32,
        value_size: size_of::<V>() as u32,
        since,
    }
}

/// IPv4 flows of TCP.
pub const CT4: MapLayout = map::<Tuple4, CtEntry>("HEALTH_CT4", 8);
/// IPv6 flows of TCP.
pub const CT6: MapLayout = map::<Tuple6, CtEntry>("HEALTH_CT6", 8);
/// IPv4 flows of other protocols.
pub const CT_ANY4: MapLayout = map::<Tuple4, CtEntry>("HEALTH_CT_ANY4", 8);
/// IPv6 flows of other protocols.
pub const CT_ANY6: MapLayout = map::<Tuple6, CtEntry>("HEALTH_CT_ANY6", 8);
/// Ports of fragmented IPv4 packets.
pub const FRAGMENTS4: MapLayout = map::<FragmentKey4, FragmentPorts>("HEALTH_FRAGMENTS4", 8);
/// Ports of fragmented IPv6 packets.
pub const FRAGMENTS6: MapLayout = map::<FragmentKey6, FragmentPorts>("HEALTH_FRAGMENTS6", 8);
/// IPv4 translations of TCP.
pub const NAT4: MapLayout = map::<Tuple4, NatEntry4>("HEALTH_NAT4", 8);
/// IPv6 translations of TCP.
pub const NAT6: MapLayout = map::<Tuple6, NatEntry6>("HEALTH_NAT6", 8);
/// IPv4 translations of other protocols.
pub const NAT_ANY4: MapLayout = map::<Tuple4, NatEntry4>("HEALTH_NAT_ANY4", 8);
/// IPv6 translations of other protocols.
pub const NAT_ANY6: MapLayout = map::<Tuple6, NatEntry6>("HEALTH_NAT_ANY6", 8);
/// Round-trip times.
pub const RTT: MapLayout = map::<RttKey, RttRow>("HEALTH_RTT", 8);
/// Probes by IP version and sequence number.
pub const INFLIGHT: MapLayout = map::<u32, Inflight>("HEALTH_INFLIGHT", 8);
/// Probes of other agents that arrived here.
pub const ARRIVALS: MapLayout = map::<Prober, Arrivals>("HEALTH_ARRIVALS", 8);
/// Addresses whose TCP connections are timed.
pub const PEERS: MapLayout = map::<Addr, Peer>("HEALTH_PEERS", 8);
/// TCP connections that are timed.
pub const TCP: MapLayout = map::<FlowKey, Flow>("HEALTH_TCP", 8);
/// Local endpoints.
pub const ENDPOINTS: MapLayout = map::<Addr, EndpointInfo>("HEALTH_ENDPOINTS", 8);
/// Verdicts on the packets of endpoints.
pub const POLICY: MapLayout = map::<Key<PolicyKey>, PolicyEntry>("HEALTH_POLICY", 8);
/// Packets and bytes that each verdict applied to.
pub const POLICY_COUNTERS: MapLayout = map::<u32, Counter>("HEALTH_POLICY_COUNTERS", 8);
/// Identities by address.
pub const IPCACHE: MapLayout = map::<Key<Addr>, IpcacheEntry>("HEALTH_IPCACHE", 8);
/// Packet counters.
pub const METRICS: MapLayout = map::<u32, Counter>("HEALTH_METRICS", 8);
/// Tail-called programs; the values are file descriptors.
pub const CALLS: MapLayout = map::<u32, u32>("HEALTH_CALLS", 9);
/// The same, for programs on uplinks whose packets begin with the IP header; pinned where such uplinks exist.
pub const IP_CALLS: MapLayout = map::<u32, u32>("HEALTH_IP_CALLS", 9);
/// Whose packets are masqueraded.
pub const MASQUERADE: MapLayout = map::<u32, MasqueradeConfig>("HEALTH_MASQUERADE", 8);
/// Events for monitors: a ring buffer, without keys and values.
pub const EVENTS: MapLayout = map::<(), ()>("HEALTH_EVENTS", 8);
/// Which events monitors want.
pub const MONITOR: MapLayout = map::<u32, MonitorFilter>("HEALTH_MONITOR", 8);
/// Frontends of IPv4 services.
pub const SVC4: MapLayout = map::<FrontendKey4, Frontend>("HEALTH_SVC4", 8);
/// Frontends of IPv6 services.
pub const SVC6: MapLayout = map::<FrontendKey6, Frontend>("HEALTH_SVC6", 8);
/// Which backends a frontend chooses from.
pub const SLOTS: MapLayout = map::<u32, u32>("HEALTH_SLOTS", 8);
/// The same, for Maglev.
pub const MAGLEV: MapLayout = map::<u32, u32>("HEALTH_MAGLEV", 8);
/// Backends of services.
pub const BACKENDS: MapLayout = map::<u32, Backend>("HEALTH_BACKENDS", 8);
/// Session affinity of clients to backends.
pub const AFFINITY: MapLayout = map::<AffinityKey, Affinity>("HEALTH_AFFINITY", 8);
/// Allowed client addresses of a service.
pub const SOURCE_RANGES: MapLayout = map::<Key<SourceRange>, u32>("HEALTH_SOURCE_RANGES", 8);
/// IPv4 flows of TCP through services.
pub const REVNAT4: MapLayout = map::<Tuple4, ServiceFlow4>("HEALTH_REVNAT4", 8);
/// IPv6 flows of TCP through services.
pub const REVNAT6: MapLayout = map::<Tuple6, ServiceFlow6>("HEALTH_REVNAT6", 8);
/// IPv4 flows of other protocols through services.
pub const REVNAT_ANY4: MapLayout = map::<Tuple4, ServiceFlow4>("HEALTH_REVNAT_ANY4", 8);
/// IPv6 flows of other protocols through services.
pub const REVNAT_ANY6: MapLayout = map::<Tuple6, ServiceFlow6>("HEALTH_REVNAT_ANY6", 8);
/// Redirections of the host's own sockets.
pub const SOCKETS: MapLayout = map::<SocketKey, SocketFlow>("HEALTH_SOCKETS", 8);
/// Devices on which XDP forwards service packets.
pub const XDP_DEVICES: MapLayout = map::<u32, XdpDevice>("HEALTH_XDP_DEVICES", 10);
/// How XDP forwards packets of IPv4 flows.
pub const XDP_FLOWS4: MapLayout = map::<Tuple4, XdpFlow<u32>>("HEALTH_XDP_FLOWS4", 10);
/// How XDP forwards packets of IPv6 flows.
pub const XDP_FLOWS6: MapLayout = map::<Tuple6, XdpFlow<[u32; 4]>>("HEALTH_XDP_FLOWS6", 10);
/// How long XDP forwarding entries stay valid.
pub const XDP_TIMES: MapLayout = map::<u32, XdpTimes>("HEALTH_XDP_TIMES", 10);
/// Keys of [`CT4`], in insertion order.
pub const CT4_RING: MapLayout = map::<u32, Tuple4>("HEALTH_CT4_RING", 11);
/// Keys of [`CT6`].
pub const CT6_RING: MapLayout = map::<u32, Tuple6>("HEALTH_CT6_RING", 11);
/// Keys of [`NAT4`].
pub const NAT4_RING: MapLayout = map::<u32, Tuple4>("HEALTH_NAT4_RING", 11);
/// Keys of [`NAT6`].
pub const NAT6_RING: MapLayout = map::<u32, Tuple6>("HEALTH_NAT6_RING", 11);
/// Keys of [`REVNAT4`].
pub const REVNAT4_RING: MapLayout = map::<u32, Tuple4>("HEALTH_REVNAT4_RING", 11);
/// Keys of [`REVNAT6`].
pub const REVNAT6_RING: MapLayout = map::<u32, Tuple6>("HEALTH_REVNAT6_RING", 11);
/// The next write position of each ring.
pub const HANDS: MapLayout = map::<u32, Hand>("HEALTH_HANDS", 11);
/// Keys of the tags on packets that nodes forward to each other's backends.
pub const DIRECT: MapLayout = map::<u32, DirectConfig>("HEALTH_DIRECT", 11);
/// The host's own addresses.
pub const OWN: MapLayout = map::<Key<OwnPrefix>, u32>("HEALTH_OWN", 12);
/// Endpoint ids by device.
pub const DEVICES: MapLayout = map::<u32, u32>("HEALTH_DEVICES", 12);
/// Settings.
pub const CONFIG: MapLayout = map::<u32, DatapathConfig>("HEALTH_CONFIG", 12);

/// All maps that are always pinned.
pub const MAPS: [MapLayout; 51] = [
    CT4,
    CT6,
    CT_ANY4,
    CT_ANY6,
    FRAGMENTS4,
    FRAGMENTS6,
    NAT4,
    NAT6,
    NAT_ANY4,
    NAT_ANY6,
    RTT,
    INFLIGHT,
    ARRIVALS,
    PEERS,
    TCP,
    ENDPOINTS,
    POLICY,
    POLICY_COUNTERS,
    IPCACHE,
    METRICS,
    CALLS,
    MASQUERADE,
    EVENTS,
    MONITOR,
    SVC4,
    SVC6,
    SLOTS,
    MAGLEV,
    BACKENDS,
    AFFINITY,
    SOURCE_RANGES,
    REVNAT4,
    REVNAT6,
    REVNAT_ANY4,
    REVNAT_ANY6,
    SOCKETS,
    XDP_DEVICES,
    XDP_FLOWS4,
    XDP_FLOWS6,
    XDP_TIMES,
    CT4_RING,
    CT6_RING,
    NAT4_RING,
    NAT6_RING,
    REVNAT4_RING,
    REVNAT6_RING,
    HANDS,
    DIRECT,
    OWN,
    DEVICES,
    CONFIG,
];

/// The hash tables whose keys are kept in rings, with their rings, indexed by hand.
pub(crate) const RINGED: [(MapLayout, MapLayout); RINGS as usize] = {
    let mut ringed = [(CT4, CT4_RING); RINGS as usize];
    ringed[RING_CT6 as usize] = (CT6, CT6_RING);
    ringed[RING_NAT4 as usize] = (NAT4, NAT4_RING);
    ringed[RING_NAT6 as usize] = (NAT6, NAT6_RING);
    ringed[RING_REVNAT4 as usize] = (REVNAT4, REVNAT4_RING);
    ringed[RING_REVNAT6 as usize] = (REVNAT6, REVNAT6_RING);
    ringed
};

/// Returns the ring of a table's keys, and the index of its hand.
pub(crate) fn ring_of(table: &MapLayout) -> Option<(u32, MapLayout)> {
    let mut ringed = (0..).zip(RINGED);
    ringed.find_map(|(index, (ringed, ring))| (ringed == *table).then_some((index, ring)))
}

/// Maps that refer to each other's entries: if the layout of one changes, all of them change.
pub(crate) const FAMILIES: [&[MapLayout]; 3] = [ENDPOINT_MAPS, SERVICE_MAPS, XDP_MAPS];

/// Endpoints, their policy, and the identities that the policy names.
pub(crate) const ENDPOINT_MAPS: &[MapLayout] = &[ENDPOINTS, POLICY, POLICY_COUNTERS, IPCACHE];

/// Services, and the flows to their backends.
const SERVICE_MAPS: &[MapLayout] = &[
    SVC4,
    SVC6,
    SLOTS,
    MAGLEV,
    BACKENDS,
    AFFINITY,
    SOURCE_RANGES,
    REVNAT4,
    REVNAT6,
    REVNAT_ANY4,
    REVNAT_ANY6,
    SOCKETS,
];

const XDP_MAPS: &[MapLayout] = &[XDP_DEVICES, XDP_FLOWS4, XDP_FLOWS6, XDP_TIMES];

/// Maps that programs of two layouts never share: each layout has its own settings and tail-calls its own programs.
pub(crate) const OWN_MAPS: &[MapLayout] = &[CONFIG, CALLS, IP_CALLS];

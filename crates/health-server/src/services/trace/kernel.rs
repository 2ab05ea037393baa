//! The state in the kernel that the programs base their decisions on.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use axum::http::StatusCode;
use health_common::addr::Addr;
use health_common::config::DatapathConfig;
use health_common::ct::{TUPLE_IN, TUPLE_OUT};
use health_common::service::outside::is_own;
use health_common::service::socket::SocketKey;
use health_common::service::{
    Affinity, Backend, FLOW_DIRECT, FLOW_FROM_OUTSIDE, FLOW_MASQUERADED, Frontend,
};
use health_datapath::dump::{DumpError, Pinned, ServiceFlow};
use health_datapath::services::{Connection, ServiceMaps, ServicesError};
use health_model::ipam::Family;
use health_model::settings::Location;
use health_net::clock;
use health_net::socket_diag::SocketDiag;

use super::hook::TraceHook;
use crate::answer::Refusal;

/// The programs' maps on this node.
pub(super) struct Kernel {
    pub(super) pinned: Pinned,
    pub(super) maps: ServiceMaps,
    config: DatapathConfig,
    /// `CLOCK_MONOTONIC`, in seconds.
    now: u32,
}

/// What the maps say about a flow whose traffic was redirected to a backend before.
#[derive(Clone, Copy, Debug)]
pub(super) struct FlowFacts {
    /// Where the flow's packets go.
    pub(super) entry: ServiceFlow,
    /// Whether the flow's backend still serves the service.
    pub(super) is_serving: bool,
    /// Whether the backend's node can be notified of the flow, if necessary.
    pub(super) can_notify: bool,
    /// Whether there is an entry that translates the backend's replies.
    pub(super) has_answer: bool,
    /// Whether the flow's connection is open; `None` if unknown.
    pub(super) is_open: Option<bool>,
    /// `CLOCK_MONOTONIC`, in seconds.
    pub(super) now: u32,
}

/// What the maps say about a host socket whose traffic was redirected to a backend before.
#[derive(Clone, Copy, Debug)]
pub(super) struct SocketFacts {
    /// The backend that the socket's traffic was redirected to.
    pub(super) to: SocketAddr,
    /// Index of that backend.
    pub(super) backend: u32,
    /// Whether the socket is connected, so that the programs do not run for each datagram.
    pub(super) is_connected: bool,
    /// Whether the backend still serves the service.
    pub(super) is_serving: bool,
}

/// What the maps say about a client with affinity.
#[derive(Clone, Copy, Debug)]
pub(super) struct ClientFacts {
    pub(super) entry: Affinity,
    /// The current backend at the entry's index.
    pub(super) backend: Option<Backend>,
    /// Whether that backend is on this node, or need not be.
    pub(super) is_within_reach: bool,
    /// `CLOCK_MONOTONIC`, in seconds.
    pub(super) now: u32,
}

/// How the programs identify the source of a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Client {
    /// The address that is checked against source ranges.
    pub(super) source: IpAddr,
    /// The address that affinity uses.
    pub(super) stays_as: IpAddr,
}

impl Kernel {
    pub(super) fn open(location: &Location) -> Result<Self, Refusal> {
        let pinned = Pinned::open(location)?;
        let config = pinned.config()?.first().map(|(_, config)| *config);
        Ok(Self {
            maps: pinned.services()?,
            pinned,
            config: config.unwrap_or_default(),
            now: clock::coarse_now_secs(),
        })
    }

    /// This node's address of a family, if the programs have one.
    pub(super) fn node_address(&self, family: Family) -> Option<IpAddr> {
        let own = self.own_address(family);
        (!own.is_unset()).then(|| own.to_ip())
    }

    fn own_address(&self, family: Family) -> Addr {
        match family {
            Family::V4 => self.config.node4,
            Family::V6 => self.config.node6,
        }
    }

    /// The client of a flow as the programs at a hook see it. All sockets of the host are one client.
    pub(super) fn client_of(&self, hook: TraceHook, flow: &Connection) -> Client {
        let source = flow.source.ip();
        match hook {
            TraceHook::Socket => Client {
                source: self.own_address(Family::of(flow.destination.ip())).to_ip(),
                stays_as: Addr::default().to_ip(),
            },
            TraceHook::Endpoint | TraceHook::Uplink => Client {
                source,
                stays_as: source,
            },
        }
    }

    /// Looks up a flow whose traffic was redirected to a backend before.
    pub(super) fn known_flow(
        &self,
        hook: TraceHook,
        flow: &Connection,
    ) -> Result<Option<FlowFacts>, Refusal> {
        let is_from_outside = hook == TraceHook::Uplink;
        let known = self.maps.flow(flow)?;
        let known = known.filter(|entry| is_from_outside == has(entry, FLOW_FROM_OUTSIDE));
        let Some(entry) = known else {
            return Ok(None);
        };
        let mut client = flow.source;
        client.set_port(entry.client_port.unwrap_or(client.port()));
        let answered = Connection {
            source: entry.to,
            destination: match hook {
                TraceHook::Endpoint => self.client_seen(client, entry.to.ip()),
                _ => client,
            },
            ..*flow
        };
        let translated = Connection {
            source: client,
            destination: entry.to,
            ..*flow
        };
        let direction = match is_from_outside && !has(&entry, FLOW_MASQUERADED) {
            true => TUPLE_IN,
            false => TUPLE_OUT,
        };
        Ok(Some(FlowFacts {
            entry,
            is_serving: self.serves(entry.backend, entry.service, entry.to)?,
            can_notify: !has(&entry, FLOW_DIRECT) || self.has_direct_key()?,
            has_answer: self.maps.answer(&answered)?.is_some(),
            is_open: self.goes_on(&translated, direction)?,
            now: self.now,
        }))
    }

    /// Whether this node has a key to notify other nodes of flows.
    fn has_direct_key(&self) -> Result<bool, Refusal> {
        let rows = self.pinned.direct()?;
        Ok(rows.first().is_some_and(|(_, direct)| direct.count != 0))
    }

    /// Looks up a host socket with the flow's source port whose traffic to the flow's destination was redirected to a
    /// backend.
    pub(super) fn known_socket(
        &self,
        flow: &Connection,
        frontend: &Frontend,
    ) -> Result<Option<SocketFacts>, Refusal> {
        let cookies = SocketDiag::open()
            .and_then(|mut diag| diag.cookies_at(flow.protocol, flow.source.port()))
            .map_err(|error| {
                let problem = format!("source: cannot list the sockets of this node: {error}");
                Refusal(StatusCode::INTERNAL_SERVER_ERROR, problem)
            })?;
        for cookie in cookies {
            let connected = SocketKey::connected(cookie, flow.protocol);
            let sent = SocketKey {
                addr: flow.destination.ip().into(),
                port_be: flow.destination.port().to_be(),
                ..connected
            };
            for (key, is_connected) in [(connected, true), (sent, false)] {
                let Some(entry) = self.pinned.socket_entry(&key)? else {
                    continue;
                };
                let to = end(entry.addr, entry.port_be);
                let answers = self
                    .pinned
                    .socket_entry(&connected.answers(entry.addr, entry.port_be))?;
                let named = answers.map(|named| end(named.addr, named.port_be));
                if is_connected && named != Some(flow.destination) {
                    continue;
                }
                let is_of_frontend = entry.service == frontend.service;
                return Ok(Some(SocketFacts {
                    to,
                    backend: entry.backend,
                    is_connected,
                    is_serving: is_of_frontend && self.serves(entry.backend, entry.service, to)?,
                }));
            }
        }
        Ok(None)
    }

    fn serves(&self, index: u32, service: u32, to: SocketAddr) -> Result<bool, Refusal> {
        let backend = self.maps.backend(index)?;
        Ok(backend.is_some_and(|backend| backend.service == service && address(&backend) == to))
    }

    /// The client address that a backend sees. An endpoint that is its own backend sees the gateway.
    fn client_seen(&self, client: SocketAddr, backend: IpAddr) -> SocketAddr {
        let gateway = match client {
            SocketAddr::V4(_) => self.config.gateway4,
            SocketAddr::V6(_) => self.config.gateway6,
        };
        match client.ip() == backend && !gateway.is_unset() {
            true => (gateway.to_ip(), client.port()).into(),
            false => client,
        }
    }

    /// Whether the client's port is known to have an open connection to a backend.
    pub(super) fn is_open(
        &self,
        hook: TraceHook,
        flow: &Connection,
        to: SocketAddr,
    ) -> Result<bool, Refusal> {
        let translated = Connection {
            destination: to,
            ..*flow
        };
        let directions: &[u8] = match hook {
            TraceHook::Socket => &[],
            TraceHook::Endpoint => &[TUPLE_OUT],
            TraceHook::Uplink => &[TUPLE_OUT, TUPLE_IN],
        };
        for direction in directions {
            if self.goes_on(&translated, *direction)? == Some(true) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Whether a connection is still open; `None` if it is unknown.
    fn goes_on(&self, packets: &Connection, direction: u8) -> Result<Option<bool>, Refusal> {
        let entry = self.pinned.conntrack_entry(packets, direction)?;
        Ok(entry.map(|entry| !entry.state().is_closed() && !entry.has_expired(self.now)))
    }

    /// Looks up a client that has affinity.
    pub(super) fn client(
        &self,
        hook: TraceHook,
        client: &Client,
        frontend: &Frontend,
    ) -> Result<Option<ClientFacts>, Refusal> {
        if frontend.affinity_secs == 0 {
            return Ok(None);
        }
        let Some(known) = self.maps.client(client.stays_as, frontend.service)? else {
            return Ok(None);
        };
        let backend = self.maps.backend(known.backend)?;
        let is_within_reach = match backend {
            Some(backend) if frontend.is_local(hook.origin()) => {
                let ip = backend.addr.to_ip();
                let identity = self.pinned.identity_of(ip)?;
                is_own(self.pinned.endpoint(ip)?.is_some(), || identity)
            }
            _ => true,
        };
        Ok(Some(ClientFacts {
            entry: known,
            backend,
            is_within_reach,
            now: self.now,
        }))
    }

    /// The backend index in the Maglev table, if it can be computed before the flow exists.
    pub(super) fn by_maglev(
        &self,
        hook: TraceHook,
        flow: &Connection,
        frontend: &Frontend,
    ) -> Result<Option<u32>, Refusal> {
        let is_by_client = frontend.affinity_secs != 0;
        let can_decide = match hook {
            // Without affinity, the socket's cookie decides.
            TraceHook::Socket => is_by_client,
            TraceHook::Endpoint | TraceHook::Uplink => is_by_client || flow.source.port() != 0,
        };
        if !can_decide {
            return Ok(None);
        }
        let hashed = match (hook, flow.destination) {
            (TraceHook::Socket, SocketAddr::V4(_)) => from_zero(flow, Ipv4Addr::UNSPECIFIED.into()),
            (TraceHook::Socket, SocketAddr::V6(_)) => from_zero(flow, Ipv6Addr::UNSPECIFIED.into()),
            (TraceHook::Endpoint | TraceHook::Uplink, _) => *flow,
        };
        let pool = frontend.pool(hook.origin());
        Ok(self.maps.by_maglev(pool, &hashed, is_by_client)?)
    }

    /// Why an external flow cannot reach a backend. A backend on another node sees this node as the source, so this
    /// node needs an address.
    pub(super) fn unreachable(
        &self,
        backend: &Backend,
        frontend: &Frontend,
    ) -> Result<Option<String>, Refusal> {
        let ip = backend.addr.to_ip();
        let identity = self.pinned.identity_of(ip)?;
        let way = frontend.way(self.pinned.endpoint(ip)?.is_some(), || identity);
        if way != FLOW_MASQUERADED {
            return Ok(None);
        }
        let rows = self.pinned.masquerade()?;
        let is_masqueraded = rows.first().is_some_and(|(_, config)| match ip {
            IpAddr::V4(_) => config.v4.is_on(),
            IpAddr::V6(_) => config.v6.is_on(),
        });
        Ok((!is_masqueraded).then(|| {
            let family = Family::of(ip).name();
            format!("it is on another node, and this node has no {family} address to send from")
        }))
    }
}

fn has(entry: &ServiceFlow, flag: u16) -> bool {
    entry.flags & flag != 0
}

/// A flow as hashed for host sockets: from port 0 of `source`.
fn from_zero(flow: &Connection, source: IpAddr) -> Connection {
    Connection {
        source: (source, 0).into(),
        ..*flow
    }
}

fn end(addr: Addr, port_be: u16) -> SocketAddr {
    (addr.to_ip(), u16::from_be(port_be)).into()
}

/// A backend's address and port.
pub(super) fn address(backend: &Backend) -> SocketAddr {
    end(backend.addr, backend.port_be)
}

impl From<DumpError> for Refusal {
    fn from(error: DumpError) -> Self {
        let code = match &error {
            DumpError::NothingPinned(_) => StatusCode::SERVICE_UNAVAILABLE,
            _ => StatusCode::INTERNAL_SERVER_ERROR,
        };
        Self(code, error.to_string())
    }
}

impl From<ServicesError> for Refusal {
    fn from(error: ServicesError) -> Self {
        Self(StatusCode::INTERNAL_SERVER_ERROR, error.to_string())
    }
}

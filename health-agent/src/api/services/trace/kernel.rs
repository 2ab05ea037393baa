//! What the programs find.

use std::net::{IpAddr, SocketAddr};

use axum::http::StatusCode;
use health_common::service::{Affinity, Backend, Frontend};
use health_datapath::dump::{DumpError, Pinned, ServiceFlow};
use health_datapath::services::{Connection, ServiceMaps, ServicesError};
use health_model::api::SourceKind;
use health_model::settings::Location;
use health_net::clock;

use crate::api::answer::Refusal;

/// The program that serves the host's own sockets.
const FOR_HOST: &str = "sock_connect4";
/// The program that serves what comes by an uplink.
const FOR_OUTSIDE: &str = "to_service";

/// The maps of this node.
pub(super) struct Kernel {
    pub(super) pinned: Pinned,
    pub(super) maps: ServiceMaps,
    /// Seconds of `CLOCK_MONOTONIC`.
    now: u32,
}

/// What is known of a flow that was sent to a service before.
#[derive(Clone, Copy, Debug)]
pub(super) struct FlowFacts {
    /// Where its packets go.
    pub(super) entry: ServiceFlow,
    /// Whether that backend still serves the service.
    pub(super) is_serving: bool,
    /// Whether the backend's answers find their way back.
    pub(super) has_answer: bool,
    /// Whether its connection is open; none if nothing is known of it.
    pub(super) is_open: Option<bool>,
    /// Seconds of `CLOCK_MONOTONIC`.
    pub(super) now: u32,
}

/// What is known of a client.
#[derive(Clone, Copy, Debug)]
pub(super) struct ClientFacts {
    pub(super) entry: Affinity,
    /// What stands where its backend stood.
    pub(super) backend: Option<Backend>,
    /// Seconds of `CLOCK_MONOTONIC`.
    pub(super) now: u32,
}

impl Kernel {
    pub(super) fn open(location: &Location) -> Result<Self, Refusal> {
        let pinned = Pinned::open(location)?;
        Ok(Self {
            maps: pinned.services()?,
            pinned,
            now: clock::coarse_now_secs(),
        })
    }

    /// Why the programs do not serve such a source, if so.
    pub(super) fn unserved(&self, kind: SourceKind) -> Option<&'static str> {
        match kind {
            SourceKind::Endpoint => None,
            SourceKind::Host if self.pinned.has_program(FOR_HOST) => None,
            SourceKind::Host => Some("the host's own sockets are not served"),
            _ if self.pinned.has_program(FOR_OUTSIDE) => None,
            _ => Some("what comes from outside the node is not served"),
        }
    }

    pub(super) fn known_flow(&self, flow: &Connection) -> Result<Option<FlowFacts>, Refusal> {
        let Some(entry) = self.maps.flow(flow)? else {
            return Ok(None);
        };
        let backend = self.maps.backend(entry.backend)?;
        let serves =
            |backend: Backend| backend.service == entry.service && address(&backend) == entry.to;
        let answered = Connection {
            source: entry.to,
            destination: self.client_seen(flow.source, entry.to.ip())?,
            ..*flow
        };
        Ok(Some(FlowFacts {
            entry,
            is_serving: backend.is_some_and(serves),
            has_answer: self.maps.answer(&answered)?.is_some(),
            is_open: self.is_open(flow, entry.to)?,
            now: self.now,
        }))
    }

    /// Whom a backend sees: an endpoint that is its own backend gets its packets from the gateway.
    fn client_seen(&self, client: SocketAddr, backend: IpAddr) -> Result<SocketAddr, Refusal> {
        if client.ip() != backend {
            return Ok(client);
        }
        let config = self.pinned.config()?;
        let gateway = config.first().map(|(_, config)| match client {
            SocketAddr::V4(_) => config.gateway4,
            SocketAddr::V6(_) => config.gateway6,
        });
        let gateway = gateway.filter(|gateway| !gateway.is_unset());
        Ok(gateway.map_or(client, |gateway| (gateway.to_ip(), client.port()).into()))
    }

    /// Whether a connection is open between the client's port and a backend; none if none is known.
    pub(super) fn is_open(
        &self,
        flow: &Connection,
        to: SocketAddr,
    ) -> Result<Option<bool>, Refusal> {
        let translated = Connection {
            destination: to,
            ..*flow
        };
        let entry = self.pinned.conntrack_entry(&translated)?;
        Ok(entry.map(|entry| !entry.state().is_closed() && !entry.has_expired(self.now)))
    }

    pub(super) fn client(
        &self,
        client: IpAddr,
        entry: &Frontend,
    ) -> Result<Option<ClientFacts>, Refusal> {
        if entry.affinity_secs == 0 {
            return Ok(None);
        }
        let Some(known) = self.maps.client(client, entry.service)? else {
            return Ok(None);
        };
        Ok(Some(ClientFacts {
            entry: known,
            backend: self.maps.backend(known.backend)?,
            now: self.now,
        }))
    }
}

/// Where a backend listens.
pub(super) fn address(backend: &Backend) -> SocketAddr {
    (backend.addr.to_ip(), u16::from_be(backend.port_be)).into()
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

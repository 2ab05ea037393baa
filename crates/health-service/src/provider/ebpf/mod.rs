//! The eBPF provider: writes services into the maps of this agent's programs.
//!
//! Each port of a service becomes a [`PortSpec`], which [`ServiceTables`] write into the maps that the programs read.
//! NodePorts become a frontend for each address of the node; if another service has such an address and port of its
//! own, that service takes precedence.
//!
//! Each namespace has a share of the maps. If a map has no space for a port, the port keeps its old entries, all other
//! ports are updated, and the sync fails, so that it is retried. A port without space for a Maglev table uses random
//! choice instead.

mod maglev;
mod port;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use health_datapath::services::{Change, ServiceTables, ServicesError};
use health_model::ipam::Family;
use tokio::sync::watch;
use tokio::task::yield_now;
use tracing::{debug, warn};

use crate::forwarding::Forwarding;
use crate::maglev::{Maglev, SEED, SIZE, SizeError};
use crate::services::{Provider, Work};
use crate::spec::{Algorithm, PortKey};
use crate::state::{Listen, State};
pub use maglev::MaglevTables;

/// Number of ports to plan before yielding to other tasks.
const TURN: usize = 256;

/// The node's addresses at which NodePorts are served.
pub type NodeAddresses = Arc<BTreeSet<IpAddr>>;

/// Settings of the provider.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// The algorithm for services that do not set one.
    pub algorithm: Algorithm,
    /// How packets from external clients reach backends on other nodes.
    pub forwarding: Forwarding,
    /// Size of a Maglev table, in slots: a prime.
    pub maglev_size: u32,
    /// Seed of the Maglev tables. Nodes with the same seed make the same choices.
    pub maglev_seed: u64,
    /// Returns `CLOCK_MONOTONIC` in nanoseconds.
    pub clock: fn() -> u64,
}

impl Settings {
    /// Creates the default settings with this clock.
    pub fn new(clock: fn() -> u64) -> Self {
        Self {
            algorithm: Algorithm::Random,
            forwarding: Forwarding::default(),
            maglev_size: SIZE,
            maglev_seed: SEED,
            clock,
        }
    }
}

/// Why some services could not be written into the maps.
#[derive(Debug, thiserror::Error)]
pub enum EbpfError {
    /// The maps could not be read or written.
    #[error(transparent)]
    Tables(#[from] ServicesError),
    /// Some ports could not be changed.
    #[error("{0}")]
    Ports(PortErrors),
}

/// Why a port is not in the desired state.
#[derive(Debug, thiserror::Error)]
pub enum PortError {
    /// The port is unchanged.
    #[error(transparent)]
    Refused(ServicesError),
    /// The port is in the desired state, except for its algorithm.
    #[error("maglev is not in force, backends are chosen at random: {0}")]
    WithoutMaglev(ServicesError),
}

/// Errors by port; never empty.
#[derive(Debug)]
pub struct PortErrors(BTreeMap<PortKey, PortError>);

impl PortErrors {
    /// Returns the ports, each with its error.
    pub fn iter(&self) -> impl Iterator<Item = (&PortKey, &PortError)> {
        self.0.iter()
    }
}

impl fmt::Display for PortErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some((key, error)) = self.0.first_key_value() else {
            return f.write_str("no port could be served");
        };
        match error {
            PortError::Refused(error) => write!(f, "cannot serve {key}: {error}")?,
            PortError::WithoutMaglev(_) => write!(f, "{key}: {error}")?,
        }
        match self.0.len() - 1 {
            0 => Ok(()),
            more => write!(f, "; and {more} more ports"),
        }
    }
}

/// Serves the services of this node through its eBPF programs. Dropping the provider leaves the maps as they are.
#[derive(Debug)]
pub struct EbpfProvider {
    tables: ServiceTables,
    settings: Settings,
    maglev: MaglevTables,
    node_addresses: watch::Receiver<NodeAddresses>,
    /// The addresses at which the maps serve NodePorts.
    addresses: NodeAddresses,
    /// The numbers of the served ports.
    numbers: BTreeMap<PortKey, u32>,
    /// The logged errors of ports that could not be changed.
    refused: BTreeMap<PortKey, String>,
}

impl EbpfProvider {
    /// Creates a provider that writes these tables. Their contents stay unchanged until the first sync.
    pub fn new(
        tables: ServiceTables,
        settings: Settings,
        node_addresses: watch::Receiver<NodeAddresses>,
    ) -> Result<Self, SizeError> {
        let maglev = Maglev::new(settings.maglev_size, settings.maglev_seed)?;
        Ok(Self {
            tables,
            settings,
            maglev: MaglevTables::new(maglev),
            node_addresses,
            addresses: NodeAddresses::default(),
            numbers: BTreeMap::new(),
            refused: BTreeMap::new(),
        })
    }

    /// Returns the ports that a partial sync must check.
    fn touched(&self, work: &Work<'_>, addresses: &BTreeSet<IpAddr>) -> BTreeSet<PortKey> {
        let state = work.state;
        let mut touched = work.changes.ports.clone();
        for key in &work.changes.ports {
            let number = self.numbers.get(key).into_iter();
            let had = number.flat_map(|number| self.tables.addresses(*number));
            let has = state.port(key).into_iter().flat_map(|port| &port.frontends);
            let has = has.filter_map(|frontend| match frontend.listen {
                Listen::Address(address) => Some(address),
                Listen::NodePort(_) => None,
            });
            // The service that owns the NodePort gains the address when this port gives it up, and loses it when this
            // port claims it.
            let shared = had
                .chain(has)
                .filter(|address| addresses.contains(&address.ip()));
            touched.extend(shared.filter_map(|address| {
                let listen = Listen::NodePort(address.port());
                let name = state.owner(key.family, key.name.protocol, listen)?.clone();
                let family = key.family;
                Some(PortKey { name, family })
            }));
        }
        if *addresses != *self.addresses {
            let ports = state.ports().filter(|(_, port)| {
                let mut frontends = port.frontends.iter();
                frontends.any(|frontend| matches!(frontend.listen, Listen::NodePort(_)))
            });
            touched.extend(ports.map(|(key, _)| key.clone()));
        }
        touched
    }

    /// Records the errors of ports, and logs each once.
    fn refuse(&mut self, errors: &BTreeMap<PortKey, PortError>) {
        let mut refused = BTreeMap::new();
        for (port, error) in errors {
            let text = error.to_string();
            if self.refused.get(port) != Some(&text) {
                match error {
                    PortError::Refused(error) => {
                        warn!(%port, %error, "cannot update the port in the maps; keeping its former entries");
                    }
                    PortError::WithoutMaglev(error) => {
                        warn!(%port, %error, "no Maglev table for the port; its backends are chosen at random");
                    }
                }
            }
            refused.insert(port.clone(), text);
        }
        self.refused = refused;
    }

    /// Writes ports into the maps. Returns the errors of those that are not in the desired state.
    async fn bring(
        &mut self,
        state: &State,
        addresses: &BTreeSet<IpAddr>,
        keys: &[PortKey],
        is_full: bool,
    ) -> Result<BTreeMap<PortKey, PortError>, EbpfError> {
        let mut errors = BTreeMap::new();
        let mut change = self.tables.change((self.settings.clock)());
        let mut ports = Ports {
            state,
            addresses,
            settings: &self.settings,
            numbers: &mut self.numbers,
            maglev: &mut self.maglev,
        };
        for keys in keys.chunks(TURN) {
            for key in keys {
                if let Err(error) = ports.bring(key, &mut change) {
                    errors.insert(key.clone(), error);
                }
            }
            yield_now().await;
        }
        if is_full {
            change.remove_others();
        }
        let written = change.commit()?;
        debug!(
            ports = keys.len(),
            is_full,
            ?written,
            "wrote services into the maps"
        );
        Ok(errors)
    }
}

impl Provider for EbpfProvider {
    type Error = EbpfError;

    fn refused(error: &EbpfError) -> impl Iterator<Item = (PortKey, String)> {
        let ports = match error {
            EbpfError::Ports(ports) => Some(ports),
            EbpfError::Tables(_) => None,
        };
        let ports = ports.into_iter().flat_map(PortErrors::iter);
        ports.map(|(key, error)| (key.clone(), error.to_string()))
    }

    async fn sync(&mut self, work: Work<'_>) -> Result<(), EbpfError> {
        let addresses = self.node_addresses.borrow_and_update().clone();
        let is_full = work.is_full || !self.tables.is_current();
        let keys: Vec<PortKey> = if is_full {
            self.tables.read()?;
            let served = work.state.ports().map(|(key, _)| key.clone());
            let gone = self.numbers.keys().cloned();
            served.chain(gone).collect::<BTreeSet<_>>()
        } else {
            self.touched(&work, &addresses)
        }
        .into_iter()
        .collect();

        let state = work.state;
        let mut errors = self.bring(state, &addresses, &keys, is_full).await?;
        // Space that other ports have given up meanwhile is free now.
        let short: Vec<PortKey> = errors.keys().cloned().collect();
        if !short.is_empty() && short.len() < keys.len() {
            errors = self.bring(state, &addresses, &short, false).await?;
        }
        if is_full {
            let recounted = self.tables.recount()?;
            debug!(recounted, "counted the flows of backends");
        }
        self.addresses = addresses;
        self.refuse(&errors);
        if errors.is_empty() {
            Ok(())
        } else {
            Err(EbpfError::Ports(PortErrors(errors)))
        }
    }
}

/// The data needed to add ports to a change.
struct Ports<'a> {
    state: &'a State,
    addresses: &'a BTreeSet<IpAddr>,
    settings: &'a Settings,
    numbers: &'a mut BTreeMap<PortKey, u32>,
    maglev: &'a mut MaglevTables,
}

impl Ports<'_> {
    /// Adds a port to the change, either its new content or its removal.
    fn bring(&mut self, key: &PortKey, change: &mut Change<'_>) -> Result<(), PortError> {
        let known = self.numbers.get(key).copied();
        let spec = self.state.port(key).map(|port| {
            let node = self.node_frontends(key);
            port::spec(key, port, self.settings, node)
        });
        // A port without frontends needs no entries.
        let Some(spec) = spec.filter(|spec| !spec.frontends.is_empty()) else {
            if let Some(number) = self.numbers.remove(key) {
                change.remove(number);
            }
            return Ok(());
        };
        let number = change.set(known, &spec, self.maglev);
        let number = number.map_err(PortError::Refused)?;
        self.numbers.insert(key.clone(), number);
        match change.without_maglev(number) {
            Some(error) => Err(PortError::WithoutMaglev(error)),
            None => Ok(()),
        }
    }

    /// Returns a function that maps a NodePort to the node's addresses at which it is served.
    fn node_frontends(&self, key: &PortKey) -> impl Fn(u16) -> Vec<std::net::SocketAddr> {
        let (state, addresses) = (self.state, self.addresses);
        let (family, protocol) = (key.family, key.name.protocol);
        move |port| {
            let addresses = addresses.iter().filter(|ip| Family::of(**ip) == family);
            let addresses = addresses.map(|ip| std::net::SocketAddr::new(*ip, port));
            let is_free = |address: &std::net::SocketAddr| {
                let listen = Listen::Address(*address);
                state.owner(family, protocol, listen).is_none()
            };
            addresses.filter(is_free).collect()
        }
    }
}

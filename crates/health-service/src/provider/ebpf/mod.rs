//! Services by the eBPF programs of this agent.
//!
//! Each port of a service becomes a [`PortSpec`], which [`ServiceTables`] bring into the maps that the programs read.
//! NodePorts become a frontend for each address of the node; where another service has that address and port for its
//! own, it comes first.
//!
//! What there is no room for keeps its place: the port is served as it was before, others as they are to be, and the sync
//! fails, so that it is tried again.

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

use crate::maglev::{Maglev, SEED, SIZE, SizeError};
use crate::services::{Provider, Work};
use crate::spec::{Algorithm, PortKey};
use crate::state::{Listen, State};
use maglev::Tables;

/// Ports that are planned before other tasks get their turn.
const TURN: usize = 256;

/// The addresses of this node that NodePorts are served at.
pub type NodeAddresses = Arc<BTreeSet<IpAddr>>;

/// What services are served by.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// How a backend is chosen, if its service does not say.
    pub algorithm: Algorithm,
    /// Places of a Maglev table: a prime.
    pub maglev_size: u32,
    /// The same on all nodes that shall choose alike.
    pub maglev_seed: u64,
    /// Tells nanoseconds of `CLOCK_MONOTONIC`.
    pub clock: fn() -> u64,
}

impl Settings {
    /// The usual ones, by this clock.
    pub fn new(clock: fn() -> u64) -> Self {
        Self {
            algorithm: Algorithm::Random,
            maglev_size: SIZE,
            maglev_seed: SEED,
            clock,
        }
    }
}

/// Why not all services could be brought into the maps.
#[derive(Debug, thiserror::Error)]
pub enum EbpfError {
    /// The maps could not be read or written.
    #[error(transparent)]
    Tables(#[from] ServicesError),
    /// Some ports are as they were before.
    #[error("{0}")]
    Ports(PortErrors),
}

/// What went wrong with ports; never empty.
#[derive(Debug)]
pub struct PortErrors(BTreeMap<PortKey, ServicesError>);

impl PortErrors {
    /// The ports, each with what went wrong.
    pub fn iter(&self) -> impl Iterator<Item = (&PortKey, &ServicesError)> {
        self.0.iter()
    }
}

impl fmt::Display for PortErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some((key, error)) = self.0.first_key_value() else {
            return f.write_str("no port could be served");
        };
        write!(f, "cannot serve {key}: {error}")?;
        match self.0.len() - 1 {
            0 => Ok(()),
            more => write!(f, "; and {more} ports more"),
        }
    }
}

/// Services of this node by its eBPF programs. Dropping it leaves the maps as they are.
#[derive(Debug)]
pub struct EbpfProvider {
    tables: ServiceTables,
    settings: Settings,
    maglev: Tables,
    node_addresses: watch::Receiver<NodeAddresses>,
    /// Those that NodePorts are served at.
    addresses: NodeAddresses,
    /// The numbers of the ports that are served.
    numbers: BTreeMap<PortKey, u32>,
    /// What was said of ports that could not be.
    refused: BTreeMap<PortKey, String>,
}

impl EbpfProvider {
    /// Serves by these tables. What is in them stays until the first sync.
    pub fn new(
        tables: ServiceTables,
        settings: Settings,
        node_addresses: watch::Receiver<NodeAddresses>,
    ) -> Result<Self, SizeError> {
        let maglev = Maglev::new(settings.maglev_size, settings.maglev_seed)?;
        Ok(Self {
            tables,
            settings,
            maglev: Tables(maglev),
            node_addresses,
            addresses: NodeAddresses::default(),
            numbers: BTreeMap::new(),
            refused: BTreeMap::new(),
        })
    }

    /// The ports that must be looked at, if not all.
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
            // Whoever has that NodePort has the address too, unless this port claims it.
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

    /// Notes what went wrong with ports, and says it of each once.
    fn refuse(&mut self, errors: &BTreeMap<PortKey, ServicesError>) {
        let errors = errors.iter();
        let refused = errors.map(|(key, error)| (key.clone(), error.to_string()));
        let refused: BTreeMap<_, _> = refused.collect();
        for (port, error) in &refused {
            if self.refused.get(port) != Some(error) {
                warn!(%port, %error, "cannot serve the port; it stays as it was");
            }
        }
        self.refused = refused;
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

        let mut errors = BTreeMap::new();
        let mut change = self.tables.change((self.settings.clock)());
        let mut ports = Ports {
            state: work.state,
            addresses: &addresses,
            algorithm: self.settings.algorithm,
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
            "services are in the maps"
        );
        self.addresses = addresses;
        self.refuse(&errors);
        if errors.is_empty() {
            Ok(())
        } else {
            Err(EbpfError::Ports(PortErrors(errors)))
        }
    }
}

/// What ports are brought into a change by.
struct Ports<'a> {
    state: &'a State,
    addresses: &'a BTreeSet<IpAddr>,
    algorithm: Algorithm,
    numbers: &'a mut BTreeMap<PortKey, u32>,
    maglev: &'a mut Tables,
}

impl Ports<'_> {
    /// Has a port as it is to be, or nothing of it.
    fn bring(&mut self, key: &PortKey, change: &mut Change<'_>) -> Result<(), ServicesError> {
        let known = self.numbers.get(key).copied();
        let spec = self.state.port(key).map(|port| {
            let node = self.node_frontends(key);
            port::spec(key, port, self.algorithm, node)
        });
        // One that is reached nowhere has nothing to lead to.
        let Some(spec) = spec.filter(|spec| !spec.frontends.is_empty()) else {
            if let Some(number) = self.numbers.remove(key) {
                change.remove(number);
            }
            return Ok(());
        };
        let number = change.set(known, &spec, self.maglev)?;
        self.numbers.insert(key.clone(), number);
        Ok(())
    }

    /// The addresses of the node that a NodePort is served at.
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

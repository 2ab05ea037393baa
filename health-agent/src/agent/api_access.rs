//! Opens the sockets and ports of the API.

use std::net::SocketAddr;

use anyhow::Context as _;
use health_net::listen;
use health_server::certificates::Certificates;
use health_server::server::{Entrances, Remote};
use health_server::socket;
use health_settings::{ApiSettings, Settings};
use tokio::net::TcpListener;

use super::folders::SocketGroups;

const BACKLOG: i32 = 128;

/// Who may use the API.
pub(super) struct ApiAccess {
    pub(super) groups: SocketGroups,
    /// `None` if the API is served only on unix sockets.
    certificates: Option<Certificates>,
}

impl ApiAccess {
    /// Looks up groups and reads certificates.
    pub(super) fn open(settings: &ApiSettings) -> anyhow::Result<Self> {
        let group = |flag, name: &Option<String>| {
            let name = name.as_deref();
            name.map(|name| socket::group(flag, name)).transpose()
        };
        Ok(Self {
            groups: SocketGroups {
                full: group("--socket-group", &settings.socket_group)?,
                readers: group("--read-only-socket-group", &settings.read_only_socket_group)?,
            },
            certificates: match settings.api_addresses.is_empty() {
                true => None,
                false => Certificates::open(settings).context("cannot serve the API over TLS")?,
            },
        })
    }

    /// Opens everything. Must be called in a tokio runtime, by the holder of the pid file.
    pub(super) fn listen(self, config: &Settings) -> anyhow::Result<Entrances> {
        // Ports come first: a failed start should leave no socket behind.
        let remote = match self.certificates {
            Some(certificates) => Some(Remote {
                listeners: listeners(&config.api.api_addresses)?,
                certificates,
            }),
            None => None,
        };
        let readers = config.location.read_only_socket();
        let read_only_socket = match self.groups.readers {
            Some(group) => Some(socket::bind(&readers, Some(group))?),
            None => {
                socket::remove_stale(&readers)?;
                None
            }
        };
        Ok(Entrances {
            socket: socket::bind(&config.location.socket(), self.groups.full)?,
            read_only_socket,
            remote,
        })
    }
}

fn listeners(addresses: &[SocketAddr]) -> anyhow::Result<Vec<TcpListener>> {
    let listen = |address: &SocketAddr| {
        let listener = listen::tcp(*address, BACKLOG).and_then(TcpListener::from_std);
        listener.with_context(|| format!("cannot listen on {address} (see --api-address)"))
    };
    addresses.iter().map(listen).collect()
}

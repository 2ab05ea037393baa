//! TCP connections that the uplinks' programs time: their peers, and the results for our own probes.

use std::io;
use std::net::IpAddr;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use aya::maps::{HashMap, MapData};
use aya::programs::SchedClassifier;
use health_common::addr::Addr;
use health_common::probe::Path as PathKind;
use health_common::rtt::{ACCOUNTED, BUSY, RttKey, SOURCE_KERNEL};
use health_common::tcp::{ConnectionRequest, FlowKey, Peer};

use super::{patiently, run};
use crate::aya_io::map_io;
use crate::error::DatapathError;
use crate::layout;
use crate::maps::typed;
use crate::program::DatapathProgram;
use crate::programs::open_classifier;
use crate::rtt_store::{Connection, Measurement};

/// `HEALTH_PEERS`, and the program that takes entries out of `HEALTH_TCP`.
pub(super) struct Connections {
    peers: Mutex<HashMap<MapData, Addr, Peer>>,
    account: SchedClassifier,
}

impl Connections {
    pub(super) fn from_pins(pins: &Path) -> Result<Self, DatapathError> {
        let peers = typed(pins, &layout::PEERS, HashMap::try_from)?;
        Ok(Self {
            peers: Mutex::new(peers),
            account: open_classifier(pins, DatapathProgram::TcpAccount)?,
        })
    }

    fn peers(&self) -> MutexGuard<'_, HashMap<MapData, Addr, Peer>> {
        // The guard holds a file descriptor: a panic cannot leave it half changed.
        self.peers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts the round trip of a connection's handshake in the row under `key`.
    pub(super) fn count(
        &self,
        key: RttKey,
        connection: &Connection,
        at_socket_ns: u64,
    ) -> io::Result<Measurement> {
        let request = ConnectionRequest {
            key,
            flow: FlowKey {
                peer: key.peer,
                local: connection.local.ip().into(),
                peer_port_be: connection.peer_port.to_be(),
                local_port_be: connection.local.port().to_be(),
            },
            begun_ns: connection.begun_ns,
            rtt_ns: at_socket_ns,
            ..ConnectionRequest::default()
        };
        patiently(|| {
            let mut answer = request;
            match run(&self.account, &mut answer)? {
                ACCOUNTED if answer.source == SOURCE_KERNEL => {
                    Ok(Some(Measurement::ByKernel(answer.rtt_ns)))
                }
                ACCOUNTED => Ok(Some(Measurement::AtSocket)),
                BUSY => Ok(None),
                _ => Err(io::ErrorKind::NotFound.into()),
            }
        })
    }

    pub(super) fn follow(&self, peer: IpAddr, path: PathKind) -> io::Result<()> {
        let value = Peer {
            path: path as u8,
            ..Peer::default()
        };
        self.peers()
            .insert(Addr::from(peer), value, 0)
            .map_err(map_io)
    }

    pub(super) fn unfollow(&self, peer: IpAddr) -> io::Result<()> {
        match self.peers().remove(&Addr::from(peer)).map_err(map_io) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            other => other,
        }
    }

    pub(super) fn followed(&self) -> io::Result<Vec<IpAddr>> {
        let peers = self.peers();
        let known = peers.keys().map(|key| key.map(Addr::to_ip));
        known.collect::<Result<_, _>>().map_err(map_io)
    }
}

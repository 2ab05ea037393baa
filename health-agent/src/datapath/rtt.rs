//! Rows of round-trip times: read from the map, written by asking a kernel program to.

use std::io;
use std::net::IpAddr;

use aya::TestRunOptions;
use aya::maps::{HashMap, MapData, MapError};
use aya::programs::{ProgramError, SchedClassifier, TestRun as _};
use health_common::addr::Addr;
use health_common::probe::Path;
use health_common::rtt::{
    ACCOUNT_CONNECTION, ACCOUNT_LOST, ACCOUNT_SAMPLE, ACCOUNTED, ALREADY_ANSWERED, AccountRequest,
    RttKey, RttRow, SOURCE_KERNEL,
};
use health_common::tcp::{FlowKey, Peer};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::sys;
use crate::mesh::rtt_store::{Connection, Counted, LossOutcome, RttStore};

/// `HEALTH_RTT` and the program that writes it on the agent's behalf.
pub struct KernelRtt {
    rows: Mutex<HashMap<MapData, RttKey, RttRow>>,
    peers: Mutex<HashMap<MapData, Addr, Peer>>,
    account: SchedClassifier,
}

impl KernelRtt {
    pub(super) fn new(
        rows: HashMap<MapData, RttKey, RttRow>,
        peers: HashMap<MapData, Addr, Peer>,
        account: SchedClassifier,
    ) -> Self {
        Self {
            rows: Mutex::new(rows),
            peers: Mutex::new(peers),
            account,
        }
    }

    fn rows(&self) -> MutexGuard<'_, HashMap<MapData, RttKey, RttRow>> {
        // The guard holds a file descriptor: nothing a panic could leave half changed.
        self.rows.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn peers(&self) -> MutexGuard<'_, HashMap<MapData, Addr, Peer>> {
        // As above.
        self.peers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn account(&self, request: &AccountRequest) -> io::Result<LossOutcome> {
        self.account_into(request, None)
    }

    /// `answer` has room for a request, and takes it as the program left it.
    fn account_into(
        &self,
        request: &AccountRequest,
        answer: Option<&mut [u8]>,
    ) -> io::Result<LossOutcome> {
        let options = TestRunOptions {
            data_in: Some(sys::bytes_of(request)),
            data_out: answer,
            ..TestRunOptions::new()
        };
        let result = self.account.test_run(options).map_err(program_io)?;
        Ok(match result.return_value {
            ACCOUNTED => LossOutcome::Counted,
            ALREADY_ANSWERED => LossOutcome::AlreadyAnswered,
            _ => LossOutcome::UnknownPeer,
        })
    }
}

impl RttStore for KernelRtt {
    fn ensure(&self, key: RttKey) -> io::Result<()> {
        const BPF_NOEXIST: u64 = 1;
        match self
            .rows()
            .insert(key, RttRow::EMPTY, BPF_NOEXIST)
            .map_err(map_io)
        {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            other => other,
        }
    }

    fn remove(&self, key: RttKey) -> io::Result<()> {
        gone(self.rows().remove(&key).map_err(map_io))
    }

    fn keys(&self) -> io::Result<Vec<RttKey>> {
        self.rows().keys().collect::<Result<_, _>>().map_err(map_io)
    }

    fn row(&self, key: RttKey) -> io::Result<Option<RttRow>> {
        match self.rows().get(&key, 0) {
            Ok(row) => Ok(Some(row)),
            Err(MapError::KeyNotFound) => Ok(None),
            Err(error) => Err(map_io(error)),
        }
    }

    fn sample(&self, key: RttKey, rtt_ns: u64) -> io::Result<()> {
        self.account(&AccountRequest {
            key,
            operation: ACCOUNT_SAMPLE,
            rtt_ns,
            ..AccountRequest::default()
        })
        .map(|_| ())
    }

    fn connected(
        &self,
        key: RttKey,
        connection: &Connection,
        measured_ns: u64,
    ) -> io::Result<Counted> {
        let request = AccountRequest {
            key,
            operation: ACCOUNT_CONNECTION,
            rtt_ns: measured_ns,
            flow: FlowKey {
                peer: key.peer,
                local: connection.local.ip().into(),
                peer_port_be: connection.peer_port.to_be(),
                local_port_be: connection.local.port().to_be(),
            },
            begun_ns: connection.begun_ns,
            ..AccountRequest::default()
        };
        let mut answer = [0; size_of::<AccountRequest>()];
        match self.account_into(&request, Some(&mut answer))? {
            LossOutcome::Counted => {}
            _ => return Err(io::ErrorKind::NotFound.into()),
        }
        let answer: AccountRequest =
            sys::read(&answer).ok_or(io::Error::from(io::ErrorKind::InvalidData))?;
        Ok(Counted {
            rtt_ns: answer.rtt_ns,
            by_kernel: answer.source == u32::from(SOURCE_KERNEL),
        })
    }

    fn lost(&self, key: RttKey, id: u16, sequence: u16, stamped: bool) -> io::Result<LossOutcome> {
        self.account(&AccountRequest {
            key,
            operation: ACCOUNT_LOST,
            id_be: id.to_be(),
            sequence_be: sequence.to_be(),
            unstamped: u32::from(!stamped),
            ..AccountRequest::default()
        })
    }

    fn lost_untracked(&self, key: RttKey) -> io::Result<LossOutcome> {
        self.account(&AccountRequest {
            key,
            operation: ACCOUNT_LOST,
            unstamped: 1,
            ..AccountRequest::default()
        })
    }

    fn follow(&self, peer: IpAddr, path: Path) -> io::Result<()> {
        let value = Peer {
            path: path as u8,
            ..Peer::default()
        };
        self.peers()
            .insert(Addr::from(peer), value, 0)
            .map_err(map_io)
    }

    fn unfollow(&self, peer: IpAddr) -> io::Result<()> {
        gone(self.peers().remove(&Addr::from(peer)).map_err(map_io))
    }

    fn followed(&self) -> io::Result<Vec<IpAddr>> {
        let peers = self.peers();
        let known = peers.keys().map(|key| key.map(Addr::to_ip));
        known.collect::<Result<_, _>>().map_err(map_io)
    }
}

/// What was not there to be removed is gone as well.
fn gone(removed: io::Result<()>) -> io::Result<()> {
    match removed {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

fn map_io(error: MapError) -> io::Error {
    match error {
        MapError::SyscallError(error) => error.io_error,
        other => io::Error::other(other),
    }
}

fn program_io(error: ProgramError) -> io::Error {
    match error {
        ProgramError::SyscallError(error) => error.io_error,
        other => io::Error::other(other),
    }
}

//! Rows of round-trip times: read from the map, written by asking a kernel program to.

use std::io;

use aya::TestRunOptions;
use aya::maps::{HashMap, MapData, MapError};
use aya::programs::{ProgramError, SchedClassifier, TestRun as _};
use health_common::rtt::{
    ACCOUNT_LOST, ACCOUNT_SAMPLE, ACCOUNTED, ALREADY_ANSWERED, AccountRequest, RttKey, RttRow,
};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::sys;
use crate::mesh::rtt_store::{LossOutcome, RttStore};

/// `HEALTH_RTT` and the program that writes it on the agent's behalf.
pub struct KernelRtt {
    rows: Mutex<HashMap<MapData, RttKey, RttRow>>,
    account: SchedClassifier,
}

impl KernelRtt {
    pub(super) fn new(rows: HashMap<MapData, RttKey, RttRow>, account: SchedClassifier) -> Self {
        Self {
            rows: Mutex::new(rows),
            account,
        }
    }

    fn rows(&self) -> MutexGuard<'_, HashMap<MapData, RttKey, RttRow>> {
        // The guard holds a file descriptor: nothing a panic could leave half changed.
        self.rows.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn account(&self, request: &AccountRequest) -> io::Result<LossOutcome> {
        let options = TestRunOptions {
            data_in: Some(sys::bytes_of(request)),
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
        match self.rows().remove(&key) {
            Ok(()) | Err(MapError::KeyNotFound) => Ok(()),
            Err(error) => Err(map_io(error)),
        }
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

//! Rows of round-trip times: read from the map under their locks, written by asking a kernel program to.

use std::io;
use std::os::fd::AsFd as _;
use std::sync::{Mutex, MutexGuard, PoisonError};

use aya::TestRunOptions;
use aya::maps::{Array, HashMap, MapData, MapError};
use aya::programs::{ProgramError, SchedClassifier, TestRun as _};
use health_common::inflight::{Fate, Inflight, same_probe, slot, ticket};
use health_common::probe::{ProbeId, Protocol};
use health_common::rtt::{
    ACCOUNT_LOST, ACCOUNT_SAMPLE, ACCOUNTED, ALREADY_ANSWERED, ALREADY_LOST, AccountRequest,
    RttKey, RttRow,
};

use super::sys::{self, BPF_F_LOCK};
use crate::mesh::rtt_store::{LossOutcome, Measured, RttStore};

/// `HEALTH_RTT` and `HEALTH_INFLIGHT`, and the program that writes them on the agent's behalf.
pub struct KernelRtt {
    maps: Mutex<Maps>,
    /// `HEALTH_INFLIGHT` once more, to be read as a whole.
    slots: MapData,
    account: SchedClassifier,
}

struct Maps {
    rows: HashMap<MapData, RttKey, RttRow>,
    inflight: Array<MapData, Inflight>,
}

impl KernelRtt {
    pub(super) fn new(
        rows: HashMap<MapData, RttKey, RttRow>,
        inflight: Array<MapData, Inflight>,
        slots: MapData,
        account: SchedClassifier,
    ) -> Self {
        Self {
            maps: Mutex::new(Maps { rows, inflight }),
            slots,
            account,
        }
    }

    fn maps(&self) -> MutexGuard<'_, Maps> {
        // The guard holds file descriptors: nothing a panic could leave half changed.
        self.maps.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What `rtt_account` says to a request.
    fn account(&self, request: &AccountRequest) -> io::Result<u32> {
        let options = TestRunOptions {
            data_in: Some(sys::bytes_of(request)),
            ..TestRunOptions::new()
        };
        let result = self.account.test_run(options).map_err(program_io)?;
        Ok(result.return_value)
    }

    fn count_loss(&self, key: RttKey, probe: ProbeId) -> io::Result<LossOutcome> {
        let answer = self.account(&AccountRequest {
            key,
            operation: ACCOUNT_LOST,
            probe,
            ..AccountRequest::default()
        })?;
        Ok(match answer {
            ACCOUNTED => LossOutcome::Counted,
            ALREADY_ANSWERED => LossOutcome::AlreadyAnswered,
            ALREADY_LOST => LossOutcome::AlreadyLost,
            _ => LossOutcome::UnknownPeer,
        })
    }

    /// The round trip of a probe that the uplinks' programs answered, nanoseconds.
    fn stamped_rtt(&self, key: RttKey, probe: ProbeId) -> io::Result<Option<u64>> {
        let slot = self
            .maps()
            .inflight
            .get(&slot(&key.peer, probe.sequence), 0)
            .map_err(map_io)?;
        let answered = slot.peer == key.peer
            && slot.fate() == Some(Fate::Answered)
            && same_probe(slot.ticket, ticket(probe, key.path, Fate::Answered));
        Ok((answered && slot.rtt_ns > 0).then_some(slot.rtt_ns))
    }
}

impl RttStore for KernelRtt {
    fn ensure(&self, key: RttKey) -> io::Result<()> {
        const BPF_NOEXIST: u64 = 1;
        match self
            .maps()
            .rows
            .insert(key, RttRow::EMPTY, BPF_NOEXIST)
            .map_err(map_io)
        {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            other => other,
        }
    }

    fn remove(&self, key: RttKey) -> io::Result<()> {
        match self.maps().rows.remove(&key) {
            Ok(()) | Err(MapError::KeyNotFound) => Ok(()),
            Err(error) => Err(map_io(error)),
        }
    }

    fn reset(&self, key: RttKey) -> io::Result<bool> {
        reset(&mut self.maps().rows, key)
    }

    fn keys(&self) -> io::Result<Vec<RttKey>> {
        self.maps()
            .rows
            .keys()
            .collect::<Result<_, _>>()
            .map_err(map_io)
    }

    fn row(&self, key: RttKey) -> io::Result<Option<RttRow>> {
        match self.maps().rows.get(&key, BPF_F_LOCK) {
            Ok(row) => Ok(Some(row)),
            Err(MapError::KeyNotFound) => Ok(None),
            Err(error) => Err(map_io(error)),
        }
    }

    fn answered(&self, key: RttKey, probe: ProbeId, at_socket_ns: u64) -> io::Result<Measured> {
        if let Some(rtt_ns) = self.stamped_rtt(key, probe)? {
            return Ok(Measured::ByKernel(rtt_ns));
        }
        let answer = self.account(&AccountRequest {
            key,
            operation: ACCOUNT_SAMPLE,
            rtt_ns: at_socket_ns,
            probe,
            ..AccountRequest::default()
        })?;
        match answer {
            ACCOUNTED | ALREADY_ANSWERED | ALREADY_LOST => Ok(Measured::AtSocket),
            _ => Err(io::ErrorKind::NotFound.into()),
        }
    }

    fn lost(&self, key: RttKey, probe: ProbeId) -> io::Result<LossOutcome> {
        self.count_loss(key, probe)
    }

    fn sample(&self, key: RttKey, rtt_ns: u64) -> io::Result<()> {
        let answer = self.account(&AccountRequest {
            key,
            operation: ACCOUNT_SAMPLE,
            rtt_ns,
            ..AccountRequest::default()
        })?;
        match answer {
            ACCOUNTED => Ok(()),
            _ => Err(io::ErrorKind::NotFound.into()),
        }
    }

    fn lost_untracked(&self, key: RttKey) -> io::Result<LossOutcome> {
        self.count_loss(key, ProbeId::default())
    }

    fn give_up_leftovers(&self) -> io::Result<u64> {
        let size = sys::EntrySize {
            key: size_of::<u32>(),
            value: size_of::<Inflight>(),
        };
        let mut leftovers = Vec::new();
        sys::walk(self.slots.fd().as_fd(), size, 0, &mut |index, probe| {
            if let (Some(index), Some(probe)) =
                (sys::read::<u32>(index), sys::read::<Inflight>(probe))
                && probe.fate() == Some(Fate::InFlight)
            {
                leftovers.push((index, probe));
            }
        })?;
        let mut given_up = 0;
        for (index, probe) in leftovers {
            let key = RttKey {
                peer: probe.peer,
                path: probe.path(),
                protocol: Protocol::Icmp as u8,
                pad: 0,
            };
            match self.count_loss(key, probe.id(index))? {
                LossOutcome::Counted => given_up += 1,
                // The row went with its peer; the slot is all that is left.
                LossOutcome::UnknownPeer => self
                    .maps()
                    .inflight
                    .set(index, Inflight::default(), 0)
                    .map_err(map_io)?,
                LossOutcome::AlreadyAnswered | LossOutcome::AlreadyLost => {}
            }
        }
        Ok(given_up)
    }
}

/// Makes a row empty under its lock. `false` when there is none.
pub(super) fn reset(rows: &mut HashMap<MapData, RttKey, RttRow>, key: RttKey) -> io::Result<bool> {
    const BPF_EXIST: u64 = 2;
    match rows
        .insert(key, RttRow::EMPTY, BPF_EXIST | BPF_F_LOCK)
        .map_err(map_io)
    {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
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

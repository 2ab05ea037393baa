//! RTT rows: read from the map as consistent snapshots, and written through a kernel program.

mod connections;

use std::net::IpAddr;
use std::os::fd::AsFd as _;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::{io, thread};

use aya::maps::{HashMap, MapData, MapError};
use aya::programs::{ProgramError, SchedClassifier, TestRun as _};
use aya::{Pod, TestRunOptions};
use aya_obj::generated::BPF_NOEXIST;
use health_common::inflight::Inflight;
use health_common::probe::{Path as PathKind, ProbeId, Protocol};
use health_common::rtt::{
    ACCOUNT_LOST, ACCOUNT_RESET, ACCOUNT_SAMPLE, ACCOUNTED, ALREADY_ANSWERED, ALREADY_LOST,
    AccountRequest, BUSY, RttKey, RttRow, UNKNOWN_PEER,
};

use crate::aya_io::{map_io, program_io};
use crate::error::DatapathError;
use crate::maps::{map_data, typed};
use crate::program::DatapathProgram;
use crate::programs::open_classifier;
use crate::rtt_store::{Connection, LossOutcome, Measurement, RttStore};
use crate::walk::{EntrySize, walk};
use crate::{layout, sys};
use connections::Connections;

/// Maximum number of attempts at a row that is being written. Writers finish within a microsecond, unless their virtual
/// CPU is descheduled.
const ATTEMPTS: u32 = 10_000;

/// `HEALTH_RTT` and `HEALTH_INFLIGHT`, and the program that writes them on the agent's behalf.
pub struct KernelRtt {
    rows: Mutex<HashMap<MapData, RttKey, RttRow>>,
    inflight: MapData,
    account: Account,
    connections: Connections,
}

impl KernelRtt {
    /// Opens the maps and the programs pinned in an instance's folder.
    pub(crate) fn from_pins(pins: &Path) -> Result<Self, DatapathError> {
        let rows = typed(pins, &layout::RTT, HashMap::try_from)?;
        Ok(Self {
            rows: Mutex::new(rows),
            inflight: map_data(pins, &layout::INFLIGHT)?,
            account: open_classifier(pins, DatapathProgram::RttAccount).map(Account)?,
            connections: Connections::from_pins(pins)?,
        })
    }

    fn rows(&self) -> MutexGuard<'_, HashMap<MapData, RttKey, RttRow>> {
        // The guard holds a file descriptor: a panic cannot leave it half changed.
        self.rows.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn count_loss(&self, key: RttKey, probe: ProbeId) -> io::Result<LossOutcome> {
        let answer = self.account.ask(AccountRequest {
            key,
            operation: ACCOUNT_LOST,
            probe,
            ..AccountRequest::default()
        })?;
        Ok(match answer {
            Answer::Done => LossOutcome::Counted,
            Answer::AlreadyAnswered { .. } => LossOutcome::AlreadyAnswered,
            Answer::AlreadyLost => LossOutcome::AlreadyLost,
            Answer::NoRow => LossOutcome::UnknownPeer,
        })
    }

    /// The probes that no row has counted yet, by slot.
    fn open(&self) -> io::Result<Vec<(u32, Inflight)>> {
        let size = EntrySize {
            key: size_of::<u32>(),
            value: size_of::<Inflight>(),
        };
        let mut open = Vec::new();
        walk(self.inflight.fd().as_fd(), size, &mut |slot, probe| {
            if let (Some(slot), Some(probe)) = (sys::read(slot), sys::read::<Inflight>(probe))
                && probe.is_open()
            {
                open.push((slot, probe));
            }
        })?;
        Ok(open)
    }
}

/// The pinned program `rtt_account`.
pub(crate) struct Account(SchedClassifier);

/// The outcome of a request to `rtt_account`.
enum Answer {
    Done,
    /// The uplinks' programs had already counted the reply, with this round trip.
    AlreadyAnswered {
        rtt_ns: u64,
    },
    AlreadyLost,
    NoRow,
}

impl Account {
    /// Opens the program's pin.
    pub(crate) fn open(pin: &Path) -> Result<Self, ProgramError> {
        SchedClassifier::from_pin(pin).map(Self)
    }

    fn ask(&self, request: AccountRequest) -> io::Result<Answer> {
        patiently(|| {
            let mut answer = request;
            Ok(match run(&self.0, &mut answer)? {
                ACCOUNTED => Some(Answer::Done),
                ALREADY_ANSWERED => Some(Answer::AlreadyAnswered {
                    rtt_ns: answer.rtt_ns,
                }),
                ALREADY_LOST => Some(Answer::AlreadyLost),
                UNKNOWN_PEER => Some(Answer::NoRow),
                BUSY => None,
                other => {
                    let text = format!("rtt_account is from another version: it returned {other}");
                    return Err(io::Error::other(text));
                }
            })
        })
    }

    /// Resets a row. Returns `false` if it does not exist.
    pub(crate) fn reset(&self, key: RttKey) -> io::Result<bool> {
        let answer = self.ask(AccountRequest {
            key,
            operation: ACCOUNT_RESET,
            ..AccountRequest::default()
        })?;
        Ok(matches!(answer, Answer::Done))
    }
}

/// Runs a program on a request, which the program replaces by its reply. Returns the program's result.
fn run<R: Pod>(program: &SchedClassifier, request: &mut R) -> io::Result<u32> {
    let mut answer = vec![0; size_of::<R>()];
    let options = TestRunOptions {
        data_in: Some(sys::bytes_of(request)),
        data_out: Some(&mut answer),
        ..TestRunOptions::new()
    };
    let result = program.test_run(options).map_err(program_io)?;
    if let Some(answer) = sys::read(&answer) {
        *request = answer;
    }
    Ok(result.return_value)
}

/// Reads a consistent snapshot of a row, with as many copies as necessary; `None` if the row does not exist.
pub(crate) fn row_of_one_moment(
    copy: impl Fn() -> io::Result<Option<RttRow>>,
) -> io::Result<Option<RttRow>> {
    patiently(|| {
        let (Some(first), Some(second)) = (copy()?, copy()?) else {
            return Ok(Some(None));
        };
        Ok((first.is_unlocked() && first == second).then_some(Some(second)))
    })
}

/// Retries an attempt while the row is busy.
fn patiently<T>(mut attempt: impl FnMut() -> io::Result<Option<T>>) -> io::Result<T> {
    for _ in 0..ATTEMPTS {
        if let Some(result) = attempt()? {
            return Ok(result);
        }
        thread::yield_now();
    }
    Err(io::Error::new(
        io::ErrorKind::TimedOut,
        "the row changes constantly",
    ))
}

impl RttStore for KernelRtt {
    fn ensure(&self, key: RttKey) -> io::Result<()> {
        match self
            .rows()
            .insert(key, RttRow::EMPTY, BPF_NOEXIST.into())
            .map_err(map_io)
        {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            other => other,
        }
    }

    fn remove(&self, key: RttKey) -> io::Result<()> {
        match self.rows().remove(&key).map_err(map_io) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            other => other,
        }
    }

    fn reset(&self, key: RttKey) -> io::Result<bool> {
        self.account.reset(key)
    }

    fn keys(&self) -> io::Result<Vec<RttKey>> {
        self.rows().keys().collect::<Result<_, _>>().map_err(map_io)
    }

    fn row(&self, key: RttKey) -> io::Result<Option<RttRow>> {
        let rows = self.rows();
        row_of_one_moment(|| match rows.get(&key, 0) {
            Ok(row) => Ok(Some(row)),
            Err(MapError::KeyNotFound) => Ok(None),
            Err(error) => Err(map_io(error)),
        })
    }

    fn answered(&self, key: RttKey, probe: ProbeId, at_socket_ns: u64) -> io::Result<Measurement> {
        let answer = self.account.ask(AccountRequest {
            key,
            operation: ACCOUNT_SAMPLE,
            rtt_ns: at_socket_ns,
            probe,
            ..AccountRequest::default()
        })?;
        match answer {
            Answer::AlreadyAnswered { rtt_ns } if rtt_ns > 0 => Ok(Measurement::ByKernel(rtt_ns)),
            Answer::Done | Answer::AlreadyAnswered { .. } | Answer::AlreadyLost => {
                Ok(Measurement::AtSocket)
            }
            Answer::NoRow => Err(io::ErrorKind::NotFound.into()),
        }
    }

    fn lost(&self, key: RttKey, probe: ProbeId) -> io::Result<LossOutcome> {
        self.count_loss(key, probe)
    }

    fn sample(&self, key: RttKey, rtt_ns: u64) -> io::Result<()> {
        let answer = self.account.ask(AccountRequest {
            key,
            operation: ACCOUNT_SAMPLE,
            rtt_ns,
            ..AccountRequest::default()
        })?;
        match answer {
            Answer::NoRow => Err(io::ErrorKind::NotFound.into()),
            _ => Ok(()),
        }
    }

    fn lost_untracked(&self, key: RttKey) -> io::Result<LossOutcome> {
        self.count_loss(key, ProbeId::default())
    }

    fn connected(
        &self,
        key: RttKey,
        connection: &Connection,
        at_socket_ns: u64,
    ) -> io::Result<Measurement> {
        self.connections.count(key, connection, at_socket_ns)
    }

    fn follow(&self, peer: IpAddr, path: PathKind) -> io::Result<()> {
        self.connections.follow(peer, path)
    }

    fn unfollow(&self, peer: IpAddr) -> io::Result<()> {
        self.connections.unfollow(peer)
    }

    fn followed(&self) -> io::Result<Vec<IpAddr>> {
        self.connections.followed()
    }

    fn give_up_leftovers(&self) -> io::Result<u64> {
        let mut given_up = 0;
        for (slot, probe) in self.open()? {
            let key = RttKey {
                peer: probe.peer,
                path: probe.path(),
                protocol: Protocol::Icmp as u8,
                pad: 0,
            };
            if self.count_loss(key, probe.id(slot))? == LossOutcome::Counted {
                given_up += 1;
            }
        }
        Ok(given_up)
    }
}

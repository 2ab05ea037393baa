//! User-space access to `HEALTH_EVENTS` and `HEALTH_MONITOR`.

use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use aya::maps::{Array, Map, MapData, MapError, PerCpuArray, RingBuf};
use health_common::events::{Event, MonitorFilter};
use health_common::metrics::{Counter, Direction, Reason, metrics_index};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::time::timeout;

use crate::aya_io::map_io;
use crate::error::{DatapathError, map_error};
use crate::events::{Ring, Switch};
use crate::maps::typed;
use crate::{layout, sys};

/// Maximum number of events per batch, before other tasks get a turn.
const BATCH: usize = 1_024;

/// How long the ring stays mapped without events. Shorter than the interval between loss checks, which interrupt a
/// wait.
const QUIET: Duration = Duration::from_millis(200);

/// The ring buffer that the programs write events to.
pub struct KernelRing {
    map: AsyncFd<OwnedFd>,
    /// `None` while idle: a mapped ring counts twice in the agent's memory.
    ring: Option<RingBuf<MapData>>,
    counters: PerCpuArray<MapData, Counter>,
}

impl KernelRing {
    /// Opens the maps pinned in an instance's folder. Must be called in a tokio runtime.
    pub(crate) fn from_pins(pins: &Path) -> Result<Self, DatapathError> {
        let ring = typed(pins, &layout::EVENTS, RingBuf::try_from)?;
        let counters = typed(pins, &layout::METRICS, PerCpuArray::try_from)?;
        Self::new(ring, counters)
            .map_err(|source| map_error("poll", layout::EVENTS.name)(MapError::IoError(source)))
    }

    fn new(ring: RingBuf<MapData>, counters: PerCpuArray<MapData, Counter>) -> io::Result<Self> {
        let map = ring.as_fd().try_clone_to_owned()?;
        // SAFETY: the descriptor is not closed or replaced before it is dropped.
        let map = unsafe { AsyncFd::register_with_interest(map, Interest::READABLE) }
            .map_err(io::Error::from)?;
        Ok(Self {
            map,
            ring: Some(ring),
            counters,
        })
    }

    fn mapped(&self) -> io::Result<RingBuf<MapData>> {
        MapData::from_fd(self.map.get_ref().try_clone()?)
            .and_then(|map| RingBuf::try_from(Map::RingBuf(map)))
            .map_err(map_io)
    }
}

impl Ring for KernelRing {
    async fn ready(&mut self) -> io::Result<()> {
        if self.ring.is_some() {
            if let Ok(ready) = timeout(QUIET, readable(&self.map)).await {
                return ready;
            }
            self.ring = None;
        }
        readable(&self.map).await?;
        self.ring = Some(self.mapped()?);
        Ok(())
    }

    fn take(&mut self, mut each: impl FnMut(&Event)) -> bool {
        let Some(ring) = &mut self.ring else {
            return false;
        };
        for _ in 0..BATCH {
            let Some(record) = ring.next() else {
                return false;
            };
            // A record of another version would have another length.
            if let Some(event) = sys::read(&record) {
                each(&event);
            }
        }
        true
    }

    fn lost(&self) -> io::Result<u64> {
        let mut lost = 0;
        for direction in [Direction::Ingress, Direction::Egress] {
            let index = metrics_index(Reason::EventLost, direction);
            let counters = self.counters.get(&index, 0).map_err(map_io)?;
            lost += counters.iter().map(|counter| counter.packets).sum::<u64>();
        }
        Ok(lost)
    }
}

async fn readable(map: &AsyncFd<OwnedFd>) -> io::Result<()> {
    map.readable().await.map(|mut ready| {
        // The kernel notifies only about events that arrive while the ring is empty, so every wakeup must drain it.
        ready.clear_ready();
    })
}

/// Selects which events the programs write.
pub struct KernelSwitch(Mutex<Array<MapData, MonitorFilter>>);

impl KernelSwitch {
    /// Opens the map pinned in an instance's folder.
    pub(crate) fn from_pins(pins: &Path) -> Result<Self, DatapathError> {
        let filter = typed(pins, &layout::MONITOR, Array::try_from)?;
        Ok(Self(Mutex::new(filter)))
    }
}

impl Switch for KernelSwitch {
    fn set(&self, filter: &MonitorFilter) -> io::Result<()> {
        let mut map = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        map.set(0, filter, 0).map_err(map_io)
    }
}

//! `HEALTH_EVENTS` and `HEALTH_MONITOR` from user space.

use std::io;
use std::sync::{Mutex, PoisonError};

use aya::maps::{Array, MapData, PerCpuArray, RingBuf};
use health_common::events::{Event, MonitorFilter};
use health_common::metrics::{Counter, Direction, Reason, metrics_index};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::events::{Ring, Switch};
use crate::kernel_rtt::map_io;
use crate::sys;

/// Events that are taken before somebody else has a turn.
const BATCH: usize = 1_024;

/// Where the programs write events.
pub struct KernelRing {
    ring: AsyncFd<RingBuf<MapData>>,
    counters: PerCpuArray<MapData, Counter>,
}

impl KernelRing {
    /// Must be called in a tokio runtime.
    pub(crate) fn new(
        ring: RingBuf<MapData>,
        counters: PerCpuArray<MapData, Counter>,
    ) -> io::Result<Self> {
        // SAFETY: the ring owns its descriptor and never closes or replaces it before it is dropped.
        let ring = unsafe { AsyncFd::register_with_interest(ring, Interest::READABLE) }
            .map_err(io::Error::from)?;
        Ok(Self { ring, counters })
    }
}

impl Ring for KernelRing {
    async fn ready(&mut self) -> io::Result<()> {
        self.ring.readable_mut().await.map(|mut ready| {
            // The kernel tells again of what comes while the ring is empty, and only then: it is emptied after
            // each time.
            ready.clear_ready();
        })
    }

    fn take(&mut self, mut each: impl FnMut(&Event)) -> bool {
        for _ in 0..BATCH {
            let Some(record) = self.ring.get_mut().next() else {
                return false;
            };
            // Another version's record would be of another length.
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

/// Which events the programs write.
pub struct KernelSwitch(Mutex<Array<MapData, MonitorFilter>>);

impl KernelSwitch {
    pub(crate) fn new(filter: Array<MapData, MonitorFilter>) -> Self {
        Self(Mutex::new(filter))
    }
}

impl Switch for KernelSwitch {
    fn set(&self, filter: &MonitorFilter) -> io::Result<()> {
        let mut map = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        map.set(0, filter, 0).map_err(map_io)
    }
}

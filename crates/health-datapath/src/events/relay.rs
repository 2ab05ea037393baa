//! Takes events from the programs' ring buffer as they come, and hands them to the hub.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use health_common::events::Event;
use health_net::clock;
use jiff::{SignedDuration, Timestamp};
use nix::net::if_::if_indextoname;
use tokio::time::MissedTickBehavior;
use tracing::warn;

use super::{Hub, show};

/// Time between two looks at what was lost. Names of devices are as old at most.
const PERIOD: Duration = Duration::from_secs(1);

/// The programs' side.
pub trait Ring: Send + 'static {
    /// Waits until there are events.
    fn ready(&mut self) -> impl Future<Output = io::Result<()>> + Send;
    /// Calls `each` with some of those there are. `false` when none are left.
    fn take(&mut self, each: impl FnMut(&Event)) -> bool;
    /// How many events the programs could not write since the ring was made.
    fn lost(&self) -> io::Result<u64>;
}

/// Hands events on until the ring fails or the task is stopped.
pub async fn relay(mut ring: impl Ring, hub: Arc<Hub>) {
    let mut losses = Losses::new(&ring);
    let mut devices = DeviceNames::new();
    let mut ticks = tokio::time::interval(PERIOD);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            ready = ring.ready() => if let Err(error) = ready {
                warn!(%error, "cannot wait for events of the programs; monitors get no more");
                return;
            },
            _ = ticks.tick() => {
                devices.clear();
                hub.tell_losses(losses.since_last(&ring));
                continue;
            }
        }
        while hand_on(&mut ring, &hub, &mut devices) {
            hub.tell_losses(losses.since_last(&ring));
            tokio::task::yield_now().await;
        }
        hub.tell_losses(losses.since_last(&ring));
    }
}

/// Hands some events on. `false` when none are left.
fn hand_on(ring: &mut impl Ring, hub: &Hub, devices: &mut DeviceNames) -> bool {
    let (now, now_ns) = (Timestamp::now(), clock::now_ns());
    ring.take(|event| {
        hub.deliver(event, |event| {
            let age_ns = i64::try_from(now_ns.saturating_sub(event.time_ns)).unwrap_or(0);
            let time = now - SignedDuration::from_nanos(age_ns);
            show::line(event, time, device(devices, event.ifindex))
        });
    })
}

/// What was lost by the last look.
struct Losses(u64);

impl Losses {
    fn new(ring: &impl Ring) -> Self {
        Self(ring.lost().unwrap_or(0))
    }

    /// What was lost since. What cannot be read now is told later.
    fn since_last(&mut self, ring: &impl Ring) -> u64 {
        let now = ring.lost().unwrap_or(self.0);
        let lost = now.saturating_sub(self.0);
        self.0 = now;
        lost
    }
}

/// Names of devices by their numbers.
type DeviceNames = HashMap<u32, Option<String>>;

fn device(known: &mut DeviceNames, ifindex: u32) -> Option<String> {
    known
        .entry(ifindex)
        .or_insert_with(|| {
            let name = if_indextoname(ifindex).ok()?;
            Some(name.to_string_lossy().into_owned())
        })
        .clone()
}

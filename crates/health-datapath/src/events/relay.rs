//! Reads events from the programs' ring buffer as they arrive, and passes them to the hub.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use health_common::events::Event;
use health_model::activity::{Problem, Reporter};
use health_net::clock;
use jiff::{SignedDuration, Timestamp};
use nix::net::if_::if_indextoname;
use tokio::time::{Instant, MissedTickBehavior};
use tracing::warn;

use super::{Hub, show};

/// Time between two loss checks. Cached device names are at most this old.
const PERIOD: Duration = Duration::from_secs(1);

/// The ring buffer that the programs write to.
pub trait Ring: Send + 'static {
    /// Waits until there are events.
    fn ready(&mut self) -> impl Future<Output = io::Result<()>> + Send;
    /// Calls `each` with some of the pending events. Returns `false` when none are left.
    fn take(&mut self, each: impl FnMut(&Event)) -> bool;
    /// How many events the programs could not write since the ring was created.
    fn lost(&self) -> io::Result<u64>;
}

/// Relays events until the ring fails or the task is stopped, and reports each turn.
pub async fn relay(mut ring: impl Ring, hub: Arc<Hub>, reporter: Reporter) {
    let mut losses = Losses::new(&ring);
    let mut devices = DeviceNames::new();
    let mut ticks = tokio::time::interval(PERIOD);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            ready = ring.ready() => if let Err(error) = ready {
                warn!(%error, "cannot wait for events from the programs; monitors will get no more events");
                let problem = format!("cannot wait for events from the programs: {error}");
                reporter.end(Some(Problem::failure(problem)), None);
                return;
            },
            _ = ticks.tick() => {
                devices.clear();
                let looked = losses.report(&ring, &hub);
                let problem = looked.err().map(|error| {
                    Problem::warning(format!("cannot read the number of lost events: {error}"))
                });
                reporter.end(problem, Some(PERIOD));
                continue;
            }
        }
        // If reading the loss count fails here, the next tick reports it.
        let begun = Instant::now();
        while hand_on(&mut ring, &hub, &mut devices) && begun.elapsed() < PERIOD {
            let _ = losses.report(&ring, &hub);
            tokio::task::yield_now().await;
        }
        let _ = losses.report(&ring, &hub);
    }
}

/// Relays some events. Returns `false` when none are left.
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

/// The loss count at the last check.
struct Losses(u64);

impl Losses {
    fn new(ring: &impl Ring) -> Self {
        Self(ring.lost().unwrap_or(0))
    }

    /// Reports losses since the last check. If the count cannot be read now, a later call reports them.
    fn report(&mut self, ring: &impl Ring, hub: &Hub) -> io::Result<()> {
        let now = ring.lost()?;
        hub.report_losses(now.saturating_sub(self.0));
        self.0 = now;
        Ok(())
    }
}

/// Device names by ifindex.
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

#[cfg(test)]
mod tests {
    use health_common::events::MonitorFilter;
    use health_model::activity::{self, Activity, Severity};

    use super::*;
    use crate::events::Switch;

    struct NoSwitch;

    impl Switch for NoSwitch {
        fn set(&self, _filter: &MonitorFilter) -> io::Result<()> {
            Ok(())
        }
    }

    /// A ring without events.
    #[derive(Default)]
    struct Silent {
        cannot_wait: bool,
        cannot_count: bool,
    }

    fn broken_if(is_broken: bool) -> io::Result<u64> {
        match is_broken {
            true => Err(io::ErrorKind::PermissionDenied.into()),
            false => Ok(0),
        }
    }

    impl Ring for Silent {
        async fn ready(&mut self) -> io::Result<()> {
            broken_if(self.cannot_wait)?;
            std::future::pending().await
        }

        fn take(&mut self, _each: impl FnMut(&Event)) -> bool {
            false
        }

        fn lost(&self) -> io::Result<u64> {
            broken_if(self.cannot_count)
        }
    }

    /// Returns the relay's activity after some seconds.
    async fn of(ring: Silent) -> Activity {
        let (reporter, activity) = activity::channel();
        let hub = Arc::new(Hub::new(NoSwitch).unwrap());
        let _ = tokio::time::timeout(3 * PERIOD, relay(ring, hub, reporter)).await;
        activity
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_wrong_with_the_ring_is_reported() {
        let fine = of(Silent::default()).await.last();
        assert!(fine.succeeded.is_some(), "{fine:?}");

        let uncounted = Silent {
            cannot_count: true,
            ..Silent::default()
        };
        let uncounted = of(uncounted).await.last();
        assert_eq!(uncounted.succeeded, None);
        let reported = uncounted.problem.unwrap();
        assert!(
            reported.reason.contains("number of lost events"),
            "{reported:?}"
        );

        let gone = Silent {
            cannot_wait: true,
            ..Silent::default()
        };
        let reported = of(gone).await.last().problem.unwrap();
        assert_eq!(reported.severity, Severity::Failure);
        assert!(
            reported.reason.contains("cannot wait for events"),
            "{reported:?}"
        );
    }
}

//! How much time passes between two runs of the agent, whatever happens to the wall clock.

use std::time::Duration;

use health_net::clock;
use jiff::Timestamp;
use nix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

/// A moment on the wall clock, and on the boot clock if that is readable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Moment {
    pub(super) wall: Timestamp,
    pub(super) boot: Option<SinceBoot>,
}

/// The boot clock, which cannot be set and keeps running while the machine sleeps.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct SinceBoot {
    /// The ID of the boot that the clock counts from.
    pub(super) id: String,
    #[serde(with = "health_model::duration::nanoseconds", rename = "clock_ns")]
    pub(super) clock: Duration,
}

impl Moment {
    pub(super) fn now() -> Self {
        Self {
            wall: Timestamp::now(),
            boot: SinceBoot::now(),
        }
    }

    /// How much later than `earlier` this moment is: by the boot clock within one boot, otherwise by the wall clock;
    /// never negative.
    pub(super) fn since(&self, earlier: &Self) -> Duration {
        self.since_in_boot(earlier).unwrap_or_else(|| {
            let passed = Duration::try_from(self.wall.duration_since(earlier.wall));
            passed.unwrap_or_default()
        })
    }

    fn since_in_boot(&self, earlier: &Self) -> Option<Duration> {
        let (now, then) = (self.boot.as_ref()?, earlier.boot.as_ref()?);
        // In another time namespace, the clock may show an earlier time.
        now.clock
            .checked_sub(then.clock)
            .filter(|_| now.id == then.id)
    }
}

impl SinceBoot {
    fn now() -> Option<Self> {
        let id = clock::boot_id().ok()?;
        let clock = clock_gettime(ClockId::CLOCK_BOOTTIME).ok()?;
        Some(Self {
            id,
            clock: clock.into(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_passes_by_the_boot_clock_of_this_machine() {
        let earlier = Moment::now();
        let later = Moment::now();
        let boot = later.boot.as_ref().unwrap();
        assert_eq!(Some(&boot.id), earlier.boot.as_ref().map(|boot| &boot.id));
        let passed = boot.clock - earlier.boot.as_ref().unwrap().clock;
        assert_eq!(later.since(&earlier), passed);
        assert_eq!(earlier.since(&later), Duration::ZERO);
    }
}

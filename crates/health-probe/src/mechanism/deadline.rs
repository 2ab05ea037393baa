//! How long a probe may take. A late prober does not mean a late target: a response that has arrived by the time the
//! deadline is noticed counts, and time that this thread spent waiting for a CPU does not.

use std::cell::RefCell;
use std::fs::File;
use std::future::poll_fn;
use std::os::unix::fs::FileExt as _;
use std::pin::pin;
use std::task::Poll;
use std::thread::{self, ThreadId};
use std::time::Duration;

use tokio::task::yield_now;
use tokio::time::{Instant, timeout_at};

/// How many more times the awaited work is polled after the deadline has passed. The tokio runtime polls the kernel
/// first and checks timers last, so it may see the deadline before a response that came earlier; and a response of the
/// container runtime passes through a few tasks.
const LAST_LOOKS: u32 = 8;
/// Minimum lost time that is compensated.
const LOST_MIN: Duration = Duration::from_millis(1);
/// Maximum lost time that is compensated, as a multiple of the timeout. A probe that lost more has no result.
const LOST_MAX: u32 = 3;
/// How long a reading of the lost time is reused for new probes.
const READING_MAX: Duration = Duration::from_millis(1);

/// The deadline of a probe.
#[derive(Clone, Copy, Debug)]
pub struct Deadline {
    at: Instant,
    timeout: Duration,
    watch: Option<Watch>,
}

impl Deadline {
    /// Returns a deadline `timeout` from now.
    pub fn after(timeout: Duration) -> Self {
        Self {
            at: Instant::now() + timeout,
            timeout,
            watch: Watch::begin(),
        }
    }

    /// Ignores the thread's waiting time: for tests with paused time.
    #[cfg(test)]
    pub(super) fn unwatched(self) -> Self {
        Self {
            watch: None,
            ..self
        }
    }

    /// The deadline if this thread never waited for a CPU.
    pub fn at(self) -> Instant {
        self.at
    }

    /// The deadline, extended by the time that this thread has waited for a CPU since the probe started.
    pub fn made_up(self) -> Instant {
        self.at + self.lost()
    }

    /// How long a probe may take from its start.
    pub fn timeout(self) -> Duration {
        self.timeout
    }

    fn lost(self) -> Duration {
        let lost = self.watch.map_or(Duration::ZERO, Watch::lost);
        lost.min(self.timeout.saturating_mul(LOST_MAX))
    }

    /// Returns the result of `work`; `None` if it takes too long.
    pub(super) async fn bound<T>(self, work: impl Future<Output = T>) -> Option<T> {
        self.bound_until(self.at, work).await
    }

    /// Like [`Self::bound`], with `until` instead of the deadline.
    pub(super) async fn bound_until<T>(
        self,
        until: Instant,
        work: impl Future<Output = T>,
    ) -> Option<T> {
        let mut work = pin!(work);
        let mut lost = Duration::ZERO;
        loop {
            if let Ok(done) = timeout_at(until + lost, &mut work).await {
                return Some(done);
            }
            for _ in 0..LAST_LOOKS {
                yield_now().await;
                let look = poll_fn(|context| match work.as_mut().poll(context) {
                    Poll::Ready(done) => Poll::Ready(Some(done)),
                    Poll::Pending => Poll::Ready(None),
                });
                if let Some(done) = look.await {
                    return Some(done);
                }
            }
            let all = self.lost();
            if all < lost + LOST_MIN {
                return None;
            }
            lost = all;
        }
    }
}

/// How long a thread had waited for a CPU when a probe started.
#[derive(Clone, Copy, Debug)]
struct Watch {
    thread: ThreadId,
    waited: Duration,
}

impl Watch {
    /// Reads the current waiting time; `None` if the kernel does not count it.
    fn begin() -> Option<Self> {
        Some(Self {
            thread: thread::current().id(),
            waited: waited(READING_MAX)?,
        })
    }

    /// How long this thread has waited since [`Self::begin`]; zero on another thread, whose waiting time is unknown.
    fn lost(self) -> Duration {
        if thread::current().id() != self.thread {
            return Duration::ZERO;
        }
        let now = waited(Duration::ZERO).unwrap_or(self.waited);
        now.saturating_sub(self.waited)
    }
}

/// How long this thread has waited for a CPU since it started. The reading may be up to `age` old.
fn waited(age: Duration) -> Option<Duration> {
    thread_local! {
        static READER: RefCell<Option<Reader>> = RefCell::new(Reader::open());
    }
    READER.with_borrow_mut(|reader| reader.as_mut()?.waited(age))
}

/// Reads the kernel's accounting of a thread.
struct Reader {
    file: File,
    last: Option<(std::time::Instant, Duration)>,
}

impl Reader {
    /// Opens the accounting of the current thread.
    fn open() -> Option<Self> {
        let file = File::open("/proc/thread-self/schedstat").ok()?;
        Some(Self { file, last: None })
    }

    fn waited(&mut self, age: Duration) -> Option<Duration> {
        if let Some((at, waited)) = self.last
            && at.elapsed() < age
        {
            return Some(waited);
        }
        let mut text = [0; 64];
        let len = self.file.read_at(&mut text, 0).ok()?;
        // Time on a CPU and time spent waiting for one, both in ns, and how often the thread got a CPU.
        let text = std::str::from_utf8(&text[..len]).ok()?;
        let waited = text.split_whitespace().nth(1)?.parse().ok()?;
        let waited = Duration::from_nanos(waited);
        self.last = Some((std::time::Instant::now(), waited));
        Some(waited)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
    use nix::unistd::Pid;
    use tokio::time::sleep_until;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn what_has_come_when_the_deadline_is_seen_counts() {
        let deadline = Deadline::after(Duration::from_secs(1)).unwatched();
        // The response came in time, but takes a few tasks to get here.
        let answer = async {
            sleep_until(deadline.at()).await;
            for _ in 0..3 {
                tokio::spawn(yield_now()).await.unwrap();
            }
            7
        };
        assert_eq!(deadline.bound(answer).await, Some(7));
        let never = std::future::pending::<()>();
        assert_eq!(deadline.bound(never).await, None);
        assert_eq!(Instant::now(), deadline.at());
    }

    #[tokio::test(start_paused = true)]
    async fn what_comes_later_does_not_count() {
        let deadline = Deadline::after(Duration::from_secs(1)).unwatched();
        let late = sleep_until(deadline.at() + Duration::from_millis(1));
        assert_eq!(deadline.bound(late).await, None);
    }

    #[test]
    fn time_without_a_processor_is_known_and_made_up_for() {
        // Two busy threads share one CPU.
        let this = Pid::from_raw(0);
        let all = sched_getaffinity(this).unwrap();
        let first = (0..CpuSet::count()).find(|cpu| all.is_set(*cpu).unwrap());
        let mut one = CpuSet::new();
        one.set(first.unwrap()).unwrap();
        let is_over = AtomicBool::new(false);
        thread::scope(|scope| {
            let busy = scope.spawn(|| {
                sched_setaffinity(this, &one).unwrap();
                while !is_over.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
            let probing = scope.spawn(|| {
                sched_setaffinity(this, &one).unwrap();
                let deadline = Deadline::after(Duration::from_secs(1));
                while deadline.lost() < Duration::from_millis(50) {}
                assert!(deadline.made_up() >= deadline.at() + Duration::from_millis(50));
                // Another thread's waiting time is unknown.
                let elsewhere = scope.spawn(move || deadline.lost());
                assert_eq!(elsewhere.join().unwrap(), Duration::ZERO);
                // The compensation is bounded.
                let short = Deadline {
                    timeout: Duration::from_millis(1),
                    ..deadline
                };
                assert_eq!(short.lost(), Duration::from_millis(3));
            });
            probing.join().unwrap();
            is_over.store(true, Ordering::Relaxed);
            busy.join().unwrap();
        });
    }
}

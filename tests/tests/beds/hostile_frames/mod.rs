//! Hostile frames, generated from a seed, on the wires of real endpoints. At every observed point, nothing arrives
//! beyond what docs/policy.md lists under "What passes without policy". Where policy allows them, the same frames
//! arrive.

mod course;
mod stand;

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use anyhow::{Context as _, ensure};
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::sys::signal::Signal;
use nix::unistd::Pid;
use tests::frames::Fate;
use tests::{RaisedAtEnd, is_long};

use self::course::Sought;
use self::stand::Stand;

/// Number of frames between two checks of what has arrived; fewer than the kernel can queue.
const BATCH: u64 = 100;
/// Number of frame numbers per course; the next course uses the numbers that follow.
const NUMBERS: u64 = 1 << 24;

/// Number of frames in the main course. Each other course has a quarter of that.
fn frames() -> u64 {
    if is_long() { 1_000_000 } else { 10_000 }
}

/// Runs `work` on a thread pinned to one processor, so that frames are received in the order in which they are sent.
fn pinned<T: Send>(work: impl FnOnce() -> anyhow::Result<T> + Send) -> anyhow::Result<T> {
    thread::scope(|scope| {
        let thread = scope.spawn(|| {
            let own = Pid::from_raw(0);
            let allowed = sched_getaffinity(own)?;
            let first = (0..CpuSet::count()).find(|&cpu| allowed.is_set(cpu) == Ok(true));
            let mut only = CpuSet::new();
            only.set(first.context("no processor")?)?;
            sched_setaffinity(own, &only)?;
            work()
        });
        match thread.join() {
            Ok(done) => done,
            Err(panic) => std::panic::resume_unwind(panic),
        }
    })
}

fn nothing_passes(flags: &str) -> anyhow::Result<()> {
    let stand = Stand::new(flags)?;
    let node = stand.node();
    let (all, some) = (frames(), frames() / 4);
    stand.to_hostile(0, some)?;
    let hostile = stand.of_hostile("from the hostile endpoint", 3)?;
    let totals = pinned(|| hostile.run(|sent| sent < all))?;
    for fate in [Fate::Passes, Fate::Judged, Fate::Dropped, Fate::Answered] {
        let count = totals.fates.get(&fate);
        ensure!(count > Some(&(all / 500)), "few of {fate:?}: {totals:?}");
    }
    stand.check_neighbours()?;
    let health = stand.course("from the health endpoint", 4, &stand.health, Sought::Others)?;
    pinned(|| health.run(|sent| sent < some))?;

    node.kill_agent(Signal::SIGKILL)?;
    let alone = stand.of_hostile("from the hostile endpoint without an agent", 5)?;
    pinned(|| alone.run(|sent| sent < some))?;
    stand.to_hostile(6, some)?;

    let is_over = AtomicBool::new(false);
    let course = stand.of_hostile("from the hostile endpoint through restarts", 9)?;
    thread::scope(|scope| {
        let sending = scope.spawn(|| {
            pinned(|| course.run(|sent| sent < some || !is_over.load(Ordering::Relaxed)))
        });
        let ends_course = RaisedAtEnd(&is_over);
        let restarted = (|| {
            node.take_over(None)?;
            for signal in [Signal::SIGKILL, Signal::SIGTERM] {
                node.kill_agent(signal)?;
                node.take_over(None)?;
            }
            anyhow::Ok(())
        })();
        drop(ends_course);
        let sent = match sending.join() {
            Ok(sent) => sent,
            Err(panic) => std::panic::resume_unwind(panic),
        };
        restarted?;
        sent
    })?;
    stand.to_hostile(10, some)?;
    stand.check_neighbours()?;
    stand.check_findings()
}

#[test]
#[ignore = "needs root"]
fn nothing_passes_but_what_links_need() -> anyhow::Result<()> {
    nothing_passes("--attach-mode auto --policy-allow-localhost false")
}

#[test]
#[ignore = "needs root"]
fn nothing_passes_but_what_links_need_with_clsact() -> anyhow::Result<()> {
    nothing_passes("--attach-mode clsact --policy-allow-localhost false")
}

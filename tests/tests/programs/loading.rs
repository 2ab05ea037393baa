//! Loading programs while the process receives signals.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::ensure;
use nix::errno::Errno;
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};
use tests::testrun::TestRun;

/// Number of signals: fewer than the number of times that a program's load is retried.
const SIGNALS: usize = 60;

extern "C" fn ignore(_: libc::c_int) {}

/// The kernel aborts a load when its thread receives a signal.
#[test]
fn programs_are_loaded_although_signals_come_meanwhile() -> anyhow::Result<()> {
    let action = SigAction::new(
        SigHandler::Handler(ignore),
        SaFlags::SA_RESTART,
        SigSet::empty(),
    );
    // SAFETY: the handler does nothing, and nothing else in this process handles this signal.
    let former = unsafe { sigaction(Signal::SIGURG, &action) }?;
    // SAFETY: `pthread_self` only returns the calling thread, which outlives the scope below.
    let loading = unsafe { libc::pthread_self() };
    let loaded = AtomicBool::new(false);
    let sent = thread::scope(|scope| {
        let sender = scope.spawn(|| {
            let mut sent = 0;
            while sent < SIGNALS && !loaded.load(Ordering::Acquire) {
                // SAFETY: the thread outlives the scope.
                let result = unsafe { libc::pthread_kill(loading, libc::SIGURG) };
                if result != 0 {
                    return Err(Errno::from_raw(result));
                }
                sent += 1;
                // Spreads the signals over the load; no other code waits on this delay.
                thread::sleep(Duration::from_millis(10));
            }
            Ok(sent)
        });
        drop(TestRun::load_alone());
        loaded.store(true, Ordering::Release);
        sender.join()
    });
    // SAFETY: this restores the former handler.
    unsafe { sigaction(Signal::SIGURG, &former) }?;
    let sent = sent.expect("the sender does not panic")?;
    ensure!(
        sent > 1,
        "the programs were loaded before a second signal came"
    );
    Ok(())
}

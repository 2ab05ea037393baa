//! What tests of this crate and of others stand on.

use std::panic;
use std::thread;

use nix::sched::{CloneFlags, unshare};
use nix::unistd::geteuid;
use tokio::runtime::Builder;

/// Runs a test in a network namespace of its own, on a thread that ends with it. Does nothing, with a message, without root.
///
/// # Panics
///
/// If there is no such namespace, and if the test panics.
pub fn in_a_namespace<F: Future<Output = ()>>(test: impl FnOnce() -> F + Send) {
    if !geteuid().is_root() {
        println!("skipped: needs root");
        return;
    }
    let run = || {
        unshare(CloneFlags::CLONE_NEWNET).expect("a network namespace");
        let runtime = Builder::new_current_thread().enable_all().build();
        runtime.expect("a runtime").block_on(test());
    };
    let joined = thread::scope(|scope| scope.spawn(run).join());
    joined.unwrap_or_else(|panic| panic::resume_unwind(panic));
}

//! Test helpers for this crate and other crates.

use std::panic;
use std::thread;

use nix::sched::{CloneFlags, unshare};
use nix::unistd::geteuid;
use tokio::runtime::Builder;

/// Runs a test in its own network namespace, on a thread that ends with it. Without root, only prints a message.
///
/// # Panics
///
/// If the namespace cannot be created, and if the test panics.
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

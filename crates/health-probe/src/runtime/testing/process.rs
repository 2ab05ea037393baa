//! A stand-in for a container's process.

use std::fs;
use std::process::{Child, Command};

/// A process in its own PID namespace. Dropping it kills the process.
pub(crate) struct IsolatedProcess(Child);

impl IsolatedProcess {
    /// Starts a process that does nothing.
    pub(crate) fn start() -> Self {
        let mut command = Command::new("unshare");
        command.args([
            "--user",
            "--pid",
            "--fork",
            "--kill-child",
            "sleep",
            "1000000",
        ]);
        Self(command.spawn().unwrap())
    }

    /// The process's PID on this host. Waits until the process exists.
    pub(crate) fn pid(&self) -> u32 {
        let parent = self.0.id();
        let path = format!("/proc/{parent}/task/{parent}/children");
        loop {
            let children = fs::read_to_string(&path).unwrap();
            if let Some(child) = children.split_whitespace().next() {
                return child.parse().unwrap();
            }
            std::thread::yield_now();
        }
    }
}

impl Drop for IsolatedProcess {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

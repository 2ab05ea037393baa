//! A container runtime for tests. It serves the CRI on its own socket, has the pods and containers that a test adds,
//! fails on demand, and records the calls that it receives.

mod process;
mod server;
mod state;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tempfile::TempDir;
use tokio::net::UnixListener;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use self::state::State;
use super::{PATIENCE, Runtime};

pub(crate) use self::process::IsolatedProcess;
pub(crate) use self::state::{ExecSyncResponse, Stage};

/// A container runtime. Dropping it stops it.
pub(crate) struct FakeRuntime {
    folder: TempDir,
    shared: Arc<Shared>,
    server: JoinHandle<()>,
}

/// State shared by the server and the test.
struct Shared {
    state: Mutex<State>,
    calls: watch::Sender<Vec<Call>>,
}

/// A call that the runtime received, whatever the result.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Call {
    /// The method, such as `StartContainer`.
    pub(crate) method: String,
    /// The ID of the container or pod, or its future ID if the call creates it. Empty for lists.
    pub(crate) subject: String,
    /// When the call was received.
    pub(crate) at: Instant,
    /// How the call failed.
    pub(crate) fault: Option<Fault>,
}

impl Call {
    /// Whether the client is still waiting for a response that never comes.
    pub(crate) fn is_awaited(&self) -> bool {
        self.fault == Some(Fault::Hangs) && self.at.elapsed() <= PATIENCE
    }
}

/// How calls fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// Calls are refused. A container that should have been started has then exited, as with containerd.
    Refused,
    /// Calls are never answered.
    Hangs,
    /// The response is not gRPC.
    Rubbish,
}

impl FakeRuntime {
    /// Starts an empty runtime. Must be called in a tokio runtime.
    pub(crate) fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(folder.path().join("socket")).unwrap();
        let shared = Arc::new(Shared {
            state: Mutex::default(),
            calls: watch::Sender::default(),
        });
        Self {
            folder,
            server: server::spawn(listener, shared.clone()),
            shared,
        }
    }

    /// Returns a client.
    pub(crate) fn runtime(&self) -> Runtime {
        Runtime::at(&self.folder.path().join("socket"))
    }

    /// Adds a pod in the namespace `default` that can hold containers. Its ID is its name.
    pub(crate) fn add_pod(&self, name: &str) {
        self.shared.state().add_pod(name);
    }

    /// Ends a pod: its containers stay as they are, and no more containers can be created.
    pub(crate) fn end_pod(&self, name: &str) {
        self.shared.state().end_pod(name);
    }

    /// Adds a container to a pod. Its ID is `POD.NAME.ATTEMPT`, as for containers created by calls.
    pub(crate) fn add_container(&self, pod: &str, name: &str, attempt: u32, stage: Stage) {
        self.shared.state().add_container(pod, name, attempt, stage);
    }

    /// Sets the stage of a container.
    pub(crate) fn set_stage(&self, id: &str, stage: Stage) {
        self.shared.state().container(id).unwrap().stage = stage;
    }

    /// Sets the PID of a container's first process.
    pub(crate) fn set_pid(&self, id: &str, pid: u32) {
        self.shared.state().container(id).unwrap().pid = pid;
    }

    /// Sets the exit code of commands that are run in a container; 0 until this is called.
    pub(crate) fn set_command_exit_code(&self, id: &str, exit_code: i32) {
        self.shared.state().container(id).unwrap().command_exit_code = exit_code;
    }

    /// Makes calls of a method on one subject fail from now on.
    pub(crate) fn break_calls(&self, method: &str, subject: &str, fault: Fault) {
        let key = (method.to_owned(), subject.to_owned());
        self.shared.state().faults.insert(key, fault);
    }

    /// Makes calls of a method on one subject succeed again.
    pub(crate) fn mend_calls(&self, method: &str, subject: &str) {
        let key = (method.to_owned(), subject.to_owned());
        self.shared.state().faults.remove(&key);
    }

    /// All calls, oldest first.
    pub(crate) fn calls(&self) -> Vec<Call> {
        self.shared.calls.borrow().clone()
    }

    /// Waits until the calls meet a condition.
    pub(crate) async fn wait_for(&self, are_good: impl FnMut(&Vec<Call>) -> bool) {
        let mut calls = self.shared.calls.subscribe();
        calls.wait_for(are_good).await.unwrap();
    }
}

impl Drop for FakeRuntime {
    fn drop(&mut self) {
        self.server.abort();
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

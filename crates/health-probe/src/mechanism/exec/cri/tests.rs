use tempfile::TempDir;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixListener;

use super::*;
use crate::RawResult;
use crate::mechanism::testing::{patience, short};
use crate::runtime::testing::IsolatedProcess;

/// The socket of a runtime that does not speak gRPC.
struct MuteRuntime {
    folder: TempDir,
    task: JoinHandle<()>,
}

impl MuteRuntime {
    /// Greets each client with `bytes`.
    fn new(bytes: &'static [u8]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(folder.path().join("socket")).unwrap();
        let task = tokio::spawn(async move {
            loop {
                let (mut stream, _) = listener.accept().await.unwrap();
                tokio::spawn(async move {
                    let _ = stream.write_all(bytes).await;
                    while matches!(stream.read(&mut [0; 1024]).await, Ok(1..)) {}
                });
            }
        });
        Self { folder, task }
    }

    fn exec(&self, pid: Option<u32>) -> CriExec {
        let runtime = Runtime::at(&self.folder.path().join("socket"));
        CriExec::new(runtime, "c1", pid, vec!["true".to_owned()])
    }
}

impl Drop for MuteRuntime {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn error(outcome: &Outcome) -> &str {
    assert_eq!(
        (outcome.result, outcome.errored),
        (RawResult::Unknown, true),
        "{outcome:?}"
    );
    &outcome.message
}

#[tokio::test]
async fn e2_a_runtime_that_is_away_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("none");
    let probed = CriExec::new(Runtime::at(&socket), "c1", None, vec!["true".to_owned()]);
    let outcome = probe(&probed, patience()).await;
    let start = format!(
        "the runtime at {} did not run the command: ",
        socket.display()
    );
    assert!(error(&outcome).starts_with(&start), "{outcome:?}");
    assert!(outcome.message.contains("No such file"), "{outcome:?}");
}

#[tokio::test]
async fn e2_a_runtime_that_answers_rubbish_is_an_error() {
    let runtime = MuteRuntime::new(b"HTTP/1.1 400 Bad Request\r\n\r\n");
    let outcome = probe(&runtime.exec(None), patience()).await;
    assert!(
        error(&outcome).starts_with("the runtime at "),
        "{outcome:?}"
    );
}

#[tokio::test]
async fn e2_e4_a_runtime_that_hangs_is_distinguished_from_a_command_that_does() {
    let runtime = MuteRuntime::new(b"");
    // This container has no process of the command.
    let container = IsolatedProcess::start();
    let probed = runtime.exec(Some(container.pid()));
    for _ in 0..2 {
        // The second time, the runtime has still not started the first command.
        let outcome = probe(&probed, short()).await;
        assert!(
            error(&outcome).ends_with("did not start the command within 300ms"),
            "{outcome:?}"
        );
    }
    // Either nothing is known of the container, or its processes would be among the host's processes.
    for pid in [None, Some(std::process::id())] {
        let outcome = probe(&runtime.exec(pid), short()).await;
        assert_eq!(
            (outcome.result, outcome.errored),
            (RawResult::Failure, false)
        );
        assert!(
            outcome.message.starts_with("timeout: command [\"true\"]"),
            "{outcome:?}"
        );
    }
}

#[tokio::test]
async fn e4_no_run_begins_beside_another_one() {
    let runtime = MuteRuntime::new(b"");
    let probed = runtime.exec(None);
    assert_eq!(probe(&probed, short()).await.result, RawResult::Failure);
    // The runtime has not yet reported that the command exited.
    let outcome = probe(&probed.clone(), short()).await;
    assert_eq!(
        (outcome.result, outcome.errored),
        (RawResult::Failure, false)
    );
    assert!(
        outcome
            .message
            .starts_with("timeout: an earlier run did not end"),
        "{outcome:?}"
    );
}

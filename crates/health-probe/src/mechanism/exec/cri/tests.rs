use std::process::{Child, Command};

use tempfile::TempDir;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixListener;

use super::*;
use crate::RawResult;
use crate::mechanism::testing::{patience, short};

/// The socket of a runtime that answers nothing but what it is told to.
struct FakeRuntime {
    folder: TempDir,
    task: JoinHandle<()>,
}

impl FakeRuntime {
    /// It greets each client with `bytes`.
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

impl Drop for FakeRuntime {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// A process among others than the host's.
struct Container(Child);

impl Container {
    fn start() -> Self {
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

    /// Its first process.
    fn pid(&self) -> u32 {
        let parent = self.0.id();
        let path = format!("/proc/{parent}/task/{parent}/children");
        loop {
            let children = std::fs::read_to_string(&path).unwrap();
            if let Some(child) = children.split_whitespace().next() {
                return child.parse().unwrap();
            }
            std::thread::yield_now();
        }
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
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
    let runtime = FakeRuntime::new(b"HTTP/1.1 400 Bad Request\r\n\r\n");
    let outcome = probe(&runtime.exec(None), patience()).await;
    assert!(
        error(&outcome).starts_with("the runtime at "),
        "{outcome:?}"
    );
}

#[tokio::test]
async fn e2_e4_a_runtime_that_hangs_is_told_from_a_command_that_does() {
    let runtime = FakeRuntime::new(b"");
    // No process of the command is in this container.
    let container = Container::start();
    let probed = runtime.exec(Some(container.pid()));
    for _ in 0..2 {
        // The second time, the runtime still has the first command to start.
        let outcome = probe(&probed, short()).await;
        assert!(
            error(&outcome).ends_with("did not start the command within 300ms"),
            "{outcome:?}"
        );
    }
    // Nothing is known of the container, or the command would be one of the host's processes.
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
    let runtime = FakeRuntime::new(b"");
    let probed = runtime.exec(None);
    assert_eq!(probe(&probed, short()).await.result, RawResult::Failure);
    // The runtime has not said yet that the command ended.
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

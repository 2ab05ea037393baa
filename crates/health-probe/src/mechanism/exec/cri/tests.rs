use std::process::Command as Program;

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

/// The outcome of a probe beside which its command runs in the container for too long, although the runtime is mute.
async fn probe_beside_its_command(probed: &CriExec, container: u32) -> Outcome {
    let run = tokio::spawn({
        let probed = probed.clone();
        async move { probe(&probed, short()).await }
    });
    // The command's process counts only if it starts after the request.
    while probed.running.try_lock().is_ok() {
        sleep(Duration::from_millis(1)).await;
    }
    let mut command = Program::new("nsenter")
        .args(["--user", "--preserve-credentials", "--pid", "--target"])
        .arg(container.to_string())
        .args(&probed.command)
        .spawn()
        .unwrap();
    let outcome = run.await.unwrap();
    let _ = command.kill();
    command.wait().unwrap();
    outcome
}

#[tokio::test]
async fn e4_a_runtime_that_reports_the_end_of_a_killed_command_late_is_an_error() {
    let runtime = MuteRuntime::new(b"");
    let container = IsolatedProcess::start();
    let command = ["sleep", "1000001"].map(str::to_owned).to_vec();
    let socket = Runtime::at(&runtime.folder.path().join("socket"));
    let probed = loop {
        let probed = CriExec::new(socket.clone(), "c1", Some(container.pid()), command.clone());
        let outcome = probe_beside_its_command(&probed, container.pid()).await;
        // On a busy machine, the process may not have appeared in time.
        if outcome.result == RawResult::Failure {
            break probed;
        }
    };
    let outcome = loop {
        let outcome = probe(&probed, short()).await;
        // Until it is known that the killed process is gone, this is a failure.
        if outcome.errored {
            break outcome;
        }
    };
    assert!(
        error(&outcome).ends_with("did not report the end of an earlier run within 300ms"),
        "{outcome:?}"
    );
}

use super::*;
use std::os::unix::net::UnixListener as StdUnixListener;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};

/// The error of a `GET /x` if the server sends `answer` and closes the connection.
async fn error_for(answer: &'static str) -> ClientError {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("health.sock");
    let listener = UnixListener::bind(&path).unwrap();
    let server = async {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut request = [0; 1024];
        let n = stream.read(&mut request).await.unwrap();
        assert!(request[..n].starts_with(b"GET /x HTTP/1.1\r\n"));
        stream.write_all(answer.as_bytes()).await.unwrap();
    };
    let client = Client::new(&path);
    let (answer, ()) = tokio::join!(client.get::<Vec<u8>>("/x"), server);
    answer.expect_err("the answer is none")
}

#[tokio::test]
async fn an_absent_and_a_dead_agent_are_distinguished() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("health.sock");
    let client = Client::new(&path);
    let error = client.get::<()>("/x").await.expect_err("no socket");
    assert!(matches!(error, ClientError::NoAgent(_)), "{error}");
    assert!(error.to_string().contains("--runtime-dir"), "{error}");

    drop(StdUnixListener::bind(&path).unwrap());
    let error = client.get::<()>("/x").await.expect_err("nobody listens");
    assert!(matches!(error, ClientError::Stale(_)), "{error}");
}

#[tokio::test]
async fn a_refusal_carries_the_agents_reason() {
    let error = error_for(
        "HTTP/1.1 404 Not Found\r\ncontent-length: 23\r\n\r\n{\"error\":\"no endpoint\"}",
    )
    .await;
    assert_eq!(error.to_string(), "GET /x: no endpoint");
    let error = error_for("HTTP/1.1 502 Bad Gateway\r\ncontent-length: 0\r\n\r\n").await;
    assert_eq!(error.to_string(), "GET /x: 502 Bad Gateway");
}

#[tokio::test]
async fn broken_answers_are_errors_of_one_line() {
    let error = error_for("HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}").await;
    assert!(matches!(error, ClientError::Decode { .. }), "{error}");
    for broken in [
        "",
        "HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n[",
        "nonsense\r\n\r\n",
    ] {
        let error = error_for(broken).await;
        assert!(matches!(error, ClientError::Broken { .. }), "{error}");
        assert!(!error.to_string().contains('\n'), "{error}");
    }
}

/// A connection whose request has been read.
async fn accept(listener: &UnixListener) -> UnixStream {
    let (mut stream, _) = listener.accept().await.unwrap();
    let mut request = [0; 1024];
    assert_ne!(stream.read(&mut request).await.unwrap(), 0);
    stream
}

const EVENTS: &str = "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n";

fn chunk(text: &str) -> String {
    format!("{:x}\r\n{text}\r\n", text.len())
}

#[tokio::test]
async fn probe_events_are_handed_over_as_they_come() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("health.sock");
    let listener = UnixListener::bind(&path).unwrap();
    let (seen, mut sights) = tokio::sync::mpsc::unbounded_channel();
    let server = async {
        let mut stream = accept(&listener).await;
        let first = r#"{"progress":{"done":1,"#;
        stream.write_all(EVENTS.as_bytes()).await.unwrap();
        stream.write_all(chunk(first).as_bytes()).await.unwrap();
        let rest = "\"total\":2}}\n{\"progress\":{\"done\":2,\"total\":2}}\n{\"done\"";
        stream.write_all(chunk(rest).as_bytes()).await.unwrap();
        // The last event is held back until the earlier ones have arrived.
        sights.recv().await.unwrap();
        sights.recv().await.unwrap();
        let done = ":{\"probeInterval\":\"10s\",\"local\":{\"name\":\"a/b\"},\"nodes\":[]}}\n";
        stream.write_all(chunk(done).as_bytes()).await.unwrap();
        stream.write_all(b"0\r\n\r\n").await.unwrap();
    };
    let client = Client::new(&path);
    let mut events = Vec::new();
    let streamed = client.stream_probe(|event| {
        events.push(event);
        let _ = seen.send(());
    });
    let (streamed, ()) = tokio::join!(streamed, server);
    streamed.unwrap();
    let progress = |done| ProbeEvent::Progress { done, total: 2 };
    assert_eq!(events[..2], [progress(1), progress(2)]);
    assert!(matches!(&events[2..], [ProbeEvent::Done(_)]), "{events:?}");
}

#[tokio::test]
async fn probe_events_without_an_end_are_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("health.sock");
    let listener = UnixListener::bind(&path).unwrap();
    let line = chunk("{\"progress\":{\"done\":1,\"total\":2}}\n");
    let server = async {
        for end in ["0\r\n\r\n", ""] {
            let mut stream = accept(&listener).await;
            let answer = format!("{EVENTS}{line}{end}");
            stream.write_all(answer.as_bytes()).await.unwrap();
        }
    };
    let client = Client::new(&path);
    let ask = async {
        let cut = client.stream_probe(|_| {}).await.expect_err("no last line");
        assert!(matches!(cut, ClientError::Cut { .. }), "{cut}");
        let broken = client.stream_probe(|_| {}).await.expect_err("cut off");
        assert!(matches!(broken, ClientError::Broken { .. }), "{broken}");
    };
    tokio::join!(ask, server);
}

#[tokio::test(start_paused = true)]
async fn a_silent_agent_is_given_up() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("health.sock");
    let _listener = UnixListener::bind(&path).unwrap();
    let client = Client::new(&path);
    let read = client.get::<()>("/x").await.expect_err("no answer");
    assert!(read.to_string().contains("no answer in 5 s"), "{read}");
    let probe = client.put::<()>("/x").await.expect_err("no answer");
    assert!(probe.to_string().contains("no answer in 30 s"), "{probe}");
    let probe = client.stream_probe(|_| {}).await.expect_err("no answer");
    assert!(probe.to_string().contains("no answer in 30 s"), "{probe}");
}

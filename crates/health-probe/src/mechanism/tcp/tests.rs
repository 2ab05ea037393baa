use std::net::SocketAddr;

use super::super::testing::*;
use super::*;
use crate::RawResult;
use crate::mechanism::Host;

#[tokio::test]
async fn t1_an_open_port_is_a_success() {
    for address in ["127.0.0.1:0", "[::1]:0"] {
        let server = Server::at(address, say_nothing).await;
        let outcome = probe(&server.target(), patience()).await;
        assert_eq!(outcome, success("connected"), "{address}");
    }
}

#[tokio::test]
async fn t1_a_closed_port_is_a_failure() {
    let closed = unused_port();
    // Nothing can listen on port 0.
    for address in [closed, SocketAddr::new(closed.ip(), 0)] {
        let outcome = probe(&target(address), patience()).await;
        assert_eq!(outcome.result, RawResult::Failure, "{outcome:?}");
        assert!(!outcome.errored);
        let start = format!("cannot connect to {address}: Connection refused");
        assert!(outcome.message.starts_with(&start), "{outcome:?}");
    }
}

#[tokio::test]
async fn names_are_resolved() {
    let server = Server::new(say_nothing).await;
    let mut target = server.target();
    target.host = Host::Name("localhost".to_owned());
    assert_eq!(probe(&target, patience()).await, success("connected"));
    target.host = Host::Name("no such name".to_owned());
    let outcome = probe(&target, patience()).await;
    assert_eq!(outcome.result, RawResult::Failure);
    assert!(
        outcome.message.contains("cannot resolve no such name"),
        "{outcome:?}"
    );
}

/// A listener that accepts nothing more: its queue is full.
#[tokio::test]
async fn a_half_open_listener_times_out() {
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let listener = socket.listen(0).unwrap();
    let address = listener.local_addr().unwrap();
    let mut waiting = Vec::new();
    let outcome = loop {
        let outcome = probe(&target(address), short()).await;
        if outcome.result == RawResult::Failure {
            break outcome;
        }
        waiting.push(tokio::net::TcpStream::connect(address));
        assert!(waiting.len() < 100, "the queue never fills");
        // Closed probe connections leave the queue; these connections stay.
        let stream = tokio::time::timeout(SHORT, waiting.pop().unwrap()).await;
        std::mem::forget(stream);
    };
    assert!(
        outcome
            .message
            .starts_with("timeout: no connection to 127.0.0.1:"),
        "{outcome:?}"
    );
    assert!(!outcome.errored);
}

#[tokio::test]
async fn the_server_reads_the_end_and_nothing_stays_in_time_wait() {
    const PROBES: usize = 2000;
    let (sender, mut received) = tokio::sync::mpsc::unbounded_channel();
    let server = Server::new(move |mut stream| {
        let sender = sender.clone();
        async move {
            let _ = sender.send(is_closed_politely(&mut stream).await);
        }
    })
    .await;
    for _ in 0..PROBES {
        assert_eq!(
            probe(&server.target(), patience()).await,
            success("connected")
        );
        assert_eq!(received.recv().await, Some(true));
    }
    // The last connection may still be open.
    assert!(open_ends(server.address.port()) <= 2);
    let left = time_waits(server.address.port());
    assert!(
        left <= PROBES / 100,
        "{left} of {PROBES} connections are in TIME_WAIT"
    );
}

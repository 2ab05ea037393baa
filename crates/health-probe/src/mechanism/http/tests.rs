use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::io::AsyncWriteExt as _;

use super::super::testing::*;
use super::*;
use crate::mechanism::Host;

fn http(server: &Server) -> HttpProbe {
    HttpProbe {
        target: server.target(),
        scheme: Scheme::Http,
        path: "/".to_owned(),
        headers: Vec::new(),
        tls: TlsClient::default(),
    }
}

fn with_headers(probe: HttpProbe, headers: &[(&str, &str)]) -> HttpProbe {
    let own = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
    HttpProbe {
        headers: headers.iter().map(own).collect(),
        ..probe
    }
}

/// A server that chooses its response by the request's path, and reports all requests.
async fn answering(
    answer: impl Fn(&str) -> String + Clone + Send + Sync + 'static,
) -> (Server, Arc<Mutex<Vec<String>>>) {
    let heads = Arc::new(Mutex::new(Vec::new()));
    let received = heads.clone();
    let server = Server::new(move |mut stream| {
        let (received, answer) = (received.clone(), answer.clone());
        async move {
            let head = read_head(&mut stream).await;
            let path = head.split(' ').nth(1).unwrap_or_default().to_owned();
            received.lock().unwrap().push(head);
            let _ = stream.write_all(answer(&path).as_bytes()).await;
        }
    })
    .await;
    (server, heads)
}

fn answer(status: &str, body: &str) -> String {
    format!(
        "HTTP/1.1 {status}\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    )
}

fn redirect(status: u16, location: &str) -> String {
    format!("HTTP/1.1 {status} x\r\nLocation: {location}\r\nContent-Length: 0\r\n\r\n")
}

/// The values of a header in a request. The name's case matters.
fn values(head: &str, name: &str) -> Vec<String> {
    let lines = head.split("\r\n").filter_map(|line| line.split_once(": "));
    lines
        .filter(|(other, _)| *other == name)
        .map(|(_, value)| value.to_owned())
        .collect()
}

/// The request that the server received for a probe with these headers.
async fn sent(headers: &[(&str, &str)]) -> String {
    let (server, heads) = answering(|_| answer("200 OK", "")).await;
    let outcome = probe(&with_headers(http(&server), headers), patience()).await;
    assert_eq!(outcome.result, RawResult::Success, "{outcome:?}");
    heads.lock().unwrap().pop().unwrap()
}

#[tokio::test]
async fn h1_no_proxy_is_used() {
    // The environment is not read; a proxy would get a request with the whole URL.
    let head = sent(&[]).await;
    assert!(
        head.starts_with("GET / HTTP/1.1\r\nHost: 127.0.0.1:"),
        "{head}"
    );
}

#[tokio::test]
async fn h2_a_good_status_is_a_success_and_the_body_is_read() {
    let (server, _) = answering(|_| answer("200 OK", "secret")).await;
    let probed = http(&server);
    assert_eq!(ask(&probed, patience()).await.unwrap(), (200, 6));
    let outcome = probe(&probed, patience()).await;
    assert_eq!(outcome, success("HTTP status 200"));
    let (server, _) = answering(|_| answer("299 x", "")).await;
    assert_eq!(
        probe(&http(&server), patience()).await,
        success("HTTP status 299")
    );
}

#[tokio::test]
async fn h3_the_user_agent_can_be_chosen() {
    let head = sent(&[
        ("X-Muffins-Or-Cupcakes", "muffins"),
        ("X-Two", "1"),
        ("x-two", "2"),
    ])
    .await;
    assert_eq!(values(&head, "X-Muffins-Or-Cupcakes"), ["muffins"]);
    assert_eq!(values(&head, "X-Two"), ["1", "2"]);
    let agents = values(&head, "User-Agent");
    assert!(
        agents.len() == 1 && agents[0].starts_with("kube-probe/"),
        "{head}"
    );
    assert_eq!(
        values(&sent(&[("user-agent", "foo/1.0")]).await, "User-Agent"),
        ["foo/1.0"]
    );
    assert!(values(&sent(&[("User-Agent", "")]).await, "User-Agent").is_empty());
}

#[tokio::test]
async fn h4_accept_can_be_chosen() {
    let head = sent(&[]).await;
    assert_eq!(values(&head, "Accept"), ["*/*"]);
    assert_eq!(values(&head, "Connection"), ["close"]);
    assert!(!head.to_lowercase().contains("accept-encoding"), "{head}");
    assert_eq!(values(&sent(&[("accept", "a/b")]).await, "Accept"), ["a/b"]);
    assert!(values(&sent(&[("Accept", "")]).await, "Accept").is_empty());
}

#[tokio::test]
async fn h5_the_host_can_be_chosen() {
    let head = sent(&[("Host", "muffins.cupcakes.org")]).await;
    assert_eq!(values(&head, "Host"), ["muffins.cupcakes.org"]);
}

#[tokio::test]
async fn h6_bad_statuses_are_failures() {
    for status in ["100 x", "404 x", "500 x"] {
        let (server, _) = answering(move |_| answer(status, "secret")).await;
        let outcome = probe(&http(&server), patience()).await;
        assert_eq!(
            (outcome.result, outcome.errored),
            (RawResult::Failure, false)
        );
        assert!(!outcome.message.contains("secret"), "{outcome:?}");
    }
    let (server, _) = answering(|_| answer("500 x", "secret")).await;
    let outcome = probe(&http(&server), patience()).await;
    assert_eq!(outcome, failure("HTTP status 500"));
    let (server, _) = answering(|_| answer("-1 x", "secret")).await;
    let outcome = probe(&http(&server), patience()).await;
    assert_eq!(
        (outcome.result, outcome.errored),
        (RawResult::Failure, false)
    );
    assert!(
        outcome.message.contains("invalid HTTP status"),
        "{outcome:?}"
    );
}

#[tokio::test]
async fn h7_silence_is_a_failure() {
    let server = Server::new(say_nothing).await;
    let probed = http(&server);
    let stage = format!("timeout: no answer from {} within ", server.address);
    late_at(&stage, |deadline| probe(&probed, deadline)).await;
}

#[tokio::test]
async fn h8_redirects_to_the_same_host_are_followed() {
    for status in [301, 302, 303, 307, 308] {
        for (location, expected) in [
            ("/good", success("HTTP status 200")),
            ("/bad", failure("HTTP status 500")),
        ] {
            let (server, heads) = answering(move |path| match path {
                "/" => redirect(status, location),
                "/good" => answer("200 OK", ""),
                _ => answer("500 x", ""),
            })
            .await;
            assert_eq!(
                probe(&http(&server), patience()).await,
                expected,
                "{status}"
            );
            assert_eq!(heads.lock().unwrap().len(), 2);
        }
    }
}

#[tokio::test]
async fn h9_redirects_to_other_hosts_are_warnings_and_loops_failures() {
    // Another port of the same host.
    let (other, _) = answering(|path| match path {
        "/good" => answer("200 OK", ""),
        _ => answer("500 x", ""),
    })
    .await;
    let port = other.address.port();
    let answers: HashMap<_, _> = [
        ("/good".to_owned(), format!("http://127.0.0.1:{port}/good")),
        ("/bad".to_owned(), format!("//127.0.0.1:{port}/bad")),
        ("/away".to_owned(), "http://0.0.0.0/".to_owned()),
        ("/loop".to_owned(), "/loop".to_owned()),
        ("/ftp".to_owned(), "ftp://127.0.0.1/".to_owned()),
    ]
    .into();
    let (server, heads) = answering(move |path| redirect(302, &answers[path])).await;
    let results = [
        ("/good", RawResult::Success),
        ("/bad", RawResult::Failure),
        ("/away", RawResult::Warning),
        ("/loop", RawResult::Failure),
        ("/ftp", RawResult::Failure),
    ];
    for (path, result) in results {
        heads.lock().unwrap().clear();
        let probed = HttpProbe {
            path: path.to_owned(),
            ..http(&server)
        };
        let outcome = probe(&probed, patience()).await;
        assert_eq!((outcome.result, outcome.errored), (result, false), "{path}");
        if path == "/loop" {
            assert_eq!(outcome.message, "stopped after 10 redirects");
            assert_eq!(heads.lock().unwrap().len(), 10);
        }
    }
    // The response does not say where the redirect leads.
    for nowhere in [answer("302 x", ""), redirect(302, "")] {
        let (server, _) = answering(move |_| nowhere.clone()).await;
        assert_eq!(
            probe(&http(&server), patience()).await.result,
            RawResult::Warning
        );
    }
    let (server, _) = answering(|_| answer("304 x", "")).await;
    assert_eq!(
        probe(&http(&server), patience()).await.result,
        RawResult::Warning
    );
}

/// The kubelet's code also has a mode that follows redirects to other hosts, which the kubelet does not use. Ours has
/// no such mode: it never connects to other hosts.
#[tokio::test]
async fn h10_other_hosts_are_not_connected_to() {
    let (other, heads) = answering(|_| answer("200 OK", "")).await;
    let port = other.address.port();
    let location = format!("http://localhost:{port}/");
    let (server, _) = answering(move |_| redirect(302, &location)).await;
    assert_eq!(
        probe(&http(&server), patience()).await.result,
        RawResult::Warning
    );
    assert!(heads.lock().unwrap().is_empty());
}

#[tokio::test]
async fn h11_the_host_stays_across_relative_redirects() {
    for (path, location) in [("/relative", "/end"), ("/absolute", "")] {
        let (server, heads) = answering(move |asked| match (asked, location) {
            ("/end", _) => answer("200 OK", ""),
            (_, "") => answer("200 OK", ""),
            (_, location) => redirect(302, location),
        })
        .await;
        let probed = HttpProbe {
            path: path.to_owned(),
            ..with_headers(http(&server), &[("Host", "example.com")])
        };
        let outcome = probe(&probed, patience()).await;
        assert_eq!(outcome.result, RawResult::Success);
        for head in heads.lock().unwrap().iter() {
            assert_eq!(values(head, "Host"), ["example.com"]);
        }
    }
    let port = Arc::new(Mutex::new(0));
    let known = port.clone();
    let (server, heads) = answering(move |path| match path {
        "/end" => answer("200 OK", ""),
        _ => redirect(
            302,
            &format!("http://127.0.0.1:{}/end", known.lock().unwrap()),
        ),
    })
    .await;
    *port.lock().unwrap() = server.address.port();
    let probed = with_headers(http(&server), &[("Host", "example.com")]);
    assert_eq!(probe(&probed, patience()).await, success("HTTP status 200"));
    let heads = heads.lock().unwrap();
    assert_eq!(values(&heads[0], "Host"), ["example.com"]);
    assert_eq!(values(&heads[1], "Host"), [server.address.to_string()]);
}

#[tokio::test]
async fn h12_bodies_are_read_up_to_a_limit() {
    for (len, expected) in [
        (OUTPUT_LIMIT + 1, OUTPUT_LIMIT),
        (OUTPUT_LIMIT - 1, OUTPUT_LIMIT - 1),
    ] {
        let (server, _) = answering(move |_| answer("200 OK", &"x".repeat(len))).await;
        let read = ask(&http(&server), patience()).await.unwrap();
        assert_eq!(read, (200, expected));
    }
}

#[tokio::test]
async fn a_body_without_an_end_is_cut() {
    let (sender, mut received) = tokio::sync::mpsc::unbounded_channel();
    let server = Server::new(move |mut stream| {
        let sender = sender.clone();
        async move {
            read_head(&mut stream).await;
            let _ = stream.write_all(b"HTTP/1.1 200 OK\r\n\r\n").await;
            let _ = sender.send(write_forever(&mut stream, &[b'x'; 4096], Duration::ZERO).await);
        }
    })
    .await;
    assert_eq!(
        probe(&http(&server), patience()).await,
        success("HTTP status 200")
    );
    // The client closed the connection, so the server stopped writing.
    assert!(received.recv().await.is_some());
}

#[tokio::test]
async fn a_body_that_stalls_fails_the_probe() {
    let server = Server::new(|mut stream| async move {
        read_head(&mut stream).await;
        let _ = stream
            .write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\nmuffin")
            .await;
        say_nothing(stream).await;
    })
    .await;
    let probed = http(&server);
    let stage = "timeout: the body from";
    let outcome = late_at(stage, |deadline| probe(&probed, deadline)).await;
    assert!(!outcome.message.contains("muffin"), "{outcome:?}");
}

#[tokio::test]
async fn a_body_that_breaks_off_is_an_error() {
    let server = Server::new(|mut stream| async move {
        read_head(&mut stream).await;
        let _ = stream
            .write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\nsec")
            .await;
    })
    .await;
    let outcome = probe(&http(&server), patience()).await;
    assert_eq!(
        (outcome.result, outcome.errored),
        (RawResult::Failure, true)
    );
}

#[tokio::test]
async fn a_byte_at_a_time_times_out() {
    for piece in [&b"HTTP/1.1 200 OK\r\n\r\n"[..], b"HTTP/1.1 200 OK\r\nX-A: "] {
        let server = Server::new(move |mut stream| async move {
            read_head(&mut stream).await;
            let _ = stream.write_all(piece).await;
            write_forever(&mut stream, b"x", Duration::from_millis(50)).await;
        })
        .await;
        let outcome = probe(&http(&server), short()).await;
        assert_eq!(
            (outcome.result, outcome.errored),
            (RawResult::Failure, false)
        );
        assert!(outcome.message.starts_with("timeout: "), "{outcome:?}");
    }
}

#[tokio::test]
async fn headers_without_an_end_are_a_failure() {
    for piece in [&b"X-A: b\r\n"[..], b"x"] {
        let (sender, mut received) = tokio::sync::mpsc::unbounded_channel();
        let server = Server::new(move |mut stream| {
            let sender = sender.clone();
            async move {
                read_head(&mut stream).await;
                let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nX-B: ").await;
                let piece = piece.repeat(512);
                let _ = sender.send(write_forever(&mut stream, &piece, Duration::ZERO).await);
            }
        })
        .await;
        let outcome = probe(&http(&server), patience()).await;
        assert_eq!(
            (outcome.result, outcome.errored),
            (RawResult::Failure, false)
        );
        assert!(outcome.message.contains("too large"), "{outcome:?}");
        // The number of bytes that the client read, plus those that were in buffers.
        assert!(received.recv().await.unwrap() < 64 << 20);
    }
}

#[tokio::test]
async fn resets_at_each_stage_are_failures() {
    let at_once = Server::new(|stream| async move { reset(stream) }).await;
    let after_request = Server::new(|mut stream| async move {
        read_head(&mut stream).await;
        reset(stream);
    })
    .await;
    let in_head = Server::new(|mut stream| async move {
        read_head(&mut stream).await;
        let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nX-").await;
        reset(stream);
    })
    .await;
    let silent_end = Server::new(|mut stream| async move {
        read_head(&mut stream).await;
    })
    .await;
    for server in [at_once, after_request, in_head, silent_end] {
        for scheme in [Scheme::Http, Scheme::Https] {
            let probed = HttpProbe {
                scheme,
                ..http(&server)
            };
            let outcome = probe(&probed, patience()).await;
            assert_eq!(
                (outcome.result, outcome.errored),
                (RawResult::Failure, false)
            );
        }
    }
}

#[tokio::test]
async fn announcements_without_an_end_are_a_failure() {
    let server = Server::new(|mut stream| async move {
        read_head(&mut stream).await;
        let interim = b"HTTP/1.1 100 Continue\r\n\r\n".repeat(100);
        write_forever(&mut stream, &interim, Duration::ZERO).await;
    })
    .await;
    let outcome = probe(&http(&server), patience()).await;
    assert_eq!(
        (outcome.result, outcome.errored),
        (RawResult::Failure, false)
    );
    assert!(
        outcome.message.contains("more than 138 KiB received"),
        "{outcome:?}"
    );
}

#[tokio::test]
async fn what_is_no_http_and_no_tls_is_a_failure() {
    let garbage = Server::new(|mut stream| async move {
        write_forever(&mut stream, &[0x16, 3, 1, 0xff, 0xff, 0x80], Duration::ZERO).await;
    })
    .await;
    let (plain, _) = answering(|_| answer("400 x", "")).await;
    for server in [&garbage, &plain] {
        let probed = HttpProbe {
            scheme: Scheme::Https,
            ..http(server)
        };
        let outcome = probe(&probed, patience()).await;
        assert_eq!(
            (outcome.result, outcome.errored),
            (RawResult::Failure, false)
        );
        let start = format!("no TLS with {}", server.address);
        assert!(outcome.message.starts_with(&start), "{outcome:?}");
    }
    let outcome = probe(&http(&garbage), patience()).await;
    assert_eq!(
        (outcome.result, outcome.errored),
        (RawResult::Failure, false)
    );
    let silent = Server::new(say_nothing).await;
    let probed = HttpProbe {
        scheme: Scheme::Https,
        ..http(&silent)
    };
    let stage = format!("timeout: no TLS with {}", silent.address);
    late_at(&stage, |deadline| probe(&probed, deadline)).await;
}

#[tokio::test]
async fn refused_connections_are_failures() {
    let (server, _) = answering(|_| answer("200 OK", "")).await;
    let mut probed = http(&server);
    for port in [unused_port().port(), 0] {
        probed.target.port = port;
        let outcome = probe(&probed, patience()).await;
        assert_eq!(
            (outcome.result, outcome.errored),
            (RawResult::Failure, false)
        );
        assert!(
            outcome.message.contains("Connection refused"),
            "{outcome:?}"
        );
    }
}

#[tokio::test]
async fn ipv6_and_names_serve_as_hosts() {
    let server = Server::at("[::1]:0", |mut stream| async move {
        let head = read_head(&mut stream).await;
        let host = values(&head, "Host").pop().unwrap();
        let status = if host.starts_with("[::1]:") {
            "200 OK"
        } else {
            "500 x"
        };
        let _ = stream.write_all(answer(status, "").as_bytes()).await;
    })
    .await;
    assert_eq!(
        probe(&http(&server), patience()).await,
        success("HTTP status 200")
    );
    let (server, heads) = answering(|_| answer("200 OK", "")).await;
    let mut probed = http(&server);
    probed.target.host = Host::Name("localhost".to_owned());
    assert_eq!(probe(&probed, patience()).await, success("HTTP status 200"));
    let host = format!("localhost:{}", server.address.port());
    assert_eq!(values(&heads.lock().unwrap()[0], "Host"), [host]);
}

#[tokio::test]
async fn headers_that_cannot_be_sent_are_errors() {
    let (server, heads) = answering(|_| answer("200 OK", "")).await;
    let probed = with_headers(http(&server), &[("X-A", "b\r\nc: d")]);
    let outcome = probe(&probed, patience()).await;
    assert_eq!(
        (outcome.result, outcome.errored),
        (RawResult::Unknown, true)
    );
    assert!(heads.lock().unwrap().is_empty());
}

#[tokio::test]
async fn nothing_stays_open_or_in_time_wait() {
    const PROBES: usize = 1000;
    // The server closes the connection after its response, as servers do when asked to.
    let (server, _) = answering(|_| answer("200 OK", "well")).await;
    let probed = http(&server);
    for _ in 0..PROBES {
        assert_eq!(probe(&probed, patience()).await, success("HTTP status 200"));
    }
    assert!(open_ends(server.address.port()) <= 16);
    let left = time_waits(server.address.port());
    assert!(
        left <= PROBES / 100,
        "{left} of {PROBES} connections are in TIME_WAIT"
    );
}

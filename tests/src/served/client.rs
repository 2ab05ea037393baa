//! Clients of a service, which count the responses of each backend.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io::{self, BufRead as _, BufReader, Read as _, Write as _};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use health_net::netns::NetNs;
use serde::Serialize;
use socket2::{Domain, Protocol, SockRef, Socket, Type};

use super::bind::bind;
use crate::PATIENCE;
use crate::bed::command_in;
use crate::process::run;

/// Timeout of a request that is retried if it fails.
const SOON: Duration = Duration::from_secs(5);

/// A backend's response.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// The backend's name.
    pub backend: String,
    /// The client's address as the backend saw it.
    pub client: IpAddr,
}

impl Answer {
    /// Parses a response, and returns it with the bytes that follow.
    pub(super) fn read(bytes: &[u8]) -> anyhow::Result<(Self, &[u8])> {
        let mut words = bytes.splitn(3, |byte| byte.is_ascii_whitespace());
        let mut word = || words.next().context("a word is missing");
        let (backend, client) = (word()?, word()?);
        let answer = Self {
            backend: std::str::from_utf8(backend)?.to_owned(),
            client: std::str::from_utf8(client)?.parse()?,
        };
        Ok((answer, words.next().unwrap_or_default()))
    }
}

/// The results of many requests.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Answers {
    /// Number of responses by backend.
    pub backends: BTreeMap<String, usize>,
    /// The client's addresses as the backends saw them.
    pub clients: BTreeSet<IpAddr>,
    /// Number of failed requests by exit code of curl: 7 if the connection was refused, 28 on timeout.
    pub failed: BTreeMap<u8, usize>,
}

impl Answers {
    /// Number of responses from this backend.
    pub fn of(&self, backend: &str) -> usize {
        self.backends.get(backend).copied().unwrap_or(0)
    }

    /// Names of the backends that responded, or `None` if any request failed.
    pub fn all_from(&self) -> Option<Vec<&str>> {
        let names = self.backends.keys().map(String::as_str);
        self.failed.is_empty().then(|| names.collect())
    }

    /// Counts a response.
    pub fn add(&mut self, answer: Answer) {
        *self.backends.entry(answer.backend).or_default() += 1;
        self.clients.insert(answer.client);
    }
}

impl fmt::Display for Answers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "answers {:?}", self.backends)?;
        if !self.failed.is_empty() {
            write!(f, ", failures by exit code of curl {:?}", self.failed)?;
        }
        Ok(())
    }
}

/// Sends this many requests with curl from a named namespace, each on its own connection, and counts the responses.
/// Stops at the first request that fails.
pub fn curl(namespace: &str, target: SocketAddr, requests: usize) -> anyhow::Result<Answers> {
    curl_within(namespace, target, requests, PATIENCE)
}

/// Like [`curl`], with a short timeout for each request, for callers that retry.
pub fn curl_soon(namespace: &str, target: SocketAddr, requests: usize) -> anyhow::Result<Answers> {
    curl_within(namespace, target, requests, SOON)
}

fn curl_within(
    namespace: &str,
    target: SocketAddr,
    requests: usize,
    each: Duration,
) -> anyhow::Result<Answers> {
    let mut curl = command_in(namespace, "curl");
    curl.args(["--silent", "--noproxy", "*", "--fail-early"])
        .args(["--max-time", &each.as_secs().to_string()])
        .args(["--header", "Connection: close"])
        .args(["--write-out", "%{exitcode}\\n"])
        .arg(format!("http://{target}/?[1-{requests}]"));
    let ran = run(&mut curl)?;
    let mut answers = Answers::default();
    let mut lines = ran.stdout.lines();
    for _ in 0..requests {
        let mut next = || {
            lines
                .next()
                .with_context(|| format!("{} said {:?} {}", ran.command, ran.stdout, ran.stderr))
        };
        let mut line = next()?;
        let mut answer = None;
        // A failed request has only an exit code, without a response before it.
        if line.parse::<u8>().is_err() {
            answer = Some(Answer::read(line.as_bytes())?.0);
            line = next()?;
        }
        match (line.parse()?, answer) {
            (0, Some(answer)) => answers.add(answer),
            (code, _) => {
                *answers.failed.entry(code).or_default() += 1;
                break;
            }
        }
    }
    Ok(answers)
}

/// A persistent connection to a web server.
#[derive(Debug)]
pub struct Connection(BufReader<TcpStream>);

impl Connection {
    /// Opens a connection from a named namespace.
    pub fn open(namespace: &str, target: SocketAddr) -> anyhow::Result<Self> {
        Self::open_from(namespace, 0, target)
    }

    /// Like [`open`](Self::open), but from this source port.
    pub fn open_from(namespace: &str, port: u16, target: SocketAddr) -> anyhow::Result<Self> {
        let connect = || -> io::Result<TcpStream> {
            let domain = Domain::for_address(target);
            let socket = Socket::new(domain, Type::STREAM, Some(Protocol::TCP))?;
            bind(&socket, port, target)?;
            socket.connect_timeout(&target.into(), PATIENCE)?;
            Ok(socket.into())
        };
        let stream = NetNs::open(namespace)?.run_in(connect)?;
        let stream = stream.with_context(|| format!("{namespace} cannot connect to {target}"))?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        Ok(Self(BufReader::new(stream)))
    }

    /// Sends a request without a body and returns the response.
    pub fn ask(&mut self) -> anyhow::Result<Answer> {
        self.upload(0)
    }

    /// Sends a request without a body, after which the server must close the connection.
    pub fn ask_last(mut self) -> anyhow::Result<Answer> {
        let answer = self.send(0, "Connection: close\r\n")?;
        let read = self.0.read(&mut [0]).context("the connection's end")?;
        ensure!(read == 0, "more than an answer");
        Ok(answer)
    }

    /// Sends a request with a body of this many bytes and returns the response.
    pub fn upload(&mut self, bytes: usize) -> anyhow::Result<Answer> {
        self.send(bytes, "")
    }

    fn send(&mut self, bytes: usize, header: &str) -> anyhow::Result<Answer> {
        let stream = self.0.get_mut();
        write!(
            stream,
            "POST / HTTP/1.1\r\nHost: web\r\n{header}Content-Length: {bytes}\r\n\r\n"
        )
        .and_then(|()| stream.write_all(&vec![b'x'; bytes]))
        .context("cannot send on an open connection")?;
        let mut length = 0;
        loop {
            let mut line = String::new();
            let read = self.0.read_line(&mut line);
            if read.context("no answer on an open connection")? == 0 {
                bail!("a connection was closed");
            }
            if line == "\r\n" {
                break;
            }
            if let Some(text) = line.strip_prefix("Content-Length: ") {
                length = text.trim_end().parse()?;
            }
        }
        let mut body = vec![0; length];
        self.0.read_exact(&mut body)?;
        Ok(Answer::read(&body)?.0)
    }

    /// The connection's socket.
    pub fn stream(&self) -> &TcpStream {
        self.0.get_ref()
    }

    /// Closes the connection with a reset.
    pub fn reset(self) -> io::Result<()> {
        SockRef::from(self.stream()).set_linger(Some(Duration::ZERO))
    }
}

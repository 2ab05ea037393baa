//! Debian's `prometheus-blackbox-exporter` and its scrapers.

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use tempfile::TempDir;

use super::Mechanism;
use crate::bench::usage::cpu_time;
use crate::process::Running;
use crate::{Node, PATIENCE, wait_for};

const PORT: u16 = 9115;
const MODULES: &str = "\
modules:
  HTTP: {prober: http, timeout: 5s, http: {preferred_ip_protocol: ip4}}
  TCP: {prober: tcp, timeout: 5s, tcp: {preferred_ip_protocol: ip4}}
  gRPC: {prober: grpc, timeout: 5s, grpc: {preferred_ip_protocol: ip4}}
";
/// Number of parallel scrapers, each on a persistent connection.
const SCRAPERS: u32 = 8;

/// The exporter running on a node.
pub(super) struct Exporter<'a> {
    node: &'a Node,
    server: Running,
    _dir: TempDir,
}

impl<'a> Exporter<'a> {
    pub(super) fn start(node: &'a Node) -> anyhow::Result<Self> {
        let dir = tempfile::tempdir().context("cannot create a folder for the exporter")?;
        let modules = dir.path().join("modules.yml");
        fs::write(&modules, MODULES).context("cannot write the exporter's modules")?;
        let mut server = node.command("prometheus-blackbox-exporter");
        server
            .arg(format!("--config.file={}", modules.display()))
            .arg(format!("--web.listen-address=127.0.0.1:{PORT}"))
            .arg("--log.level=error");
        let exporter = Self {
            server: Running::start(&mut server)?,
            node,
            _dir: dir,
        };
        wait_for("the exporter to serve", PATIENCE, || {
            exporter.connect().map(Some)
        })?;
        Ok(exporter)
    }

    fn connect(&self) -> anyhow::Result<TcpStream> {
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, PORT));
        let connect = || TcpStream::connect_timeout(&address, PATIENCE);
        let stream = self.node.run_in(connect)??;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_nodelay(true)?;
        Ok(stream)
    }

    /// The exporter's CPU time per probe in us, at this rate or, if lower, at the maximum rate that it can sustain.
    pub(super) fn cost(
        &self,
        mechanism: Mechanism,
        per_second: u32,
        window: Duration,
    ) -> anyhow::Result<f64> {
        let pid = self.server.pid();
        let used = cpu_time(pid)?;
        let pause = Duration::from_secs(1) * SCRAPERS / per_second;
        let scrapers: Vec<TcpStream> = (0..SCRAPERS)
            .map(|_| self.connect())
            .collect::<anyhow::Result<_>>()?;
        let start = Instant::now();
        let scrape = |mut stream: TcpStream| -> anyhow::Result<u32> {
            let mut scrapes = 0;
            while start.elapsed() < window {
                let target = format!("10.99.0.{}:{}", scrapes % 250, mechanism.port());
                let target = match mechanism {
                    Mechanism::Http => format!("http://{target}/"),
                    Mechanism::Tcp | Mechanism::Grpc => target,
                };
                let body = get(&mut stream, mechanism.name(), &target)?;
                ensure!(body.contains("\nprobe_success 1"), "{target}: {body}");
                scrapes += 1;
                // Keep to the given rate.
                thread::sleep((pause * scrapes).saturating_sub(start.elapsed()));
            }
            Ok(scrapes)
        };
        let scrapes: u32 = thread::scope(|scope| {
            let running: Vec<_> = scrapers
                .into_iter()
                .map(|stream| scope.spawn(|| scrape(stream)))
                .collect();
            let ended = running.into_iter().map(|one| {
                one.join()
                    .unwrap_or_else(|_| Err(anyhow::anyhow!("a scraper panicked")))
            });
            ended.sum::<anyhow::Result<u32>>()
        })?;
        let used = cpu_time(pid)? - used;
        Ok(used.as_secs_f64() * 1e6 / f64::from(scrapes))
    }
}

/// Scrapes a module over a persistent connection.
fn get(stream: &mut TcpStream, module: &str, target: &str) -> anyhow::Result<String> {
    write!(
        stream,
        "GET /probe?module={module}&target={target} HTTP/1.1\r\nHost: exporter\r\n\r\n"
    )?;
    let mut answer = Vec::new();
    let mut buffer = [0; 16 << 10];
    loop {
        let read = stream.read(&mut buffer)?;
        ensure!(read > 0, "the exporter closed its connection");
        answer.extend_from_slice(&buffer[..read]);
        let text = String::from_utf8_lossy(&answer);
        let Some((head, body)) = text.split_once("\r\n\r\n") else {
            continue;
        };
        let length = head.lines().find_map(|line| {
            let length = line.strip_prefix("Content-Length: ")?;
            length.parse::<usize>().ok()
        });
        match length {
            Some(length) if body.len() >= length => return Ok(body.to_owned()),
            None if body.ends_with("\r\n0\r\n\r\n") => return Ok(joined(body)),
            _ => {}
        }
    }
}

/// Joins the chunks of a body (RFC 9112, 7.1).
fn joined(body: &str) -> String {
    let mut joined = String::new();
    let mut rest = body;
    while let Some((size, chunk)) = rest.split_once("\r\n") {
        let Ok(size) = usize::from_str_radix(size, 16) else {
            break;
        };
        let Some(piece) = chunk.get(..size) else {
            break;
        };
        joined.push_str(piece);
        rest = chunk.get(size + 2..).unwrap_or_default();
    }
    joined
}

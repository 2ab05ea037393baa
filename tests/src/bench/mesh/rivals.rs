//! Other probers, with the same peers and at the same rate.

use std::io::Write as _;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use http_body_util::{BodyExt as _, Empty};
use hyper::Request;
use hyper::body::Bytes;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tempfile::NamedTempFile;
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};

use super::cost::Cost;
use crate::bench::cluster::{Cluster, PORT};
use crate::bench::sent::SentProbes;
use crate::process::{Running, run};
use crate::wait_for;

/// How long to wait for a program to get ready.
const PATIENCE: Duration = Duration::from_secs(10);
/// Time for a program to reach its steady rate before it is measured.
const WARM_UP: Duration = Duration::from_secs(2);

/// Address of the exporter in the node's namespace.
const EXPORTER: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 9115);
const EXPORTER_SETTINGS: &str = "modules:\n  http_2xx:\n    prober: http\n    timeout: 1s\n";
/// Number of connections to the exporter, and of parallel probes.
const SCRAPERS: usize = 16;

/// Time that `fping` takes to probe every address once, spread over `period`, and to wait for replies until the
/// timeout.
pub(super) fn fping_once(
    cluster: &Cluster,
    period: Duration,
    timeout: Duration,
) -> anyhow::Result<Duration> {
    let (list, gap) = addresses(cluster, period)?;
    let mut fping = cluster.node().command("fping");
    let fping = fping
        .args(["-4", "-q", "-c", "1"])
        .args(["-i", &millis(gap), "-t", &millis(timeout)])
        .arg("-f")
        .arg(list.path());
    let start = Instant::now();
    let ran = run(fping)?;
    let elapsed = start.elapsed();
    // Code 1: some addresses did not reply.
    ensure!(
        matches!(ran.code, Some(0 | 1)),
        "{} failed: {}",
        ran.command,
        ran.stderr
    );
    Ok(elapsed)
}

/// Writes the peers' addresses to a file. Returns the file and the time between two probes.
fn addresses(cluster: &Cluster, period: Duration) -> anyhow::Result<(NamedTempFile, Duration)> {
    let addresses = cluster.peers_addresses();
    let mut list = NamedTempFile::new().context("cannot create a temporary file")?;
    for address in &addresses {
        writeln!(list, "{address}")?;
    }
    list.flush()?;
    Ok((list, period / u32::try_from(addresses.len())?))
}

/// Cost of `fping` when it probes every address once per `period`.
pub(super) fn fping(cluster: &Cluster, period: Duration, window: Duration) -> anyhow::Result<Cost> {
    let (list, gap) = addresses(cluster, period)?;
    let before = SentProbes::by(cluster.node())?;
    let fping = Running::start(
        cluster
            .node()
            .command("fping")
            .args(["-4", "-q", "-l"])
            .args(["-i", &millis(gap), "-p", &millis(period)])
            .arg("-f")
            .arg(list.path()),
    )?;
    wait_for("the first echo of fping", PATIENCE, || {
        let sent = SentProbes::by(cluster.node())? - before;
        Ok((sent.echoes > 0).then_some(()))
    })?;
    // From now on its rate is even, except for its startup.
    thread::sleep(WARM_UP);
    Cost::measure(cluster, fping.pid(), window)
}

fn millis(duration: Duration) -> String {
    format!("{:.3}", duration.as_secs_f64() * 1e3)
}

/// Cost of `prometheus-blackbox-exporter`, which is asked `rate` times per second to probe the next address. The CPU
/// time of the client that asks is not counted.
pub(super) fn blackbox(cluster: &Cluster, rate: f64, window: Duration) -> anyhow::Result<Cost> {
    let mut settings = NamedTempFile::new().context("cannot create a temporary file")?;
    settings.write_all(EXPORTER_SETTINGS.as_bytes())?;
    settings.flush()?;
    let exporter = Running::start(
        cluster
            .node()
            .command("prometheus-blackbox-exporter")
            .arg(format!("--config.file={}", settings.path().display()))
            .arg(format!("--web.listen-address={EXPORTER}"))
            .arg("--log.level=error"),
    )?;
    wait_for("the exporter to serve", PATIENCE, || {
        let connected = cluster
            .node()
            .run_in(|| std::net::TcpStream::connect(EXPORTER))?;
        Ok(connected.is_ok().then_some(()))
    })?;
    let scrapes = Scrapes {
        addresses: cluster.peers_addresses(),
        rate,
        stop: AtomicBool::new(false),
        failed: AtomicU64::new(0),
    };
    let cost = thread::scope(|scope| {
        let scraping = scope.spawn(|| cluster.node().run_in(|| scrapes.run())?);
        thread::sleep(WARM_UP);
        let cost = Cost::measure(cluster, exporter.pid(), window);
        scrapes.stop.store(true, Ordering::Relaxed);
        let scraped = scraping
            .join()
            .map_err(|_| anyhow::anyhow!("the exporter's client thread panicked"));
        scraped??;
        cost
    })?;
    let failed = scrapes.failed.load(Ordering::Relaxed);
    ensure!(failed == 0, "{failed} probes of the exporter failed");
    Ok(cost)
}

/// A client that asks the exporter for one probe after another.
struct Scrapes {
    addresses: Vec<Ipv4Addr>,
    /// Probes per second.
    rate: f64,
    stop: AtomicBool,
    failed: AtomicU64,
}

impl Scrapes {
    /// Sends requests until it is stopped.
    fn run(&self) -> anyhow::Result<()> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        runtime.block_on(async {
            let start = Instant::now();
            let lanes = (0..SCRAPERS).map(|lane| self.lane(start, lane));
            futures_util::future::try_join_all(lanes).await.map(drop)
        })
    }

    /// Requests every [`SCRAPERS`]th probe over one connection.
    async fn lane(&self, start: Instant, lane: usize) -> anyhow::Result<()> {
        let stream = TcpStream::connect(EXPORTER).await?;
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
        let mut driver = JoinSet::new();
        driver.spawn(connection);
        for number in (lane..).step_by(SCRAPERS) {
            sleep_until(start + Duration::from_secs_f64(number as f64 / self.rate)).await;
            if self.stop.load(Ordering::Relaxed) {
                break;
            }
            let address = self.addresses[number % self.addresses.len()];
            let uri = format!("/probe?module=http_2xx&target=http://{address}:{PORT}/hello");
            let request = Request::get(uri)
                .header("Host", "exporter")
                .body(Empty::<Bytes>::new())?;
            let body = sender.send_request(request).await?.into_body();
            let metrics = body.collect().await?.to_bytes();
            if !metrics.ends_with(b"probe_success 1\n")
                && !String::from_utf8_lossy(&metrics).contains("\nprobe_success 1\n")
            {
                self.failed.fetch_add(1, Ordering::Relaxed);
            }
        }
        Ok(())
    }
}

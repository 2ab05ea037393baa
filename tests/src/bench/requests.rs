//! Polls an agent's API and records the latency of each response.

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};

/// Timeout of a request. A slower response would make the measurement pointless.
const PATIENCE: Duration = Duration::from_secs(30);

/// Returns the body of `GET path`, using a new connection.
pub(super) fn get(socket: &Path, path: &str) -> anyhow::Result<String> {
    send(socket, "GET", path, "")
}

/// Sends a request with this body over a new connection, and returns the body of the response.
pub(super) fn send(socket: &Path, method: &str, path: &str, body: &str) -> anyhow::Result<String> {
    let fetch = || {
        let mut stream = UnixStream::connect(socket)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        // HTTP/1.0 has no chunked encoding: the response ends with the connection.
        let length = body.len();
        write!(
            stream,
            "{method} {path} HTTP/1.0\r\nHost: agent\r\nContent-Length: {length}\r\n\r\n{body}"
        )?;
        let mut response = String::new();
        stream.read_to_string(&mut response)?;
        anyhow::Ok(response)
    };
    let mut response =
        fetch().with_context(|| format!("{method} {path} at {}", socket.display()))?;
    let head = response.find("\r\n\r\n");
    let head = head.with_context(|| format!("{method} {path} got an incomplete response"))?;
    ensure!(
        response.starts_with("HTTP/1.0 200 "),
        "{method} {path} got the response: {response}",
    );
    response.drain(..head + "\r\n\r\n".len());
    Ok(response)
}

/// A thread that polls the API until it is stopped.
pub(super) struct Asker {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<anyhow::Result<Vec<Duration>>>,
}

impl Asker {
    /// Requests `path`, pauses, and repeats until `look` fails. `look` gets each body and its arrival time.
    pub(super) fn start(
        socket: PathBuf,
        path: &'static str,
        pause: Duration,
        mut look: impl FnMut(&str, Instant) -> anyhow::Result<()> + Send + 'static,
    ) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let reported = stop.clone();
        let thread = thread::spawn(move || {
            let mut latencies = Vec::new();
            while !reported.load(Ordering::Relaxed) {
                let asked = Instant::now();
                let body = get(&socket, path)?;
                let answered = Instant::now();
                latencies.push(answered - asked);
                look(&body, answered)?;
                // The polling interval. There is nothing else to wait for.
                thread::sleep(pause);
            }
            Ok(latencies)
        });
        Self { stop, thread }
    }

    /// Stops polling and returns the latencies of the requests in ascending order.
    pub(super) fn finish(self) -> anyhow::Result<Vec<Duration>> {
        self.stop.store(true, Ordering::Relaxed);
        let mut latencies = self
            .thread
            .join()
            .map_err(|_| anyhow::anyhow!("the API's client thread panicked"))??;
        latencies.sort_unstable();
        Ok(latencies)
    }
}

/// The quantile `part` of the ascending `values`: the smallest value that at least this fraction does not exceed.
pub(super) fn quantile(values: &[Duration], part: f64) -> anyhow::Result<Duration> {
    let rank = (values.len() as f64 * part).ceil() as usize;
    values
        .get(rank.saturating_sub(1))
        .copied()
        .context("no request was answered")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_values_that_were_measured() {
        let values: Vec<Duration> = (1..=100).map(Duration::from_millis).collect();
        assert_eq!(quantile(&values, 0.5).unwrap(), Duration::from_millis(50));
        assert_eq!(quantile(&values, 0.99).unwrap(), Duration::from_millis(99));
        assert_eq!(quantile(&values, 1.0).unwrap(), Duration::from_millis(100));
        assert_eq!(quantile(&values[..1], 0.5).unwrap(), values[0]);
        assert!(quantile(&[], 0.5).is_err());
    }
}

//! A bare HTTP server on a Unix socket with prepared responses: the floor for an agent's API.

use std::io::{Read as _, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use tempfile::TempDir;

use super::requests::get;
use crate::process::print_line;

/// Maximum number of request bytes per read.
const REQUEST_LEN: usize = 1024;

/// A server thread and the latencies of its responses. It stops on drop.
pub(super) struct Bare {
    folder: TempDir,
    body: Arc<Mutex<String>>,
    latencies: Mutex<Vec<Duration>>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Bare {
    pub(super) fn start() -> anyhow::Result<Self> {
        let folder = tempfile::tempdir().context("cannot create a folder for a socket")?;
        let listener = UnixListener::bind(socket(folder.path())).context("cannot listen")?;
        let (body, stop) = <(Arc<Mutex<String>>, Arc<AtomicBool>)>::default();
        let thread = thread::Builder::new().name("bare".to_owned()).spawn({
            let (body, stop) = (body.clone(), stop.clone());
            move || {
                while !stop.load(Ordering::Relaxed) {
                    // A broken connection is the client's problem.
                    let _ = listener
                        .accept()
                        .and_then(|(stream, _)| answer(stream, &lock(&body)));
                }
            }
        })?;
        Ok(Self {
            folder,
            body,
            latencies: Mutex::default(),
            stop,
            thread: Some(thread),
        })
    }

    /// Requests this body once and records the latency.
    pub(super) fn ask(&self, body: &str) -> anyhow::Result<()> {
        body.clone_into(&mut lock(&self.body));
        let asked = Instant::now();
        let got = get(&socket(self.folder.path()), "/")?;
        lock(&self.latencies).push(asked.elapsed());
        ensure!(got.len() == body.len(), "the answer differs");
        Ok(())
    }

    /// Latencies of the responses in ascending order.
    pub(super) fn latencies(&self) -> Vec<Duration> {
        let mut latencies = lock(&self.latencies).clone();
        latencies.sort_unstable();
        latencies
    }
}

impl Drop for Bare {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        // Wakes up the thread.
        drop(UnixStream::connect(socket(self.folder.path())));
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            print_line("bench: the bare server panicked");
        }
    }
}

fn socket(folder: &Path) -> PathBuf {
    folder.join("socket")
}

fn answer(mut stream: UnixStream, body: &str) -> std::io::Result<()> {
    let mut request = Vec::new();
    let mut part = [0; REQUEST_LEN];
    while !request.ends_with(b"\r\n\r\n") {
        match stream.read(&mut part)? {
            0 => return Ok(()),
            len => request.extend_from_slice(&part[..len]),
        }
    }
    stream.write_all(b"HTTP/1.0 200 OK\r\n\r\n")?;
    stream.write_all(body.as_bytes())
}

fn lock<T>(value: &Mutex<T>) -> MutexGuard<'_, T> {
    value.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_answers_with_what_it_was_given() {
        let bare = Bare::start().unwrap();
        for body in ["{}", "", "a longer one"] {
            bare.ask(body).unwrap();
        }
        assert_eq!(bare.latencies().len(), 3);
    }
}

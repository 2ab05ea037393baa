//! Allows only one bed at a time, as beds share names and addresses on this machine.

use std::fs::{self, File, OpenOptions};
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use anyhow::Context as _;
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};

use crate::process::print_line;

const PATH: &str = "/run/health-agent-bed.lock";

/// Exclusive use of the machine's bed. The lock file is removed on drop.
#[derive(Debug)]
pub struct BedLock {
    // Keeps the lock; never read.
    _file: Flock<File>,
}

impl BedLock {
    /// Waits until no other process or thread holds the bed.
    pub fn acquire() -> anyhow::Result<Self> {
        let path = Path::new(PATH);
        let mut reported = false;
        loop {
            let file = OpenOptions::new()
                .create(true)
                .truncate(false)
                .write(true)
                .open(path)
                .with_context(|| format!("cannot open {} (are you root?)", path.display()))?;
            let file = match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
                Ok(file) => file,
                Err((file, Errno::EWOULDBLOCK)) => {
                    if !reported {
                        print_line("waiting for another bed on this machine to end");
                        reported = true;
                    }
                    Flock::lock(file, FlockArg::LockExclusive)
                        .map_err(|(_, errno)| errno)
                        .with_context(|| format!("cannot lock {}", path.display()))?
                }
                Err((_, errno)) => {
                    return Err(errno).with_context(|| format!("cannot lock {}", path.display()));
                }
            };
            // The previous holder may have removed the file, in which case this lock excludes no one.
            let own = file.metadata().context("cannot stat the bed's lock")?;
            match fs::metadata(path) {
                Ok(there) if there.ino() == own.ino() && there.dev() == own.dev() => {
                    return Ok(Self { _file: file });
                }
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                Err(error) => {
                    return Err(error).with_context(|| format!("cannot stat {}", path.display()));
                }
            }
        }
    }
}

impl Drop for BedLock {
    fn drop(&mut self) {
        // The file is still locked here, so nothing else can have recreated it.
        if let Err(error) = fs::remove_file(PATH) {
            print_line(format_args!("bed: cannot remove {PATH}: {error}"));
        }
    }
}

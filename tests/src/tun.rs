//! A link whose packets have no Ethernet header: a tun device in each of two namespaces, and a thread that carries
//! packets between them.

use std::fs::File;
use std::io::{self, ErrorKind, Read as _, Write as _};
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::Context as _;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::Node;
use crate::process::{print_line, run};

/// Device file that creates tun devices.
const TUN: &str = "/dev/net/tun";
/// Buffer size, which fits the longest packet.
const LONGEST: usize = 1 << 16;
/// Maximum time between two checks of the stop flag.
const PAUSE: Duration = Duration::from_millis(100);

/// Two joined tun devices. Both are removed on drop.
#[derive(Debug)]
pub struct TunLink {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl TunLink {
    /// Creates a device with this name on each of the two nodes, both down and without addresses. `link_type`
    /// (`ARPHRD_*`, linux/if_arp.h) replaces the link type of tun devices.
    pub fn join(nodes: [&Node; 2], device: &str, link_type: Option<u16>) -> anyhow::Result<Self> {
        if !Path::new(TUN).exists() {
            run(Command::new("modprobe").arg("tun"))?.success()?;
        }
        let [a, b] = nodes.map(|node| {
            let opened = node.run_in(|| open(device, link_type))?;
            opened.with_context(|| format!("cannot create {device} of {}", node.name()))
        });
        let ends = [a?, b?];
        let stop = Arc::new(AtomicBool::new(false));
        let thread = thread::Builder::new().name("tun".to_owned()).spawn({
            let stop = stop.clone();
            move || {
                while !stop.load(Ordering::Relaxed) {
                    if let Err(error) = carry(&ends) {
                        print_line(format_args!("the tun relay stopped: {error:#}"));
                        return;
                    }
                }
            }
        })?;
        Ok(Self {
            stop,
            thread: Some(thread),
        })
    }
}

impl Drop for TunLink {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            print_line("the thread between tun devices panicked");
        }
    }
}

/// Creates a device in the calling thread's namespace. The device exists as long as the file is open.
fn open(device: &str, link_type: Option<u16>) -> io::Result<File> {
    let mut options = File::options();
    options.read(true).write(true);
    let file = options.custom_flags(libc::O_NONBLOCK).open(TUN)?;
    // SAFETY: plain data, for which all zeros is a valid value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(device.bytes()) {
        *to = from.cast_signed();
    }
    request.ifr_ifru.ifru_flags = (libc::IFF_TUN | libc::IFF_NO_PI) as libc::c_short;
    // SAFETY: the file is open and the kernel only reads the request; it terminates the name itself.
    Errno::result(unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF, &raw const request) })?;
    if let Some(link_type) = link_type {
        let link_type = libc::c_ulong::from(link_type);
        // SAFETY: the file is open and the argument is a number. The kernel accepts it because the device is still
        // down.
        Errno::result(unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETLINK, link_type) })?;
    }
    Ok(file)
}

/// Waits for packets and carries them to the other end.
fn carry(ends: &[File; 2]) -> anyhow::Result<()> {
    let [a, b] = ends;
    let mut waiting = [a, b].map(|end| PollFd::new(end.as_fd(), PollFlags::POLLIN));
    match poll(&mut waiting, PollTimeout::try_from(PAUSE)?) {
        Ok(_) | Err(Errno::EINTR) => {}
        Err(error) => return Err(error).context("cannot wait for packets"),
    }
    let mut buffer = vec![0; LONGEST];
    for (mut from, mut to) in [(a, b), (b, a)] {
        loop {
            let len = match from.read(&mut buffer) {
                Ok(len) => len,
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) => return Err(error).context("cannot read a packet"),
            };
            // A device that is down or full drops packets, like any device.
            let _ = to.write(&buffer[..len]);
        }
    }
    Ok(())
}

//! Identifies this process to the programs.

use std::io;
use std::os::fd::AsFd as _;

use health_common::LAYOUT_VERSION;
use health_common::config::DatapathConfig;
use health_model::settings::Location;

use crate::error::DatapathError;
use crate::{layout, pin_folder, sys};

/// `r0 = bpf_get_current_pid_tgid()`.
const CALL_PID_TGID: u64 = 0x0000_000e_0000_0085;
/// `r0 >>= 32`.
const UPPER_HALF: u64 = 0x0000_0020_0000_0077;
/// `exit`.
const EXIT: u64 = 0x0000_0000_0000_0095;

/// Returns this process's id in the initial PID namespace, with which the programs compare. A process in another
/// namespace cannot query this id, so a program does. Needs the right to load programs.
pub fn tgid() -> io::Result<u32> {
    sys::run_raw_tracepoint(&[CALL_PID_TGID, UPPER_HALF, EXIT])
}

/// Makes socket programs that an earlier agent left running exempt this process's sockets from now on: the programs
/// recognise the agent by its process id. Does nothing if no programs of this layout are left, or if another agent is
/// using them. Needs the right to load programs.
pub fn spare_own_sockets(location: &Location) -> io::Result<()> {
    let pins = location.pins();
    let _lock = match pin_folder::lock(&pins) {
        Ok(Some(lock)) => lock,
        // Either no programs are left, or an active agent needs its own id there.
        Ok(None) | Err(DatapathError::InUse(_)) => return Ok(()),
        Err(error) => return Err(io::Error::other(error)),
    };
    let (map, info) = match sys::open_map(&pins.join(layout::CONFIG.name)) {
        Ok(Some(opened)) => opened,
        Ok(None) => return Ok(()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    if info.value_size as usize != size_of::<DatapathConfig>() {
        return Ok(());
    }
    let (first, mut value) = (0u32.to_ne_bytes(), [0; size_of::<DatapathConfig>()]);
    let is_there = sys::lookup(map.as_fd(), &first, &mut value)?;
    let Some(config) = sys::read::<DatapathConfig>(&value).filter(|_| is_there) else {
        return Ok(());
    };
    if config.layout_version != LAYOUT_VERSION {
        return Ok(());
    }
    let config = DatapathConfig {
        agent_tgid: tgid()?,
        ..config
    };
    sys::set(map.as_fd(), &first, sys::bytes_of(&config))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_threads_of_a_process_have_its_number() {
        let is_root = std::fs::read_to_string("/proc/self/status")
            .is_ok_and(|status| status.lines().any(|line| line.starts_with("Uid:\t0\t")));
        if !is_root {
            println!("skipped: needs root");
            return;
        }
        let here = tgid().unwrap();
        let there = std::thread::spawn(|| tgid().unwrap()).join().unwrap();
        assert_eq!(here, there);
        assert_ne!(here, 0);
        let is_first = std::fs::read_link("/proc/self/ns/pid")
            .is_ok_and(|link| link.as_os_str() == "pid:[4026531836]");
        if is_first {
            assert_eq!(here, std::process::id());
        }
    }
}

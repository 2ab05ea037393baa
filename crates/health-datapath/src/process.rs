//! This process, as programs see it.

use std::io;
use std::os::fd::AsFd as _;

use health_common::LAYOUT_VERSION;
use health_common::config::DatapathConfig;
use health_model::settings::Location;

use crate::{DatapathError, layout, pin_folder, sys};

/// `r0 = bpf_get_current_pid_tgid()`.
const CALL_PID_TGID: u64 = 0x0000_000e_0000_0085;
/// `r0 >>= 32`.
const UPPER_HALF: u64 = 0x0000_0020_0000_0077;
/// `exit`.
const EXIT: u64 = 0x0000_0000_0000_0095;

/// The number of this process in the first PID namespace, which programs compare. A process in another namespace cannot
/// ask for it, so a program does. Needs the right to load programs.
pub fn tgid() -> io::Result<u32> {
    sys::run_raw_tracepoint(&[CALL_PID_TGID, UPPER_HALF, EXIT])
}

/// Makes the programs for sockets that an agent before this one left at work spare the sockets of this process from now on:
/// they know the agent by its number. Does nothing where no programs of this layout are left, or where another agent works
/// with them. Needs the right to load programs.
pub fn spare_own_sockets(location: &Location) -> io::Result<()> {
    let pins = location.pins();
    let _lock = match pin_folder::lock(&pins) {
        Ok(Some(lock)) => lock,
        // Nothing is left, or whoever is at work there needs its own number.
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

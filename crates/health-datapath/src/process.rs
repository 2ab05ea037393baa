//! This process, as programs see it.

use std::io;

use crate::sys;

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

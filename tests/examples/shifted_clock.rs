//! A library for `LD_PRELOAD`: in a process that loads it, the time of day is off by the number of seconds in a file,
//! which may change at any time. All other clocks are the host's.

use std::env;
use std::ffi::c_int;
use std::fs::File;
use std::os::fd::AsRawFd as _;
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicI64, Ordering};

/// Environment variable that names the file with the seconds: eight bytes in host byte order.
const FILE: &str = "HEALTH_CLOCK_SHIFT";

/// Replaces the C library's function of this name.
///
/// # Safety
/// As for `clock_gettime(2)`: `time` points to a writable `timespec`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn clock_gettime(clock: libc::clockid_t, time: *mut libc::timespec) -> c_int {
    // SAFETY: the caller's pointer; the kernel checks what it can.
    let result = unsafe { libc::syscall(libc::SYS_clock_gettime, clock, time) };
    let is_of_day = matches!(clock, libc::CLOCK_REALTIME | libc::CLOCK_REALTIME_COARSE);
    if result == 0
        && is_of_day
        && let Some(shift) = shift()
    {
        // SAFETY: the kernel has just written to it.
        unsafe { (*time).tv_sec += shift.load(Ordering::Relaxed) };
    }
    // 0 or -1.
    result as c_int
}

/// The shift in seconds, which another process changes; `None` without a file.
fn shift() -> Option<&'static AtomicI64> {
    static SHIFT: OnceLock<Option<&'static AtomicI64>> = OnceLock::new();
    *SHIFT.get_or_init(|| {
        let file = File::open(env::var_os(FILE)?).ok()?;
        let is_whole = file.metadata().ok()?.len() >= size_of::<AtomicI64>() as u64;
        if !is_whole {
            return None;
        }
        // SAFETY: creates a mapping at an address that the kernel chooses, and takes no pointers.
        let mapped = unsafe {
            libc::mmap(
                ptr::null_mut(),
                size_of::<AtomicI64>(),
                libc::PROT_READ,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                0,
            )
        };
        let is_mapped = mapped != libc::MAP_FAILED;
        // SAFETY: the page stays mapped as long as the process runs; the file is never truncated. Writes to it are
        // atomic.
        is_mapped.then(|| unsafe { &*mapped.cast_const().cast::<AtomicI64>() })
    })
}

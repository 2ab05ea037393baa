//! A library that the loader puts before all others (`LD_PRELOAD`): the process that has it finds the clock of the day
//! as many seconds off as a file says, from one moment to the next. All other clocks are the host's.

use std::env;
use std::ffi::c_int;
use std::fs::File;
use std::os::fd::AsRawFd as _;
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicI64, Ordering};

/// In the environment: the file with the seconds, eight bytes in host byte order.
const FILE: &str = "HEALTH_CLOCK_SHIFT";

/// The clocks of the system, as programs ask for them.
///
/// # Safety
/// As of `clock_gettime(2)`: `time` points to a `timespec` that may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn clock_gettime(clock: libc::clockid_t, time: *mut libc::timespec) -> c_int {
    // SAFETY: the caller's pointer, for which the kernel checks what it can.
    let result = unsafe { libc::syscall(libc::SYS_clock_gettime, clock, time) };
    let is_of_day = matches!(clock, libc::CLOCK_REALTIME | libc::CLOCK_REALTIME_COARSE);
    if result == 0
        && is_of_day
        && let Some(shift) = shift()
    {
        // SAFETY: the kernel has written there.
        unsafe { (*time).tv_sec += shift.load(Ordering::Relaxed) };
    }
    // 0 or -1.
    result as c_int
}

/// The seconds, which another process changes; `None` without a file of them.
fn shift() -> Option<&'static AtomicI64> {
    static SHIFT: OnceLock<Option<&'static AtomicI64>> = OnceLock::new();
    *SHIFT.get_or_init(|| {
        let file = File::open(env::var_os(FILE)?).ok()?;
        let is_whole = file.metadata().ok()?.len() >= size_of::<AtomicI64>() as u64;
        if !is_whole {
            return None;
        }
        // SAFETY: makes a mapping at an address of the kernel's choice, and takes no pointers.
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
        // SAFETY: a page that is there as long as the process; the file is never cut short. It is written at once.
        is_mapped.then(|| unsafe { &*mapped.cast_const().cast::<AtomicI64>() })
    })
}

//! Why the kernel did not do what it was asked.

use std::io;

use super::netlink::os_error;

/// The kernel refused: what was attempted, on what, and its answer.
#[derive(Debug, thiserror::Error)]
#[error("cannot {attempt} {on}: {source}")]
pub struct KernelError {
    attempt: &'static str,
    on: String,
    source: io::Error,
}

impl KernelError {
    pub(crate) fn new(attempt: &'static str, on: impl ToString, source: io::Error) -> Self {
        Self {
            attempt,
            on: on.to_string(),
            source,
        }
    }

    /// Of a request by netlink.
    pub(crate) fn netlink(
        attempt: &'static str,
        on: impl ToString,
    ) -> impl FnOnce(rtnetlink::Error) -> Self {
        let on = on.to_string();
        move |error| Self::new(attempt, on, os_error(error))
    }

    /// The kernel's error number.
    pub fn os_code(&self) -> Option<i32> {
        self.source.raw_os_error()
    }
}

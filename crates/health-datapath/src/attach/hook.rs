//! A program on a device: its hook, and the faults that it can have.

use std::path::{Path, PathBuf};
use std::{fmt, io};

use aya::programs::ProgramError;
use nix::net::if_::if_nametoindex;

use crate::error::DatapathError;
use crate::link_pin;
use crate::pin_folder::LINK_PINS;
use crate::program::DatapathProgram::{
    self, FromEndpoint, FromIpNetdev, FromNetdev, ToEndpoint, ToIpNetdev, ToNetdev, XdpNetdev,
};
use crate::program::{AttachPoint, Direction};

/// One program on one device.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Hook {
    /// The program.
    pub(crate) program: DatapathProgram,
    /// The device's name.
    pub device: String,
    /// The device's ifindex, if an agent created the device: another device with the same name does not match.
    pub(crate) number: Option<u32>,
}

impl Hook {
    /// Returns both hooks of an endpoint's device with this ifindex, which an agent created.
    pub fn endpoint(device: &str, number: u32) -> [Self; 2] {
        Self::pair(device, Some(number), [FromEndpoint, ToEndpoint])
    }

    /// Returns both hooks of an uplink.
    pub fn uplink(device: &str) -> [Self; 2] {
        Self::pair(device, None, [FromNetdev, ToNetdev])
    }

    /// Returns both hooks of an uplink whose packets begin with the IP header.
    pub fn ip_uplink(device: &str) -> [Self; 2] {
        Self::pair(device, None, [FromIpNetdev, ToIpNetdev])
    }

    /// Returns the XDP hook of an uplink.
    pub fn xdp(device: &str) -> Self {
        Self {
            program: XdpNetdev,
            device: device.to_owned(),
            number: None,
        }
    }

    /// Whether everything works without the program: XDP only makes services faster.
    pub fn is_optional(&self) -> bool {
        self.program.is_optional()
    }

    /// The direction of the packets that the program sees.
    pub(super) const fn direction(&self) -> Direction {
        match self.program.attach_point() {
            AttachPoint::Tc(direction) => direction,
            // XDP sees what the device receives; no other program has a hook.
            _ => Direction::Ingress,
        }
    }

    fn pair(device: &str, number: Option<u32>, programs: [DatapathProgram; 2]) -> [Self; 2] {
        programs.map(|program| Self {
            program,
            device: device.to_owned(),
            number,
        })
    }

    /// Returns the ifindex of the hook's device. Fails if the device is gone or another device has its name.
    pub(super) fn device_number(&self) -> io::Result<u32> {
        let number = if_nametoindex(self.device.as_str())?;
        if self.number.is_some_and(|meant| meant != number) {
            let problem = format!("{} now names another device", self.device);
            return Err(io::Error::new(io::ErrorKind::NotFound, problem));
        }
        Ok(number)
    }

    /// Whether agents create the device: whatever else they attach to it disappears with it.
    pub(super) fn is_on_own_device(&self) -> bool {
        matches!(self.program, FromEndpoint | ToEndpoint)
    }

    /// Returns the file name of the link's pin.
    pub(super) fn pin_name(&self) -> String {
        link_pin::name(self.program, &self.device)
    }

    /// Returns the path of the link's pin.
    pub(crate) fn link_pin(&self, pins: &Path) -> PathBuf {
        pins.join(LINK_PINS).join(self.pin_name())
    }

    /// Error: the program could not be attached or replaced here.
    pub(super) fn program_error(
        &self,
        what: &'static str,
    ) -> impl FnOnce(ProgramError) -> DatapathError {
        let (program, on) = (self.program, format!(" on {}", self.device));
        move |source| DatapathError::Program {
            what,
            program,
            on,
            source: Box::new(source),
        }
    }

    /// Error: the kernel refused an operation on a filter here.
    pub(super) fn failed(&self, what: &'static str) -> impl FnOnce(io::Error) -> DatapathError {
        let hook = self.to_string();
        move |source| DatapathError::Filter { what, hook, source }
    }
}

impl fmt::Display for Hook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            program, device, ..
        } = self;
        match program.attach_point() {
            AttachPoint::Tc(direction) => write!(f, "{program} at {direction} of {device}"),
            _ => write!(f, "{program} of {device}"),
        }
    }
}

/// What was wrong with a hook.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HookFault {
    /// The program was not attached to the device.
    Detached(Hook),
    /// The program was attached, but its link's pin was missing.
    PinLost(Hook),
}

impl HookFault {
    /// The hook that has the fault.
    pub const fn hook(&self) -> &Hook {
        match self {
            Self::Detached(hook) | Self::PinLost(hook) => hook,
        }
    }

    /// A short fixed word, for counters.
    pub const fn cause(&self) -> &'static str {
        match self {
            Self::Detached(_) => "program-detached",
            Self::PinLost(_) => "link-pin-lost",
        }
    }
}

impl fmt::Display for HookFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Detached(hook) => write!(f, "program {hook} was detached"),
            Self::PinLost(hook) => write!(f, "the pinned link of program {hook} was removed"),
        }
    }
}

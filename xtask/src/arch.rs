//! Processor architectures of this machine and of guests.

use std::env::consts;

use anyhow::Context as _;
use clap::ValueEnum;

/// A processor architecture.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Arch {
    #[value(name = "x86_64")]
    X86_64,
    Aarch64,
}

impl Arch {
    /// This machine's architecture.
    pub(crate) fn own() -> anyhow::Result<Self> {
        Self::from_str(consts::ARCH, false)
            .ok()
            .with_context(|| format!("processors of {} are not supported", consts::ARCH))
    }

    pub(crate) fn is_own(self) -> bool {
        Self::own().is_ok_and(|own| own == self)
    }

    /// The architecture's name in the kernel and in Rust.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::X86_64 => "x86_64",
            Self::Aarch64 => "aarch64",
        }
    }

    /// The architecture's name in Debian.
    pub(crate) fn debian(self) -> &'static str {
        match self {
            Self::X86_64 => "amd64",
            Self::Aarch64 => "arm64",
        }
    }

    /// The emulator for machines with this architecture.
    pub(crate) fn qemu(self) -> &'static str {
        match self {
            Self::X86_64 => "qemu-system-x86_64",
            Self::Aarch64 => "qemu-system-aarch64",
        }
    }

    /// The target for statically linked programs.
    pub(crate) fn static_target(self) -> &'static str {
        match self {
            Self::X86_64 => "x86_64-unknown-linux-musl",
            Self::Aarch64 => "aarch64-unknown-linux-musl",
        }
    }

    /// The target for programs that use Debian's shared libraries.
    pub(crate) fn shared_target(self) -> &'static str {
        match self {
            Self::X86_64 => "x86_64-unknown-linux-gnu",
            Self::Aarch64 => "aarch64-unknown-linux-gnu",
        }
    }
}

//! Static programs for a foreign architecture. Debian's cross compiler builds the C parts with the headers of Debian's
//! musl; the linker that comes with Rust links the programs.

use std::process::Command;

use anyhow::Context as _;

use crate::arch::Arch;
use crate::debian::{self, PackageScope};
use crate::process::output;
use crate::workspace::Workspace;

/// Sets the environment variables of `cargo` for a foreign architecture.
pub(crate) fn environment(
    workspace: &Workspace,
    arch: Arch,
    cargo: &mut Command,
) -> anyhow::Result<()> {
    let compiler = format!("{}-linux-gnu-gcc", arch.name());
    let musl = debian::unpacked(workspace, arch, "musl", &["musl-dev"], PackageScope::Alone)?;
    let headers = musl.join(format!("usr/include/{}-linux-musl", arch.name()));
    let own_headers = output(Command::new(&compiler).arg("-print-file-name=include"))?
        .with_context(|| format!("{compiler} does not print its header folder"))?;
    let target = arch.static_target().replace('-', "_");
    let flags = format!(
        "-nostdinc -isystem {} -isystem {}",
        headers.display(),
        own_headers.trim_end()
    );
    cargo
        .env(format!("CC_{target}"), compiler)
        .env(format!("CFLAGS_{target}"), flags)
        .env(
            format!("CARGO_TARGET_{}_LINKER", target.to_uppercase()),
            "rust-lld",
        );
    Ok(())
}

//! Compiles and compresses the eBPF programs that the agent embeds.

use std::env;
use std::fs;
use std::path::PathBuf;

use anyhow::Context as _;

/// DEFLATE level. The best level saves only one percent more.
const LEVEL: u8 = 8;

fn main() -> anyhow::Result<()> {
    health_ebpf_build::compile("datapath")?;
    let out = PathBuf::from(env::var_os("OUT_DIR").context("OUT_DIR is missing")?);
    let object = fs::read(out.join("datapath")).context("cannot read the object")?;
    let compressed = miniz_oxide::deflate::compress_to_vec(&object, LEVEL);
    fs::write(out.join("datapath.deflate"), compressed).context("cannot write the object")
}

//! Compiles the eBPF programs of the benchmarks.

use std::env;

fn main() -> anyhow::Result<()> {
    println!("cargo::rerun-if-changed=build.rs");
    if env::var_os("CARGO_FEATURE_ALL").is_some() {
        health_ebpf_build::compile("bench")?;
    }
    Ok(())
}

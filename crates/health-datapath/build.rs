//! Compiles the eBPF programs that the agent embeds.

fn main() -> anyhow::Result<()> {
    health_ebpf_build::compile("datapath")
}

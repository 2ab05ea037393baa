//! Programs from the distribution that building and testing need.

use std::process::Command;

use anyhow::bail;

use crate::arch::Arch;
use crate::privilege::as_root;
use crate::process::{installed, run};

/// A program, or a file by its path relative to the programs' folders, and the Debian package that contains it.
pub(crate) struct Tool {
    program: &'static str,
    package: &'static str,
}

impl Tool {
    /// The name, if this is a program.
    pub(crate) fn program(&self) -> Option<&'static str> {
        (!self.program.contains('/')).then_some(self.program)
    }
}

const fn tool(program: &'static str, package: &'static str) -> Tool {
    Tool { program, package }
}

/// Needed to build: `make` for jemalloc, and `protoc` for etcd's client, which is generated from a protocol definition.
/// The definition imports a file that `protoc` looks for next to itself.
pub(crate) const BUILD: &[Tool] = &[
    tool("make", "make"),
    tool("protoc", "protobuf-compiler"),
    tool(
        "../include/google/protobuf/descriptor.proto",
        "libprotobuf-dev",
    ),
];

/// Needed for a bed.
pub(crate) const BED: &[Tool] = &[tool("ip", "iproute2"), tool("nsenter", "util-linux")];

/// Needed for a bed with containers.
pub(crate) const CONTAINERS: &[Tool] = &[
    tool("setpriv", "util-linux"),
    tool("busybox", "busybox-static"),
    tool("runc", "runc"),
    tool("containerd", "containerd"),
    tool("ctr", "containerd"),
];

/// Needed for a bed with services.
pub(crate) const SERVICES: &[Tool] = &[
    tool("setpriv", "util-linux"),
    tool("nginx", "nginx-light"),
    tool("curl", "curl"),
];

/// Needed for the tests.
pub(crate) const TESTS: &[Tool] = &[
    tool("ip", "iproute2"),
    tool("ss", "iproute2"),
    tool("nsenter", "util-linux"),
    tool("setpriv", "util-linux"),
    tool("setarch", "util-linux"),
    tool("setsid", "util-linux"),
    tool("chrt", "util-linux"),
    tool("ping", "iputils-ping"),
    tool("nft", "nftables"),
    tool("conntrack", "conntrack"),
    tool("ipset", "ipset"),
    tool("ipvsadm", "ipvsadm"),
    tool("bpftool", "bpftool"),
    tool("prometheus", "prometheus"),
    tool("promtool", "prometheus"),
    tool("etcd", "etcd-server"),
    tool("etcdctl", "etcd-client"),
    tool("iperf3", "iperf3"),
    tool("traceroute", "traceroute"),
    tool("dnsmasq", "dnsmasq-base"),
    tool("dig", "bind9-dnsutils"),
    tool("podman", "podman"),
    tool("runc", "runc"),
    tool("busybox", "busybox-static"),
    tool("wg", "wireguard-tools"),
    tool("containerd", "containerd"),
    tool("ctr", "containerd"),
    tool("nginx", "nginx-light"),
    tool("curl", "curl"),
    tool("mandoc", "mandoc"),
    tool("strace", "strace"),
];

/// Needed for a Kubernetes cluster, besides its own programs.
pub(crate) const KUBERNETES: &[Tool] = &[
    tool("bash", "bash"),
    tool("setpriv", "util-linux"),
    tool("nsenter", "util-linux"),
    tool("strip", "binutils"),
    tool("busybox", "busybox-static"),
    tool("kubectl", "kubernetes-client"),
    tool("etcd", "etcd-server"),
    tool("runc", "runc"),
    tool("containerd", "containerd"),
    tool("ctr", "containerd"),
    tool("../lib/cni/loopback", "containernetworking-plugins"),
    // The kubelet calls them.
    tool("iptables", "iptables"),
    tool("conntrack", "conntrack"),
    tool("mount", "mount"),
];

/// Needed for the tests that CI runs in guests. All other tools would make up most of what a guest has to unpack.
pub(crate) const CI_GUESTS: &[Tool] = &[
    tool("ip", "iproute2"),
    tool("nsenter", "util-linux"),
    tool("setpriv", "util-linux"),
    tool("ping", "iputils-ping"),
];

/// The emulator for virtual machines.
pub(crate) fn emulator(arch: Arch) -> Tool {
    tool(
        arch.qemu(),
        match arch {
            Arch::X86_64 => "qemu-system-x86",
            Arch::Aarch64 => "qemu-system-arm",
        },
    )
}

/// Needed for a virtual machine and for its static programs.
pub(crate) const VM: &[Tool] = &[
    tool("setpriv", "util-linux"),
    tool("ldd", "libc-bin"),
    tool("strip", "binutils"),
    tool("modprobe", "kmod"),
    tool("busybox", "busybox-static"),
    tool("ss", "iproute2"),
    tool("ps", "procps"),
    tool("find", "findutils"),
];

/// Needed to link static programs.
pub(crate) const STATIC: &[Tool] = &[tool("musl-gcc", "musl-tools")];

/// Needed to compile for a foreign architecture.
pub(crate) fn cross_compiler(arch: Arch) -> [Tool; 2] {
    match arch {
        Arch::X86_64 => [
            tool("x86_64-linux-gnu-gcc", "gcc-x86-64-linux-gnu"),
            tool(
                "../x86_64-linux-gnu/include/stdio.h",
                "libc6-dev-amd64-cross",
            ),
        ],
        Arch::Aarch64 => [
            tool("aarch64-linux-gnu-gcc", "gcc-aarch64-linux-gnu"),
            tool(
                "../aarch64-linux-gnu/include/stdio.h",
                "libc6-dev-arm64-cross",
            ),
        ],
    }
}

/// Needed to unpack Debian packages.
pub(crate) const ARCHIVES: &[Tool] = &[
    tool("apt-get", "apt"),
    tool("apt-cache", "apt"),
    tool("dpkg-deb", "dpkg"),
];

/// Needed to prepare a Debian kernel.
pub(crate) const DEBIAN_KERNELS: &[Tool] = &[tool("depmod", "kmod")];

/// Needed for the benchmarks.
pub(crate) const BENCHES: &[Tool] = &[
    tool("ip", "iproute2"),
    tool("nsenter", "util-linux"),
    tool("taskset", "util-linux"),
    tool("ping", "iputils-ping"),
    tool("fping", "fping"),
    tool(
        "prometheus-blackbox-exporter",
        "prometheus-blackbox-exporter",
    ),
    tool("iperf3", "iperf3"),
    tool("nft", "nftables"),
    tool("ipset", "ipset"),
    tool("ipvsadm", "ipvsadm"),
    tool("iptables-restore", "iptables"),
    tool("tcpdump", "tcpdump"),
    tool("bpftool", "bpftool"),
    tool("conntrack", "conntrack"),
    tool("../lib/cni/ptp", "containernetworking-plugins"),
];

/// Installs the packages of missing programs.
pub(crate) fn require(tools: &[Tool]) -> anyhow::Result<()> {
    let mut missing: Vec<&str> = tools
        .iter()
        .filter(|tool| !installed(tool.program))
        .map(|tool| tool.package)
        .collect();
    missing.dedup();
    if missing.is_empty() {
        return Ok(());
    }
    if !installed("apt-get") {
        bail!(
            "missing programs; install these Debian packages: {}",
            missing.join(" ")
        );
    }
    println!("installing {}", missing.join(" "));
    // Fetches the package lists only if they are missing (a new container) or outdated.
    if run(&mut install(&missing)?).is_err() {
        run(as_root("apt-get", "installing packages")?.args(["-q", "update"]))?;
        run(&mut install(&missing)?)?;
    }
    Ok(())
}

fn install(packages: &[&str]) -> anyhow::Result<Command> {
    let mut apt = as_root("env", "installing packages")?;
    apt.args([
        "DEBIAN_FRONTEND=noninteractive",
        "apt-get",
        "-q",
        "-y",
        "--no-install-recommends",
        "install",
    ])
    .args(packages);
    Ok(apt)
}

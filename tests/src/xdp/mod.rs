//! A test stand for `xdp_netdev`: devices in their own namespace, whose routes and neighbours the program looks up, and
//! flows from outside that the program knows.

mod flow;
mod packet;

use std::net::IpAddr;
use std::process::Command;
use std::time::Duration;
use std::{fs, thread};

use anyhow::{Context as _, ensure};
use aya::TestRunOptions;
use aya::maps::{Array, Map, MapData};
use aya::programs::{TestRun as _, Xdp};
use aya_obj::programs::XdpAttachType;
use health_common::LAYOUT_VERSION;
use health_common::config::{DatapathConfig, SERVICES};
use health_common::service::Backend;
use health_common::service::xdp::XdpTimes;
use health_datapath::{Hook, MapSizes, layout};
use health_model::settings::ServiceXdp;
use health_net::clock;
use health_settings::MasqueradeSettings;
use nix::sched::{CloneFlags, unshare};
use nix::time::{ClockId, clock_gettime};

use crate::bed::wait_local;
use crate::process::run;
use crate::testrun::TestRun;

pub use flow::{Known, Version, now_secs};
pub use packet::Packet;

/// Return value for a packet that continues to the stack (`XDP_PASS`).
pub const PASS: u32 = 2;
/// Return value for a packet that goes back out of its device (`XDP_TX`).
pub const TX: u32 = 3;
/// Return value for a redirected packet (`XDP_REDIRECT`).
pub const REDIRECT: u32 = 4;

/// The device towards clients and the device towards backends.
pub const DEVICES: [&str; 2] = ["out", "in"];
/// Hardware addresses of the devices.
pub const MACS: [[u8; 6]; 2] = [[2, 0, 0, 0, 1, 1], [2, 0, 0, 0, 1, 2]];
/// Hardware addresses of the hosts behind the devices.
const CLIENT_MAC: [u8; 6] = [2, 0, 0, 0, 9, 1];
const BACKEND_MAC: [u8; 6] = [2, 0, 0, 0, 9, 2];

const CLIENT_PORT: u16 = 50_000;
const FRONTEND_PORT: u16 = 30_080;
const BACKEND_PORT: u16 = 8_080;
const NODE_PORT: u16 = 40_001;
/// Index of the backend, and number of the service port.
const BACKEND: u32 = 1;
const SERVICE: u32 = 7;

/// The addresses of all participants for one IP version.
#[derive(Clone, Copy, Debug)]
pub struct Hosts {
    /// A host outside the cluster.
    pub client: IpAddr,
    /// This node.
    pub node: IpAddr,
    /// A backend behind the other device.
    pub backend: IpAddr,
    /// A backend behind the client's device.
    pub near_backend: IpAddr,
    /// A backend with a route but without a neighbour entry.
    pub silent_backend: IpAddr,
}

/// The participants' IPv4 addresses and their IPv6 addresses.
pub fn hosts() -> [Hosts; 2] {
    let of = |[client, node, backend, near, silent]: [&str; 5]| {
        let ip = |text: &str| text.parse().expect(text);
        Hosts {
            client: ip(client),
            node: ip(node),
            backend: ip(backend),
            near_backend: ip(near),
            silent_backend: ip(silent),
        }
    };
    [
        of([
            "198.51.100.9",
            "172.30.0.1",
            "172.30.0.2",
            "198.51.100.20",
            "172.30.0.3",
        ]),
        of([
            "2001:db8:1::9",
            "fd00:30::1",
            "fd00:30::2",
            "2001:db8:1::20",
            "fd00:30::3",
        ]),
    ]
}

/// Loaded programs, with the XDP program attached to devices in the calling thread's own namespace.
pub struct Stand {
    /// Owner of the programs and maps.
    pub run: TestRun,
    /// The XDP program.
    pub program: Xdp,
    /// Interface indexes of the devices.
    pub numbers: [u32; 2],
    config: DatapathConfig,
}

/// Runs a test in a new network namespace.
pub fn in_namespace<R: Send + 'static>(
    test: impl FnOnce(&mut Stand) -> anyhow::Result<R> + Send + 'static,
) -> anyhow::Result<R> {
    let thread = thread::spawn(|| {
        unshare(CloneFlags::CLONE_NEWNET)?;
        test(&mut Stand::new()?)
    });
    thread.join().map_err(|_| anyhow::anyhow!("it panicked"))?
}

/// Runs `ip`. Arguments are separated by spaces.
pub fn ip(words: &str) -> anyhow::Result<()> {
    run(Command::new("ip").args(words.split_whitespace()))?
        .success()
        .with_context(|| format!("ip {words}"))?;
    Ok(())
}

/// The clock with which the program timestamps cached ways.
fn coarse_now_ns() -> u64 {
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC_COARSE).expect("a clock");
    Duration::from(now).as_nanos() as u64
}

/// Formats a hardware address for `ip`.
pub fn mac(bytes: [u8; 6]) -> String {
    bytes.map(|byte| format!("{byte:02x}")).join(":")
}

/// Enables or disables forwarding in the namespace.
pub fn set_forwarding(is_on: bool) -> anyhow::Result<()> {
    for family in ["ipv4", "ipv6"] {
        let setting = format!("/proc/sys/net/{family}/conf/all/forwarding");
        fs::write(&setting, if is_on { "1" } else { "0" }).context(setting)?;
    }
    Ok(())
}

impl Stand {
    fn new() -> anyhow::Result<Self> {
        for (device, bytes) in DEVICES.into_iter().zip(MACS) {
            ip(&format!(
                "link add {device} address {} up type veth peer name {device}-peer",
                mac(bytes)
            ))?;
            ip(&format!("link set {device}-peer up"))?;
        }
        set_forwarding(true)?;
        for (address, device) in [
            ("198.51.100.1/24", "out"),
            ("2001:db8:1::1/64", "out"),
            ("172.30.0.1/24", "in"),
            ("fd00:30::1/64", "in"),
        ] {
            ip(&format!("address add {address} dev {device} nodad"))?;
            wait_local(address, &[])?;
        }
        for hosts in hosts() {
            let known = [
                (hosts.client, CLIENT_MAC, "out"),
                (hosts.backend, BACKEND_MAC, "in"),
                (hosts.near_backend, BACKEND_MAC, "out"),
            ];
            for (address, bytes, device) in known {
                let bytes = mac(bytes);
                ip(&format!(
                    "neighbour add {address} lladdr {bytes} dev {device}"
                ))?;
            }
        }
        let mut run = TestRun::load_sized(MapSizes {
            xdp_flows: 1_024,
            ..MapSizes::default()
        });
        run.datapath.set_xdp(ServiceXdp::Generic);
        run.datapath.attach(&DEVICES.map(Hook::xdp))?;
        ensure!(
            run.datapath.refused().is_empty(),
            "{:?}",
            run.datapath.refused()
        );
        let settings = MasqueradeSettings {
            native_routing_cidrs: vec!["0.0.0.0/0".parse()?, "::/0".parse()?],
            masquerade_ports: "40000-40999".parse()?,
            masquerade_excludes: Vec::new(),
            gateway_cidrs: Vec::new(),
        };
        let nodes = hosts().map(|hosts| hosts.node);
        run.datapath
            .set_masquerade(settings.of_node(&nodes, &[])?)?;
        let program = run.location.pins().join("programs/xdp_netdev");
        let mut stand = Self {
            program: Xdp::from_pin(program, XdpAttachType::Interface)?,
            run,
            numbers: [0; 2],
            config: DatapathConfig {
                layout_version: LAYOUT_VERSION,
                flags: SERVICES,
                ..DatapathConfig::default()
            },
        };
        for (number, device) in stand.numbers.iter_mut().zip(DEVICES) {
            *number = nix::net::if_::if_nametoindex(device)?;
        }
        stand.configure(SERVICES)?;
        Ok(stand)
    }

    /// Sets the flags in the configuration.
    pub fn configure(&mut self, flags: u16) -> anyhow::Result<()> {
        self.config.flags = flags;
        Ok(self.run.datapath.configure(self.config)?)
    }

    /// Makes each way that the program caches valid for this many ticks, and invalidates the ways cached before.
    pub fn set_way_ticks(&self, ticks: u64) -> anyhow::Result<()> {
        let mut times = self.times()?;
        let changed_ns = clock::now_ns();
        let way_ticks = ticks;
        times.set(
            0,
            XdpTimes {
                changed_ns,
                way_ticks,
            },
            0,
        )?;
        // The program's clock advances in ticks: a way cached before the next tick would not count as newer.
        while coarse_now_ns() <= changed_ns {
            thread::yield_now();
        }
        Ok(())
    }

    /// Invalidates the ways that the program has cached.
    pub fn note_change(&self) -> anyhow::Result<()> {
        let times = self.times()?.get(&0, 0)?;
        self.set_way_ticks(times.way_ticks)
    }

    fn times(&self) -> anyhow::Result<Array<MapData, XdpTimes>> {
        let pin = self.run.location.pins().join(layout::XDP_TIMES.name);
        Ok(Map::from_map_data(MapData::from_pin(pin)?)?.try_into()?)
    }

    /// Sets the backend's address, or removes the backend, in the format that the agent writes for the programs.
    pub fn serve(&self, address: Option<IpAddr>) -> anyhow::Result<()> {
        let pin = self.run.location.pins().join("HEALTH_BACKENDS");
        let map = Map::from_map_data(MapData::from_pin(pin)?)?;
        let mut backends: Array<MapData, Backend> = map.try_into()?;
        let backend = address.map(|address| Backend {
            addr: address.into(),
            service: SERVICE,
            port_be: BACKEND_PORT.to_be(),
            ..Backend::default()
        });
        backends.set(BACKEND, backend.unwrap_or_default(), 0)?;
        self.note_change()
    }

    /// The context of a packet of this length that arrives at a device.
    pub fn context(&self, device: usize, len: usize) -> Vec<u8> {
        // `struct xdp_md`: start and end of the packet, no metadata, the device, its queue, no egress device.
        let context = [0, len as u32, 0, self.numbers[device], 0, 0];
        context.map(u32::to_ne_bytes).concat()
    }

    /// Runs the program on a packet that arrives at a device. Returns the program's return value and the resulting
    /// packet.
    pub fn send(&self, device: usize, packet: &[u8]) -> anyhow::Result<(u32, Vec<u8>)> {
        let mut out = vec![0; packet.len()];
        let result = self.program.test_run(TestRunOptions {
            data_in: Some(packet),
            data_out: Some(&mut out),
            ctx_in: Some(&self.context(device, packet.len())),
            ..TestRunOptions::new()
        })?;
        out.truncate(result.data_size_out as usize);
        Ok((result.return_value, out))
    }
}

//! A node that moves packets from its endpoints directly into the destination's namespace after a single lookup: the
//! minimum that host routing has to do.

use std::net::IpAddr;
use std::process::Command;

use anyhow::Context as _;
use aya::maps::{HashMap, MapData};
use aya::programs::{SchedClassifier, TcAttachType};
use aya::{Ebpf, EbpfLoader};
use health_common::addr::Addr;
use health_common::endpoint::EndpointInfo;
use health_net::mac::MacAddr;
use health_net::netns::NetNs;

use super::super::objects::BENCH_PROGRAMS;
use super::stand::{Place, Pod};
use crate::Node;
use crate::bed::command_in;
use crate::process::run;

const PROGRAM: &str = "bench_forward";
const ENDPOINTS: &str = "BENCH_ENDPOINTS";

pub(super) struct Floor {
    pub(super) place: Place,
    /// Keeps the program attached.
    _ebpf: Ebpf,
}

impl Floor {
    /// Starts it with the maps of another node's agent, which the program of this node does not use.
    pub(super) fn start(node: &Node, maps_of: &Node) -> anyhow::Result<Self> {
        let place = Place::without_agent(node)?;
        let pods = Pod::all_of(node);
        let mut ebpf = EbpfLoader::new()
            .default_map_pin_directory(maps_of.pins())
            .load(BENCH_PROGRAMS)?;
        let map = ebpf.map_mut(ENDPOINTS).context(ENDPOINTS)?;
        let mut endpoints: HashMap<&mut MapData, Addr, EndpointInfo> = map.try_into()?;
        for pod in &pods {
            let (ifindex, host_mac) = device(node.command("ip"), &pod.device)?;
            let (_, mac) = device(command_in(&pod.namespace, "ip"), "eth0")?;
            let info = EndpointInfo {
                ifindex,
                mac: mac.0,
                host_mac: host_mac.0,
                ..EndpointInfo::default()
            };
            endpoints.insert(Addr::from(IpAddr::from(pod.address)), info, 0)?;
        }
        let program = ebpf.program_mut(PROGRAM).context(PROGRAM)?;
        let program: &mut SchedClassifier = program.try_into()?;
        program.load()?;
        NetNs::open(node.name())?.run_in(|| {
            pods.iter().try_for_each(|pod| {
                program.attach(&pod.device, TcAttachType::Ingress)?;
                anyhow::Ok(())
            })
        })??;
        Ok(Self { place, _ebpf: ebpf })
    }
}

/// Ifindex and hardware address of a device.
fn device(mut ip: Command, name: &str) -> anyhow::Result<(u32, MacAddr)> {
    let listed = run(ip.args(["-j", "link", "show", "dev", name]))?.success()?;
    let listed: serde_json::Value = serde_json::from_str(&listed)?;
    let device = &listed[0];
    let number = device["ifindex"].as_u64().context("no number")?;
    let address = device["address"].as_str().context("no address")?;
    Ok((number.try_into()?, address.parse()?))
}

//! The bed for hostile frames: endpoints, the points where frames are sent and seen, and the courses between them.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::process::Command;
use std::sync::{Mutex, PoisonError};

use anyhow::{Context as _, bail, ensure};
use health_common::addr::Addr;
use health_model::api::Endpoint;
use health_net::netns::NetNs;
use serde_json::Value;
use tests::bed::{FABRIC, ip};
use tests::frames::{
    Outlet, Party, Scene, Tap, fate_of_received, is_of_host, marked_number, without_tags,
};
use tests::process::run;
use tests::{Bed, Member, Node, PATIENCE, seed, wait_for};

use super::course::{Course, Sought, Totals, Watch, hex, send_batch};
use super::{BATCH, NUMBERS, pinned};

/// Endpoints with this label may neither send nor receive anything.
const DENY_ALL: &str = r#"[{"labels": ["name=deny"], "endpointSelector": {"matchLabels": {"app": "hostile"}},
    "ingress": [{}], "egress": [{}]}]"#;
/// World addresses used in frames.
const WORLD4: &str = "198.51.100.0/24";
const WORLD6: &str = "2001:db8::/32";
/// The identity of health endpoints.
const HEALTH: u32 = 4;

fn hardware(text: &str) -> anyhow::Result<[u8; 6]> {
    let bytes: Result<Vec<u8>, _> = text
        .trim()
        .split(':')
        .map(|byte| u8::from_str_radix(byte, 16))
        .collect();
    let bytes = <[u8; 6]>::try_from(bytes?).ok();
    bytes.with_context(|| format!("no hardware address: {text}"))
}

/// Hardware address and link-local address of a device in a namespace.
fn device(namespace: &NetNs, name: &str) -> anyhow::Result<([u8; 6], Ipv6Addr)> {
    let said =
        namespace.run_in(|| run(Command::new("ip").args(["-j", "address", "show", name])))??;
    let listed: Value = serde_json::from_str(&said.success()?)?;
    let mac = hardware(listed[0]["address"].as_str().context("no address")?)?;
    let addresses = listed[0]["addr_info"].as_array().context("no addresses")?;
    let link = addresses
        .iter()
        .filter_map(|one| one["local"].as_str()?.parse::<Ipv6Addr>().ok())
        .find(Ipv6Addr::is_unicast_link_local);
    // A device without a link-local address sends from the address that it would have.
    let IpAddr::V6(own) = Addr::link_local(mac).to_ip() else {
        bail!("not an IPv6 address");
    };
    Ok((mac, link.unwrap_or(own)))
}

fn addresses(v4: Option<IpAddr>, v6: Option<IpAddr>) -> anyhow::Result<(Ipv4Addr, Ipv6Addr)> {
    match (v4, v6) {
        (Some(IpAddr::V4(v4)), Some(IpAddr::V6(v6))) => Ok((v4, v6)),
        other => bail!("not an address of each IP version: {other:?}"),
    }
}

fn node_party(node: &Node, on: &str) -> anyhow::Result<Party> {
    let (mac, link) = device(&NetNs::open(node.name())?, on)?;
    Ok(Party {
        mac,
        v4: node.ipv4(),
        v6: node.ipv6().context("no IPv6")?,
        link,
    })
}

/// An endpoint, the parties at both ends of its wire, and the namespace where its frames are sent and seen.
pub(super) struct Place {
    pub(super) endpoint: Endpoint,
    pub(super) party: Party,
    /// The host at the other end of the wire.
    host: Party,
    gateway: (Ipv4Addr, Ipv6Addr),
    /// The endpoint's namespace.
    netns: NetNs,
}

impl Place {
    fn new(node: &Node, endpoint: &Endpoint, netns: NetNs) -> anyhow::Result<Self> {
        let (mac, link) = device(&netns, &endpoint.inner_interface)?;
        let (v4, v6) = addresses(endpoint.ipv4, endpoint.ipv6)?;
        Ok(Self {
            party: Party { mac, v4, v6, link },
            host: node_party(node, &endpoint.interface)?,
            gateway: addresses(endpoint.gateway4, endpoint.gateway6)?,
            endpoint: endpoint.clone(),
            netns,
        })
    }

    fn outlet(&self) -> anyhow::Result<Outlet> {
        self.netns
            .run_in(|| Outlet::on(&self.endpoint.inner_interface))?
    }

    fn tap(&self) -> anyhow::Result<Tap> {
        self.netns
            .run_in(|| Tap::of_all(&self.endpoint.inner_interface))?
    }
}

/// A node with three endpoints (one that may neither send nor receive, one without policy, and the health endpoint),
/// and another node.
pub(super) struct Stand {
    pub(super) hostile: Place,
    open: Place,
    pub(super) health: Place,
    findings: Mutex<Vec<String>>,
    _members: [Member; 2],
    bed: Bed,
}

impl Stand {
    pub(super) fn new(flags: &str) -> anyhow::Result<Self> {
        let bed = Bed::builder()
            .nodes(2)
            .ipv6(true)
            .agent_args(flags)
            .start()?;
        bed.wait_all_reachable(PATIENCE)?;
        let (node, far) = (bed.node(1), bed.node(2));
        // Frames from there also carry the hardware addresses of other parties.
        ip(
            FABRIC,
            &format!("link set {} type bridge_slave learning off", far.name()),
        )?;
        for via in far.addresses() {
            let world = if via.is_ipv4() { WORLD4 } else { WORLD6 };
            node.exec(&format!("ip route add {world} via {via}"))?;
        }
        // Imported before any endpoint that it selects exists, so that no state of such an endpoint could let packets
        // pass.
        let folder = tempfile::tempdir()?;
        let file = folder.path().join("policy");
        std::fs::write(&file, DENY_ALL)?;
        let import = format!("policy import {}", file.display());
        node.cli(&import)?.success()?;
        let hostile = Member::on(node, "hostile", "--label app=hostile")?;
        let open = Member::on(node, "open", "--label app=open")?;
        for member in [&hostile, &open] {
            // Allows sending frames that are too long for the host.
            ip(
                &member.name,
                &format!("link set {} mtu 9000", member.endpoint.inner_interface),
            )?;
        }
        wait_for("policy to be enforced", PATIENCE, || {
            let listed: Vec<Endpoint> = serde_json::from_value(node.listing("endpoint list")?)?;
            Ok(listed.iter().all(|one| one.state == "ready").then_some(()))
        })?;
        let listed: Vec<Endpoint> = serde_json::from_value(node.listing("endpoint list")?)?;
        let health = listed.iter().find(|one| one.identity == HEALTH);
        let health = health.context("there is no health endpoint")?;
        let place = |member: &Member| {
            let netns = NetNs::open(&member.name)?;
            Place::new(node, &member.endpoint, netns)
        };
        let stand = Self {
            hostile: place(&hostile)?,
            open: place(&open)?,
            health: Place::new(node, health, NetNs::at(&node.endpoint_netns())?)?,
            findings: Mutex::default(),
            _members: [hostile, open],
            bed,
        };
        // Resolve neighbours now, because packets would otherwise have to wait for them.
        for address in stand
            .open
            .endpoint
            .ipv4
            .iter()
            .chain(&stand.open.endpoint.ipv6)
        {
            wait_for("the endpoint", PATIENCE, || {
                Ok(stand.node().pings(*address)?.then_some(()))
            })?;
        }
        Ok(stand)
    }

    pub(super) fn node(&self) -> &Node {
        self.bed.node(1)
    }

    fn watch(&self, name: &'static str, place: &Place) -> anyhow::Result<Watch> {
        Ok(Watch {
            name,
            tap: place.tap()?,
            fence: self
                .node()
                .run_in(|| Outlet::on(&place.endpoint.interface))??,
            mac: place.party.mac,
        })
    }

    fn watch_far(&self) -> anyhow::Result<Watch> {
        let far = self.bed.node(2);
        Ok(Watch {
            name: "the other node",
            tap: far.run_in(|| Tap::of_all("eth0"))??,
            fence: self.node().run_in(|| Outlet::on("eth0"))??,
            mac: node_party(far, "eth0")?.mac,
        })
    }

    /// Creates a course of frames from an endpoint.
    pub(super) fn course(
        &self,
        name: &'static str,
        index: u64,
        sender: &Place,
        sought: Sought,
    ) -> anyhow::Result<Course<'_>> {
        let far = node_party(self.bed.node(2), "eth0")?;
        let mut others = vec![self.watch_far()?];
        let mut parties = Vec::new();
        for (name, place) in [
            ("the hostile endpoint", &self.hostile),
            ("the open endpoint", &self.open),
            ("the health endpoint", &self.health),
        ] {
            if place.endpoint.id != sender.endpoint.id {
                parties.push(place.party);
                if place.endpoint.id != self.hostile.endpoint.id {
                    others.push(self.watch(name, place)?);
                }
            }
        }
        parties.push(far);
        let interface = &sender.endpoint.interface;
        Ok(Course {
            name,
            scene: Scene {
                own: sender.party,
                peer: sender.host,
                gateway: sender.gateway,
                others: parties,
            },
            outlet: sender.outlet()?,
            landed: self.node().run_in(|| Tap::behind_programs(interface))??,
            is_enforced: sought == Sought::Nothing,
            victim: self.watch("the hostile endpoint", &self.hostile)?,
            others,
            sought,
            stand: self,
            first: index * NUMBERS,
        })
    }

    pub(super) fn of_hostile(&self, name: &'static str, index: u64) -> anyhow::Result<Course<'_>> {
        self.course(name, index, &self.hostile, Sought::Nothing)
    }

    /// Sends frames to the endpoint that may receive nothing: from an endpoint without policy, from another node, and
    /// from the host itself.
    pub(super) fn to_hostile(&self, index: u64, count: u64) -> anyhow::Result<()> {
        let open = self.course("from the open endpoint", index, &self.open, Sought::Others)?;
        let totals = pinned(|| open.run(|sent| sent < count))?;
        for watch in &open.others {
            ensure!(
                totals.seen.get(watch.name) > Some(&(count / 1000)),
                "{} sees too little: {totals:?}",
                watch.name
            );
        }
        self.send_from_far(index + 1, count)?;
        self.send_from_host(index + 2, count)
    }

    fn send_from_far(&self, index: u64, count: u64) -> anyhow::Result<()> {
        let node = node_party(self.node(), "eth0")?;
        let far = node_party(self.bed.node(2), "eth0")?;
        let scene = Scene {
            own: far,
            peer: node,
            gateway: (node.v4, node.v6),
            others: vec![self.hostile.party, self.open.party, self.health.party],
        };
        let outlet = self.bed.node(2).run_in(|| Outlet::on("eth0"))??;
        // The fence crosses the uplink before it crosses the endpoint's wire.
        let uplink = Watch {
            name: "the uplink",
            tap: self.node().run_in(|| Tap::of_all("eth0"))??,
            fence: self.bed.node(2).run_in(|| Outlet::on("eth0"))??,
            mac: node.mac,
        };
        let open = self.watch("the open endpoint", &self.open)?;
        let victim = self.watch("the hostile endpoint", &self.hostile)?;
        let first = index * NUMBERS;
        let mut totals = Totals::default();
        pinned(|| {
            for number in (first..first + count).step_by(BATCH as usize) {
                send_batch(&outlet, &scene, number, &mut totals)?;
                totals.landed += uplink.arrivals(number)?.len() as u64;
                for arrived in open.arrivals(number)? {
                    if marked_number(seed(), &arrived).is_some() {
                        *totals.seen.entry(open.name).or_insert(0) += 1;
                    }
                }
                for arrived in victim.arrivals(number)? {
                    let number = marked_number(seed(), &arrived);
                    if number.is_some() || !is_of_host(&arrived) {
                        totals.find(format!("it got {} of {number:?}", hex(&arrived)));
                    }
                }
            }
            self.note("from the other node", &mut totals);
            let seen = totals.seen.get(open.name);
            ensure!(seen > Some(&(count / 1000)), "too little: {totals:?}");
            Ok(())
        })
    }

    fn send_from_host(&self, index: u64, count: u64) -> anyhow::Result<()> {
        let mut course = self.of_hostile("from the host", index)?;
        let scene = Scene {
            own: self.hostile.host,
            peer: self.hostile.party,
            ..course.scene.clone()
        };
        course.scene = scene.clone();
        let interface = &self.hostile.endpoint.interface;
        let outlet = self.node().run_in(|| Outlet::on(interface))??;
        let mut totals = Totals::default();
        pinned(|| {
            for number in (course.first..course.first + count).step_by(BATCH as usize) {
                let sent = send_batch(&outlet, &scene, number, &mut totals)?;
                let mut arrived = course.victim.arrivals(number)?;
                totals.landed += arrived.len() as u64;
                // Tagged frames pass, and are seen without their first tag.
                let (whole, tagged): (Vec<_>, Vec<_>) = sent.into_iter().partition(|(_, frame)| {
                    !matches!(frame.bytes[12..14], [0x81, 0] | [0x88, 0xa8])
                });
                let plain: BTreeSet<&[u8]> =
                    whole.iter().map(|(_, frame)| &frame.bytes[..]).collect();
                let shorter: BTreeSet<Vec<u8>> = tagged
                    .iter()
                    .flat_map(|(_, frame)| without_tags(&frame.bytes))
                    .collect();
                arrived.retain(|bytes| plain.contains(&bytes[..]) || !shorter.contains(bytes));
                course.compare(
                    &whole,
                    &arrived,
                    |bytes| fate_of_received(&scene, bytes),
                    &mut totals,
                );
            }
            self.note("from the host", &mut totals);
            Ok(())
        })
    }

    /// Prints the totals of a course, and keeps its findings for the end.
    pub(super) fn note(&self, course: &str, totals: &mut Totals) {
        println!("{course}: {totals:?}");
        let found = totals.findings.drain(..);
        let mut findings = self.findings.lock().unwrap_or_else(PoisonError::into_inner);
        findings.extend(found.map(|what| format!("{course}: {what}")));
    }

    pub(super) fn check_findings(&self) -> anyhow::Result<()> {
        let findings = self.findings.lock().unwrap_or_else(PoisonError::into_inner);
        let seed = seed();
        ensure!(findings.is_empty(), "seed {seed}:\n{}", findings.join("\n"));
        Ok(())
    }

    /// Checks that the only neighbour the host has learned at the hostile endpoint is that endpoint itself.
    pub(super) fn check_neighbours(&self) -> anyhow::Result<()> {
        let command = format!("ip -j neigh show dev {}", self.hostile.endpoint.interface);
        let listed: Value = serde_json::from_str(&self.node().exec(&command)?)?;
        for row in listed.as_array().context("no list")? {
            let address: IpAddr = row["dst"].as_str().context("no address")?.parse()?;
            let own = self.hostile.party;
            let is_link = matches!(address, IpAddr::V6(v6) if v6.is_unicast_link_local());
            ensure!(
                is_link || address == own.v4 || address == own.v6,
                "the host took the endpoint for {row}"
            );
        }
        Ok(())
    }
}

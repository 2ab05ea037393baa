//! Hostile frames, made of a seed, on the wires of real endpoints: nothing arrives beyond what docs/policy.md lists
//! under "What passes without policy", wherever it is looked for. Where policy lets them, the same frames arrive.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt::Write as _;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;

use anyhow::{Context as _, bail, ensure};
use health_common::addr::Addr;
use health_model::api::Endpoint;
use health_net::netns::NetNs;
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::sys::signal::Signal;
use nix::unistd::Pid;
use serde_json::Value;
use tests::bed::{FABRIC, ip};
use tests::frames::{
    ETHERTYPES, Fate, Frame, Outlet, Party, Scene, Tap, fate_of_received, fate_of_sent, frame,
    is_of_host, marked_number, names_address, without_tags,
};
use tests::packet::{ARP, arp, ethernet};
use tests::process::run;
use tests::{Bed, Member, Node, PATIENCE, is_long, seed, wait_for};

/// Endpoints with this label may neither send nor be sent anything.
const DENY_ALL: &str = r#"[{"labels": ["name=deny"], "endpointSelector": {"matchLabels": {"app": "hostile"}},
    "ingress": [{}], "egress": [{}]}]"#;
/// Frames between two looks at what has arrived; fewer than the kernel queues.
const BATCH: u64 = 100;
/// Numbers of frames of one course; those of the next begin behind.
const NUMBERS: u64 = 1 << 24;
/// A frame with more bytes does not get through a device, unless it is cut.
const LONGEST: usize = 1514;
/// Findings that are told.
const FINDINGS_MAX: usize = 12;
/// Addresses of the world in frames.
const WORLD4: &str = "198.51.100.0/24";
const WORLD6: &str = "2001:db8::/32";
/// The identity of health endpoints.
const HEALTH: u32 = 4;
/// Nobody's address.
const FENCE: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 1);
const FENCE_MAC: [u8; 6] = [2, 0, 0, 0, 0xfe, 1];

/// Frames of the main course; each other one has a quarter.
fn frames() -> u64 {
    if is_long() { 1_000_000 } else { 10_000 }
}

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
    // A device without one sends under the one that it would have.
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

/// An endpoint, what is at both ends of its wire, and where its frames are sent and seen.
struct Place {
    endpoint: Endpoint,
    party: Party,
    /// The host at the other end.
    host: Party,
    gateway: (Ipv4Addr, Ipv6Addr),
    /// In the endpoint.
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

/// A place where frames can be seen that its own outlet, at the other end of its wire, reaches last.
struct Watch {
    name: &'static str,
    tap: Tap,
    fence: Outlet,
    mac: [u8; 6],
}

impl Watch {
    /// All that arrived before a fence, which is sent now: it comes behind all that the kernel has queued.
    fn arrivals(&self, fence: u64) -> anyhow::Result<Vec<Vec<u8>>> {
        let last = arp(2, (FENCE_MAC, FENCE), (self.mac, FENCE));
        let last = [&last[..], &fence.to_be_bytes()].concat();
        let last = ethernet(self.mac, FENCE_MAC, ARP, &last);
        self.fence.send_plain(&last)?;
        self.tap.until(&last).with_context(|| self.name)
    }
}

/// What is looked for of a sender's frames, apart from what is behind the programs at its own wire.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Sought {
    /// Nothing of it may arrive anywhere.
    Nothing,
    /// It arrives with others, but nothing with the endpoint that may be sent nothing.
    Others,
}

/// Frames of one sender.
struct Course<'a> {
    name: &'static str,
    scene: Scene,
    outlet: Outlet,
    /// Behind the programs at the other end of the sender's wire.
    landed: Vec<Tap>,
    /// Who judges these frames, if policy does.
    is_enforced: bool,
    /// The endpoint that may be sent nothing.
    victim: Watch,
    others: Vec<Watch>,
    sought: Sought,
    stand: &'a Stand,
    /// The number of the first frame.
    first: u64,
}

/// What came of the frames of a course.
#[derive(Debug, Default)]
struct Totals {
    sent: u64,
    refused_by_kernel: u64,
    fates: BTreeMap<Fate, u64>,
    landed: u64,
    /// By where they were seen.
    seen: BTreeMap<&'static str, u64>,
    findings: Vec<String>,
}

impl Totals {
    fn find(&mut self, what: String) {
        if self.findings.len() < FINDINGS_MAX {
            self.findings.push(what);
        }
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

impl Course<'_> {
    /// Sends frames until `goes_on` says no, on one processor, so that none overtakes another.
    fn run(&self, mut goes_on: impl FnMut(u64) -> bool) -> anyhow::Result<Totals> {
        let mut totals = Totals::default();
        let mut number = 0;
        while goes_on(number) {
            self.batch(self.first + number, &mut totals)
                .with_context(|| format!("{}, behind frame {number}", self.name))?;
            number += BATCH;
        }
        self.stand.note(self.name, &mut totals);
        Ok(totals)
    }

    fn batch(&self, first: u64, totals: &mut Totals) -> anyhow::Result<()> {
        let mut sent: Vec<(u64, Frame)> = Vec::new();
        for number in first..first + BATCH {
            let frame = frame(&self.scene, seed(), number);
            if self.outlet.send(&frame)? {
                sent.push((number, frame));
            } else {
                totals.refused_by_kernel += 1;
            }
        }
        totals.sent += sent.len() as u64;
        self.check_landed(first, &sent, totals)?;
        for arrived in self.victim.arrivals(first)? {
            // The datapath turns a question into its answer, with all that is behind it.
            let is_arp = arrived[12..14] == ARP.to_be_bytes();
            let number = self.number(&arrived).filter(|_| !is_arp);
            if number.is_some() || !is_of_host(&arrived) {
                totals.find(format!(
                    "{} got {} of {number:?}",
                    self.victim.name,
                    hex(&arrived)
                ));
            }
        }
        for watch in &self.others {
            for arrived in watch.arrivals(first)? {
                let number = self.number(&arrived);
                if number.is_some() {
                    *totals.seen.entry(watch.name).or_insert(0) += 1;
                }
                let hostile = self.stand.hostile.party;
                let is_named = [hostile.v4.into(), hostile.v6.into()]
                    .iter()
                    .any(|address| names_address(&arrived, *address));
                if self.sought == Sought::Nothing && (number.is_some() || is_named) {
                    totals.find(format!(
                        "{} got {} of {number:?}",
                        watch.name,
                        hex(&arrived)
                    ));
                }
            }
        }
        Ok(())
    }

    /// The number of this course's frame that one stems from. Errors about fragments of earlier courses come when
    /// those have waited for the rest of their packets in vain.
    fn number(&self, bytes: &[u8]) -> Option<u64> {
        let number = marked_number(seed(), bytes)?.into();
        (self.first..self.first + NUMBERS)
            .contains(&number)
            .then_some(number)
    }

    /// What the programs at the sender's wire have let pass, and nothing else, is behind them.
    fn check_landed(
        &self,
        first: u64,
        sent: &[(u64, Frame)],
        totals: &mut Totals,
    ) -> anyhow::Result<()> {
        let own = self.scene.own;
        let fence = arp(2, (own.mac, own.v4), (self.scene.peer.mac, FENCE));
        let fence = [&fence[..], &first.to_be_bytes()].concat();
        let fence = ethernet(self.scene.peer.mac, own.mac, ARP, &fence);
        self.outlet.send_plain(&fence)?;
        let at_arp = ETHERTYPES.iter().position(|one| *one == ARP);
        let at_arp = at_arp.context("nothing is seen of ARP")?;
        let mut landed = self.landed[at_arp].until(&fence)?;
        for (at, tap) in self.landed.iter().enumerate() {
            if at != at_arp {
                landed.extend(tap.drain()?);
            }
        }
        totals.landed += landed.len() as u64;
        let fate_of = |bytes: &[u8]| fate_of_sent(&self.scene, bytes);
        self.compare(sent, &landed, fate_of, totals);
        Ok(())
    }

    /// Compares what arrived, unchanged, with what is to become of it.
    fn compare(
        &self,
        sent: &[(u64, Frame)],
        arrived: &[Vec<u8>],
        fate_of: impl Fn(&[u8]) -> Fate,
        totals: &mut Totals,
    ) {
        let mut numbers: HashMap<&[u8], u64> = HashMap::new();
        let mut shortened: HashMap<Vec<u8>, u64> = HashMap::new();
        for (number, frame) in sent {
            numbers.insert(&frame.bytes, *number);
            for shorter in without_tags(&frame.bytes) {
                shortened.insert(shorter, *number);
            }
        }
        let may_pass = |fate| match fate {
            Fate::Passes => true,
            Fate::Judged | Fate::Odd => !self.is_enforced,
            Fate::Dropped | Fate::Answered => false,
        };
        for bytes in arrived {
            let number = numbers.get(&bytes[..]);
            let fate = fate_of(bytes);
            match shortened.get(bytes) {
                Some(number) if !numbers.contains_key(&bytes[..]) => totals.find(format!(
                    "frame {number} passed without its tags: {}",
                    hex(bytes)
                )),
                _ if !may_pass(fate) => {
                    totals.find(format!("frame {number:?} passed, {fate:?}: {}", hex(bytes)));
                }
                _ => {}
            }
        }
        let arrived: BTreeSet<&[u8]> = arrived.iter().map(|bytes| &bytes[..]).collect();
        for (number, frame) in sent {
            let fate = fate_of(&frame.bytes);
            *totals.fates.entry(fate).or_insert(0) += 1;
            let is_whole = frame.segmentation.is_none() && frame.bytes.len() <= LONGEST;
            if is_whole
                && fate != Fate::Odd
                && may_pass(fate)
                && !arrived.contains(&frame.bytes[..])
            {
                totals.find(format!(
                    "frame {number} did not pass, {fate:?}: {}",
                    hex(&frame.bytes)
                ));
            }
        }
    }
}

/// A node with an endpoint that may send and be sent nothing, one without policy, the health endpoint; another node.
struct Stand {
    hostile: Place,
    open: Place,
    health: Place,
    findings: Mutex<Vec<String>>,
    _members: [Member; 2],
    bed: Bed,
}

impl Stand {
    fn new(flags: &str) -> anyhow::Result<Self> {
        let bed = Bed::builder()
            .nodes(2)
            .ipv6(true)
            .agent_args(flags)
            .start()?;
        bed.wait_all_reachable(PATIENCE)?;
        let (node, far) = (bed.node(1), bed.node(2));
        // Frames from there have others' hardware addresses too.
        ip(
            FABRIC,
            &format!("link set {} type bridge_slave learning off", far.name()),
        )?;
        for via in far.addresses() {
            let world = if via.is_ipv4() { WORLD4 } else { WORLD6 };
            node.exec(&format!("ip route add {world} via {via}"))?;
        }
        // Before there is an endpoint that it selects: nothing is known of one that might be let pass.
        let folder = tempfile::tempdir()?;
        let file = folder.path().join("policy");
        std::fs::write(&file, DENY_ALL)?;
        let import = format!("policy import {}", file.display());
        node.cli(&import)?.success()?;
        let hostile = Member::on(node, "hostile", "--label app=hostile")?;
        let open = Member::on(node, "open", "--label app=open")?;
        for member in [&hostile, &open] {
            // So that frames are sent which are too long for the host.
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
        // Neighbours that packets would have to wait for.
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

    fn node(&self) -> &Node {
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

    /// Frames of an endpoint.
    fn course(
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

    fn of_hostile(&self, name: &'static str, index: u64) -> anyhow::Result<Course<'_>> {
        self.course(name, index, &self.hostile, Sought::Nothing)
    }

    /// Frames to the endpoint that may be sent nothing: from an endpoint without policy, from another node, and from
    /// the host itself.
    fn to_hostile(&self, index: u64, count: u64) -> anyhow::Result<()> {
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
                for number in number..number + BATCH {
                    totals.sent += u64::from(outlet.send(&frame(&scene, seed(), number))?);
                }
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
                let mut sent = Vec::new();
                for number in number..number + BATCH {
                    let frame = frame(&scene, seed(), number);
                    if outlet.send(&frame)? {
                        sent.push((number, frame));
                    }
                }
                totals.sent += sent.len() as u64;
                let mut arrived = course.victim.arrivals(number)?;
                totals.landed += arrived.len() as u64;
                // Tagged frames pass, and are seen without the first tag.
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

    /// Tells what came of a course, and keeps what was found for the end.
    fn note(&self, course: &str, totals: &mut Totals) {
        println!("{course}: {totals:?}");
        let found = totals.findings.drain(..);
        let mut findings = self.findings.lock().unwrap_or_else(PoisonError::into_inner);
        findings.extend(found.map(|what| format!("{course}: {what}")));
    }

    fn check_findings(&self) -> anyhow::Result<()> {
        let findings = self.findings.lock().unwrap_or_else(PoisonError::into_inner);
        let seed = seed();
        ensure!(findings.is_empty(), "seed {seed}:\n{}", findings.join("\n"));
        Ok(())
    }

    /// The host has learnt of no neighbour at the hostile endpoint but that endpoint.
    fn check_neighbours(&self) -> anyhow::Result<()> {
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

/// Does something on a thread that stays on one processor: frames that one sends there are received in their order.
fn pinned<T: Send>(work: impl FnOnce() -> anyhow::Result<T> + Send) -> anyhow::Result<T> {
    thread::scope(|scope| {
        let thread = scope.spawn(|| {
            let own = Pid::from_raw(0);
            let allowed = sched_getaffinity(own)?;
            let first = (0..CpuSet::count()).find(|&cpu| allowed.is_set(cpu) == Ok(true));
            let mut only = CpuSet::new();
            only.set(first.context("no processor")?)?;
            sched_setaffinity(own, &only)?;
            work()
        });
        match thread.join() {
            Ok(done) => done,
            Err(panic) => std::panic::resume_unwind(panic),
        }
    })
}

fn nothing_passes(flags: &str) -> anyhow::Result<()> {
    let stand = Stand::new(flags)?;
    let node = stand.node();
    let (all, some) = (frames(), frames() / 4);
    stand.to_hostile(0, some)?;
    let hostile = stand.of_hostile("from the hostile endpoint", 3)?;
    let totals = pinned(|| hostile.run(|sent| sent < all))?;
    for fate in [Fate::Passes, Fate::Judged, Fate::Dropped, Fate::Answered] {
        let count = totals.fates.get(&fate);
        ensure!(count > Some(&(all / 500)), "few of {fate:?}: {totals:?}");
    }
    stand.check_neighbours()?;
    let health = stand.course("from the health endpoint", 4, &stand.health, Sought::Others)?;
    pinned(|| health.run(|sent| sent < some))?;

    node.kill_agent(Signal::SIGKILL)?;
    let alone = stand.of_hostile("from the hostile endpoint without an agent", 5)?;
    pinned(|| alone.run(|sent| sent < some))?;
    stand.to_hostile(6, some)?;

    let is_over = AtomicBool::new(false);
    let course = stand.of_hostile("from the hostile endpoint through restarts", 9)?;
    thread::scope(|scope| {
        let sending = scope.spawn(|| {
            pinned(|| course.run(|sent| sent < some || !is_over.load(Ordering::Relaxed)))
        });
        let restarted = (|| {
            node.take_over(None)?;
            for signal in [Signal::SIGKILL, Signal::SIGTERM] {
                node.kill_agent(signal)?;
                node.take_over(None)?;
            }
            anyhow::Ok(())
        })();
        is_over.store(true, Ordering::Relaxed);
        let sent = match sending.join() {
            Ok(sent) => sent,
            Err(panic) => std::panic::resume_unwind(panic),
        };
        restarted?;
        sent
    })?;
    stand.to_hostile(10, some)?;
    stand.check_neighbours()?;
    stand.check_findings()
}

#[test]
#[ignore = "needs root"]
fn nothing_passes_but_what_links_need() -> anyhow::Result<()> {
    nothing_passes("--attach-mode auto --policy-allow-localhost false")
}

#[test]
#[ignore = "needs root"]
fn nothing_passes_but_what_links_need_with_clsact() -> anyhow::Result<()> {
    nothing_passes("--attach-mode clsact --policy-allow-localhost false")
}

//! Unused addresses in a node's pod CIDRs: senders get an ICMP error, and packets do not bounce between the node and
//! its router.

use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use health_net::netns::NetNs;
use nix::sys::signal::Signal;
use nix::sys::socket::{setsockopt, sockopt};
use tests::bed::{ROUTER, ip};
use tests::outside::{self, FAR};
use tests::process::run;
use tests::{Bed, Member, Node, PATIENCE, wait_for};

/// Unused addresses in the first node's pod CIDRs. Endpoints get random addresses, but hardly ever these.
const FREE: [&str; 2] = ["10.244.1.253", "fd00:10:244:1::fffd"];

/// Number of packets that the router has forwarded.
fn forwarded(like: IpAddr) -> anyhow::Result<u64> {
    let counter = if like.is_ipv4() {
        "IpForwDatagrams"
    } else {
        "Ip6OutForwDatagrams"
    };
    let count = || run(Command::new("nstat").args(["-asz", counter]));
    let said = NetNs::open(ROUTER)?.run_in(count)??.success()?;
    let mut lines = said.lines().filter_map(|line| line.strip_prefix(counter));
    let count = lines.next().and_then(|line| line.split_whitespace().next());
    Ok(count.context("no count")?.parse()?)
}

/// Sends a datagram to an address from outside, and waits for the ICMP error about it.
fn gets_an_error(address: IpAddr) -> anyhow::Result<()> {
    let any: IpAddr = match address {
        IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let netns = NetNs::open(FAR)?;
    let socket = netns.run_in(|| {
        let socket = UdpSocket::bind((any, 0))?;
        socket.connect((address, 7))?;
        socket.set_read_timeout(Some(Duration::from_secs(1)))?;
        // Without this option, the kernel hides transient errors from a process.
        match address {
            IpAddr::V4(_) => setsockopt(&socket, sockopt::Ipv4RecvErr, &true)?,
            IpAddr::V6(_) => setsockopt(&socket, sockopt::Ipv6RecvErr, &true)?,
        }
        std::io::Result::Ok(socket)
    })??;
    let before = forwarded(address)?;
    let mut sent = 0;
    wait_for("an error about a datagram", PATIENCE, || {
        sent += 1;
        match socket
            .send(b"anybody?")
            .and_then(|_| socket.recv(&mut [0; 8]))
        {
            Err(error) => match error.kind() {
                ErrorKind::HostUnreachable | ErrorKind::NetworkUnreachable => Ok(Some(())),
                ErrorKind::WouldBlock => Ok(None),
                _ => Err(error.into()),
            },
            Ok(_) => anyhow::bail!("somebody answers"),
        }
    })?;
    // The router has forwarded each datagram once, and the errors about them.
    let forwarded = forwarded(address)? - before;
    ensure!(forwarded <= 2 * sent, "{address}: {forwarded} for {sent}");
    Ok(())
}

fn routes(node: &Node) -> anyhow::Result<Vec<String>> {
    let mut found = Vec::new();
    for family in ["-4", "-6"] {
        let shown = node.exec(&format!("ip {family} route show type unreachable proto 72"))?;
        found.extend(shown.lines().map(|line| line.trim().to_owned()));
    }
    Ok(found)
}

#[test]
#[ignore = "needs root"]
fn who_sends_to_a_free_address_gets_an_error() -> anyhow::Result<()> {
    let bed = Bed::builder().nodes(1).ipv6(true).start()?;
    bed.wait_all_reachable(PATIENCE)?;
    let node = bed.node(1);
    outside::add(node)?;
    for (cidr, via) in node.pod_cidrs().iter().zip(node.addresses()) {
        ip(ROUTER, &format!("route add {cidr} via {via}"))?;
    }
    let free = FREE.map(|text| text.parse::<IpAddr>().expect(text));
    wait_for("the routes", PATIENCE, || {
        Ok((routes(node)?.len() == 2).then_some(()))
    })?;
    for address in free {
        gets_an_error(address)?;
    }
    // Endpoints are still reachable.
    let member = Member::on(node, "one", "--label app=one")?;
    for address in member.addresses() {
        wait_for("the endpoint", PATIENCE, || {
            Ok(node.pings(address)?.then_some(()))
        })?;
    }

    // The routes stay without an agent. The next agent adds missing routes beside those of others.
    node.kill_agent(Signal::SIGKILL)?;
    ensure!(routes(node)?.len() == 2, "{:?}", routes(node)?);
    gets_an_error(free[0])?;
    for cidr in node.pod_cidrs() {
        ip(
            node.name(),
            &format!("route del unreachable {cidr} proto 72"),
        )?;
        ip(
            node.name(),
            &format!("route add blackhole {cidr} metric 77"),
        )?;
    }
    node.take_over(None)?;
    wait_for("the routes again", PATIENCE, || {
        Ok((routes(node)?.len() == 2).then_some(()))
    })?;
    let foreign = node.exec("ip -4 route show type blackhole")?;
    ensure!(foreign.contains("metric 77"), "{foreign}");
    Ok(())
}

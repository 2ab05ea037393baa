//! ICMP errors about service flows, and spoofed sources.

use std::fs;
use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, UdpSocket};

use anyhow::{Context as _, ensure};
use health_common::metrics::Reason;
use tests::bed::{add_address, command_in, ip};
use tests::process::run;
use tests::served::{Answer, Backend, Connection, Datagrams, ServiceManifest, ServicePort};
use tests::{Member, PATIENCE, wait_for};

use super::outside::node_port;
use super::{Row, SOON, Stand, counted, targets, wait_answered_by};

pub(super) const ROWS: &[Row] = &[
    ("an_error_of_a_backend_gets_to_the_client", port_unreachable),
    ("a_client_learns_of_a_smaller_path", smaller_path),
    ("nobody_has_the_address_of_a_service", spoofed),
];

pub(super) const EBPF_ROWS: &[Row] = &[
    (
        "a_client_that_its_backend_sees_by_another_port_learns_of_a_smaller_path",
        smaller_path_by_another_port,
    ),
    (
        "an_endpoint_that_is_its_own_backend_learns_that_nobody_listens",
        own_port_unreachable,
    ),
];

/// A port on which no process listens.
const NOBODY: u16 = 9;

/// A backend's ICMP error reaches the client as an error about the service.
fn port_unreachable(stand: &Stand, number: u8) -> anyhow::Result<()> {
    let [client, _] = &stand.clients;
    for (backend, number) in stand.backends[..2].iter().zip([number, number + 100]) {
        let name = format!("nobody-{}", backend.name);
        let mut service = ServiceManifest::new(&name, number).of([backend]);
        service.ports = vec![
            ServicePort::http(80),
            ServicePort {
                target: NOBODY,
                ..ServicePort::datagrams(80)
            },
        ];
        stand.write(&service)?;
        for target in targets(&service) {
            wait_answered_by(&client.name, target, &[&backend.name])?;
            let before = unheard(backend, target)?;
            wait_for(
                "datagrams to be refused",
                PATIENCE,
                || match Datagrams::open(&client.name, target)?.ask(SOON) {
                    Err(error) if error.kind() == ErrorKind::ConnectionRefused => {
                        Ok((unheard(backend, target)? > before).then_some(()))
                    }
                    other => anyhow::bail!("{target}: {other:?}"),
                },
            )?;
        }
    }
    Ok(())
}

/// Number of datagrams that arrived at closed ports of a backend.
fn unheard(backend: &Backend, like: SocketAddr) -> anyhow::Result<u64> {
    let read = |file: &str| {
        let path = format!("/proc/thread-self/net/{file}");
        let text = backend.member.netns.run_in(|| fs::read_to_string(&path))?;
        text.with_context(|| format!("cannot read {path}"))
    };
    if like.is_ipv6() {
        let text = read("snmp6")?;
        let mut lines = text.lines();
        let line = lines.find_map(|line| line.strip_prefix("Udp6NoPorts"));
        return Ok(line.context("no count")?.trim().parse()?);
    }
    let text = read("snmp")?;
    let mut lines = text.lines().filter_map(|line| line.strip_prefix("Udp: "));
    let [names, values] = [(); 2].map(|()| lines.next().unwrap_or_default().split(' '));
    let mut both = names.zip(values);
    let (_, count) = both
        .find(|(name, _)| *name == "NoPorts")
        .context("no count")?;
    Ok(count.parse()?)
}

/// The backend is its own client, at a ClusterIP and at a NodePort.
fn own_port_unreachable(stand: &Stand, number: u8) -> anyhow::Result<()> {
    let backend = &stand.backends[0];
    let mut service = ServiceManifest::new("nobody-at-home", number).of([backend]);
    service.ports = vec![
        ServicePort::http(80),
        ServicePort {
            target: NOBODY,
            ..ServicePort::datagrams(80)
        },
    ];
    let service = service.with_node_port(node_port(number));
    stand.write(&service)?;
    let node_addresses = stand.bed.node(1).addresses().into_iter();
    let node_ports = node_addresses.map(|ip| SocketAddr::new(ip, node_port(number)));
    let own = &backend.member.name;
    for target in targets(&service).into_iter().chain(node_ports) {
        wait_answered_by(own, target, &[&backend.name])?;
        let before = unheard(backend, target)?;
        wait_for(
            "datagrams to be refused",
            PATIENCE,
            || match Datagrams::open(own, target)?.ask(SOON) {
                Err(error) if error.kind() == ErrorKind::ConnectionRefused => Ok(Some(())),
                other => anyhow::bail!("{target}: {other:?}"),
            },
        )?;
        ensure!(unheard(backend, target)? > before, "{target}");
    }
    Ok(())
}

const SMALLER: u32 = 1300;

/// A packet that the node forwards to a backend exceeds the MTU, and the client gets an error about the service.
fn smaller_path(stand: &Stand, number: u8) -> anyhow::Result<()> {
    let backend = &stand.backends[2];
    learn_smaller_path(stand, backend, number, |client, target, _| {
        Connection::open(&client.name, target)?.upload(1 << 20)
    })
}

/// The same test while the client also has a direct connection to the backend between the same ports.
fn smaller_path_by_another_port(stand: &Stand, number: u8) -> anyhow::Result<()> {
    let mut port = 21_000 + 10 * u16::from(number);
    let backend = &stand.backends[1];
    learn_smaller_path(stand, backend, number, |client, target, own| {
        port += 1;
        let mut first = Connection::open_from(&client.name, port, own)?;
        first.ask()?;
        Connection::open_from(&client.name, port, target)?.upload(1 << 20)
    })
}

/// Makes a client send packets through a service that exceed the path MTU to the backend. The last argument of `send`
/// is the backend's own address.
fn learn_smaller_path(
    stand: &Stand,
    backend: &Backend,
    number: u8,
    mut send: impl FnMut(&Member, SocketAddr, SocketAddr) -> anyhow::Result<Answer>,
) -> anyhow::Result<()> {
    let service = ServiceManifest::new(&format!("narrow-{number}"), number).of([backend]);
    stand.write(&service)?;
    let [client, _] = &stand.clients;
    let (here, there) = (stand.bed.node(1), stand.bed.node(2));
    for target in targets(&service) {
        wait_answered_by(&client.name, target, &[&backend.name])?;
    }
    let addresses = backend.member.addresses();
    for (to, via) in addresses.iter().zip(there.addresses()) {
        let route = format!("route add {to} via {via} dev eth0 mtu {SMALLER}");
        ip(here.name(), &route)?;
    }
    let mut learn = || -> anyhow::Result<()> {
        for (target, own) in targets(&service).into_iter().zip(backend.addresses()) {
            ensure!(
                known_mtu(client, target.ip())? != Some(SMALLER),
                "known before"
            );
            send(client, target, own)?;
            let mtu = known_mtu(client, target.ip())?;
            ensure!(mtu == Some(SMALLER), "{target}: learned {mtu:?}");
        }
        Ok(())
    };
    let learned = learn();
    for to in addresses {
        ip(here.name(), &format!("route delete {to}"))?;
    }
    learned
}

/// The path MTU to a destination that the kernel has learned, if any.
fn known_mtu(client: &Member, to: IpAddr) -> anyhow::Result<Option<u32>> {
    let mut route = command_in(&client.name, "ip");
    let route = run(route.args(["route", "get", &to.to_string()]))?.success()?;
    let mut words = route.split_whitespace();
    let at = words.find(|word| *word == "mtu");
    Ok(at.and_then(|_| words.next()?.parse().ok()))
}

/// An endpoint must not use a service's address as its source.
fn spoofed(stand: &Stand, number: u8) -> anyhow::Result<()> {
    let service = stand.service("spoofed", number);
    stand.write(&service)?;
    let [other, liar] = &stand.clients;
    let node = stand.node_of(liar);
    ip(&liar.name, "link set lo up")?;
    for target in targets(&service) {
        wait_answered_by(&other.name, target, &["web-1", "web-2", "web-3"])?;
        let own = target.ip();
        add_address(&liar.name, &own.to_string(), "lo")?;
        let socket = liar.netns.run_in(|| UdpSocket::bind((own, 80)))??;
        let mut victims = other.addresses().into_iter();
        let victim = victims.find(|ip| ip.is_ipv4() == own.is_ipv4());
        let victim = victim.context("no address of this IP version")?;
        let listener = other.netns.run_in(|| UdpSocket::bind((victim, 4000)))??;
        listener.set_read_timeout(Some(SOON))?;
        let before = counted(node, Reason::InvalidSource)?;
        socket.send_to(b"lie", (victim, 4000))?;
        wait_for("the packet to be dropped", PATIENCE, || {
            Ok((counted(node, Reason::InvalidSource)? > before).then_some(()))
        })?;
        let heard = listener.recv_from(&mut [0; 16]);
        ensure!(heard.is_err(), "{heard:?}");
        ip(&liar.name, &format!("address delete {own} dev lo"))?;
    }
    Ok(())
}

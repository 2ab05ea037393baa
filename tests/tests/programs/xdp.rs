//! `xdp_netdev` on crafted packets.

mod known;

use anyhow::{Context as _, ensure};
use aya::Pod;
use health_common::addr::Addr;
use health_common::config::{PASSIVE_RTT, SERVICES};
use health_common::ct::{CT_RX_CLOSING, CT_SEEN_NON_SYN, CtEntry, CtState, Tuple4, Tuple6};
use health_common::metrics::Reason;
use health_common::nat::{NAT_HOST_LOCAL, NAT_NEEDS_CT};
use health_common::service::xdp::XdpDevice;
use health_common::service::{FLOW_FROM_OUTSIDE, FLOW_MASQUERADED};
use health_common::tcp::Peer;
use health_common::tuple::Tuple;
use health_datapath::own::OwnAddress;
use tests::packet::{payload, tagged};
use tests::xdp::{
    Hosts, Known, MACS, PASS, Packet, REDIRECT, Stand, TX, Version, hosts, in_namespace, ip,
    now_secs, set_forwarding,
};
use tests::{PATIENCE, wait_for};

const TCP: u8 = 6;
const UDP: u8 = 17;
const FIN: u8 = 1;
const SYN: u8 = 2;
const RST: u8 = 4;
const PSH: u8 = 8;
const ACK: u8 = 16;

/// Sends a packet through the program, and compares the result with the expected one.
fn goes_on(
    stand: &Stand,
    (device, packet): (usize, &Packet),
    (code, expected): (u32, &Packet),
) -> anyhow::Result<()> {
    let (returned, bytes) = stand.send(device, &packet.frame())?;
    ensure!(returned == code, "it returned {returned}: {packet:?}");
    ensure!(
        bytes == expected.frame(),
        "{bytes:02x?}\nand not\n{:02x?}",
        expected.frame()
    );
    Ok(())
}

fn both_ways_of<T: Version>(stand: &Stand, hosts: Hosts, protocol: u8) -> anyhow::Result<()>
where
    T::Translation: Pod,
    T::ServiceFlow: Pod,
{
    for (backend, device, code) in [(hosts.backend, 1, REDIRECT), (hosts.near_backend, 0, TX)] {
        let known = Known::<T>::enter(stand, hosts, backend, protocol)?;
        stand.set_way_ticks(0)?;
        let (request, answer) = (known.request(), known.answer(device));
        let counted = stand.run.counted(Reason::ForwardedByXdp);
        goes_on(stand, (0, &request), (code, &known.sent_on(device)))?;
        goes_on(stand, (device, &answer), (code, &known.returned(device)))?;
        goes_on(stand, (device, &answer), (code, &known.returned(device)))?;
        assert_eq!(stand.run.counted(Reason::ForwardedByXdp) - counted, 3);

        let entry = known.tracked()?;
        let len = request.frame().len() as u64 - 14;
        assert_eq!((entry.tx_packets, entry.tx_bytes), (1, len));
        assert_eq!((entry.rx_packets, entry.rx_bytes), (2, 2 * len));
        let (lifetime, seen) = match protocol {
            TCP => (8000, [SYN | PSH | ACK; 2]),
            _ => (60, [0; 2]),
        };
        assert_eq!([entry.rx_flags_seen, entry.tx_flags_seen], seen);
        let lasts = |expires: u32| expires.abs_diff(now_secs() + lifetime) <= 2;
        assert!(lasts(entry.expires), "{entry:?}");
        if protocol == UDP {
            for key in [known.sent, known.flow.reply()] {
                let flow: T::ServiceFlow = known.map(2).get(&key, 0)?;
                assert!(lasts(T::service_flow_parts(&flow).expires));
            }
        }
    }
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn packets_of_known_flows_are_sent_on_both_ways_and_counted_as_by_tc() -> anyhow::Result<()> {
    in_namespace(|stand| {
        let [v4, v6] = hosts();
        for protocol in [TCP, UDP] {
            both_ways_of::<Tuple4>(stand, v4, protocol).context("IPv4")?;
            both_ways_of::<Tuple6>(stand, v6, protocol).context("IPv6")?;
        }
        Ok(())
    })
}

#[test]
#[ignore = "needs root"]
fn a_datagram_without_a_checksum_gets_none() -> anyhow::Result<()> {
    in_namespace(|stand| {
        let [v4, _] = hosts();
        let known = Known::<Tuple4>::enter(stand, v4, v4.backend, UDP)?;
        let without = |packet: Packet| Packet {
            has_checksum: false,
            ..packet
        };
        // The first packet goes through a full lookup.
        for _ in 0..2 {
            goes_on(
                stand,
                (0, &without(known.request())),
                (REDIRECT, &without(known.sent_on(1))),
            )?;
        }
        Ok(())
    })
}

/// Checks that the program passes a packet unchanged and does not touch its flow.
fn is_left<T: Version>(known: &Known<'_, T>, device: usize, frame: &[u8]) -> anyhow::Result<()>
where
    T::Translation: Pod,
    T::ServiceFlow: Pod,
{
    let before = known.tracked().ok();
    let (code, bytes) = known.stand.send(device, frame)?;
    ensure!(code == PASS, "it returned {code}");
    ensure!(bytes == frame, "it changed the packet");
    ensure!(known.tracked().ok() == before, "it entered the packet");
    Ok(())
}

/// A case's name, and a change that makes XDP pass a known flow's packet to the stack.
type Left<T> = (
    &'static str,
    fn(&Known<'_, T>, &mut Packet) -> anyhow::Result<()>,
);

fn ways<T: Version>() -> Vec<Left<T>>
where
    T::Translation: Pod,
    T::ServiceFlow: Pod,
{
    vec![
        ("its time is over", |_, packet| {
            packet.hops = 1;
            Ok(())
        }),
        ("it is for another host on the link", |_, packet| {
            packet.macs[0] = [2, 0, 0, 0, 7, 7];
            Ok(())
        }),
        ("it is larger than the next device takes", |_, packet| {
            packet.data = payload(1_473);
            Ok(())
        }),
        ("conntrack does not know the flow", |known, _| {
            Ok(known.map::<CtEntry>(0).remove(&known.flow)?)
        }),
        ("conntrack knows that the flow is over", |known, _| {
            known.track(|entry| entry.expires = 1)
        }),
        ("the translation is the host's own", |known, _| {
            known.translate(NAT_HOST_LOCAL | NAT_NEEDS_CT)
        }),
        ("the translation is an endpoint's", |known, _| {
            known.translate(0)
        }),
        ("there is no translation", |known, _| {
            let mut translations = known.map::<T::Translation>(1);
            translations.remove(&known.flow)?;
            Ok(translations.remove(&known.key)?)
        }),
        ("the flow is an endpoint's", |known, _| {
            known.serve(now_secs() + 5, 0)
        }),
        ("the backend is on this node", |known, _| {
            known.serve(now_secs() + 5, FLOW_FROM_OUTSIDE)
        }),
        ("there is no flow of a service", |known, _| {
            let mut flows = known.map::<T::ServiceFlow>(2);
            flows.remove(&known.sent)?;
            Ok(flows.remove(&known.flow.reply())?)
        }),
    ]
}

/// Half-closes the connection as conntrack sees it, in a new entry with zero counters.
fn half_close<T: Version>(known: &Known<'_, T>) -> anyhow::Result<()>
where
    T::Translation: Pod,
    T::ServiceFlow: Pod,
{
    known.track(|entry| {
        let state = CtState::new(CT_SEEN_NON_SYN | CT_RX_CLOSING, SYN | FIN, SYN);
        entry.set_state(state);
    })
}

fn ways_of_tcp<T: Version>() -> Vec<Left<T>>
where
    T::Translation: Pod,
    T::ServiceFlow: Pod,
{
    fn with(packet: &mut Packet, flags: u8) -> anyhow::Result<()> {
        packet.flags = flags;
        Ok(())
    }
    vec![
        ("it opens a connection", |_, packet| with(packet, SYN)),
        ("it answers that", |_, packet| with(packet, SYN | ACK)),
        ("it ends one", |_, packet| with(packet, FIN | ACK)),
        ("it resets one", |_, packet| with(packet, RST | ACK)),
        ("it says nothing", |_, packet| with(packet, 0)),
        ("the connection is not open yet", |known, _| {
            known.track(|entry| entry.set_state(CtState::new(0, SYN, SYN | ACK)))
        }),
        ("one side has ended it", |known, _| half_close(known)),
    ]
}

fn ways_of_udp<T: Version>() -> Vec<Left<T>>
where
    T::Translation: Pod,
    T::ServiceFlow: Pod,
{
    vec![("the flow is over", |known, _| {
        known.serve(1, FLOW_FROM_OUTSIDE | FLOW_MASQUERADED)
    })]
}

fn ways_of_ipv4() -> Vec<Left<Tuple4>> {
    vec![
        ("it has options", |_, packet| {
            packet.options = vec![1; 4];
            Ok(())
        }),
        ("it is a first fragment", |_, packet| {
            packet.fragment = 0x2000;
            Ok(())
        }),
        ("it is a later fragment", |_, packet| {
            packet.fragment = 0x0001;
            Ok(())
        }),
    ]
}

fn are_left<T: Version>(
    stand: &Stand,
    hosts: Hosts,
    protocol: u8,
    ways: &[Left<T>],
) -> anyhow::Result<()>
where
    T::Translation: Pod,
    T::ServiceFlow: Pod,
{
    for (why, make) in ways {
        for is_answer in [false, true] {
            let known = Known::<T>::enter(stand, hosts, hosts.backend, protocol)?;
            let device = usize::from(is_answer);
            let mut packet = match is_answer {
                true => known.answer(1),
                false => known.request(),
            };
            make(&known, &mut packet)?;
            is_left(&known, device, &packet.frame())
                .with_context(|| format!("{why}, answer: {is_answer}, protocol {protocol}"))?;
        }
    }
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn all_else_goes_on_to_the_stack_as_it_is() -> anyhow::Result<()> {
    in_namespace(|stand| {
        let [v4, v6] = hosts();
        for protocol in [TCP, UDP] {
            are_left(stand, v4, protocol, &ways::<Tuple4>())?;
            are_left(stand, v6, protocol, &ways::<Tuple6>())?;
            are_left(stand, v4, protocol, &ways_of_ipv4())?;
        }
        are_left(stand, v4, TCP, &ways_of_tcp::<Tuple4>())?;
        are_left(stand, v6, TCP, &ways_of_tcp::<Tuple6>())?;
        are_left(stand, v4, UDP, &ways_of_udp::<Tuple4>())?;
        are_left(stand, v6, UDP, &ways_of_udp::<Tuple6>())?;

        let known = Known::<Tuple4>::enter(stand, v4, v4.backend, TCP)?;
        let frame = known.request().frame();
        is_left(&known, 0, &tagged(&frame, &[(0x8100, 5)])).context("a tag")?;
        for len in [0, 13, 14, 33, 34, 53, frame.len() - 1] {
            // The kernel accepts no shorter packets in test runs.
            if let Some(frame) = frame.get(..len).filter(|frame| frame.len() >= 14) {
                is_left(&known, 0, frame).with_context(|| format!("cut to {len} bytes"))?;
            }
        }
        let silent = Known::<Tuple4>::enter(stand, v4, v4.silent_backend, TCP)?;
        is_left(&silent, 0, &silent.request().frame()).context("an unknown neighbour")
    })
}

#[test]
#[ignore = "needs root"]
fn datagrams_to_a_backend_that_serves_no_more_are_left_and_segments_are_not() -> anyhow::Result<()>
{
    in_namespace(|stand| {
        let [v4, _] = hosts();
        let udp = Known::<Tuple4>::enter(stand, v4, v4.backend, UDP)?;
        let tcp = Known::<Tuple4>::enter(stand, v4, v4.backend, TCP)?;
        stand.serve(None)?;
        is_left(&udp, 0, &udp.request().frame())?;
        goes_on(stand, (0, &tcp.request()), (REDIRECT, &tcp.sent_on(1)))
    })
}

#[test]
#[ignore = "needs root"]
fn the_settings_of_host_and_agent_decide() -> anyhow::Result<()> {
    in_namespace(|stand| {
        let [v4, v6] = hosts();
        let is_taken = |stand: &Stand| -> anyhow::Result<[bool; 2]> {
            let four = Known::<Tuple4>::enter(stand, v4, v4.backend, TCP)?;
            let six = Known::<Tuple6>::enter(stand, v6, v6.backend, TCP)?;
            let is_taken = |frame: Vec<u8>| anyhow::Ok(stand.send(0, &frame)?.0 == REDIRECT);
            Ok([
                is_taken(four.request().frame())?,
                is_taken(six.request().frame())?,
            ])
        };
        assert_eq!(is_taken(stand)?, [true; 2]);
        set_forwarding(false)?;
        assert_eq!(is_taken(stand)?, [false; 2], "the host does not forward");
        set_forwarding(true)?;
        stand.configure(0)?;
        assert_eq!(is_taken(stand)?, [false; 2], "no services");
        stand.configure(SERVICES | PASSIVE_RTT)?;
        assert_eq!(is_taken(stand)?, [true; 2]);
        let mut peers = stand.run.hash_map("HEALTH_PEERS");
        for address in [v4.backend, v6.client] {
            peers.insert(Addr::from(address), Peer::default(), 0)?;
        }
        assert_eq!(
            is_taken(stand)?,
            [false; 2],
            "round trips to peers are timed by tc"
        );
        stand.configure(SERVICES)?;
        assert_eq!(is_taken(stand)?, [true; 2]);

        let mut devices = stand.run.hash_map::<u32, XdpDevice>("HEALTH_XDP_DEVICES");
        let inner = devices.get(&stand.numbers[1], 0)?;
        assert_eq!(inner.mac, MACS[1]);
        devices.remove(&stand.numbers[1])?;
        assert_eq!(is_taken(stand)?, [false; 2], "no device to send by");
        stand.run.datapath.note_xdp_devices()?;
        assert_eq!(is_taken(stand)?, [true; 2]);
        ip("link set in address 02:00:00:00:01:77")?;
        stand.run.datapath.note_xdp_devices()?;
        let inner = devices.get(&stand.numbers[1], 0)?;
        assert_eq!(inner.mac, [2, 0, 0, 0, 1, 0x77]);
        Ok(())
    })
}

/// The program leaves a packet whose source has become an address of this node to the tc programs, which drop it.
#[test]
#[ignore = "needs root"]
fn packets_from_an_address_of_this_node_are_left() -> anyhow::Result<()> {
    in_namespace(|stand| {
        let [v4, v6] = hosts();
        let four = Known::<Tuple4>::enter(stand, v4, v4.backend, TCP)?;
        let six = Known::<Tuple6>::enter(stand, v6, v6.backend, UDP)?;
        let own = [v4.client, v6.client].map(|address| OwnAddress {
            prefix: address.into(),
            device: 0,
        });
        let mut map = stand.run.datapath.own_addresses()?;
        map.set_all(own)?;
        is_left(&four, 0, &four.request().frame())?;
        is_left(&six, 0, &six.request().frame())?;
        map.set_all([])?;
        goes_on(stand, (0, &four.request()), (REDIRECT, &four.sent_on(1)))?;
        goes_on(stand, (0, &six.request()), (REDIRECT, &six.sent_on(1)))
    })
}

//! Flows whose path the XDP program has already resolved.

use super::*;

use health_common::ct::TUPLE_IN;
use health_common::service::xdp::XdpFlow;
use tests::xdp::mac;

/// Longer than any test runs.
const FOREVER: u64 = u32::MAX as u64;

/// The packets and bytes reported to conntrack: first those from the client, then those from the backend.
fn reported<T: Version>(known: &Known<'_, T>) -> anyhow::Result<[(u64, u64); 2]>
where
    T::Translation: Pod,
    T::ServiceFlow: Pod,
{
    let entry = known.tracked()?;
    Ok([
        (entry.tx_packets, entry.tx_bytes),
        (entry.rx_packets, entry.rx_bytes),
    ])
}

/// Another packet of the same flow, and its expected result.
fn varied(packet: &Packet, sent_on: &Packet) -> [Packet; 2] {
    let with = |packet: &Packet, hops| Packet {
        hops,
        data: payload(77),
        ..packet.clone()
    };
    [with(packet, 2), with(sent_on, 1)]
}

fn later_packets_of<T: Version>(stand: &Stand, hosts: Hosts, protocol: u8) -> anyhow::Result<()>
where
    T::Translation: Pod,
    T::ServiceFlow: Pod,
{
    for (backend, device, code) in [(hosts.backend, 1, REDIRECT), (hosts.near_backend, 0, TX)] {
        let known = Known::<T>::enter(stand, hosts, backend, protocol)?;
        stand.set_way_ticks(FOREVER)?;
        let counted = stand.run.counted(Reason::ForwardedByXdp);
        let ways = [
            (0, known.request(), known.sent_on(device)),
            (device, known.answer(device), known.returned(device)),
        ];
        for (from, packet, sent_on) in &ways {
            let [other, other_sent_on] = varied(packet, sent_on);
            for (packet, sent_on) in [
                (packet, sent_on),
                (packet, sent_on),
                (&other, &other_sent_on),
                (packet, sent_on),
            ] {
                goes_on(stand, (*from, packet), (code, sent_on))?;
            }
        }
        assert_eq!(stand.run.counted(Reason::ForwardedByXdp) - counted, 8);
        let len = |packet: &Packet| packet.frame().len() as u64 - 14;
        let [(_, request, sent_on), _] = &ways;
        let first = (1, len(request));
        assert_eq!(
            reported(&known)?,
            [first; 2],
            "the first ones were looked up"
        );

        stand.note_change()?;
        for (from, packet, sent_on) in &ways {
            goes_on(stand, (*from, packet), (code, sent_on))?;
        }
        let all = (5, 4 * len(request) + len(&varied(request, sent_on)[0]));
        assert_eq!(reported(&known)?, [all; 2]);
    }
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn packets_behind_the_first_become_what_it_does_and_are_reported_to_conntrack_later()
-> anyhow::Result<()> {
    in_namespace(|stand| {
        let [v4, v6] = hosts();
        for protocol in [TCP, UDP] {
            later_packets_of::<Tuple4>(stand, v4, protocol).context("IPv4")?;
            later_packets_of::<Tuple6>(stand, v6, protocol).context("IPv6")?;
        }
        Ok(())
    })
}

fn ends_of<T: Version>(stand: &Stand, hosts: Hosts, flags: u8) -> anyhow::Result<()>
where
    T::Translation: Pod,
    T::ServiceFlow: Pod,
{
    for is_answer in [false, true] {
        let known = Known::<T>::enter(stand, hosts, hosts.backend, TCP)?;
        stand.set_way_ticks(FOREVER)?;
        let both_ways = || {
            goes_on(stand, (0, &known.request()), (REDIRECT, &known.sent_on(1)))?;
            goes_on(stand, (1, &known.answer(1)), (REDIRECT, &known.returned(1)))
        };
        both_ways()?;
        both_ways()?;
        let packets = |reported: [(u64, u64); 2]| reported.map(|(packets, _)| packets);
        assert_eq!(packets(reported(&known)?), [1; 2]);
        let end = Packet {
            flags,
            ..match is_answer {
                true => known.answer(1),
                false => known.request(),
            }
        };
        let frame = end.frame();
        let (code, bytes) = stand.send(usize::from(is_answer), &frame)?;
        assert!(code == PASS && bytes == frame, "it is for the stack");
        assert_eq!(packets(reported(&known)?), [2; 2]);
        both_ways()?;
        assert_eq!(
            packets(reported(&known)?),
            [3; 2],
            "they are looked up again"
        );
    }
    Ok(())
}

/// Sends two requests. The first goes through a full lookup; the second is not yet reported to conntrack afterwards.
fn two_requests<T: Version>(known: &Known<'_, T>) -> anyhow::Result<()>
where
    T::Translation: Pod,
    T::ServiceFlow: Pod,
{
    for _ in 0..2 {
        let sent_on = (REDIRECT, &known.sent_on(1));
        goes_on(known.stand, (0, &known.request()), sent_on)?;
    }
    assert_eq!(reported(known)?[0].0, 1);
    Ok(())
}

fn packets_to_a_former_backend<T: Version>(stand: &Stand, hosts: Hosts) -> anyhow::Result<()>
where
    T::Translation: Pod,
    T::ServiceFlow: Pod,
{
    let former = Known::<T>::enter(stand, hosts, hosts.backend, UDP)?;
    stand.set_way_ticks(FOREVER)?;
    two_requests(&former)?;
    let present = Known::<T>::enter(stand, hosts, hosts.near_backend, UDP)?;
    goes_on(stand, (0, &present.request()), (TX, &present.sent_on(0)))?;
    assert_eq!(reported(&former)?[0].0, 2);
    assert_eq!(reported(&present)?[0].0, 1);
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn what_went_to_a_former_backend_is_reported_to_its_flow() -> anyhow::Result<()> {
    in_namespace(|stand| {
        let [v4, v6] = hosts();
        packets_to_a_former_backend::<Tuple4>(stand, v4).context("IPv4")?;
        packets_to_a_former_backend::<Tuple6>(stand, v6).context("IPv6")
    })
}

#[test]
#[ignore = "needs root"]
fn what_went_by_before_an_end_that_tc_alone_saw_is_reported_to_conntrack() -> anyhow::Result<()> {
    in_namespace(|stand| {
        let [v4, _] = hosts();
        let known = Known::<Tuple4>::enter(stand, v4, v4.backend, TCP)?;
        stand.set_way_ticks(FOREVER)?;
        two_requests(&known)?;
        half_close(&known)?;
        stand.note_change()?;
        let frame = known.request().frame();
        let (code, bytes) = stand.send(0, &frame)?;
        assert!(code == PASS && bytes == frame, "it is for the stack");
        assert_eq!(
            reported(&known)?[0].0,
            1,
            "the one that is for the stack is not"
        );
        Ok(())
    })
}

#[test]
#[ignore = "needs root"]
fn a_later_flow_between_the_same_ports_starts_with_no_packets() -> anyhow::Result<()> {
    in_namespace(|stand| {
        let [v4, _] = hosts();
        let enter = |protocol| Known::<Tuple4>::enter(stand, v4, v4.backend, protocol);
        let starts = |later: Known<'_, Tuple4>| {
            goes_on(stand, (0, &later.request()), (REDIRECT, &later.sent_on(1)))?;
            assert_eq!(reported(&later)?[0].0, 1);
            anyhow::Ok(())
        };
        let known = enter(TCP)?;
        stand.set_way_ticks(FOREVER)?;
        two_requests(&known)?;
        stand.serve(None)?;
        let opens = Packet {
            flags: SYN,
            ..known.request()
        };
        let frame = opens.frame();
        let (code, bytes) = stand.send(0, &frame)?;
        assert!(code == PASS && bytes == frame, "it is for the stack");
        assert_eq!(reported(&known)?[0].0, 2, "those of the former connection");
        starts(enter(TCP)?).context("a connection")?;

        let known = enter(UDP)?;
        two_requests(&known)?;
        // The time since boot must exceed the lifetime of a flow.
        wait_for("the machine to be up long enough", PATIENCE, || {
            Ok((now_secs() > 60).then_some(()))
        })?;
        let mut ways = stand
            .run
            .hash_map::<Tuple4, XdpFlow<u32>>("HEALTH_XDP_FLOWS4");
        let key = known.sent.with_direction(TUPLE_IN);
        let way = ways.get(&key, 0)?;
        ways.insert(key, XdpFlow { made_ns: 1, ..way }, 0)?;
        starts(enter(UDP)?).context("datagrams")
    })
}

fn sums_of_zero<T: Version>(stand: &Stand, hosts: Hosts) -> anyhow::Result<()>
where
    T::Translation: Pod,
    T::ServiceFlow: Pod,
{
    let known = Known::<T>::enter(stand, hosts, hosts.backend, UDP)?;
    stand.set_way_ticks(FOREVER)?;
    let with = |packet: Packet, data: [u8; 2]| Packet {
        data: data.to_vec(),
        ..packet
    };
    // The checksum over zero data: used as the data itself, it makes the checksum 0xffff.
    let frame = with(known.sent_on(1), [0; 2]).frame();
    let check_at = frame.len() - 4;
    let data = [frame[check_at], frame[check_at + 1]];
    let [request, sent_on] = [known.request(), known.sent_on(1)].map(|packet| with(packet, data));
    assert_eq!(sent_on.frame()[check_at..][..2], [0xff; 2]);
    for _ in 0..2 {
        goes_on(stand, (0, &request), (REDIRECT, &sent_on))?;
    }
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn a_datagram_whose_checksum_comes_to_zero_still_has_one() -> anyhow::Result<()> {
    in_namespace(|stand| {
        let [v4, v6] = hosts();
        sums_of_zero::<Tuple4>(stand, v4).context("IPv4")?;
        sums_of_zero::<Tuple6>(stand, v6).context("IPv6")
    })
}

#[test]
#[ignore = "needs root"]
fn the_end_of_a_connection_and_a_new_one_are_for_the_stack_and_nothing_stays_known()
-> anyhow::Result<()> {
    in_namespace(|stand| {
        let [v4, v6] = hosts();
        for flags in [SYN, SYN | ACK, FIN | ACK, RST, RST | ACK] {
            ends_of::<Tuple4>(stand, v4, flags).with_context(|| format!("IPv4, {flags:#x}"))?;
            ends_of::<Tuple6>(stand, v6, flags).with_context(|| format!("IPv6, {flags:#x}"))?;
        }
        Ok(())
    })
}

#[test]
#[ignore = "needs root"]
fn a_new_connection_to_a_backend_that_serves_no_more_gets_another() -> anyhow::Result<()> {
    in_namespace(|stand| {
        let [v4, _] = hosts();
        let known = Known::<Tuple4>::enter(stand, v4, v4.backend, TCP)?;
        stand.set_way_ticks(FOREVER)?;
        stand.serve(None)?;
        goes_on(stand, (0, &known.request()), (REDIRECT, &known.sent_on(1)))?;
        let opens = Packet {
            flags: SYN,
            ..known.request()
        };
        is_left(&known, 0, &opens.frame())?;
        // Does what tc would do: removes the flow.
        known
            .map::<<Tuple4 as Tuple>::ServiceFlow>(2)
            .remove(&known.sent)?;
        is_left(&known, 0, &known.request().frame())
    })
}

fn packets_that_are_not_alike<T: Version>(
    stand: &Stand,
    hosts: Hosts,
    others: &[Packet],
) -> anyhow::Result<()>
where
    T::Translation: Pod,
    T::ServiceFlow: Pod,
{
    let known = Known::<T>::enter(stand, hosts, hosts.backend, TCP)?;
    stand.set_way_ticks(FOREVER)?;
    for _ in 0..2 {
        goes_on(stand, (0, &known.request()), (REDIRECT, &known.sent_on(1)))?;
    }
    let request = known.request();
    let late = Packet {
        hops: 1,
        ..request.clone()
    };
    let large = Packet {
        data: payload(1_473),
        ..request.clone()
    };
    let mut astray = request.clone();
    astray.macs[0] = [2, 0, 0, 0, 7, 7];
    for packet in [late, large, astray].iter().chain(others) {
        is_left(&known, 0, &packet.frame()).with_context(|| format!("{packet:?}"))?;
    }
    let frame = request.frame();
    is_left(&known, 0, &frame[..frame.len() - 1]).context("it is cut off")?;
    assert_eq!(reported(&known)?[0].0, 1);
    // Packets that arrive on the other device take another path.
    let mut elsewhere = request;
    elsewhere.macs[0] = MACS[1];
    goes_on(stand, (1, &elsewhere), (TX, &known.sent_on(1)))?;
    assert_eq!(reported(&known)?[0].0, 3);
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn packets_that_are_not_as_the_first_have_no_known_way() -> anyhow::Result<()> {
    in_namespace(|stand| {
        let [v4, v6] = hosts();
        let request = Known::<Tuple4>::enter(stand, v4, v4.backend, TCP)?.request();
        let others = [(0x2000, vec![]), (0x0001, vec![]), (0x4000, vec![1; 4])];
        let others = others.map(|(fragment, options)| Packet {
            fragment,
            options,
            ..request.clone()
        });
        packets_that_are_not_alike::<Tuple4>(stand, v4, &others).context("IPv4")?;
        packets_that_are_not_alike::<Tuple6>(stand, v6, &[]).context("IPv6")
    })
}

#[test]
#[ignore = "needs root"]
fn what_the_agent_changes_holds_at_once() -> anyhow::Result<()> {
    in_namespace(|stand| {
        let [v4, _] = hosts();
        let udp = Known::<Tuple4>::enter(stand, v4, v4.backend, UDP)?;
        stand.set_way_ticks(FOREVER)?;
        let is_sent_on = || goes_on(stand, (0, &udp.request()), (REDIRECT, &udp.sent_on(1)));
        is_sent_on()?;
        is_sent_on()?;
        stand.serve(None)?;
        is_left(&udp, 0, &udp.request().frame()).context("nobody serves")?;
        Ok(())
    })?;
    in_namespace(|stand| {
        let [v4, _] = hosts();
        let (request, sent_on) = {
            let known = Known::<Tuple4>::enter(stand, v4, v4.backend, TCP)?;
            (known.request(), known.sent_on(1))
        };
        stand.configure(SERVICES)?;
        stand.note_change()?;
        for _ in 0..2 {
            goes_on(stand, (0, &request), (REDIRECT, &sent_on))?;
        }
        stand.configure(0)?;
        assert_eq!(stand.send(0, &request.frame())?.0, PASS, "no services");
        stand.configure(SERVICES)?;
        stand.note_change()?;
        for _ in 0..2 {
            goes_on(stand, (0, &request), (REDIRECT, &sent_on))?;
        }
        ip("link set out address 02:00:00:00:01:77")?;
        stand.run.datapath.note_xdp_devices()?;
        let left = stand.send(0, &request.frame())?.0;
        assert_eq!(left, PASS, "the device has another address");
        Ok(())
    })
}

#[test]
#[ignore = "needs root"]
fn a_packet_goes_to_the_stack_now_and_then_so_that_the_kernel_asks_for_the_next_hop()
-> anyhow::Result<()> {
    in_namespace(|stand| {
        let [v4, v6] = hosts();
        let four = Known::<Tuple4>::enter(stand, v4, v4.backend, TCP)?;
        let six = Known::<Tuple6>::enter(stand, v6, v6.backend, UDP)?;
        for hosts in [v4, v6] {
            let (address, bytes) = (hosts.backend, mac(four.sent_on(1).macs[0]));
            // The state in which the kernel leaves the neighbour if only XDP sends.
            ip(&format!(
                "neighbour replace {address} lladdr {bytes} dev in nud stale"
            ))?;
        }
        stand.set_way_ticks(1)?;
        for frame in [four.request().frame(), six.request().frame()] {
            for turn in 0..3 {
                for expected in [REDIRECT, PASS] {
                    wait_for("the other to have its turn", PATIENCE, || {
                        let (code, bytes) = stand.send(0, &frame)?;
                        ensure!(code != PASS || bytes == frame, "it changed the packet");
                        Ok((code == expected).then_some(()))
                    })
                    .with_context(|| format!("turn {turn}"))?;
                }
            }
        }
        Ok(())
    })
}

#[test]
#[ignore = "needs root"]
fn what_the_host_changes_holds_soon() -> anyhow::Result<()> {
    in_namespace(|stand| {
        let [v4, _] = hosts();
        let known = Known::<Tuple4>::enter(stand, v4, v4.backend, TCP)?;
        let new_mac = [2, 0, 0, 0, 9, 99];
        let move_to = |bytes| {
            let (address, bytes) = (v4.backend, mac(bytes));
            ip(&format!(
                "neighbour replace {address} lladdr {bytes} dev in"
            ))
        };
        let mut moved = known.sent_on(1);
        moved.macs[0] = new_mac;
        let frame = known.request().frame();
        goes_on(stand, (0, &known.request()), (REDIRECT, &known.sent_on(1)))?;
        move_to(new_mac)?;
        wait_for("packets to the new hardware address", PATIENCE, || {
            let (_, bytes) = stand.send(0, &frame)?;
            Ok((bytes == moved.frame()).then_some(()))
        })?;
        let wait_left = |frame: &[u8]| {
            wait_for("packets to be left to the stack", PATIENCE, || {
                Ok((stand.send(0, frame)?.0 == PASS).then_some(()))
            })
        };
        // The stack may handle some packets before that.
        let wait_sent_on = |frame: &[u8]| {
            wait_for("packets to be sent on", PATIENCE, || {
                Ok((stand.send(0, frame)?.0 == REDIRECT).then_some(()))
            })
        };
        let large = Packet {
            data: payload(1_200),
            ..known.request()
        };
        wait_sent_on(&large.frame())?;
        ip("link set in mtu 1000")?;
        wait_left(&large.frame()).context("the next device takes less")?;
        wait_sent_on(&frame)?;
        ip("link set in down")?;
        wait_left(&frame).context("the next device is down")
    })
}

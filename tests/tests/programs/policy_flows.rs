//! Flows whose policy changes during their lifetime, and flows of removed endpoints.

use std::net::IpAddr;

use health_common::ct::{Tuple4, Tuple6};
use health_common::identity;
use health_common::ipcache::IpcacheEntry;
use health_common::metrics::Reason;
use health_common::policy::{ANY_IDENTITY, VERDICT_ALLOW};

use crate::endpoint_packets::Way::{self, In, Out};
use crate::endpoint_packets::{ACK, ICMP, ICMPV6, SYN, TCP, UDP, frame, segment, with_ports};
use crate::policy_packets::{
    APP, BOTH, Bed, address, everything, exactly, fresh, message, protocol, set_endpoint,
};

const DENIED: Option<Reason> = Some(Reason::PolicyDenied);

/// A flow from both sides: the packets that open and continue it, and the replies.
struct Flow {
    way: Way,
    peer: IpAddr,
    protocol: u8,
    client: u16,
}

impl Flow {
    fn new(way: Way, peer: u32, is_v4: bool, protocol: u8) -> Self {
        Self {
            way,
            peer: address(peer, is_v4),
            protocol,
            client: fresh(),
        }
    }

    /// One flow for each protocol that has replies, in both directions and both IP versions.
    fn of_every_kind(peer: u32) -> Vec<Self> {
        let mut flows = Vec::new();
        for way in [In, Out] {
            for (is_v4, icmp) in [(true, ICMP), (false, ICMPV6)] {
                flows
                    .extend([TCP, UDP, icmp].map(|protocol| Self::new(way, peer, is_v4, protocol)));
            }
        }
        flows
    }

    fn packet(&self, way: Way, flags: u8) -> Vec<u8> {
        let is_reply = way != self.way;
        let ports = if is_reply {
            (443, self.client)
        } else {
            (self.client, 443)
        };
        match self.protocol {
            TCP => segment(way, self.peer, ports, flags),
            UDP => frame(way, self.peer, UDP, &with_ports(ports.0, ports.1)),
            icmp => {
                let [request, reply] = if icmp == ICMP { [8, 0] } else { [128, 129] };
                let kind = if is_reply { reply } else { request };
                message(way, self.peer, kind, self.client)
            }
        }
    }

    /// Opens the flow, including the reply.
    fn open(&self, bed: &Bed) {
        let (there, back) = (self.way, self.way.back());
        for (way, flags) in [(there, SYN), (back, SYN | ACK), (there, ACK)] {
            assert_eq!(bed.verdict(way, &self.packet(way, flags)), None, "{self}");
        }
    }

    fn sends(&self, bed: &Bed) -> Option<Reason> {
        bed.verdict(self.way, &self.packet(self.way, ACK))
    }

    fn replies(&self, bed: &Bed) -> Option<Reason> {
        bed.verdict(self.way.back(), &self.packet(self.way.back(), ACK))
    }

    /// Sends an ICMP error about a packet from the side that opened the flow.
    fn error(&self, bed: &Bed) -> Option<Reason> {
        let (icmp, unreachable) = match self.peer {
            IpAddr::V4(_) => (ICMP, 3),
            IpAddr::V6(_) => (ICMPV6, 1),
        };
        let start = [unreachable, 1, 0, 0, 0, 0, 0, 0];
        let error = [&start[..], &self.packet(self.way, ACK)[14..]].concat();
        let back = self.way.back();
        bed.verdict(back, &frame(back, self.peer, icmp, &error))
    }
}

impl std::fmt::Display for Flow {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?} {} {}", self.way, self.peer, self.protocol)
    }
}

#[test]
#[ignore = "needs root"]
fn replies_end_with_the_policy_that_let_their_flow_be_opened() {
    let all = [In, Out].map(|way| (everything(way, ANY_IDENTITY), VERDICT_ALLOW));
    let mut bed = Bed::new(&all);
    let flows = Flow::of_every_kind(APP);
    let spoken_about = Flow::of_every_kind(APP);
    for flow in flows.iter().chain(&spoken_about) {
        flow.open(&bed);
        assert_eq!(flow.error(&bed), None, "{flow}");
        assert_eq!(flow.replies(&bed), None, "{flow}");
    }
    // A new policy that still allows the flows does not end them.
    bed.change(1, 2, &all);
    for flow in &flows {
        assert_eq!(flow.replies(&bed), None, "{flow}");
    }
    bed.change(2, 3, &[]);
    for flow in &flows {
        assert_eq!(flow.replies(&bed), DENIED, "{flow}");
        assert_eq!(flow.replies(&bed), DENIED, "{flow}");
        assert_eq!(flow.sends(&bed), DENIED, "{flow}");
    }
    for flow in &spoken_about {
        assert_eq!(flow.error(&bed), DENIED, "{flow}");
    }
    bed.change(3, 4, &[(everything(In, ANY_IDENTITY), VERDICT_ALLOW)]);
    for flow in flows.iter().filter(|flow| flow.way == In) {
        assert_eq!(flow.replies(&bed), None, "{flow}");
    }
}

#[test]
#[ignore = "needs root"]
fn each_direction_of_a_narrower_policy_ends_what_it_no_longer_allows() {
    for way in [In, Out] {
        let all = [In, Out].map(|way| (everything(way, ANY_IDENTITY), VERDICT_ALLOW));
        let mut bed = Bed::new(&all);
        let flows = Flow::of_every_kind(APP);
        let others = Flow::of_every_kind(identity::WORLD);
        flows.iter().chain(&others).for_each(|flow| flow.open(&bed));
        bed.change(
            1,
            2,
            &[
                (everything(way.back(), APP), VERDICT_ALLOW),
                (protocol(way, APP, TCP), VERDICT_ALLOW),
            ],
        );
        for flow in &flows {
            let is_kept = flow.way != way || flow.protocol == TCP;
            let verdict = if is_kept { None } else { DENIED };
            // The replies are refused although everything is allowed in their direction, where they would open a new
            // flow.
            assert_eq!(flow.replies(&bed), verdict, "{flow}");
            assert_eq!(flow.sends(&bed), verdict, "{flow}");
        }
        for flow in &others {
            assert_eq!(flow.replies(&bed), DENIED, "{flow}");
        }
    }
}

#[test]
#[ignore = "needs root"]
fn the_first_policy_ends_flows_that_were_opened_before_it() {
    let mut bed = Bed::new(&[]);
    set_endpoint(&mut bed.run.datapath, 0, 0);
    let flows = Flow::of_every_kind(APP);
    flows.iter().for_each(|flow| flow.open(&bed));
    for (flags, table) in [(0, 0), (BOTH, 0), (BOTH, 1)] {
        set_endpoint(&mut bed.run.datapath, flags, table);
        let verdict = if flags == 0 { None } else { DENIED };
        for flow in &flows {
            assert_eq!(flow.replies(&bed), verdict, "{flow} {flags} {table}");
        }
    }
}

/// The table does not change, so the side that opened the flow is the first to notice.
#[test]
#[ignore = "needs root"]
fn a_peer_of_another_identity_keeps_no_flow() {
    let all = [In, Out].map(|way| (everything(way, APP), VERDICT_ALLOW));
    let mut bed = Bed::new(&all);
    let flows = Flow::of_every_kind(APP);
    flows.iter().for_each(|flow| flow.open(&bed));
    for flow in &flows {
        let other = IpcacheEntry {
            identity: identity::WORLD,
            ..IpcacheEntry::default()
        };
        bed.ipcache
            .set(flow.peer.into(), other)
            .expect("room for a prefix");
    }
    for flow in &flows {
        assert_eq!(flow.sends(&bed), DENIED, "{flow}");
        assert_eq!(flow.replies(&bed), DENIED, "{flow}");
    }
}

/// A reply whose flow is no longer allowed is judged as the first packet of a new flow.
#[test]
#[ignore = "needs root"]
fn who_may_open_flows_may_do_so_from_the_ports_of_one_that_ended() {
    let all = [In, Out].map(|way| (everything(way, ANY_IDENTITY), VERDICT_ALLOW));
    for is_v4 in [true, false] {
        let mut bed = Bed::new(&all);
        let flow = Flow::new(Out, APP, is_v4, TCP);
        flow.open(&bed);
        let client = flow.client;
        bed.change(1, 2, &[(exactly(In, APP, TCP, client), VERDICT_ALLOW)]);
        for (way, flags) in [(In, SYN), (Out, SYN | ACK), (In, ACK), (Out, ACK)] {
            let packet = flow.packet(way, flags);
            assert_eq!(bed.verdict(way, &packet), None, "{way:?} {flags}");
        }
    }
}

/// The next segment recreates a lost entry, even if that segment comes from the side that did not open the connection.
#[test]
#[ignore = "needs root"]
fn a_connection_that_was_picked_up_goes_on_where_its_peer_may_open_it() {
    let all = [In, Out].map(|way| (everything(way, ANY_IDENTITY), VERDICT_ALLOW));
    for is_v4 in [true, false] {
        let mut bed = Bed::new(&all);
        let flow = Flow::new(Out, APP, is_v4, TCP);
        assert_eq!(flow.sends(&bed), None, "{flow}");
        bed.change(1, 2, &[(exactly(In, APP, TCP, flow.client), VERDICT_ALLOW)]);
        assert_eq!(flow.sends(&bed), DENIED, "{flow}");
        assert_eq!(flow.replies(&bed), None, "{flow}");
        assert_eq!(flow.sends(&bed), None, "{flow}");
    }
}

#[test]
#[ignore = "needs root"]
fn a_new_endpoint_inherits_no_flow_of_its_address() {
    let all = [In, Out].map(|way| (everything(way, ANY_IDENTITY), VERDICT_ALLOW));
    let mut bed = Bed::new(&all);
    let flows = Flow::of_every_kind(APP);
    let taken_over = Flow::of_every_kind(APP);
    flows
        .iter()
        .chain(&taken_over)
        .for_each(|flow| flow.open(&bed));
    // The earlier endpoint had another device.
    for map in ["HEALTH_CT4", "HEALTH_CT_ANY4"] {
        bed.run
            .change_flows::<Tuple4>(map, |entry| entry.ifindex = 77);
    }
    for map in ["HEALTH_CT6", "HEALTH_CT_ANY6"] {
        bed.run
            .change_flows::<Tuple6>(map, |entry| entry.ifindex = 77);
    }
    for flow in &taken_over {
        assert_eq!(flow.sends(&bed), None, "{flow}");
        assert_eq!(flow.replies(&bed), None, "{flow}");
    }
    for (way, former, table) in [(In, 1, 2), (Out, 2, 3)] {
        // The policy would allow opening the flow again, but its peer's packets would open one in the other direction.
        bed.change(
            former,
            table,
            &[(everything(way, ANY_IDENTITY), VERDICT_ALLOW)],
        );
        for flow in flows.iter().filter(|flow| flow.way == way) {
            assert_eq!(flow.error(&bed), DENIED, "{flow}");
            assert_eq!(flow.replies(&bed), DENIED, "{flow}");
        }
    }
}

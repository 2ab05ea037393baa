//! Builds packets for the XDP program.

use std::net::IpAddr;

use health_common::ct::IP_PROTOCOL_UDP;
use health_common::tcp::{ACK, IP_PROTOCOL_TCP};

use crate::packet::{IPV4, IPV6, Ipv4, Ipv6, Tcp, ethernet, payload, transport_checksum};

const PSH: u8 = 8;

/// A packet to build.
#[derive(Clone, Debug)]
pub struct Packet {
    /// Hardware addresses of the receiver and the sender.
    pub macs: [[u8; 6]; 2],
    /// Address and port of the source and the destination.
    pub ends: [(IpAddr, u16); 2],
    /// IP protocol number.
    pub protocol: u8,
    /// Time to live, or hop limit.
    pub hops: u8,
    /// TCP flags.
    pub flags: u8,
    /// IPv4 flags and fragment offset.
    pub fragment: u16,
    /// IPv4 options.
    pub options: Vec<u8>,
    /// Data after the transport header.
    pub data: Vec<u8>,
    /// Whether UDP datagrams have a checksum.
    pub has_checksum: bool,
}

impl Packet {
    /// A packet of this protocol, with unspecified ends.
    pub fn of(protocol: u8) -> Self {
        let nobody = (IpAddr::from([0; 4]), 0);
        Self {
            macs: [[0; 6]; 2],
            ends: [nobody; 2],
            protocol,
            hops: 64,
            flags: PSH | ACK,
            fragment: 0x4000,
            options: Vec::new(),
            data: payload(100),
            has_checksum: true,
        }
    }

    fn transport(&self) -> Vec<u8> {
        let [(source, sport), (destination, dport)] = self.ends;
        if self.protocol == IP_PROTOCOL_TCP {
            let segment = Tcp {
                data: self.data.clone(),
                ..Tcp::between((sport, dport), self.flags)
            };
            return segment.segment(source, destination);
        }
        let len = 8 + self.data.len();
        let mut datagram = [sport, dport, len as u16, 0].map(u16::to_be_bytes).concat();
        datagram.extend(&self.data);
        if self.has_checksum {
            let check = transport_checksum(source, destination, IP_PROTOCOL_UDP, &datagram);
            // A checksum of 0 would mean that there is none (RFC 768).
            let check = if check == 0 { 0xffff } else { check };
            datagram[6..8].copy_from_slice(&check.to_be_bytes());
        }
        datagram
    }

    /// Builds the frame, starting with the Ethernet header.
    pub fn frame(&self) -> Vec<u8> {
        let transport = self.transport();
        let (ethertype, packet) = match (self.ends[0].0, self.ends[1].0) {
            (IpAddr::V4(source), IpAddr::V4(destination)) => {
                let header = Ipv4 {
                    protocol: self.protocol,
                    ttl: self.hops,
                    fragment: self.fragment,
                    options: self.options.clone(),
                    tos: 0x28,
                    ..Ipv4::icmp(source, destination)
                };
                (IPV4, header.packet(&transport))
            }
            (IpAddr::V6(source), IpAddr::V6(destination)) => {
                let header = Ipv6 {
                    next_header: self.protocol,
                    hop_limit: self.hops,
                    class: 0x28,
                    flow: 0x12345,
                    ..Ipv6::icmp(source, destination)
                };
                (IPV6, header.packet(&transport))
            }
            ends => panic!("{ends:?} are of two IP versions"),
        };
        ethernet(self.macs[0], self.macs[1], ethertype, &packet)
    }
}

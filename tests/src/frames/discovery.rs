//! Almost valid neighbour discovery and multicast listener messages, with at most a few errors.

use std::net::Ipv6Addr;

use super::maker::{Content, Maker};
use super::{ALL_NODES, ALL_ROUTERS, LISTENERS_ROUTERS};
use crate::packet::{IPV6, Ipv6};

impl Maker<'_> {
    /// A neighbour discovery or multicast listener message.
    pub(super) fn discovery(&mut self) -> Content {
        if self.one_in(4) {
            self.listener()
        } else {
            self.neighbour()
        }
    }

    /// A source address: one that links know the sender by, or another host's.
    fn source(&mut self) -> Ipv6Addr {
        let scene = self.scene;
        match self.rng.u8(0..16) {
            0..6 => scene.own.v6,
            6..10 => scene.own.link,
            10 | 11 => Ipv6Addr::UNSPECIFIED,
            12 => scene.peer.link,
            13 => scene.gateway.1,
            14 => self.pick(&scene.others).v6,
            _ => Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, self.rng.u16(..)),
        }
    }

    fn neighbour(&mut self) -> Content {
        let scene = self.scene;
        let kind: u8 = self.pick(&[133, 135, 135, 135, 136, 136, 134, 137]);
        let other = self.pick(&scene.others).v6;
        let target = match self.rng.u8(0..8) {
            0 | 1 => scene.gateway.1,
            2 => scene.peer.v6,
            3 => scene.peer.link,
            4 => scene.own.v6,
            5 => scene.own.link,
            _ => other,
        };
        let group = solicited(target);
        let right = match kind {
            133 => ALL_ROUTERS,
            135 if self.rng.bool() => group,
            135 => target,
            _ => self.pick(&[ALL_NODES, scene.peer.link, scene.peer.v6, scene.gateway.1]),
        };
        let destination = match self.rng.u8(0..10) {
            0..7 => right,
            7 => self.pick(&[ALL_NODES, ALL_ROUTERS, group]),
            8 => self.pick(&scene.others).v6,
            _ => scene.peer.v6,
        };
        let code = if self.one_in(8) { self.rng.u8(..) } else { 0 };
        let hop_limit = if self.one_in(6) {
            self.pick(&[1, 64, 254, 0])
        } else {
            255
        };
        let flags = if kind == 136 {
            self.pick(&[0x00, 0x20, 0x60, 0xe0])
        } else {
            0
        };
        let mut message = vec![kind, code, 0, 0, flags, 0, 0, 0];
        match kind {
            133 => {}
            // A router advertisement with a lifetime of half an hour and a prefix for address autoconfiguration.
            134 => {
                message[4..8].copy_from_slice(&[64, 0xc0, 7, 8]);
                message.extend([0; 8]);
                let prefix = Ipv6Addr::new(0x2001, 0xdb8, 0, 0x66, 0, 0, 0, 0).octets();
                message.extend([3, 4, 64, 0xc0, 0, 0, 7, 8, 0, 0, 7, 8, 0, 0, 0, 0]);
                message.extend(prefix);
            }
            // A redirect: another target is reachable through the sender.
            137 => {
                message.extend(target.octets());
                message.extend(other.octets());
            }
            _ => message.extend(target.octets()),
        }
        // The link-layer address of the source or target, and a nonce (RFC 3971), which has space for the marker.
        if !self.one_in(4) {
            let mac = if self.one_in(5) {
                self.pick(&scene.others).mac
            } else {
                scene.own.mac
            };
            message.push(if kind == 136 || kind == 137 { 2 } else { 1 });
            message.push(if self.one_in(20) {
                self.rng.u8(0..3)
            } else {
                1
            });
            message.extend(mac);
        }
        if !self.one_in(3) {
            message.extend([14, 2, 0, 0]);
            message.extend(self.marker);
        }
        self.message(destination, hop_limit, message)
    }

    fn listener(&mut self) -> Content {
        let group = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 1, 0xff00, self.rng.u16(..));
        let about = if self.one_in(6) {
            self.pick(&self.scene.others).v6
        } else {
            group
        };
        let kind: u8 = self.pick(&[143, 143, 131, 132, 130]);
        let right = match kind {
            143 => LISTENERS_ROUTERS,
            131 => about,
            132 => ALL_ROUTERS,
            _ => ALL_NODES,
        };
        let destination = if self.one_in(5) {
            self.pick(&[
                ALL_NODES,
                ALL_ROUTERS,
                self.scene.peer.link,
                self.scene.peer.v6,
            ])
        } else {
            right
        };
        let hop_limit = if self.one_in(6) {
            self.pick(&[0, 2, 64, 255])
        } else {
            1
        };
        let code = if self.one_in(10) { self.rng.u8(..) } else { 0 };
        let mut message = vec![kind, code, 0, 0, 0, 0, 0, 1];
        if kind == 143 {
            message.extend([4, 0, 0, 0]);
        }
        message.extend(about.octets());
        if self.rng.bool() {
            message.extend(self.marker);
        }
        if self.one_in(5) {
            return self.message(destination, hop_limit, message);
        }
        let options = if self.one_in(5) {
            self.pick(&[
                [5, 2, 0, 1, 1, 0],
                [1, 4, 0, 0, 0, 0],
                [5, 2, 0, 0, 5, 2],
                [0xc2, 4, 0, 1, 0, 0],
            ])
        } else {
            self.pick(&[[5, 2, 0, 0, 1, 0], [5, 2, 0, 0, 0, 0], [1, 0, 5, 2, 0, 0]])
        };
        let next = if self.one_in(12) {
            self.pick(&[17, 0, 43, 60, 59])
        } else {
            58
        };
        let units = if self.one_in(20) { 1 } else { 0 };
        let header = [&[next, units][..], &options].concat();
        let ip = Ipv6 {
            hop_limit,
            ..Ipv6::icmp(self.source(), destination)
        };
        let message = ip.with_checksum(message);
        let ip = Ipv6 {
            next_header: 0,
            ..ip
        };
        (IPV6, ip.packet(&[header, message].concat()))
    }

    /// Puts a message right after the IP header, or rarely after an extension header that is not allowed there.
    fn message(&mut self, destination: Ipv6Addr, hop_limit: u8, message: Vec<u8>) -> Content {
        let ip = Ipv6 {
            hop_limit,
            ..Ipv6::icmp(self.source(), destination)
        };
        let mut message = ip.with_checksum(message);
        if self.one_in(30) {
            message[2] ^= 1;
        }
        if !self.one_in(15) {
            return (IPV6, ip.packet(&message));
        }
        let kind: u8 = self.pick(&[0, 60, 44, 43]);
        let header = match kind {
            44 => [58, 0, 0, self.rng.u8(0..2), 0, 0, 0, 9],
            43 => [58, 0, 4, 0, 0, 0, 0, 0],
            _ => [58, 0, 1, 4, 0, 0, 0, 0],
        };
        let ip = Ipv6 {
            next_header: kind,
            ..ip
        };
        (IPV6, ip.packet(&[&header[..], &message].concat()))
    }
}

/// The solicited-node multicast address of an address (RFC 4291 section 2.7.1).
pub(super) fn solicited(target: Ipv6Addr) -> Ipv6Addr {
    let [.., high, low] = target.segments();
    Ipv6Addr::new(0xff02, 0, 0, 0, 0, 1, 0xff00 | high & 0xff, low)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_group_of_an_address_has_its_last_three_bytes() {
        for (address, group) in [
            ("fd00::1:2:3", "ff02::1:ff02:3"),
            ("fe80::1234:5678", "ff02::1:ff34:5678"),
        ] {
            let address = address.parse().expect("an address");
            assert_eq!(solicited(address).to_string(), group);
        }
    }
}

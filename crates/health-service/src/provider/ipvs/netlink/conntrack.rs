//! Dumps and deletes flows in the kernel's conntrack (include/uapi/linux/netfilter/nfnetlink_conntrack.h,
//! net/netfilter/nf_conntrack_netlink.c).

use std::net::SocketAddr;

use health_model::ipam::Family;
use health_model::policy::Protocol;
use netlink_packet_core::{DefaultNla, NLA_F_NESTED};
use netlink_packet_netfilter::conntrack::{ConntrackAttribute, ConntrackMessage};
use netlink_packet_netfilter::{NetfilterHeader, NetfilterMessage, NetfilterMessageInner};
use netlink_sys::protocols::NETLINK_NETFILTER;

use super::attributes::{
    Malformed, address_of, be_u16_of, bytes, each, family_of, netfilter_attributes, plain,
};
use super::connection::{Connection, NetlinkError};
use super::server::ServerKey;

/// `CTA_*` of flows.
mod flow {
    pub(super) const ORIGINAL: u16 = 1;
    pub(super) const REPLY: u16 = 2;
    pub(super) const ID: u16 = 12;
    pub(super) const ZONE: u16 = 18;
}

/// `CTA_TUPLE_*`, `CTA_IP_*` and `CTA_PROTO_*`.
mod tuple {
    pub(super) const IP: u16 = 1;
    pub(super) const PROTOCOL: u16 = 2;
    pub(super) const V4_SOURCE: u16 = 1;
    pub(super) const V4_DESTINATION: u16 = 2;
    pub(super) const V6_SOURCE: u16 = 3;
    pub(super) const V6_DESTINATION: u16 = 4;
    pub(super) const NUMBER: u16 = 1;
    pub(super) const SOURCE_PORT: u16 = 2;
    pub(super) const DESTINATION_PORT: u16 = 3;
}

/// A flow of a protocol with ports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Flow {
    /// The destination of the flow's first packet.
    pub to: ServerKey,
    /// The address that replies come from.
    pub answered_by: SocketAddr,
    family: Family,
    /// The attributes that identify the flow to the kernel.
    name: Vec<DefaultNla>,
}

/// A connection to conntrack.
#[derive(Debug)]
pub struct Client(Connection);

impl Client {
    /// Opens a connection in the calling thread's network namespace.
    pub fn open() -> Result<Self, NetlinkError> {
        Ok(Self(Connection::open(NETLINK_NETFILTER)?))
    }

    /// Returns the wanted flows of a family.
    pub fn flows(
        &mut self,
        family: Family,
        is_wanted: impl Fn(&Flow) -> bool,
    ) -> Result<Vec<Flow>, NetlinkError> {
        let request = message(family, ConntrackMessage::Get(Vec::new()));
        self.0.list(&request, |object| {
            let flow = read(netfilter_attributes(object)?, family)?;
            Ok(flow.filter(&is_wanted))
        })
    }

    /// Deletes flows. Returns how many of them still existed.
    pub fn delete(&mut self, flows: Vec<Flow>) -> Result<usize, NetlinkError> {
        let requests = flows.into_iter().map(|flow| {
            let name = flow.name.into_iter().map(ConntrackAttribute::Other);
            let request = ConntrackMessage::Delete(name.collect());
            (message(flow.family, request), 0)
        });
        let mut deleted = 0;
        for result in self.0.execute(requests.collect())? {
            match result {
                Ok(()) => deleted += 1,
                Err(refusal) if refusal.code == libc::ENOENT => {}
                Err(refusal) => return Err(NetlinkError::Refused(refusal)),
            }
        }
        Ok(deleted)
    }
}

fn message(family: Family, request: ConntrackMessage) -> NetfilterMessage {
    let header = NetfilterHeader::new(family_of(family), 0, 0);
    NetfilterMessage::new(header, NetfilterMessageInner::from(request))
}

/// Parses a flow; `None` if its protocol has no ports.
fn read(attributes: &[u8], family: Family) -> Result<Option<Flow>, Malformed> {
    let (mut original, mut reply, mut name) = (None, None, Vec::new());
    for attribute in each(attributes) {
        let (kind, value) = attribute?;
        match kind {
            flow::ORIGINAL => {
                original = read_tuple(value)?;
                name.push(plain(kind | NLA_F_NESTED, value));
            }
            flow::REPLY => reply = read_tuple(value)?,
            flow::ID | flow::ZONE => name.push(plain(kind, value)),
            _ => {}
        }
    }
    let (Some(original), Some(reply)) = (original, reply) else {
        return Ok(None);
    };
    Ok(Some(Flow {
        to: ServerKey {
            address: original.destination,
            protocol: original.protocol,
        },
        answered_by: reply.source,
        family,
        name,
    }))
}

struct Tuple {
    source: SocketAddr,
    destination: SocketAddr,
    protocol: Protocol,
}

fn read_tuple(attributes: &[u8]) -> Result<Option<Tuple>, Malformed> {
    const ADDRESS: &str = "the address of a flow";
    const PORT: &str = "the port of a flow";
    let (mut from, mut to) = (None, None);
    let (mut protocol, mut source, mut destination) = (None, None, None);
    for part in each(attributes) {
        let (part, attributes) = part?;
        for attribute in each(attributes) {
            let (kind, value) = attribute?;
            match (part, kind) {
                (tuple::IP, tuple::V4_SOURCE | tuple::V6_SOURCE) => {
                    from = Some(address_of(value, ADDRESS)?);
                }
                (tuple::IP, tuple::V4_DESTINATION | tuple::V6_DESTINATION) => {
                    to = Some(address_of(value, ADDRESS)?);
                }
                (tuple::PROTOCOL, tuple::NUMBER) => {
                    let [number] = bytes(value, "the protocol of a flow")?;
                    protocol = Some(Protocol(number));
                }
                (tuple::PROTOCOL, tuple::SOURCE_PORT) => source = Some(be_u16_of(value, PORT)?),
                (tuple::PROTOCOL, tuple::DESTINATION_PORT) => {
                    destination = Some(be_u16_of(value, PORT)?);
                }
                _ => {}
            }
        }
    }
    let addresses = from.zip(source).zip(to.zip(destination)).zip(protocol);
    Ok(addresses.map(|((source, destination), protocol)| Tuple {
        source: source.into(),
        destination: destination.into(),
        protocol,
    }))
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;
    use std::process::Command;
    use std::thread;

    use nix::sched::{CloneFlags, unshare};
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_flow_is_listed_with_both_its_ends_and_deleted_once() {
        if !nix::unistd::geteuid().is_root() {
            println!("skipped: needs root");
            return;
        }
        let in_namespace = || {
            unshare(CloneFlags::CLONE_NEWNET).unwrap();
            for words in [
                "ip link set lo up",
                "nft add table inet tracked",
                "nft add chain inet tracked out { type filter hook output priority 0; }",
                "nft add rule inet tracked out ct state new accept",
            ] {
                let mut words = words.split(' ');
                let ran = Command::new(words.next().unwrap()).args(words).status();
                assert!(ran.unwrap().success());
            }
            let mut client = Client::open().unwrap();
            for (family, loopback) in [(Family::V4, "127.0.0.1:0"), (Family::V6, "[::1]:0")] {
                let server = UdpSocket::bind(loopback).unwrap();
                let to = server.local_addr().unwrap();
                UdpSocket::bind(loopback)
                    .unwrap()
                    .send_to(b"one", to)
                    .unwrap();
                let key = ServerKey {
                    address: to,
                    protocol: Protocol::UDP,
                };
                let flows = client.flows(family, |flow| flow.to == key).unwrap();
                assert_eq!(flows.len(), 1, "{flows:?}");
                assert_eq!(flows[0].answered_by, to);
                assert_eq!(client.delete(flows.clone()).unwrap(), 1);
                assert_eq!(client.delete(flows).unwrap(), 0);
                assert_eq!(client.flows(family, |flow| flow.to == key).unwrap(), []);
            }
        };
        thread::spawn(in_namespace).join().unwrap();
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(bytes: Vec<u8>) {
            let _ = read(&bytes, Family::V4);
        }
    }
}

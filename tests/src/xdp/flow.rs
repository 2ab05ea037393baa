//! A flow from outside that the XDP program can forward.

use std::fmt::Debug;
use std::net::IpAddr;

use aya::Pod;
use aya::maps::MapData;
use health_common::addr::Addr;
use health_common::ct::{CT_SEEN_NON_SYN, CtEntry, CtState, TUPLE_IN, TUPLE_OUT, Tuple4, Tuple6};
use health_common::identity;
use health_common::masquerade::Address as _;
use health_common::nat::NAT_NEEDS_CT;
use health_common::service::{FLOW_FROM_OUTSIDE, FLOW_MASQUERADED};
use health_common::tcp::{ACK, IP_PROTOCOL_TCP, SYN};
use health_common::tuple::{ServiceFlowParts, Tuple};
use nix::time::{ClockId, clock_gettime};

use super::{
    BACKEND, BACKEND_MAC, BACKEND_PORT, CLIENT_MAC, CLIENT_PORT, FRONTEND_PORT, Hosts, MACS,
    NODE_PORT, Packet, SERVICE, Stand,
};

/// `CLOCK_MONOTONIC`, in seconds.
pub fn now_secs() -> u32 {
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC).expect("a clock");
    now.tv_sec().try_into().expect("a number of seconds")
}

/// A flow from outside that is in the maps, with tuples of one IP version.
pub struct Known<'a, T> {
    /// The stand whose program knows the flow.
    pub stand: &'a Stand,
    hosts: Hosts,
    backend: IpAddr,
    /// IP protocol number.
    pub protocol: u8,
    /// Tuple of packets from the client to the frontend.
    pub sent: T,
    /// Tuple of packets from the client to the backend.
    pub flow: T,
    /// Tuple of packets from the backend to the node, to which NAT still applies.
    pub key: T,
}

/// An IP version, represented by its tuple type.
pub trait Version: Tuple + Pod + Debug {
    /// Names of the maps for conntrack, NAT and service flows: those for TCP, and those for all other protocols.
    const MAPS: [[&str; 3]; 2];
    /// The tuple of a packet between these ends. Ports are in host byte order.
    fn of(ends: [(Self::Address, u16); 2], protocol: u8, direction: u8) -> Self;
}

macro_rules! version {
    ($tuple:ty, $maps:expr) => {
        impl Version for $tuple {
            const MAPS: [[&str; 3]; 2] = $maps;
            fn of(ends: [(Self::Address, u16); 2], protocol: u8, direction: u8) -> Self {
                let [(saddr_be, sport), (daddr_be, dport)] = ends;
                Self {
                    saddr_be,
                    daddr_be,
                    sport_be: sport.to_be(),
                    dport_be: dport.to_be(),
                    protocol,
                    direction,
                    pad: 0,
                }
            }
        }
    };
}

version!(
    Tuple4,
    [
        ["HEALTH_CT4", "HEALTH_NAT4", "HEALTH_REVNAT4"],
        ["HEALTH_CT_ANY4", "HEALTH_NAT_ANY4", "HEALTH_REVNAT_ANY4"],
    ]
);
version!(
    Tuple6,
    [
        ["HEALTH_CT6", "HEALTH_NAT6", "HEALTH_REVNAT6"],
        ["HEALTH_CT_ANY6", "HEALTH_NAT_ANY6", "HEALTH_REVNAT_ANY6"],
    ]
);

fn address<T: Tuple>(address: IpAddr) -> T::Address {
    T::Address::of_addr(&Addr::from(address))
}

impl<'a, T: Version> Known<'a, T>
where
    T::Translation: Pod,
    T::ServiceFlow: Pod,
{
    /// Adds a flow to all maps, as the tc programs do.
    pub fn enter(
        stand: &'a Stand,
        hosts: Hosts,
        backend: IpAddr,
        protocol: u8,
    ) -> anyhow::Result<Self> {
        let end = |host: IpAddr, port: u16| (address::<T>(host), port);
        let client = end(hosts.client, CLIENT_PORT);
        let (frontend, server) = (end(hosts.node, FRONTEND_PORT), end(backend, BACKEND_PORT));
        let node = end(hosts.node, NODE_PORT);
        let known = Self {
            stand,
            hosts,
            backend,
            protocol,
            sent: T::of([client, frontend], protocol, TUPLE_OUT),
            flow: T::of([client, server], protocol, TUPLE_OUT),
            key: T::of([server, node], protocol, TUPLE_IN),
        };
        stand.serve(Some(backend))?;
        known.serve(now_secs() + 5, FLOW_FROM_OUTSIDE | FLOW_MASQUERADED)?;
        known.translate(NAT_NEEDS_CT)?;
        known.track(|_| {})?;
        Ok(known)
    }

    /// Opens one of the flow's maps, by its index in [`Version::MAPS`].
    pub fn map<V: Pod>(&self, which: usize) -> aya::maps::HashMap<MapData, T, V> {
        let maps = T::MAPS[usize::from(self.protocol != IP_PROTOCOL_TCP)];
        self.stand.run.hash_map(maps[which])
    }

    /// Adds the flow as a service flow, to the backend and back from the frontend.
    pub fn serve(&self, expires: u32, flags: u16) -> anyhow::Result<()> {
        let be = |host: IpAddr, port: u16| (address::<T>(host), port.to_be());
        let server = be(self.backend, BACKEND_PORT);
        let frontend = be(self.hosts.node, FRONTEND_PORT);
        let mut flows = self.map(2);
        for (key, to) in [(self.sent, server), (self.flow.reply(), frontend)] {
            let flow = T::service_flow(&ServiceFlowParts {
                to,
                backend: BACKEND,
                service: SERVICE,
                expires,
                flags,
                client_port_be: 0,
            });
            flows.insert(key, flow, 0)?;
        }
        Ok(())
    }

    /// Adds the flow's NAT entries with these flags.
    pub fn translate(&self, flags: u32) -> anyhow::Result<()> {
        let node = (address::<T>(self.hosts.node), NODE_PORT.to_be());
        let client = (address::<T>(self.hosts.client), CLIENT_PORT.to_be());
        let mut translations = self.map(1);
        translations.insert(self.flow, T::translation(node, flags, 1), 0)?;
        translations.insert(self.key, T::translation(client, flags, 1), 0)?;
        Ok(())
    }

    /// Adds the flow to conntrack, established in both directions.
    pub fn track(&self, change: impl FnOnce(&mut CtEntry)) -> anyhow::Result<()> {
        let mut entry = CtEntry {
            expires: now_secs() + 5,
            source_identity: identity::WORLD,
            ..CtEntry::default()
        };
        if self.protocol == IP_PROTOCOL_TCP {
            entry.set_state(CtState::new(CT_SEEN_NON_SYN, SYN | ACK, SYN | ACK));
        }
        change(&mut entry);
        self.map(0).insert(self.flow, entry, 0)?;
        Ok(())
    }

    /// The flow's conntrack entry.
    pub fn tracked(&self) -> anyhow::Result<CtEntry> {
        Ok(self.map(0).get(&self.flow, 0)?)
    }

    /// The client's packet to the frontend.
    pub fn request(&self) -> Packet {
        Packet {
            macs: [MACS[0], CLIENT_MAC],
            ends: [
                (self.hosts.client, CLIENT_PORT),
                (self.hosts.node, FRONTEND_PORT),
            ],
            ..Packet::of(self.protocol)
        }
    }

    /// The request on its way to the backend, as it leaves through this device.
    pub fn sent_on(&self, device: usize) -> Packet {
        Packet {
            macs: [BACKEND_MAC, MACS[device]],
            ends: [(self.hosts.node, NODE_PORT), (self.backend, BACKEND_PORT)],
            hops: 63,
            ..self.request()
        }
    }

    /// The backend's reply, as it arrives at this device.
    pub fn answer(&self, device: usize) -> Packet {
        Packet {
            macs: [MACS[device], BACKEND_MAC],
            ends: [(self.backend, BACKEND_PORT), (self.hosts.node, NODE_PORT)],
            ..Packet::of(self.protocol)
        }
    }

    /// The reply on its way to the client, after it arrived at this device.
    pub fn returned(&self, device: usize) -> Packet {
        Packet {
            macs: [CLIENT_MAC, MACS[0]],
            ends: [
                (self.hosts.node, FRONTEND_PORT),
                (self.hosts.client, CLIENT_PORT),
            ],
            hops: 63,
            ..self.answer(device)
        }
    }
}

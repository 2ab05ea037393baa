//! Paths that do not take packets of the size that this host sends.

use std::net::IpAddr;

use super::{Cause, Diagnosis, PeerFacts};
use crate::path_mtu::PathMtu;

/// Whether a router reports to a packet's sender that it is too big.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TooBigNotice {
    /// A router does: connections adapt.
    ByRouter,
    /// No router does: a black hole (RFC 2923 section 2.1).
    ByNobody,
}

/// Diagnoses the paths to a peer's addresses whose notice is `told`; `None` if they have no fault.
pub(super) fn diagnose(peer: &PeerFacts<'_>, told: TooBigNotice) -> Option<Diagnosis> {
    let paths: Vec<(IpAddr, &PathMtu)> = peer
        .targets
        .iter()
        .filter_map(|target| Some((target.key.address, target.path_mtu?)))
        .filter(|(_, path)| path.is_reduced())
        .collect();
    let is_such = |path: &PathMtu| path.told.is_none() == (told == TooBigNotice::ByNobody);
    let &(address, worst) = paths
        .iter()
        .filter(|(_, path)| is_such(path))
        .min_by_key(|(_, path)| path.mtu)?;
    let name = peer.display();
    let mtu = worst.mtu;
    let message = match worst.told {
        None => format!(
            "path MTU: packets of more than {mtu} bytes to {name} on {address} vanish, though {} and \
             nobody says that they are too big, so connections hang when they carry much; correct the \
             MTU on the way, or let ICMP \"packet too big\" pass",
            allowed(worst)
        ),
        Some(told) => format!(
            "path MTU: {} takes packets of {mtu} bytes at most to {name} on {address}, though {}; \
             connections have to find that out one by one; correct the MTU on the way, or set that \
             of the route to {mtu}",
            told.from,
            allowed(worst)
        ),
    };
    Some(Diagnosis {
        cause: Cause::PathMtu,
        message,
        evidence: paths
            .iter()
            .map(|(address, path)| evidence(*address, path))
            .collect(),
    })
}

/// `eth0 takes 1500`.
fn allowed(path: &PathMtu) -> String {
    let way = &path.way;
    match way.mtu == way.device_mtu {
        true => format!("{} takes {}", way.device, way.mtu),
        false => format!("the route by {} allows {}", way.device, way.mtu),
    }
}

fn evidence(address: IpAddr, path: &PathMtu) -> String {
    let (mtu, more) = (path.mtu, path.mtu + 1);
    let fate = match path.told {
        None => "lost without an ICMP error".to_owned(),
        Some(told) => format!(
            "rejected by {}: packet too big, next-hop MTU {}",
            told.from, told.next_hop_mtu
        ),
    };
    format!(
        "path to {address}: packets of {mtu} bytes are answered, those of {more} {fate}; {}",
        allowed(path)
    )
}

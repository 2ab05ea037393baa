//! Paths that do not carry packets of the size that this host sends.

use std::net::IpAddr;

use super::{Cause, Diagnosis, PeerFacts};
use crate::path_mtu::PathMtu;

/// Whether a router reports packets that are too big to their sender.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TooBigNotice {
    /// A router does: connections adapt.
    ByRouter,
    /// No router does: a black hole (RFC 2923 section 2.1).
    ByNobody,
}

/// Diagnoses the paths to a peer's addresses whose notice is `notice`; `None` if they have no fault.
pub(super) fn diagnose(peer: &PeerFacts<'_>, notice: TooBigNotice) -> Option<Diagnosis> {
    let paths: Vec<(IpAddr, &PathMtu)> = peer
        .targets
        .iter()
        .filter_map(|target| Some((target.key.address, target.path_mtu?)))
        .filter(|(_, path)| path.is_reduced())
        .collect();
    let is_such = |path: &PathMtu| path.notice.is_none() == (notice == TooBigNotice::ByNobody);
    let &(address, worst) = paths
        .iter()
        .filter(|(_, path)| is_such(path))
        .min_by_key(|(_, path)| path.mtu)?;
    let name = peer.display();
    let mtu = worst.mtu;
    let message = match worst.notice {
        None => format!(
            "path MTU: packets larger than {mtu} bytes to {name} on {address} vanish without an \
             ICMP error, though {}; connections that carry a lot of data hang; correct the MTU on \
             the way, or let ICMP \"packet too big\" pass",
            allowed(worst)
        ),
        Some(notice) => format!(
            "path MTU: {} accepts packets of at most {mtu} bytes to {name} on {address}, though \
             {}; each connection must discover this limit on its own; correct the MTU on the way, \
             or set the route's MTU to {mtu}",
            notice.from,
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

/// `eth0 allows 1500`.
fn allowed(path: &PathMtu) -> String {
    let way = &path.way;
    match way.mtu == way.device_mtu {
        true => format!("{} allows {}", way.device, way.mtu),
        false => format!("the route through {} allows {}", way.device, way.mtu),
    }
}

fn evidence(address: IpAddr, path: &PathMtu) -> String {
    let (mtu, more) = (path.mtu, path.mtu + 1);
    let fate = match path.notice {
        None => "are lost without an ICMP error".to_owned(),
        Some(notice) => format!(
            "are rejected by {}: packet too big, next-hop MTU {}",
            notice.from, notice.next_hop_mtu
        ),
    };
    format!(
        "path to {address}: packets of {mtu} bytes are answered, packets of {more} bytes {fate}; \
         {}",
        allowed(path)
    )
}

//! Combines the findings of both protocols for one address of a peer, and formats address lists.

use std::net::IpAddr;

use health_common::probe::Path;

use super::reason::Reason;
use crate::failure::Failure;

/// Maximum number of addresses that a message lists.
const LISTED: usize = 4;

/// Finding of one protocol for an address.
#[derive(Clone, Copy, Debug)]
pub(super) enum Finding<'a> {
    /// Nothing: disabled, or this host could not probe.
    None,
    Up,
    Down(Reason, &'a Failure),
}

impl Finding<'_> {
    pub(super) fn is_up(self) -> bool {
        matches!(self, Self::Up)
    }

    pub(super) fn is_some(self) -> bool {
        !matches!(self, Self::None)
    }

    pub(super) fn reason(self) -> Option<Reason> {
        match self {
            Self::Down(reason, _) => Some(reason),
            _ => None,
        }
    }

    pub(super) fn is(self, reasons: &[Reason]) -> bool {
        self.reason()
            .is_some_and(|reason| reasons.contains(&reason))
    }
}

/// Findings of both protocols for an address.
#[derive(Clone, Copy, Debug)]
pub(super) struct Address<'a> {
    pub(super) address: IpAddr,
    pub(super) path: Path,
    pub(super) icmp: Finding<'a>,
    pub(super) http: Finding<'a>,
}

impl<'a> Address<'a> {
    /// Uses the finding of one protocol to interpret the other.
    pub(super) fn resolve(&mut self) {
        let Finding::Down(reason, failure) = self.http else {
            return;
        };
        let resolved = match (reason, self.icmp) {
            (Reason::Unreachable, Finding::Up) => Reason::Rejected(None),
            (Reason::Unreachable, Finding::Down(Reason::Silent | Reason::NextHopSilent, _)) => {
                Reason::Silent
            }
            (Reason::Unreachable, Finding::Down(of_icmp, _)) => of_icmp,
            // A firewall that rejects everything, and rejects connections with a reset.
            (Reason::Refused, Finding::Down(of_icmp @ Reason::Rejected(_), _)) => of_icmp,
            _ => reason,
        };
        self.http = Finding::Down(resolved, failure);
    }

    pub(super) fn reasons(&self) -> impl Iterator<Item = Reason> {
        [self.icmp, self.http]
            .into_iter()
            .filter_map(Finding::reason)
    }

    pub(super) fn is_up(&self) -> bool {
        self.reasons().next().is_none()
    }

    /// Whether the address sent no packet at all.
    pub(super) fn is_unheard(&self) -> bool {
        !self.icmp.is_up()
            && !self.http.is_up()
            && !self.reasons().any(|reason| reason.is_heard(self.address))
    }

    /// Whether nothing came back at all, neither from the address nor about it.
    pub(super) fn is_silent(&self) -> bool {
        let silent = |reason| matches!(reason, Reason::Silent | Reason::NextHopSilent);
        self.is_unheard() && self.reasons().all(silent)
    }
}

/// Splits off the addresses of a family that is silent while the other is heard; returns them and the rest.
pub(super) fn without_silent_family<'a>(
    all: &[Address<'a>],
) -> (Vec<Address<'a>>, Vec<Address<'a>>) {
    for ipv4 in [true, false] {
        let (family, rest): (Vec<_>, Vec<_>) =
            all.iter().partition(|a| a.address.is_ipv4() == ipv4);
        let silent = !family.is_empty() && family.iter().all(Address::is_silent);
        // If only the endpoint has this family, the problem is the endpoint's, unless the endpoint is heard by the
        // other family.
        let host = family.iter().any(|a| a.path == Path::Host);
        let path = if host { Path::Host } else { Path::Endpoint };
        if silent && rest.iter().any(|a| a.path == path && !a.is_unheard()) {
            return (family, rest);
        }
    }
    (Vec::new(), all.to_vec())
}

pub(super) fn pick<'a>(
    addresses: &[Address<'a>],
    is: impl Fn(&Address<'a>) -> bool,
) -> Vec<Address<'a>> {
    addresses.iter().filter(|a| is(a)).copied().collect()
}

/// `a, b and c`, or `a, b, c, d and 7 more`.
pub(super) fn list(addresses: &[Address<'_>]) -> String {
    let shown = addresses.len().min(LISTED);
    let mut items: Vec<String> = addresses[..shown]
        .iter()
        .map(|a| a.address.to_string())
        .collect();
    if addresses.len() > shown {
        items.push(format!("{} more", addresses.len() - shown));
    }
    join(&items)
}

/// `a, b and c`.
pub(super) fn join(items: &[String]) -> String {
    match items {
        [] => String::new(),
        [item] => item.clone(),
        [items @ .., last] => format!("{} and {last}", items.join(", ")),
    }
}

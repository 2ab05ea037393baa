//! Diagnoses a peer that has failures: the rows of the table, one function each.

use std::net::IpAddr;

use health_common::probe::Path;
use nix::errno::Errno;

use super::address::{Address, Finding, join, list, pick, without_silent_family};
use super::reason::Reason;
use super::{Cause, Context, Diagnosis, PeerFacts, TargetFacts, Verdict};
use crate::failure::{Failure, IcmpError};
use crate::target::Protocol;

/// Everything known about a peer that has failures.
pub(super) struct Picture<'a> {
    context: &'a Context<'a>,
    peer: &'a PeerFacts<'a>,
    /// Addresses with a finding from at least one protocol.
    addresses: Vec<Address<'a>>,
}

impl<'a> Picture<'a> {
    pub(super) fn new(context: &'a Context<'a>, peer: &'a PeerFacts<'a>) -> Self {
        let mut addresses: Vec<Address<'a>> = Vec::new();
        for target in peer.targets {
            let key = target.key;
            let finding = match target.verdict {
                Verdict::Off | Verdict::Unknown => continue,
                Verdict::Reachable => Finding::Up,
                Verdict::Unreachable(failure) => match Reason::new(context, key, failure) {
                    Reason::LocalError => continue,
                    reason => Finding::Down(reason, failure),
                },
            };
            let same = |a: &&mut Address<'_>| (a.address, a.path) == (key.address, key.path);
            let known = addresses.iter_mut().find(same);
            let (icmp, http) = match key.protocol {
                Protocol::Icmp => (finding, Finding::None),
                Protocol::Http => (Finding::None, finding),
            };
            match (known, key.protocol) {
                (Some(known), Protocol::Icmp) => known.icmp = finding,
                (Some(known), Protocol::Http) => known.http = finding,
                (None, _) => addresses.push(Address {
                    address: key.address,
                    path: key.path,
                    icmp,
                    http,
                }),
            }
        }
        addresses.iter_mut().for_each(Address::resolve);
        Self {
            context,
            peer,
            addresses,
        }
    }

    pub(super) fn diagnosis(&self, cause: Cause, message: String) -> Diagnosis {
        let is_down = |target: &&TargetFacts<'_>| matches!(target.verdict, Verdict::Unreachable(_));
        let mut down = self.peer.targets.iter().filter(is_down);
        let message = match down.find_map(|target| self.context.loss_location(target)) {
            Some(place) if may_add_place(cause) => format!("{message}; {}", place.of_silence()),
            _ => message,
        };
        let line = |target: &TargetFacts<'_>| {
            let text = match target.verdict {
                Verdict::Off | Verdict::Unknown => return None,
                Verdict::Reachable => "answered".to_owned(),
                Verdict::Unreachable(failure) => {
                    let next_hop = match Reason::new(self.context, target.key, failure) {
                        Reason::NextHopSilent if target.key.address.is_ipv4() => {
                            ", this host: ARP is not answered"
                        }
                        Reason::NextHopSilent => ", this host: neighbor discovery is not answered",
                        _ => "",
                    };
                    let counts = self.context.loss_location(target);
                    let counts =
                        counts.map_or_else(String::new, |place| format!("; {}", place.evidence()));
                    format!("{failure}{next_hop}{counts}")
                }
            };
            Some(format!("{}: {text}", self.context.label(target.key)))
        };
        Diagnosis {
            cause,
            message,
            evidence: self.peer.targets.iter().filter_map(line).collect(),
        }
    }

    /// The rows of the table from `local-error` to `icmp-filtered`.
    pub(super) fn diagnose(&self) -> Diagnosis {
        let all = &self.addresses;
        if all.iter().all(Address::is_up) {
            return self.local_error();
        }
        // An error from the node itself, even if it is about another of its addresses.
        let own = |reason: Reason| reason.sender().is_some_and(|s| self.peer.has(s));
        if all.iter().all(|a| a.is_unheard() && !a.reasons().any(own)) {
            return self.unheard(all);
        }
        let (family, rest) = without_silent_family(all);
        if !family.is_empty() && rest.iter().all(Address::is_up) {
            return self.one_family(&family);
        }
        self.rejected(&rest)
            .or_else(|| self.agent_down(&rest))
            .or_else(|| self.no_route(&rest))
            .or_else(|| self.endpoint_down(&rest))
            .or_else(|| self.address_unreachable(&rest))
            .or_else(|| self.http_trouble(&rest))
            .or_else(|| self.icmp_filtered(&rest))
            .unwrap_or_else(|| self.some_unreachable(&rest))
    }

    fn local_error(&self) -> Diagnosis {
        let name = self.name();
        let failure = |target: &TargetFacts<'a>| match target.verdict {
            Verdict::Unreachable(failure) => Some((target.key, failure)),
            _ => None,
        };
        let message = match self.peer.targets.iter().find_map(failure) {
            Some((key, failure)) => format!(
                "local error: this host fails to probe {name}: {}: {failure}",
                self.context.label(key)
            ),
            None => format!("local error: this host fails to probe {name}"),
        };
        self.diagnosis(Cause::LocalError, message)
    }

    /// Nothing is heard from the peer.
    fn unheard(&self, all: &[Address<'a>]) -> Diagnosis {
        let hosts = pick(all, |a| a.path == Path::Host);
        if !hosts.iter().any(Address::is_silent) {
            // The hosts' problem explains the whole node.
            let rejected = |a: &Address<'_>| a.reasons().any(|r| matches!(r, Reason::Rejected(_)));
            let reported = if hosts.iter().any(rejected) {
                self.rejected(all)
            } else {
                self.no_route(all).or_else(|| self.rejected(all))
            };
            return reported.unwrap_or_else(|| self.some_unreachable(all));
        }
        if self.peer.local {
            return self.some_unreachable(all);
        }
        let name = self.name();
        let silent = pick(all, Address::is_silent);
        let on = match silent.len() {
            n if n > 2 && n == all.len() => "any of its addresses".to_owned(),
            _ => list(&silent),
        };
        let resolution = hosts
            .iter()
            .any(|a| a.reasons().any(|reason| reason == Reason::NextHopSilent));
        let icmp = all.iter().any(|a| a.icmp.is_some());
        let http = all.iter().any(|a| a.http.is_some());
        let port = self.context.port;
        let (not, check) = match (icmp, http) {
            (true, true) => (
                "answers neither ICMP nor HTTP",
                "check its power, its kernel and its link".to_owned(),
            ),
            (true, false) => (
                "does not answer ICMP",
                "HTTP is not probed, so an ICMP filter would look the same".to_owned(),
            ),
            (false, _) => (
                "does not answer HTTP",
                format!("ICMP is not probed, so a filter on port {port} would look the same"),
            ),
        };
        let message = if resolution {
            format!(
                "node down: {name} {not} on {on}, and the next hop on the way to it does not answer \
                 ARP or neighbor discovery; check its power and its link"
            )
        } else {
            format!("node down: {name} {not} on {on}; {check}")
        };
        self.diagnosis(Cause::NodeDown, message)
    }

    fn one_family(&self, family: &[Address<'a>]) -> Diagnosis {
        let (down, up) = match family.first() {
            Some(address) if address.address.is_ipv4() => ("IPv4", "IPv6"),
            _ => ("IPv6", "IPv4"),
        };
        let message = format!(
            "one family only: {} answers over {up}, but not over {down} on {}; check its {down} \
             addresses, and {down} routes and firewalls on the way",
            self.name(),
            list(family),
        );
        self.diagnosis(Cause::OneFamilyOnly, message)
    }

    fn rejected(&self, addresses: &[Address<'a>]) -> Option<Diagnosis> {
        let reported =
            self.reported_failure(addresses, |reason| matches!(reason, Reason::Rejected(_)))?;
        let ReportedFailure { failure, what, .. } = &reported;
        let message = match reported.reason.sender() {
            Some(sender) => format!(
                "rejected: {} rejects {what}: {failure}; check its firewall and policies",
                self.who(sender)
            ),
            None if matches!(failure, Failure::Os(Errno::EPERM | Errno::EACCES)) => format!(
                "rejected: this host refuses to send {what}: {failure}; check its own firewall and \
                 prohibit routes"
            ),
            None => format!(
                "rejected: a firewall rejects {what} on port {}: {failure}, while ICMP is answered; check \
                 the firewalls there and on the way",
                self.context.port
            ),
        };
        Some(self.diagnosis(Cause::Rejected, message))
    }

    fn agent_down(&self, addresses: &[Address<'a>]) -> Option<Diagnosis> {
        let asked = pick(addresses, |a| a.http.is_some());
        let up = asked.iter().any(|a| a.http.is_up());
        let no_agent = |a: &Address<'_>| a.http.is(&[Reason::Refused, Reason::Hung]);
        if up || !asked.iter().any(no_agent) {
            return None;
        }
        let icmp = pick(addresses, |a| a.icmp.is_up());
        // If all three lists are the same, the addresses are named only once.
        let same = icmp.len() == addresses.len() && asked.len() == addresses.len();
        let parts: Vec<String> = [
            ("refused", &[Reason::Refused][..]),
            ("accepted and never answered", &[Reason::Hung]),
            ("answered wrongly", &[Reason::BadAnswer, Reason::Unproven]),
            ("dropped silently", &[Reason::Silent]),
        ]
        .into_iter()
        .filter_map(|(what, reasons)| {
            let part = pick(&asked, |a| a.http.is(reasons));
            match part.len() {
                0 => None,
                1 if same && asked.len() == 1 => Some(what.to_owned()),
                2 if same && asked.len() == 2 => Some(format!("{what} on both")),
                n if same && asked.len() == n => Some(format!("{what} on all")),
                _ => Some(format!("{what} on {}", list(&part))),
            }
        })
        .collect();
        let name = self.name();
        let alive = match icmp.is_empty() {
            true => "is up".to_owned(),
            false if same && icmp.len() > 2 => "answers ICMP on all its addresses".to_owned(),
            false => format!("answers ICMP on {}", list(&icmp)),
        };
        let message = format!(
            "agent down: {name} {alive}, but HTTP on port {} is {}; check whether it runs, and its \
             log",
            self.context.port,
            join(&parts)
        );
        Some(self.diagnosis(Cause::AgentDown, message))
    }

    fn no_route(&self, addresses: &[Address<'a>]) -> Option<Diagnosis> {
        // A node that has no route to its own endpoint reports a problem of the endpoint.
        let others = |reason| match reason {
            Reason::NoRoute(Some(sender)) => !self.peer.has(sender),
            reason => matches!(reason, Reason::NoRoute(None) | Reason::Unreachable),
        };
        let reported = self.reported_failure(addresses, others)?;
        let ReportedFailure {
            failure,
            what,
            first,
            ..
        } = &reported;
        let message = match reported.reason.sender() {
            Some(sender) if is_loop(failure) => format!(
                "no route: {what} is caught in a routing loop: {failure}; check the routes of {} \
                 and its neighbors",
                self.who(sender)
            ),
            Some(sender) => format!(
                "no route: {} cannot deliver {what}: {failure}; check its routes and its link to that \
                 address",
                self.who(sender)
            ),
            None if reported.reason == Reason::Unreachable => format!(
                "no route: {what} is unreachable: {failure}, because of a missing route, an \
                 unanswered ARP request or a firewall; check `ip route get {first}` and `ip neigh`"
            ),
            None if self.peer.local => format!(
                "no route: this host has no route for {what}: {failure}; check whether one of its \
                 own devices has the address"
            ),
            None => format!(
                "no route: this host has no route for {what}: {failure}; check `ip route get {first}`"
            ),
        };
        Some(self.diagnosis(Cause::NoRoute, message))
    }

    fn endpoint_down(&self, addresses: &[Address<'a>]) -> Option<Diagnosis> {
        let unheard = pick(addresses, Address::is_unheard);
        let up = pick(addresses, |a| {
            a.path == Path::Host && (a.http.is_up() || a.is_up())
        });
        if unheard.is_empty() || up.is_empty() || unheard.iter().any(|a| a.path == Path::Host) {
            return None;
        }
        let sender = unheard
            .iter()
            .flat_map(Address::reasons)
            .find_map(Reason::sender);
        let says = match sender {
            None => "is silent".to_owned(),
            Some(sender) => format!("is unreachable, says {}", self.who(sender)),
        };
        let message = format!(
            "endpoint datapath down: the host of {} answers on {}, but its health endpoint on {} \
             {says}; check lxc_health and its programs there, and the routes to its pod CIDRs",
            self.name(),
            list(&up),
            list(&unheard),
        );
        Some(self.diagnosis(Cause::EndpointDatapathDown, message))
    }

    fn address_unreachable(&self, addresses: &[Address<'a>]) -> Option<Diagnosis> {
        let silent = |a: &Address<'_>| a.path == Path::Host && a.is_unheard();
        let any = addresses.iter().any(silent);
        any.then(|| self.some_unreachable(addresses))
    }

    /// The fallback if nothing more specific can be said.
    fn some_unreachable(&self, addresses: &[Address<'a>]) -> Diagnosis {
        let unheard = pick(addresses, Address::is_unheard);
        let heard = pick(addresses, |a| !a.is_unheard());
        let down = match unheard.is_empty() {
            true => pick(addresses, |a| !a.is_up()),
            false => unheard,
        };
        let but = match heard.is_empty() {
            true => String::new(),
            false => format!(", though it is up on {}", list(&heard)),
        };
        let message = format!(
            "address unreachable: {} does not answer on {}{but}; check whether it has the address, and \
             the routes and firewalls on the way",
            self.name(),
            list(&down),
        );
        self.diagnosis(Cause::AddressUnreachable, message)
    }

    /// HTTP fails where ICMP is answered, or HTTP gets a wrong answer.
    fn http_trouble(&self, addresses: &[Address<'a>]) -> Option<Diagnosis> {
        let name = self.name();
        let port = self.context.port;
        let up = pick(addresses, |a| a.http.is_up());
        let though = match up.is_empty() {
            true => String::new(),
            false => format!(", though answered on {}", list(&up)),
        };
        let refused = pick(addresses, |a| a.http.is(&[Reason::Refused]));
        if !refused.is_empty() {
            let message = format!(
                "port refused: HTTP on port {port} of {name} is refused on {}{though}; its listener is \
                 missing there, or a firewall rejects",
                list(&refused)
            );
            return Some(self.diagnosis(Cause::PortRefused, message));
        }
        if let Some(diagnosis) = self.unproven(addresses, &though) {
            return Some(diagnosis);
        }
        let wrong = pick(addresses, |a| a.http.is(&[Reason::BadAnswer, Reason::Hung]));
        if let Some(Finding::Down(_, failure)) = wrong.first().map(|a| a.http) {
            let message = format!(
                "bad answer: HTTP on port {port} of {name} is not answered by a healthy agent on {} \
                 ({failure}){though}; check its log, and what listens there",
                list(&wrong)
            );
            return Some(self.diagnosis(Cause::BadAnswer, message));
        }
        let filtered = pick(addresses, |a| {
            a.http.is(&[Reason::Silent]) && a.icmp.is_up()
        });
        if filtered.is_empty() {
            return None;
        }
        let message = if up.is_empty() {
            format!(
                "port filtered: {name} answers ICMP on {}, but HTTP to port {port} is dropped silently; \
                 check the firewalls on the way, and whether its agent hangs",
                list(&filtered)
            )
        } else {
            format!(
                "port filtered: HTTP to port {port} of {name} is dropped silently on {}{though}; check \
                 the firewalls and policies on the way",
                list(&filtered)
            )
        };
        Some(self.diagnosis(Cause::PortFiltered, message))
    }

    /// HTTP is answered without a proof of being this node.
    fn unproven(&self, addresses: &[Address<'a>], though: &str) -> Option<Diagnosis> {
        let unproven = |a: &Address<'_>| a.http.is(&[Reason::Unproven]);
        let Finding::Down(_, failure) = addresses.iter().find(|a| unproven(a))?.http else {
            return None;
        };
        // In whole seconds, the clock difference may vary between two probes.
        let is_alike = |other: &Failure| {
            let clocks = |a: &Failure| matches!(a, Failure::ClockDiffers { .. });
            other == failure || clocks(other) && clocks(failure)
        };
        let such = |a: &Address<'_>| matches!(a.http, Finding::Down(_, other) if is_alike(other));
        let on = list(&pick(addresses, such));
        let name = self.name();
        let port = self.context.port;
        let (cause, message) = match failure {
            Failure::NoProof => (
                Cause::NoKey,
                format!(
                    "no key: HTTP on port {port} of {name} is answered without proof of the mesh \
                     key on {on}{though}; something else listens there, or an agent that is too \
                     old to prove its answers"
                ),
            ),
            Failure::KeyRefused => (
                Cause::WrongKey,
                format!(
                    "wrong key: {name} refuses this node's mesh key on {on}{though}; compare the \
                     --mesh-key-file of both, and check what listens on port {port}"
                ),
            ),
            Failure::WrongProof => (
                Cause::WrongKey,
                format!(
                    "wrong key: HTTP on port {port} of {name} is answered with a wrong proof of the mesh \
                     key on {on}{though}; check what listens there"
                ),
            ),
            Failure::Replayed => (
                Cause::ReplayedAnswer,
                format!(
                    "replayed answer: HTTP on port {port} of {name} is answered on {on} with an \
                     agent's answer to another request{though}; check what listens there and on \
                     the way"
                ),
            ),
            Failure::WrongNode(node) => (
                Cause::WrongNode,
                format!(
                    "wrong node: HTTP to {name} on {on} is answered by {node}{though}; check who has the \
                     address, and the names of both nodes and their clusters"
                ),
            ),
            Failure::ClockDiffers { .. } => (
                Cause::ClockDiffers,
                format!(
                    "clock differs: {name} does not answer HTTP on {on} ({failure}){though}; set both \
                     clocks"
                ),
            ),
            _ => return None,
        };
        Some(self.diagnosis(cause, message))
    }

    fn icmp_filtered(&self, addresses: &[Address<'a>]) -> Option<Diagnosis> {
        let filtered = pick(addresses, |a| a.icmp.reason().is_some() && a.http.is_up());
        if filtered.is_empty() {
            return None;
        }
        let message = format!(
            "ICMP filtered: {} answers HTTP, but not ICMP, on {}; check for firewalls that drop echo \
             requests or replies",
            self.name(),
            list(&filtered),
        );
        Some(self.diagnosis(Cause::IcmpFiltered, message))
    }

    /// The failures of this peer's targets for which `is` holds and that share a sender: the first sender that any of
    /// these failures names, or this host if none of them names one.
    fn reported_failure(
        &self,
        addresses: &[Address<'a>],
        is: impl Fn(Reason) -> bool,
    ) -> Option<ReportedFailure<'a>> {
        let such = |finding: Finding<'a>| match finding {
            Finding::Down(reason, failure) if is(reason) => Some((reason, failure)),
            _ => None,
        };
        let findings = || addresses.iter().flat_map(|a| [a.icmp, a.http]);
        let named = |(reason, _): &(Reason, _)| reason.sender().is_some();
        let (reason, failure) = findings()
            .filter_map(such)
            .find(named)
            .or_else(|| findings().find_map(such))?;
        let same =
            |finding| such(finding).is_some_and(|(other, _)| other.sender() == reason.sender());
        let protocols = match (
            addresses.iter().any(|a| same(a.icmp)),
            addresses.iter().any(|a| same(a.http)),
        ) {
            (true, true) => "ICMP and HTTP",
            (true, false) => "ICMP",
            (false, _) => "HTTP",
        };
        let on = pick(addresses, |a| same(a.icmp) || same(a.http));
        Some(ReportedFailure {
            reason,
            failure,
            first: on.first()?.address,
            what: format!("{protocols} to {} of {}", list(&on), self.name()),
        })
    }

    fn name(&self) -> String {
        self.peer.display()
    }

    /// Describes an address in terms that an operator knows.
    fn who(&self, address: IpAddr) -> String {
        if self.context.local_addresses.contains(&address) {
            format!("this host ({address})")
        } else if self.peer.has(address) {
            format!("the node itself ({address})")
        } else {
            address.to_string()
        }
    }
}

/// A failure as reported in a diagnosis: see [`Picture::reported_failure`].
struct ReportedFailure<'a> {
    reason: Reason,
    failure: &'a Failure,
    first: IpAddr,
    /// The protocols, addresses and node.
    what: String,
}

/// Whether the location of lost echo probes adds information to this cause.
fn may_add_place(cause: Cause) -> bool {
    matches!(
        cause,
        Cause::IcmpFiltered
            | Cause::OneFamilyOnly
            | Cause::EndpointDatapathDown
            | Cause::AddressUnreachable
    )
}

/// Whether packets exceeded their hop limit, as in a routing loop.
fn is_loop(failure: &Failure) -> bool {
    matches!(
        failure,
        Failure::Icmp(
            IcmpError {
                kind: 11,
                from: IpAddr::V4(_),
                ..
            } | IcmpError {
                kind: 3,
                from: IpAddr::V6(_),
                ..
            }
        )
    )
}

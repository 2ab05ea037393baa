//! Rules in Cilium's format: the `spec` of its objects, and bare lists of rules.

use std::sync::Arc;

use health_model::identity::Identity;
use health_model::labels::pod::{K8S, POD_NAMESPACE};
use health_model::labels::{Label, LabelSet, UNSPEC};
use health_model::manifest::check_port_name;
use health_model::policy::{Direction, Protocol};

use super::cidr::{read_cidr, read_cidr_set};
use super::error::{PolicyError, Problem};
use super::field::{Field, Fields};
use super::icmp;
use super::peer::{CidrSet, Entity, PeerSelector, Peers};
use super::rule::{Action, Entry, PolicyName, Rule, RuleRef, Section};
use super::selector::Selector;
use super::services::ServicePeers;
use crate::ports::{PortSpec, Ports, Traffic};

/// Maximum number of ports, or of ICMP types, in one list (Cilium's limit).
pub(super) const PORTS_MAX: usize = 40;

/// The scope in which a rule's selectors match endpoints.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Scope<'a> {
    /// Everywhere.
    Unlimited,
    /// In all Kubernetes namespaces, as for clusterwide policies.
    Cluster,
    /// In this namespace.
    Namespace(&'a str),
}

impl Scope<'_> {
    /// Limits a rule's `endpointSelector`. A selector that requires `reserved:init` stays unchanged, because those
    /// endpoints have no namespace yet.
    fn limit_subject(self, selector: &mut Selector, field: &Field<'_>) -> Result<(), PolicyError> {
        let Self::Namespace(own) = self else {
            return Ok(());
        };
        if let Some(other) = selector.namespaces().find(|named| *named != own) {
            return Err(field.error(Problem::Conflict(format!(
                "a policy in namespace {own:?} cannot select endpoints in namespace {other:?}"
            ))));
        }
        if !selector.requires_init() {
            selector.require(K8S, POD_NAMESPACE, own);
        }
        Ok(())
    }

    /// Limits a selector of peers to the scope, unless the selector itself names one.
    fn limit_peers(self, selector: &mut Selector, subject_is_init: bool) {
        if selector.names_reserved() || selector.names_namespace() {
            return;
        }
        match self {
            Self::Unlimited => {}
            Self::Cluster if subject_is_init => {}
            Self::Cluster => selector.require_key(K8S, POD_NAMESPACE),
            Self::Namespace(_) if selector.names_namespace_labels() => {}
            Self::Namespace(own) => selector.require(K8S, POD_NAMESPACE, own),
        }
    }
}

/// Reads a rule of the policy with this name. The rule gets the `derived` labels.
pub(super) fn read_rule(
    field: &Field<'_>,
    scope: Scope<'_>,
    policy: &Arc<PolicyName>,
    derived: &[Label],
) -> Result<Rule, PolicyError> {
    let fields = field.fields(&[
        "endpointSelector",
        "ingress",
        "ingressDeny",
        "egress",
        "egressDeny",
        "enableDefaultDeny",
        "labels",
        "description",
    ])?;
    let subject_field = fields.required("endpointSelector")?;
    let mut subject = Selector::read(&subject_field)?;
    subject_field.check(check_subject(&subject))?;
    let subject_is_init = subject.requires_init();
    scope.limit_subject(&mut subject, &subject_field)?;
    if let Some(description) = fields.get("description") {
        description.text()?;
    }

    let reader = SectionReader {
        fields: &fields,
        scope,
        subject_is_init,
        policy,
    };
    let ingress = reader.read(Direction::Ingress)?;
    let egress = reader.read(Direction::Egress)?;
    if !ingress.is_there && !egress.is_there {
        let problem = "it has neither ingress nor egress rules, so it does nothing; \
             to deny all by default, write an empty rule: `ingress: [{}]`";
        return Err(field.error(Problem::Conflict(problem.to_owned())));
    }

    let mut labels = derived.to_vec();
    labels.extend(read_labels(&fields)?);
    Ok(Rule {
        place: place(policy, field),
        labels: LabelSet::new(labels).map_err(|error| field.error(error))?,
        subject,
        ingress,
        egress,
    })
}

/// Fails if policy does not apply to what a rule selects.
fn check_subject(subject: &Selector) -> Result<(), Problem> {
    let init = Identity::INIT.reserved_name();
    match subject.required_reserved().find(|name| Some(*name) != init) {
        None => Ok(()),
        Some(name) => Err(Problem::Conflict(format!(
            "policy does not apply to reserved:{name}, so the rule would do nothing"
        ))),
    }
}

pub(super) fn place(policy: &Arc<PolicyName>, field: &Field<'_>) -> RuleRef {
    RuleRef {
        policy: policy.clone(),
        field: field.path().into(),
    }
}

/// Reads the `labels` of a rule. Each is a string, or an object with `key`, `value` and `source`.
pub(super) fn read_labels(rule: &Fields<'_>) -> Result<Vec<Label>, PolicyError> {
    let read = |field: Field<'_>| {
        let label = if field.value().is_string() {
            field.text()?.parse()
        } else {
            let fields = field.fields(&["key", "value", "source"])?;
            let text = |name: &str, default| {
                fields
                    .get(name)
                    .map_or(Ok(default), |field| field.text().map(str::to_owned))
            };
            let key = fields.required("key")?.text()?;
            Label::new(
                &text("source", UNSPEC.to_owned())?,
                key,
                &text("value", String::new())?,
            )
        };
        label.map_err(|error| field.error(error))
    };
    rule.items("labels")?.into_iter().map(read).collect()
}

/// Reads both lists, of allow and deny entries, of one direction.
struct SectionReader<'a> {
    fields: &'a Fields<'a>,
    scope: Scope<'a>,
    subject_is_init: bool,
    policy: &'a Arc<PolicyName>,
}

impl SectionReader<'_> {
    fn read(&self, direction: Direction) -> Result<Section, PolicyError> {
        let [allow, deny] = match direction {
            Direction::Ingress => ["ingress", "ingressDeny"],
            Direction::Egress => ["egress", "egressDeny"],
        };
        let mut entries = Vec::new();
        for (name, action) in [(allow, Action::Allow), (deny, Action::Deny)] {
            for field in self.fields.items(name)? {
                entries.push(self.entry(&field, direction, action)?);
            }
        }
        let default_deny = match self.default_deny(direction)? {
            Some(set) => set,
            None => !entries.is_empty(),
        };
        Ok(Section {
            is_there: default_deny || !entries.is_empty(),
            default_deny,
            entries,
        })
    }

    fn default_deny(&self, direction: Direction) -> Result<Option<bool>, PolicyError> {
        let Some(field) = self.fields.get("enableDefaultDeny") else {
            return Ok(None);
        };
        let fields = field.fields(&["ingress", "egress"])?;
        let of_direction = fields.get(&direction.to_string());
        of_direction.map(|field| field.boolean()).transpose()
    }

    fn entry(
        &self,
        field: &Field<'_>,
        direction: Direction,
        action: Action,
    ) -> Result<Entry, PolicyError> {
        let peer_fields: &[&str] = match direction {
            Direction::Ingress => &[
                "fromEndpoints",
                "fromEntities",
                "fromCIDR",
                "fromCIDRSet",
                "fromNodes",
            ],
            Direction::Egress => &[
                "toEndpoints",
                "toEntities",
                "toCIDR",
                "toCIDRSet",
                "toNodes",
                "toServices",
            ],
        };
        let known = [peer_fields, &["toPorts", "icmps"]].concat();
        let fields = field.fields(&known)?;

        let given: Vec<&str> = peer_fields
            .iter()
            .copied()
            .filter(|name| fields.get(name).is_some())
            .collect();
        if let [first, second, ..] = given[..] {
            let problem =
                format!("{first} and {second} cannot be combined; write a separate rule for each");
            return Err(field.error(Problem::Conflict(problem)));
        }
        let selected = match given.first() {
            None => None,
            Some(name) => {
                let list = fields.items(name)?;
                Some(match *name {
                    "fromEndpoints" | "toEndpoints" => self.endpoints(&list)?,
                    "fromEntities" | "toEntities" => read_entities(&list)?,
                    "fromNodes" | "toNodes" => read_nodes(&list)?,
                    "toServices" => self.services(&list)?,
                    _ => vec![PeerSelector::Cidrs(read_cidrs(&list)?)],
                })
            }
        };
        let traffic = read_traffic(field, &fields)?;
        // As in Cilium, an empty rule matches nothing; it only turns on the default deny.
        let peers = match (selected, &traffic) {
            (Some(selectors), _) => Peers::Selected(selectors),
            (None, Some(_)) => Peers::All,
            (None, None) => Peers::NOBODY,
        };
        Ok(Entry {
            place: place(self.policy, field),
            action,
            peers,
            traffic: traffic.unwrap_or(Traffic::All),
        })
    }

    fn endpoints(&self, list: &[Field<'_>]) -> Result<Vec<PeerSelector>, PolicyError> {
        list.iter()
            .map(|field| {
                let mut selector = Selector::read(field)?;
                self.scope.limit_peers(&mut selector, self.subject_is_init);
                Ok(PeerSelector::Labels(selector))
            })
            .collect()
    }

    fn services(&self, list: &[Field<'_>]) -> Result<Vec<PeerSelector>, PolicyError> {
        let own_namespace = match self.scope {
            Scope::Namespace(own) => Some(own),
            Scope::Unlimited | Scope::Cluster => None,
        };
        list.iter()
            .map(|field| ServicePeers::read(field, own_namespace).map(PeerSelector::Services))
            .collect()
    }
}

fn read_nodes(list: &[Field<'_>]) -> Result<Vec<PeerSelector>, PolicyError> {
    list.iter()
        .map(|field| Selector::read(field).map(PeerSelector::Nodes))
        .collect()
}

fn read_entities(list: &[Field<'_>]) -> Result<Vec<PeerSelector>, PolicyError> {
    list.iter()
        .map(|field| {
            let name = field.text()?;
            let entity = Entity::by_name(name).ok_or_else(|| {
                let problem = format!("not an entity; expected {}", Entity::NAMES);
                field.error(Problem::value(name, problem))
            })?;
            Ok(PeerSelector::Entity(entity))
        })
        .collect()
}

/// Reads CIDRs, given as strings or as objects with exceptions.
fn read_cidrs(list: &[Field<'_>]) -> Result<CidrSet, PolicyError> {
    let mut set = CidrSet::default();
    for field in list {
        let (cidr, except) = if field.value().is_object() {
            read_cidr_set(field)?
        } else {
            (read_cidr(field)?, Vec::new())
        };
        set.insert(cidr, except);
    }
    Ok(set)
}

/// Reads the ports or ICMP types of an entry; `None` if the entry has neither field.
fn read_traffic(field: &Field<'_>, fields: &Fields<'_>) -> Result<Option<Traffic>, PolicyError> {
    let ports = fields.items("toPorts")?;
    let icmps = fields.items("icmps")?;
    if !ports.is_empty() && !icmps.is_empty() {
        let problem = "toPorts and icmps cannot be combined; write a separate rule for each";
        return Err(field.error(Problem::Conflict(problem.to_owned())));
    }
    let mut read = Ports::default();
    for list in ports {
        let list = list.fields(&["ports"])?.required("ports")?;
        let items = list.list_of_at_most(PORTS_MAX)?;
        if items.is_empty() {
            return Err(list.error(Problem::Conflict("expected at least one port".to_owned())));
        }
        for item in items {
            read_port(&item, &mut read)?;
        }
    }
    for list in icmps {
        let list = list.fields(&["fields"])?.required("fields")?;
        let items = list.list_of_at_most(PORTS_MAX)?;
        if items.is_empty() {
            return Err(list.error(Problem::Conflict("expected at least one type".to_owned())));
        }
        for item in items {
            let (protocol, number) = read_icmp(&item)?;
            read.add(protocol, PortSpec::Range(number, number));
        }
    }
    Ok((!read.is_empty()).then_some(Traffic::Ports(read)))
}

fn read_port(field: &Field<'_>, ports: &mut Ports) -> Result<(), PolicyError> {
    let fields = field.fields(&["port", "endPort", "protocol"])?;
    let protocols = match fields.get("protocol") {
        None => Protocol::WITH_PORTS.to_vec(),
        Some(field) if field.text()?.eq_ignore_ascii_case("ANY") => Protocol::WITH_PORTS.to_vec(),
        Some(field) => vec![read_protocol(&field)?],
    };
    let port = read_port_spec(&fields.required("port")?, fields.get("endPort"))?;
    for protocol in protocols {
        ports.add(protocol, port.clone());
    }
    Ok(())
}

/// Reads the protocol of an entry with ports.
pub(super) fn read_protocol(field: &Field<'_>) -> Result<Protocol, PolicyError> {
    let text = field.text()?;
    let known = Protocol::WITH_PORTS
        .into_iter()
        .find(|protocol| protocol.to_string().eq_ignore_ascii_case(text));
    known.ok_or_else(|| {
        let problem =
            "not a protocol with ports; expected TCP, UDP, SCTP, or ANY in Cilium's policies";
        field.error(Problem::value(text, problem))
    })
}

/// Reads a port, a range of ports, or a port name: text that contains a letter. As in Cilium, port 0 means every port,
/// and upper-case letters of a name count as lower-case ones.
pub(super) fn read_port_spec(
    port: &Field<'_>,
    end: Option<Field<'_>>,
) -> Result<PortSpec, PolicyError> {
    if port.value().is_string() {
        let text = port.text()?;
        if text.contains(|c: char| c.is_ascii_alphabetic()) {
            return read_port_name(port, text, end.as_ref());
        }
    }
    let first = read_port_number(port)?;
    match (first, end) {
        (0, None) => Ok(PortSpec::ALL),
        (_, None) => Ok(PortSpec::Range(first, first)),
        (_, Some(end)) => {
            let last = read_port_number(&end)?;
            if first == 0 || last < first {
                let problem = format!("not a valid end of a range that begins at port {first}");
                return Err(end.error(Problem::value(last, problem)));
            }
            Ok(PortSpec::Range(first, last))
        }
    }
}

fn read_port_name(
    port: &Field<'_>,
    text: &str,
    end: Option<&Field<'_>>,
) -> Result<PortSpec, PolicyError> {
    let name = text.to_ascii_lowercase();
    if let Some(detail) = check_port_name(&name) {
        let problem = format!("not a port name, which {detail}");
        return Err(port.error(Problem::value(text, problem)));
    }
    if let Some(end) = end {
        let problem = "a named port cannot begin a range".to_owned();
        return Err(end.error(Problem::Conflict(problem)));
    }
    Ok(PortSpec::Name(name))
}

fn read_port_number(field: &Field<'_>) -> Result<u16, PolicyError> {
    let text = field.text_or_number()?;
    let is_number = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    text.parse().ok().filter(|_| is_number).ok_or_else(|| {
        let problem = "not a port; expected 0 to 65535, 0 for all";
        field.error(Problem::value(text, problem))
    })
}

fn read_icmp(field: &Field<'_>) -> Result<(Protocol, u16), PolicyError> {
    let fields = field.fields(&["family", "type"])?;
    let (protocol, family) = match fields.get("family") {
        None => (Protocol::ICMP, "IPv4"),
        Some(field) => match field.text()? {
            "IPv4" => (Protocol::ICMP, "IPv4"),
            "IPv6" => (Protocol::ICMPV6, "IPv6"),
            other => {
                let problem = "not an address family; expected IPv4 or IPv6";
                return Err(field.error(Problem::value(other, problem)));
            }
        },
    };
    let kind = fields.required("type")?;
    let text = kind.text_or_number()?;
    let number: Option<u8> = text.parse().ok();
    let number = number.or_else(|| icmp::type_by_name(protocol, &text));
    let number = number.ok_or_else(|| {
        let problem = format!(
            "not an ICMP type for {family}; expected 0 to 255, or a name such as EchoRequest"
        );
        kind.error(Problem::value(&text, problem))
    })?;
    Ok((protocol, number.into()))
}

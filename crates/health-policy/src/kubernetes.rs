//! Rules in Kubernetes' form: the `spec` of a NetworkPolicy (networking.k8s.io/v1).

use std::sync::Arc;

use health_model::labels::{Label, LabelSet};
use health_model::policy::{Direction, Protocol};

use super::cilium::{place, read_cidr_block, read_port_range, read_protocol};
use super::error::{PolicyError, Problem};
use super::field::{Field, Fields};
use super::peer::{CidrSet, PeerSelector, Peers};
use super::rule::{Action, Entry, PolicyName, Rule, Section};
use super::selector::{K8S, NAMESPACE, NAMESPACE_LABELS, Selector};
use crate::ports::{PortRange, Traffic};

/// Reads the rule of the policy of this name and namespace, which gives it the `derived` labels.
pub(super) fn read_rule(
    field: &Field<'_>,
    namespace: &str,
    policy: &Arc<PolicyName>,
    derived: &[Label],
) -> Result<Rule, PolicyError> {
    let fields = field.fields(&["podSelector", "policyTypes", "ingress", "egress"])?;
    let mut subject = Selector::read_k8s(&fields.required("podSelector")?, "")?;
    subject.require(K8S, NAMESPACE, namespace);
    let types = PolicyTypes::read(&fields)?;
    let section = |direction: Direction, is_there: bool| {
        let mut entries = Vec::new();
        for field in fields.items(&direction.to_string())? {
            entries.push(read_entry(&field, direction, namespace, policy)?);
        }
        if !is_there
            && let Some(field) = fields.get(&direction.to_string())
            && !entries.is_empty()
        {
            let problem = "policyTypes does not list this direction, so these rules do nothing";
            return Err(field.error(Problem::Conflict(problem.to_owned())));
        }
        Ok(Section {
            is_there,
            default_deny: is_there,
            entries,
        })
    };
    Ok(Rule {
        place: place(policy, field),
        labels: LabelSet::new(derived.iter().cloned()).map_err(|error| field.error(error))?,
        subject,
        ingress: section(Direction::Ingress, types.ingress)?,
        egress: section(Direction::Egress, types.egress)?,
    })
}

/// The directions that a policy is about.
struct PolicyTypes {
    ingress: bool,
    egress: bool,
}

impl PolicyTypes {
    /// Those that are listed; without a list ingress always, and egress if there are rules for it.
    fn read(fields: &Fields<'_>) -> Result<Self, PolicyError> {
        let listed = fields.items("policyTypes")?;
        if listed.is_empty() {
            return Ok(Self {
                ingress: true,
                egress: !fields.items("egress")?.is_empty(),
            });
        }
        let mut types = Self {
            ingress: false,
            egress: false,
        };
        for field in listed {
            match field.text()? {
                "Ingress" => types.ingress = true,
                "Egress" => types.egress = true,
                other => {
                    let problem = "no policy type: write Ingress or Egress";
                    return Err(field.error(Problem::value(other, problem)));
                }
            }
        }
        Ok(types)
    }
}

fn read_entry(
    field: &Field<'_>,
    direction: Direction,
    namespace: &str,
    policy: &Arc<PolicyName>,
) -> Result<Entry, PolicyError> {
    let peers_name = match direction {
        Direction::Ingress => "from",
        Direction::Egress => "to",
    };
    let fields = field.fields(&[peers_name, "ports"])?;
    let mut selectors = Vec::new();
    for field in fields.items(peers_name)? {
        selectors.push(read_peer(&field, namespace)?);
    }
    let mut ranges = Vec::new();
    for field in fields.items("ports")? {
        ranges.push(read_port(&field)?);
    }
    Ok(Entry {
        place: place(policy, field),
        action: Action::Allow,
        peers: if selectors.is_empty() {
            Peers::All
        } else {
            Peers::Selected(selectors)
        },
        traffic: if ranges.is_empty() {
            Traffic::All
        } else {
            Traffic::Ports(ranges)
        },
    })
}

fn read_peer(field: &Field<'_>, namespace: &str) -> Result<PeerSelector, PolicyError> {
    let fields = field.fields(&["podSelector", "namespaceSelector", "ipBlock"])?;
    let pods = fields.get("podSelector");
    let namespaces = fields.get("namespaceSelector");
    let block = fields.get("ipBlock");
    let mut selector = match (&pods, &namespaces, block) {
        (None, None, Some(block)) => {
            let (cidr, except) = read_cidr_block(&block)?;
            let mut cidrs = CidrSet::default();
            cidrs.insert(cidr, except);
            return Ok(PeerSelector::Cidrs(cidrs));
        }
        (None, None, None) => {
            let problem = "name podSelector, namespaceSelector or ipBlock";
            return Err(field.error(Problem::Conflict(problem.to_owned())));
        }
        (_, _, Some(_)) => {
            let problem = "ipBlock cannot be combined with podSelector or namespaceSelector";
            return Err(field.error(Problem::Conflict(problem.to_owned())));
        }
        (Some(pods), _, None) => Selector::read_k8s(pods, "")?,
        (None, _, None) => Selector::default(),
    };
    match namespaces {
        None => selector.require(K8S, NAMESPACE, namespace),
        Some(field) => {
            selector.and(Selector::read_k8s(&field, NAMESPACE_LABELS)?);
            // An empty one selects every namespace, but nothing that is in none.
            selector.require_key(K8S, NAMESPACE);
        }
    }
    Ok(PeerSelector::Labels(selector))
}

fn read_port(field: &Field<'_>) -> Result<PortRange, PolicyError> {
    let fields = field.fields(&["port", "endPort", "protocol"])?;
    let protocol = fields.get("protocol");
    let protocol = protocol.map_or(Ok(Protocol::TCP), |field| read_protocol(&field))?;
    match (fields.get("port"), fields.get("endPort")) {
        (None, None) => Ok(PortRange::all_of(protocol)),
        (None, Some(end)) => {
            let problem = "the end of a range needs the field port for its beginning";
            Err(end.error(Problem::Conflict(problem.to_owned())))
        }
        (Some(port), end) => {
            let (first, last) = read_port_range(&port, end)?;
            Ok(PortRange {
                protocol,
                first,
                last,
            })
        }
    }
}

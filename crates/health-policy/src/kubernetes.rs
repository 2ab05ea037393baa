//! Rules in Kubernetes' format: the `spec` of a NetworkPolicy (networking.k8s.io/v1).

use std::sync::Arc;

use health_model::labels::pod::{K8S, NAMESPACE_LABELS, POD_NAMESPACE};
use health_model::labels::{Label, LabelSet};
use health_model::manifest::{self, PORT_OUT_OF_RANGE, check_port_name};
use health_model::policy::{Direction, Protocol};

use super::cidr::read_ip_block;
use super::cilium::{self, place};
use super::error::PolicyError;
use super::field::{Field, Fields};
use super::peer::{CidrSet, PeerSelector, Peers};
use super::rule::{Action, Entry, PolicyName, Rule, Section};
use super::selector::Selector;
use crate::ports::{PortSpec, Ports, Traffic};

const POLICY_TYPES: [&str; 2] = ["Ingress", "Egress"];
const PROTOCOLS: [&str; 3] = ["TCP", "UDP", "SCTP"];
/// How many characters of a list an error shows.
const SHOWN: usize = 64;

/// Reads the rule of the policy with this name and namespace. The rule gets the `derived` labels.
pub(super) fn read_rule(
    field: &Field<'_>,
    namespace: &str,
    policy: &Arc<PolicyName>,
    derived: &[Label],
) -> Result<Rule, PolicyError> {
    let fields = field.fields(&["podSelector", "policyTypes", "ingress", "egress"])?;
    let mut subject = Selector::read_k8s(&fields.required("podSelector")?, "")?;
    subject.require(K8S, POD_NAMESPACE, namespace);
    let types = PolicyTypes::read(&fields)?;
    let section = |direction: Direction, is_there: bool| -> Result<Section, PolicyError> {
        let mut entries = Vec::new();
        for field in fields.items(&direction.to_string())? {
            entries.push(read_entry(&field, direction, namespace, policy)?);
        }
        if !is_there {
            // The API server accepts rules of a direction that `policyTypes` does not list; they have no effect.
            entries.clear();
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

/// The directions that a policy covers.
struct PolicyTypes {
    ingress: bool,
    egress: bool,
}

impl PolicyTypes {
    /// Returns the listed directions. Without a list, ingress is always covered, and egress is if there are rules for
    /// it.
    fn read(fields: &Fields<'_>) -> Result<Self, PolicyError> {
        let listed = fields.items("policyTypes")?;
        if listed.is_empty() {
            return Ok(Self {
                ingress: true,
                egress: !fields.items("egress")?.is_empty(),
            });
        }
        if let Some(field) = fields.get("policyTypes")
            && listed.len() > POLICY_TYPES.len()
        {
            let detail = "may not specify more than two policyTypes";
            let types = field.value().to_string();
            field.check(Err(manifest::Problem::Invalid {
                value: types.chars().take(SHOWN).collect(),
                detail: detail.to_owned(),
            }))?;
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
                    let problem = manifest::Problem::not_supported(other, &POLICY_TYPES);
                    return Err(field.error(problem));
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
    let mut ports = Ports::default();
    for field in fields.items("ports")? {
        let (protocol, port) = read_port(&field)?;
        ports.add(protocol, port);
    }
    Ok(Entry {
        place: place(policy, field),
        action: Action::Allow,
        peers: if selectors.is_empty() {
            Peers::All
        } else {
            Peers::Selected(selectors)
        },
        traffic: if ports.is_empty() {
            Traffic::All
        } else {
            Traffic::Ports(ports)
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
            let (cidr, except) = read_ip_block(&block)?;
            let mut cidrs = CidrSet::default();
            cidrs.insert(cidr, except);
            return Ok(PeerSelector::Cidrs(cidrs));
        }
        (None, None, None) => {
            let detail = "must specify a peer: podSelector, namespaceSelector or ipBlock";
            return Err(field.error(manifest::Problem::Required(detail)));
        }
        (_, _, Some(_)) => {
            let detail = "may not specify both ipBlock and another peer";
            return Err(field.error(manifest::Problem::Forbidden(detail)));
        }
        (Some(pods), _, None) => Selector::read_k8s(pods, "")?,
        (None, _, None) => Selector::default(),
    };
    match namespaces {
        None => selector.require(K8S, POD_NAMESPACE, namespace),
        Some(field) => {
            selector.and(Selector::read_k8s(&field, NAMESPACE_LABELS)?);
            // An empty selector selects every namespace, but nothing outside of namespaces.
            selector.require_key(K8S, POD_NAMESPACE);
        }
    }
    Ok(PeerSelector::Labels(selector))
}

fn read_port(field: &Field<'_>) -> Result<(Protocol, PortSpec), PolicyError> {
    let fields = field.fields(&["port", "endPort", "protocol"])?;
    let protocol = fields.get("protocol");
    let protocol = protocol.map_or(Ok(Protocol::TCP), |field| read_protocol(&field))?;
    let end = fields.get("endPort");
    let port = match (fields.get("port"), end) {
        (None, None) => PortSpec::ALL,
        (None, Some(end)) => {
            let detail = "may not be specified when `port` is not specified";
            return Err(end.error(manifest::Problem::invalid_number(end.integer()?, detail)));
        }
        (Some(port), end) if field.is_stored() => cilium::read_port_spec(&port, end)?,
        (Some(port), end) => read_port_spec(&port, end)?,
    };
    Ok((protocol, port))
}

fn read_protocol(field: &Field<'_>) -> Result<Protocol, PolicyError> {
    let text = field.text()?;
    let is_known = PROTOCOLS.contains(&text);
    let problem = || manifest::Problem::not_supported(text, &PROTOCOLS);
    field.check(is_known.then_some(()).ok_or_else(problem))?;
    cilium::read_protocol(field)
}

/// Reads a port, a range of ports, or a port name. As the API server does, treats a number in quotes as a name, which is
/// then invalid.
fn read_port_spec(port: &Field<'_>, end: Option<Field<'_>>) -> Result<PortSpec, PolicyError> {
    if port.value().is_string() {
        let name = port.text()?;
        if let Some(detail) = check_port_name(name) {
            return Err(port.error(manifest::Problem::invalid(name, detail)));
        }
        if let Some(end) = end {
            let detail = "may not be specified when `port` is non-numeric";
            return Err(end.error(manifest::Problem::invalid_number(end.integer()?, detail)));
        }
        return Ok(PortSpec::Name(name.to_owned()));
    }
    let first = read_port_number(port)?;
    let Some(end) = end else {
        return Ok(PortSpec::Range(first, first));
    };
    let last = read_port_number(&end)?;
    if last < first {
        let detail = "must be greater than or equal to `port`";
        return Err(end.error(manifest::Problem::invalid_number(last.into(), detail)));
    }
    Ok(PortSpec::Range(first, last))
}

fn read_port_number(field: &Field<'_>) -> Result<u16, PolicyError> {
    let number = field.integer()?;
    let port = u16::try_from(number).ok().filter(|&port| port > 0);
    port.ok_or_else(|| field.error(manifest::Problem::invalid_number(number, PORT_OUT_OF_RANGE)))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use crate::document::{parse, read_stored};

    fn policy(metadata: Value, spec: Value) -> Value {
        json!({
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": metadata,
            "spec": spec,
        })
    }

    fn of_spec(spec: Value) -> Value {
        policy(json!({"name": "p", "namespace": "shop"}), spec)
    }

    fn of_rule(rule: Value) -> Value {
        of_spec(json!({"podSelector": {}, "ingress": [rule]}))
    }

    fn of_port(port: Value) -> Value {
        of_rule(json!({"ports": [port]}))
    }

    fn of_block(block: Value) -> Value {
        of_rule(json!({"from": [{"ipBlock": block}]}))
    }

    fn of_selector(selector: Value) -> Value {
        of_rule(json!({"from": [{"namespaceSelector": selector}]}))
    }

    fn of_expression(operator: &str, values: Value) -> Value {
        of_selector(
            json!({"matchExpressions": [{"key": "tier", "operator": operator, "values": values}]}),
        )
    }

    /// Returns the problem of a policy, without its name and the path to the field.
    fn error(document: &Value) -> String {
        match parse(&document.to_string()) {
            Ok(_) => "accepted".to_owned(),
            Err(error) => {
                let error = error.to_string();
                let error = error.trim_start_matches("NetworkPolicy shop/p: ");
                let error = error.trim_start_matches("spec.ingress[0].");
                error.trim_start_matches("from[0].").to_owned()
            }
        }
    }

    #[test]
    fn what_the_api_server_refuses_is_refused_by_its_words() {
        const RANGE: &str = "must be between 1 and 65535, inclusive";
        let long = "a".repeat(64);
        for (document, expected) in [
            (of_port(json!({"port": 0})), format!("ports[0].port: Invalid value: 0: {RANGE}")),
            (of_port(json!({"port": -1})), format!("ports[0].port: Invalid value: -1: {RANGE}")),
            (of_port(json!({"port": 65536})), format!("ports[0].port: Invalid value: 65536: {RANGE}")),
            (of_port(json!({"port": 80.5})), "ports[0].port: must be a whole number".to_owned()),
            (of_port(json!({"port": "0"})), "ports[0].port: Invalid value: \"0\": must contain at least one letter (a-z)".to_owned()),
            (of_port(json!({"port": "80"})), "ports[0].port: Invalid value: \"80\": must contain at least one letter (a-z)".to_owned()),
            (of_port(json!({"port": "a--b"})), "ports[0].port: Invalid value: \"a--b\": must not contain consecutive hyphens".to_owned()),
            (of_port(json!({"port": ""})), "ports[0].port: Invalid value: \"\": must contain".to_owned()),
            (of_port(json!({"port": "HTTP"})), "ports[0].port: Invalid value: \"HTTP\": must contain only lower-case letters, digits and hyphens".to_owned()),
            (of_port(json!({"port": "a-name-of-16-let"})), "ports[0].port: Invalid value: \"a-name-of-16-let\": must be no more than 15 characters".to_owned()),
            (of_port(json!({"port": "http", "endPort": 81})), "ports[0].endPort: Invalid value: 81: may not be specified when `port` is non-numeric".to_owned()),
            (of_port(json!({"endPort": 81})), "ports[0].endPort: Invalid value: 81: may not be specified when `port` is not specified".to_owned()),
            (of_port(json!({"port": 81, "endPort": 80})), "ports[0].endPort: Invalid value: 80: must be greater than or equal to `port`".to_owned()),
            (of_port(json!({"port": 81, "endPort": 65536})), format!("ports[0].endPort: Invalid value: 65536: {RANGE}")),
            (of_port(json!({"port": 81, "endPort": 0})), format!("ports[0].endPort: Invalid value: 0: {RANGE}")),
            (of_port(json!({"port": 81, "endPort": "82"})), "ports[0].endPort: must be a whole number".to_owned()),
            (of_port(json!({"protocol": "tcp"})), "ports[0].protocol: Unsupported value: \"tcp\": supported values: \"TCP\", \"UDP\", \"SCTP\"".to_owned()),
            (of_port(json!({"protocol": "ICMP"})), "ports[0].protocol: Unsupported value: \"ICMP\"".to_owned()),
            (of_block(json!({"cidr": "10.0.0.0/8", "except": ["10.0.0.0/8"]})), "ipBlock.except[0]: Invalid value: \"10.0.0.0/8\": must be a strict subset of `cidr`".to_owned()),
            (of_block(json!({"cidr": "10.0.0.0/8", "except": ["10.9.9.9/8"]})), "ipBlock.except[0]: Invalid value: \"10.9.9.9/8\": must be a strict subset of `cidr`".to_owned()),
            (of_block(json!({"cidr": "10.0.0.0/8", "except": ["10.1.0.0/16", "0.0.0.0/0"]})), "ipBlock.except[1]: Invalid value: \"0.0.0.0/0\": must be a strict subset of `cidr`".to_owned()),
            (of_block(json!({"cidr": "10.0.0.0/8", "except": ["11.0.0.0/16"]})), "ipBlock.except[0]: Invalid value: \"11.0.0.0/16\": must be a strict".to_owned()),
            (of_block(json!({"cidr": "10.0.0.0/8", "except": ["fd00::/16"]})), "ipBlock.except[0]: Invalid value: \"fd00::/16\": must be a strict".to_owned()),
            (of_block(json!({"cidr": "10.0.0.0/8", "except": ["10.0.0.1"]})), "ipBlock.except[0]: Invalid value: \"10.0.0.1\": must be a valid CIDR".to_owned()),
            (of_block(json!({"cidr": "10.0.0.1"})), "ipBlock.cidr: Invalid value: \"10.0.0.1\": must be a valid CIDR".to_owned()),
            (of_block(json!({"cidr": ""})), "ipBlock.cidr: Required value".to_owned()),
            (of_block(json!({"except": []})), "ipBlock.cidr: Required value".to_owned()),
            (of_rule(json!({"from": [{}]})), "from[0]: Required value: must specify a peer".to_owned()),
            (of_rule(json!({"from": [{"ipBlock": {"cidr": "::/0"}, "podSelector": {}}]})), "from[0]: Forbidden: may not specify both ipBlock and another peer".to_owned()),
            (of_selector(json!({"matchLabels": {"a b": ""}})), "namespaceSelector.matchLabels: Invalid value: \"a b\": name part must consist of".to_owned()),
            (of_selector(json!({"matchLabels": {"/a": ""}})), "namespaceSelector.matchLabels: Invalid value: \"/a\": prefix part must be non-empty".to_owned()),
            (of_selector(json!({"matchLabels": {"A/a": ""}})), "namespaceSelector.matchLabels: Invalid value: \"A/a\": prefix part a lowercase RFC 1123 subdomain".to_owned()),
            (of_selector(json!({"matchLabels": {"k8s:a": ""}})), "namespaceSelector.matchLabels: Invalid value: \"k8s:a\": name part must consist of".to_owned()),
            (of_selector(json!({"matchLabels": {long.clone(): ""}})), "namespaceSelector.matchLabels: Invalid value: ".to_owned()),
            (of_selector(json!({"matchLabels": {"a": "b c"}})), "namespaceSelector.matchLabels.a: Invalid value: \"b c\": a valid label must be".to_owned()),
            (of_selector(json!({"matchLabels": {"a": long.clone()}})), "namespaceSelector.matchLabels.a: Invalid value: ".to_owned()),
            (of_expression("In", json!(["a", "-b"])), "namespaceSelector.matchExpressions[0].values[1]: Invalid value: \"-b\": a valid label must be".to_owned()),
            (of_expression("In", json!([])), "namespaceSelector.matchExpressions[0].values: Required value: must be specified when `operator` is 'In' or 'NotIn'".to_owned()),
            (of_expression("Exists", json!(["a"])), "namespaceSelector.matchExpressions[0].values: Forbidden: may not be specified when".to_owned()),
            (of_expression("Is", json!(["a"])), "namespaceSelector.matchExpressions[0].operator: Invalid value: \"Is\": not a valid selector operator".to_owned()),
            (of_spec(json!({"podSelector": {"matchLabels": {"-": ""}}})), "spec.podSelector.matchLabels: Invalid value: \"-\": name part".to_owned()),
            (of_spec(json!({"podSelector": {}, "policyTypes": ["ingress"]})), "spec.policyTypes[0]: Unsupported value: \"ingress\": supported values: \"Ingress\", \"Egress\"".to_owned()),
            (of_spec(json!({"podSelector": {}, "policyTypes": ["Ingress", "Egress", "Ingress"]})), "spec.policyTypes: Invalid value: [\"Ingress\",\"Egress\",\"Ingress\"]: may not specify more than two policyTypes".to_owned()),
            (policy(json!({"name": "a..b"}), json!({"podSelector": {}})), "metadata.name: Invalid value: \"a..b\": a lowercase RFC 1123 subdomain".to_owned()),
            (policy(json!({"name": "a", "namespace": "b.c"}), json!({"podSelector": {}})), "metadata.namespace: Invalid value: \"b.c\": must not contain dots".to_owned()),
            (policy(json!({"name": "a", "labels": {"a": "b c"}}), json!({"podSelector": {}})), "metadata.labels: Invalid value: \"b c\": a valid label".to_owned()),
        ] {
            let error = error(&document);
            assert!(error.starts_with(&expected), "{document}: {error}");
            assert!(error.len() < 400, "{error}");
        }
    }

    #[test]
    fn what_the_api_server_accepts_is_accepted() {
        for document in [
            of_port(json!({"port": 1, "endPort": 65535, "protocol": "SCTP"})),
            of_port(json!({"port": 80, "endPort": 80})),
            of_port(json!({"port": "http"})),
            of_port(json!({"port": "9p-of-15-letter", "protocol": "UDP"})),
            of_block(json!({"cidr": "10.1.2.3/8", "except": ["10.1.0.0/16", "10.0.0.0/9"]})),
            of_block(json!({"cidr": "010.0.0.0/8", "except": []})),
            of_block(json!({"cidr": "::ffff:10.0.0.0/104", "except": ["10.1.0.0/16"]})),
            of_selector(json!({"matchLabels": {"example.com/A_b.c": ""}})),
            of_expression("Exists", Value::Null),
            of_spec(json!({"podSelector": {}, "policyTypes": ["Ingress", "Ingress"]})),
        ] {
            assert_eq!(error(&document), "accepted", "{document}");
        }
    }

    #[test]
    fn a_stored_policy_with_a_named_port_is_the_same_when_read() {
        let document = of_port(json!({"port": "http"}));
        let imported = parse(&document.to_string()).unwrap().policies;
        assert_eq!(read_stored(&document), Ok((imported[0].clone(), None)));
    }

    #[test]
    fn what_an_earlier_version_imported_is_kept_and_reported() {
        for document in [
            of_port(json!({"port": 0})),
            of_port(json!({"port": "80", "protocol": "tcp"})),
            of_block(json!({"cidr": "10.0.0.1", "except": ["10.0.0.1"]})),
            of_block(json!({"cidr": "::ffff:10.0.0.0/90"})),
            of_selector(json!({"matchLabels": {"a b": "c d"}})),
            policy(json!({"name": "-a"}), json!({"podSelector": {}})),
        ] {
            let (stored, refused) = read_stored(&document).unwrap();
            assert_eq!(stored.document(), &document);
            let refused = refused.unwrap().to_string();
            assert!(refused.contains("d value: "), "{refused}");
        }
    }
}

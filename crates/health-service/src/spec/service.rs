//! Reads a `Service` of the Kubernetes API.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use health_model::ipam::Family;
use health_model::manifest::{NAMESPACE, PORT_OUT_OF_RANGE, Problem, check_label, check_name};
use health_model::policy::Protocol;
use k8s_openapi::api::core::v1 as k8s;

use super::address::{Use, address, network};
use super::error::{Errors, Extent, Kind, SpecError};
use super::selection::{Selection, Skip};
use super::{
    Common, Service, ServiceName, ServicePort, ServiceType, SourceRanges, TrafficPolicy, annotation,
};

/// Default affinity timeout.
const AFFINITY: Duration = Duration::from_secs(10_800);
/// Maximum affinity timeout in seconds.
const AFFINITY_MAX: i32 = 86_400;
/// The ClusterIP of a headless service.
const NONE: &str = "None";

const SERVICE_TYPES: [&str; 4] = ["ClusterIP", "NodePort", "LoadBalancer", "ExternalName"];
const PROTOCOLS: [&str; 3] = ["TCP", "UDP", "SCTP"];

/// The result of reading a service.
#[derive(Clone, Debug, PartialEq)]
pub struct ServiceReading {
    /// The service's name.
    pub name: ServiceName,
    /// The service, or the reason why it is not served.
    pub service: Result<Service, Skip>,
    /// All errors in the object.
    pub errors: Vec<SpecError>,
}

/// Reads a service of the API. Fails if the service has no valid name; all other errors are in the result.
pub fn read_service(
    service: &k8s::Service,
    selection: &Selection,
) -> Result<ServiceReading, SpecError> {
    let metadata = &service.metadata;
    let (name, mut errors) = named(
        Kind::Service,
        metadata.namespace.as_deref(),
        metadata.name.as_deref(),
    )?;
    let name = ServiceName::new(&name.0, &name.1);
    let service = match selection.skips(metadata.labels.as_ref()) {
        Some(skip) => Err(skip),
        None => read(service, &name, &mut errors),
    };
    Ok(ServiceReading {
        name,
        service,
        errors: errors.into_list(),
    })
}

/// Returns the name of an object with its namespace, and a collector for the object's errors.
pub(super) fn named(
    kind: Kind,
    namespace: Option<&str>,
    name: Option<&str>,
) -> Result<((String, String), Errors), SpecError> {
    let namespace = namespace.filter(|namespace| !namespace.is_empty());
    let namespace = namespace.unwrap_or(NAMESPACE);
    let name = name.unwrap_or_default();
    let error = |path: &str, problem| SpecError {
        kind,
        object: format!("{namespace}/{name}"),
        path: path.to_owned(),
        problem,
        extent: Extent::Object,
    };
    if name.is_empty() {
        return Err(error("metadata.name", Problem::Required("")));
    }
    check_name(name).map_err(|problem| error("metadata.name", problem))?;
    check_name(namespace).map_err(|problem| error("metadata.namespace", problem))?;
    let errors = Errors::of(kind, namespace, name);
    Ok(((namespace.to_owned(), name.to_owned()), errors))
}

fn read(service: &k8s::Service, name: &ServiceName, errors: &mut Errors) -> Result<Service, Skip> {
    let metadata = &service.metadata;
    let Some(spec) = &service.spec else {
        errors.add("spec", Problem::Required(""));
        return Err(Skip::NoClusterIp);
    };
    let kind = service_type(spec, errors).ok_or(Skip::ExternalName)?;
    let cluster_ips = cluster_ips(spec, errors)?;
    let is_served = |address: &IpAddr| {
        let family = Family::of(*address);
        cluster_ips.iter().any(|ip| Family::of(*ip) == family)
    };
    let external_ips = spec.external_ips.iter().flatten().enumerate();
    let external_ips = external_ips.map(|(i, ip)| (format!("spec.externalIPs[{i}]"), ip.as_str()));
    let external_ips = addresses(external_ips, Use::Written, is_served, errors);
    let load_balancer_ips = addresses(delivered(service, errors), Use::Assigned, is_served, errors);
    let is_accessible = match kind {
        ServiceType::LoadBalancer | ServiceType::NodePort => true,
        ServiceType::ClusterIp => !external_ips.is_empty(),
    };
    let external_policy = traffic_policy(
        spec.external_traffic_policy.as_deref(),
        "spec.externalTrafficPolicy",
        errors,
    );
    let external_policy = if is_accessible {
        external_policy
    } else {
        TrafficPolicy::Cluster
    };
    let is_checked = kind == ServiceType::LoadBalancer && external_policy == TrafficPolicy::Local;
    let annotations = annotation::of_service(metadata.annotations.as_ref(), errors);
    let common = Arc::new(Common {
        name: name.clone(),
        kind,
        created: metadata.creation_timestamp.as_ref().map(|time| time.0),
        source_ranges: source_ranges(spec, errors),
        affinity: affinity(spec, errors),
        internal_policy: traffic_policy(
            spec.internal_traffic_policy.as_deref(),
            "spec.internalTrafficPolicy",
            errors,
        ),
        external_policy,
        health_check_node_port: if is_checked {
            health_check_node_port(spec, errors)
        } else {
            None
        },
        algorithm: annotations.algorithm,
        forwarding: annotations.forwarding,
        local_readiness: annotations.local_readiness,
        cluster_ips,
        external_ips,
        load_balancer_ips,
    });
    let ports = ports(spec, &common, errors);
    Ok(Service { common, ports })
}

/// Returns the type; `None` for `ExternalName`.
fn service_type(spec: &k8s::ServiceSpec, errors: &mut Errors) -> Option<ServiceType> {
    match spec.type_.as_deref().unwrap_or_default() {
        "" | "ClusterIP" => Some(ServiceType::ClusterIp),
        "NodePort" => Some(ServiceType::NodePort),
        "LoadBalancer" => Some(ServiceType::LoadBalancer),
        "ExternalName" => None,
        other => {
            errors.add("spec.type", Problem::not_supported(other, &SERVICE_TYPES));
            Some(ServiceType::ClusterIp)
        }
    }
}

/// Returns the ClusterIPs: the first of each family.
fn cluster_ips(spec: &k8s::ServiceSpec, errors: &mut Errors) -> Result<Vec<IpAddr>, Skip> {
    let listed = spec.cluster_ips.iter().flatten().enumerate();
    let listed = listed.map(|(i, ip)| (format!("spec.clusterIPs[{i}]"), ip.as_str()));
    let single = spec.cluster_ip.as_deref();
    let single = single.map(|ip| ("spec.clusterIP".to_owned(), ip));
    let mut addresses: Vec<IpAddr> = Vec::new();
    let first = errors.len();
    // The single address and the first in the list are the same.
    for (path, text) in single.into_iter().chain(listed) {
        if text.is_empty() {
            continue;
        }
        if text == NONE {
            return Err(Skip::Headless);
        }
        match address(text, Use::Assigned) {
            Ok(ip) if addresses.contains(&ip) => {}
            Ok(ip)
                if addresses
                    .iter()
                    .any(|one| Family::of(*one) == Family::of(ip)) =>
            {
                let family = Family::of(ip).name();
                let detail = format!("the service already has another {family} address");
                errors.leave_out(path, Problem::invalid(text, detail));
            }
            Ok(ip) => addresses.push(ip),
            Err(problem) => errors.leave_out(path, problem),
        }
    }
    if addresses.is_empty() {
        errors.concern_the_object(first);
        return Err(Skip::NoClusterIp);
    }
    Ok(addresses)
}

/// Returns the addresses that can be served, without duplicates.
fn addresses<'a>(
    texts: impl IntoIterator<Item = (String, &'a str)>,
    what_for: Use,
    is_served: impl Fn(&IpAddr) -> bool,
    errors: &mut Errors,
) -> Vec<IpAddr> {
    let mut addresses = Vec::new();
    for (path, text) in texts {
        match address(text, what_for) {
            Ok(address) if !is_served(&address) => {
                let family = Family::of(address).name();
                let detail = format!("the service has no {family} ClusterIP");
                errors.leave_out(path, Problem::invalid(text, detail));
            }
            Ok(address) if addresses.contains(&address) => {}
            Ok(address) => addresses.push(address),
            Err(problem) => errors.leave_out(path, problem),
        }
    }
    addresses
}

/// Returns the addresses for which a load balancer forwards packets without changing the destination, with their paths.
fn delivered<'a>(service: &'a k8s::Service, errors: &mut Errors) -> Vec<(String, &'a str)> {
    let status = service.status.as_ref();
    let balancer = status.and_then(|status| status.load_balancer.as_ref());
    let ingress = balancer.and_then(|balancer| balancer.ingress.as_ref());
    let mut delivered = Vec::new();
    for (i, ingress) in ingress.into_iter().flatten().enumerate() {
        let path = format!("status.loadBalancer.ingress[{i}]");
        let Some(ip) = ingress.ip.as_deref().filter(|ip| !ip.is_empty()) else {
            continue;
        };
        match ingress.ip_mode.as_deref() {
            None | Some("VIP") => delivered.push((format!("{path}.ip"), ip)),
            Some("Proxy") => {}
            Some(other) => {
                let problem = Problem::not_supported(other, &["VIP", "Proxy"]);
                errors.leave_out(format!("{path}.ipMode"), problem);
            }
        }
    }
    delivered
}

fn source_ranges(spec: &k8s::ServiceSpec, errors: &mut Errors) -> SourceRanges {
    let mut ranges = SourceRanges::default();
    let texts = spec.load_balancer_source_ranges.iter().flatten();
    for (i, text) in texts.enumerate() {
        match network(text) {
            Ok(network) if ranges.networks.contains(&network) => {}
            Ok(network) => ranges.networks.push(network),
            Err(problem) => {
                ranges.has_error = true;
                errors.leave_out(format!("spec.loadBalancerSourceRanges[{i}]"), problem);
            }
        }
    }
    ranges
}

fn affinity(spec: &k8s::ServiceSpec, errors: &mut Errors) -> Option<Duration> {
    match spec.session_affinity.as_deref().unwrap_or_default() {
        "" | "None" => return None,
        "ClientIP" => {}
        other => {
            let problem = Problem::not_supported(other, &["ClientIP", "None"]);
            errors.add("spec.sessionAffinity", problem);
            return None;
        }
    }
    let config = spec.session_affinity_config.as_ref();
    let config = config.and_then(|config| config.client_ip.as_ref());
    match config.and_then(|config| config.timeout_seconds) {
        None => Some(AFFINITY),
        Some(seconds) if (1..=AFFINITY_MAX).contains(&seconds) => {
            Some(Duration::from_secs(u64::from(seconds.unsigned_abs())))
        }
        Some(seconds) => {
            let detail = "must be between 1 and 86400, inclusive";
            errors.add(
                "spec.sessionAffinityConfig.clientIP.timeoutSeconds",
                Problem::invalid_number(seconds.into(), detail),
            );
            Some(AFFINITY)
        }
    }
}

fn traffic_policy(text: Option<&str>, path: &str, errors: &mut Errors) -> TrafficPolicy {
    match text.unwrap_or_default() {
        "" | "Cluster" => TrafficPolicy::Cluster,
        "Local" => TrafficPolicy::Local,
        other => {
            errors.add(path, Problem::not_supported(other, &["Cluster", "Local"]));
            TrafficPolicy::Cluster
        }
    }
}

fn health_check_node_port(spec: &k8s::ServiceSpec, errors: &mut Errors) -> Option<u16> {
    const PATH: &str = "spec.healthCheckNodePort";
    match spec.health_check_node_port.unwrap_or_default() {
        0 => {
            let detail = "the load balancer has no way to tell which nodes have endpoints";
            errors.add(PATH, Problem::Required(detail));
            None
        }
        number => {
            let first = errors.len();
            let port = port_number(number, PATH, errors);
            errors.concern_the_object(first);
            port
        }
    }
}

/// Returns the ports that can be served.
fn ports(spec: &k8s::ServiceSpec, service: &Arc<Common>, errors: &mut Errors) -> Vec<ServicePort> {
    let all = spec.ports.as_deref().unwrap_or_default();
    if all.is_empty() {
        errors.add("spec.ports", Problem::Required(""));
    }
    let first = errors.len();
    let mut names = BTreeSet::new();
    let mut numbers = BTreeSet::new();
    let mut ports = Vec::new();
    for (i, port) in all.iter().enumerate() {
        let path = format!("spec.ports[{i}]");
        let name = port.name.as_deref().unwrap_or_default();
        if name.is_empty() && all.len() > 1 {
            errors.leave_out(format!("{path}.name"), Problem::Required(""));
            continue;
        }
        if !name.is_empty()
            && let Err(problem) = check_label(name)
        {
            errors.leave_out(format!("{path}.name"), problem);
            continue;
        }
        let Some(protocol) = protocol(port.protocol.as_deref(), &path, errors) else {
            continue;
        };
        let Some(number) = port_number(port.port, &format!("{path}.port"), errors) else {
            continue;
        };
        let node_port = match port.node_port.unwrap_or_default() {
            0 => None,
            number => port_number(number, &format!("{path}.nodePort"), errors),
        };
        // The name alone must be unique, as in Kubernetes, because endpoints are matched by it.
        if !names.insert(name) {
            let problem = Problem::Duplicate(name.to_owned());
            errors.leave_out(format!("{path}.name"), problem);
            continue;
        }
        if !numbers.insert((protocol, number)) {
            errors.leave_out(path, Problem::Duplicate(format!("{number}/{protocol}")));
            continue;
        }
        ports.push(ServicePort {
            name: name.into(),
            protocol,
            port: number,
            node_port,
            service: service.clone(),
        });
    }
    if ports.is_empty() {
        errors.concern_the_object(first);
    }
    ports
}

/// Parses the protocol of a port as Kubernetes writes it; the default is TCP.
pub(super) fn protocol(text: Option<&str>, path: &str, errors: &mut Errors) -> Option<Protocol> {
    match text.unwrap_or_default() {
        "" | "TCP" => Some(Protocol::TCP),
        "UDP" => Some(Protocol::UDP),
        "SCTP" => Some(Protocol::SCTP),
        other => {
            let problem = Problem::not_supported(other, &PROTOCOLS);
            errors.leave_out(format!("{path}.protocol"), problem);
            None
        }
    }
}

/// Checks the number of a port in a list; 0 is an error.
pub(super) fn port_number(number: i32, path: &str, errors: &mut Errors) -> Option<u16> {
    let port = u16::try_from(number).ok().filter(|&port| port > 0);
    if port.is_none() {
        let problem = Problem::invalid_number(number.into(), PORT_OUT_OF_RANGE);
        errors.leave_out(path, problem);
    }
    port
}

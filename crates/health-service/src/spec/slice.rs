//! Reads an `EndpointSlice` of the Kubernetes API.

use std::collections::HashSet;
use std::sync::Arc;

use health_model::ipam::Family;
use health_model::manifest::Problem;
use jiff::Timestamp;
use k8s_openapi::api::discovery::v1 as k8s;

use super::address::{Use, address};
use super::error::{Errors, Kind, SpecError};
use super::selection::{Selection, Skip};
use super::service::{named, port_number, protocol};
use super::{
    Conditions, EndpointSlice, Hints, ServiceName, SliceEndpoint, SliceName, SlicePort, annotation,
};

/// Label that names the slice's service.
const SERVICE_NAME: &str = "kubernetes.io/service-name";
/// Annotation with the time of the event that last changed the slice.
const TRIGGER_TIME: &str = "endpoints.kubernetes.io/last-change-trigger-time";

/// The result of reading a slice.
#[derive(Clone, Debug, PartialEq)]
pub struct SliceReading {
    /// The slice's name.
    pub name: SliceName,
    /// The slice, or the reason why it is not served.
    pub slice: Result<EndpointSlice, Skip>,
    /// When the event happened that last changed the slice.
    pub trigger_time: Option<Timestamp>,
    /// All errors in the object.
    pub errors: Vec<SpecError>,
}

/// Reads an endpoint slice of the API. Fails if the slice has no valid name; all other errors are in the result.
pub fn read_slice(
    slice: &k8s::EndpointSlice,
    selection: &Selection,
) -> Result<SliceReading, SpecError> {
    let metadata = &slice.metadata;
    let (name, mut errors) = named(
        Kind::Slice,
        metadata.namespace.as_deref(),
        metadata.name.as_deref(),
    )?;
    let name = SliceName::new(&name.0, &name.1);
    let slice = match selection.skips(metadata.labels.as_ref()) {
        Some(skip) => Err(skip),
        None => read(slice, &name, &mut errors),
    };
    let annotations = metadata.annotations.as_ref();
    let trigger_time = annotations.and_then(|all| all.get(TRIGGER_TIME));
    let trigger_time = trigger_time.filter(|_| slice.is_ok());
    Ok(SliceReading {
        name,
        slice,
        trigger_time: trigger_time.and_then(|text| time(text, &mut errors)),
        errors: errors.into_list(),
    })
}

fn read(
    slice: &k8s::EndpointSlice,
    name: &SliceName,
    errors: &mut Errors,
) -> Result<EndpointSlice, Skip> {
    let metadata = &slice.metadata;
    let label = metadata.labels.as_ref();
    let label = label.and_then(|labels| labels.get(SERVICE_NAME));
    let Some(service) = label.filter(|service| !service.is_empty()) else {
        let path = format!("metadata.labels[{SERVICE_NAME}]");
        errors.add(path, Problem::Required(""));
        return Err(Skip::NoService);
    };
    let family = match slice.address_type.as_str() {
        "IPv4" => Family::V4,
        "IPv6" => Family::V6,
        "FQDN" => return Err(Skip::NoIpAddresses),
        other => {
            let problem = Problem::not_supported(other, &["IPv4", "IPv6", "FQDN"]);
            errors.add("addressType", problem);
            return Err(Skip::NoIpAddresses);
        }
    };
    Ok(EndpointSlice {
        name: name.clone(),
        service: ServiceName {
            namespace: name.namespace.clone(),
            name: service.as_str().into(),
        },
        family,
        ports: ports(slice, errors),
        endpoints: endpoints(slice, family, errors),
        weight: annotation::weight(metadata.annotations.as_ref(), errors),
    })
}

fn time(text: &str, errors: &mut Errors) -> Option<Timestamp> {
    let time = text.parse().ok();
    if time.is_none() {
        let problem = Problem::invalid(text, "must be an RFC 3339 time");
        errors.add(annotation::path(TRIGGER_TIME), problem);
    }
    time
}

/// Returns the ports that can be served. In Kubernetes, a port without a name or number stands for all ports, which no
/// service has; an empty name is a name.
fn ports(slice: &k8s::EndpointSlice, errors: &mut Errors) -> Vec<SlicePort> {
    let mut ports: Vec<SlicePort> = Vec::new();
    let first = errors.len();
    for (i, port) in slice.ports.iter().flatten().enumerate() {
        let path = format!("ports[{i}]");
        let Some(name) = port.name.as_deref() else {
            errors.leave_out(format!("{path}.name"), Problem::Required(""));
            continue;
        };
        let Some(number) = port.port else {
            errors.leave_out(format!("{path}.port"), Problem::Required(""));
            continue;
        };
        let Some(protocol) = protocol(port.protocol.as_deref(), &path, errors) else {
            continue;
        };
        let Some(number) = port_number(number, &format!("{path}.port"), errors) else {
            continue;
        };
        ports.push(SlicePort {
            name: name.into(),
            protocol,
            port: number,
        });
    }
    if ports.is_empty() {
        errors.concern_the_object(first);
    }
    ports
}

fn endpoints(
    slice: &k8s::EndpointSlice,
    family: Family,
    errors: &mut Errors,
) -> Vec<SliceEndpoint> {
    let mut names = Names::default();
    let first = errors.len();
    let mut endpoints = Vec::with_capacity(slice.endpoints.len());
    for (i, endpoint) in slice.endpoints.iter().enumerate() {
        // In Kubernetes, all addresses of an endpoint are interchangeable, so the first is enough.
        let Some(text) = endpoint.addresses.first() else {
            errors.leave_out(format!("endpoints[{i}].addresses"), Problem::Required(""));
            continue;
        };
        let path = format!("endpoints[{i}].addresses[0]");
        let address = match address(text, Use::Written) {
            Ok(address) if Family::of(address) == family => address,
            Ok(_) => {
                let detail = format!("must be an {} address, to match addressType", family.name());
                errors.leave_out(path, Problem::invalid(text, detail));
                continue;
            }
            Err(problem) => {
                errors.leave_out(path, problem);
                continue;
            }
        };
        let conditions = endpoint.conditions.as_ref();
        endpoints.push(SliceEndpoint {
            address,
            conditions: Conditions {
                ready: conditions.and_then(|all| all.ready).unwrap_or(true),
                serving: conditions.and_then(|all| all.serving).unwrap_or(true),
                terminating: conditions.and_then(|all| all.terminating).unwrap_or(false),
            },
            node: endpoint.node_name.as_deref().map(|name| names.get(name)),
            zone: endpoint.zone.as_deref().map(|name| names.get(name)),
            hints: names.hints(endpoint, i, errors),
        });
    }
    if endpoints.is_empty() {
        errors.concern_the_object(first);
    }
    endpoints
}

/// The names of nodes and zones of a slice, each stored only once.
#[derive(Default)]
struct Names {
    known: HashSet<Arc<str>>,
    /// The hints of the previous endpoint, as the next one often has the same.
    hints: Option<Arc<Hints>>,
}

impl Names {
    fn get(&mut self, name: &str) -> Arc<str> {
        if let Some(known) = self.known.get(name) {
            return known.clone();
        }
        let name: Arc<str> = name.into();
        self.known.insert(name.clone());
        name
    }

    /// Returns the hints of the endpoint at this index. A hint without a name applies to no client, so dropping it does
    /// not affect other endpoints: hints count only if every ready endpoint has some.
    fn hints(
        &mut self,
        endpoint: &k8s::Endpoint,
        place: usize,
        errors: &mut Errors,
    ) -> Option<Arc<Hints>> {
        let hints = endpoint.hints.as_ref()?;
        let nodes = hints.for_nodes.iter().flatten().map(|node| &node.name);
        let zones = hints.for_zones.iter().flatten().map(|zone| &zone.name);
        let nodes = nodes.enumerate().map(|(i, name)| ("forNodes", i, name));
        let zones = zones.enumerate().map(|(i, name)| ("forZones", i, name));
        for (field, i, _) in nodes.chain(zones).filter(|(.., name)| name.is_empty()) {
            let path = format!("endpoints[{place}].hints.{field}[{i}].name");
            errors.leave_out(path, Problem::Required(""));
        }
        let nodes = hints.for_nodes.iter().flatten();
        let zones = hints.for_zones.iter().flatten();
        let hints = Hints {
            nodes: nodes.map(|node| self.get(&node.name)).collect(),
            zones: zones.map(|zone| self.get(&zone.name)).collect(),
        };
        if hints == Hints::default() {
            return None;
        }
        if self.hints.as_deref() != Some(&hints) {
            self.hints = Some(Arc::new(hints));
        }
        self.hints.clone()
    }
}

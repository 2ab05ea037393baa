//! Services and endpoint slices as written in manifests. Only the relevant fields are read: parsing the unused fields
//! of Kubernetes' own types would take a lot of code.

use std::collections::BTreeMap;
use std::fmt;

use health_model::manifest::{NAMESPACE, Object, ObjectKinds, Problem, typed};
use jiff::Timestamp;
use k8s_openapi::api::core::v1 as core;
use k8s_openapi::api::discovery::v1 as discovery;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::folder::{SERVICE, SLICE};
use super::members::{Members, WrongTypes};
use crate::spec::{
    EndpointSlice, Extent, Kind, Selection, Service, ServiceName, Skip, SliceName, SpecError,
    read_service, read_slice,
};

/// An object that can be read.
pub trait Readable: Sized + Eq {
    type Name: Ord + Clone + fmt::Display;
    /// The relevant fields.
    type Fields: DeserializeOwned;
    const KIND: Kind;
    /// The kinds that a document with only one such object may contain.
    const KINDS: ObjectKinds;

    /// Reads the object. Fails if it cannot be identified.
    fn read(fields: Self::Fields, selection: &Selection) -> Result<Reading<Self>, SpecError>;
}

/// The result of reading an object.
pub struct Reading<T: Readable> {
    pub(super) name: T::Name,
    /// The object, or the reason why it must not be served.
    pub(super) object: Result<T, Skip>,
    pub(super) trigger_time: Option<Timestamp>,
    pub(super) errors: Vec<SpecError>,
}

/// Why an object was not read.
pub(super) struct Unreadable {
    /// The object's `NAMESPACE/NAME`, if it has a name.
    pub(super) object: Option<String>,
    /// All problems with the object.
    pub(super) errors: Vec<SpecError>,
}

/// Reads an object of a manifest. List members with an error are left out, unless the list would then be empty. With
/// any other error, the meaning is unclear, because the API would not have accepted the object.
pub(super) fn read<T: Readable>(
    object: Object,
    selection: &Selection,
) -> Result<Reading<T>, Unreadable> {
    let Lenient {
        title,
        is_named,
        reading,
        mut errors,
        ..
    } = read_leniently::<T>(object.value, selection);
    let lacks_address = |reading: &Reading<T>| matches!(reading.object, Err(Skip::NoClusterIp));
    let is_sound = |errors: &[SpecError]| errors.iter().all(|error| error.extent == Extent::Member);
    if is_sound(&errors) && reading.as_ref().is_some_and(lacks_address) {
        errors.push(SpecError {
            kind: T::KIND,
            object: title.clone(),
            path: "spec.clusterIP".to_owned(),
            problem: Problem::Required("nothing assigns an address to a service in a manifest"),
            extent: Extent::Object,
        });
    }
    for error in &mut errors {
        error.path.insert_str(0, &object.prefix);
    }
    match reading {
        Some(reading) if is_sound(&errors) => Ok(Reading { errors, ..reading }),
        _ => Err(Unreadable {
            object: is_named.then_some(title),
            errors,
        }),
    }
}

/// The result of reading an object that may have errors.
pub(super) struct Lenient<T: Readable> {
    /// The object's `NAMESPACE/NAME`, as far as it is given.
    pub(super) title: String,
    /// Whether the object has a name.
    pub(super) is_named: bool,
    /// Whether everything in the object has the right type.
    pub(super) is_typed: bool,
    /// The object without the fields that have an error; `None` if nothing is left.
    pub(super) reading: Option<Reading<T>>,
    /// All problems with the object.
    pub(super) errors: Vec<SpecError>,
}

/// Reads an object as far as possible.
pub(super) fn read_leniently<T: Readable>(mut object: Value, selection: &Selection) -> Lenient<T> {
    let text = |pointer: &str| {
        let text = object.pointer(pointer)?.as_str();
        text.filter(|text| !text.is_empty()).map(str::to_owned)
    };
    let name = text("/metadata/name");
    let namespace = text("/metadata/namespace").unwrap_or_else(|| NAMESPACE.to_owned());
    let title = format!("{namespace}/{}", name.as_deref().unwrap_or_default());
    let mut typed = typed::<T::Fields>(&mut object);
    let wrong_types = std::mem::take(&mut typed.problems).into_iter();
    let mut errors: Vec<_> = wrong_types
        .map(|(path, problem)| SpecError {
            kind: T::KIND,
            object: title.clone(),
            path,
            problem,
            extent: Extent::Object,
        })
        .collect();
    let is_typed = errors.is_empty();
    let reading = typed.value.take().map(|fields| T::read(fields, selection));
    // If a field is missing only because it was left out, this is not another error.
    let is_own = |error: &SpecError| !typed.is_removed(&error.path);
    let reading = match reading {
        Some(Ok(mut reading)) => {
            let more = std::mem::take(&mut reading.errors).into_iter();
            errors.extend(more.filter(is_own));
            Some(reading)
        }
        Some(Err(error)) => {
            errors.extend(Some(error).filter(is_own));
            None
        }
        None => None,
    };
    Lenient {
        title,
        is_named: name.is_some(),
        is_typed,
        reading,
        errors,
    }
}

impl Readable for Service {
    type Name = ServiceName;
    type Fields = ServiceFields;
    const KIND: Kind = Kind::Service;
    const KINDS: ObjectKinds = ObjectKinds {
        kinds: &[SERVICE],
        names: &[SERVICE.name],
        item_names: &[SERVICE.name],
        noun: "service",
    };

    fn read(fields: ServiceFields, selection: &Selection) -> Result<Reading<Self>, SpecError> {
        let mut wrong_types = WrongTypes::default();
        let reading = read_service(&fields.into_object(&mut wrong_types), selection)?;
        Ok(Reading {
            errors: wrong_types.in_place_of(reading.errors, Self::KIND, &reading.name),
            name: reading.name,
            object: reading.service,
            trigger_time: None,
        })
    }
}

impl Readable for EndpointSlice {
    type Name = SliceName;
    type Fields = SliceFields;
    const KIND: Kind = Kind::Slice;
    const KINDS: ObjectKinds = ObjectKinds {
        kinds: &[SLICE],
        names: &[SLICE.name],
        item_names: &[SLICE.name],
        noun: "endpoint slice",
    };

    fn read(fields: SliceFields, selection: &Selection) -> Result<Reading<Self>, SpecError> {
        let mut wrong_types = WrongTypes::default();
        let reading = read_slice(&fields.into_object(&mut wrong_types), selection)?;
        Ok(Reading {
            errors: wrong_types.in_place_of(reading.errors, Self::KIND, &reading.name),
            name: reading.name,
            object: reading.slice,
            trigger_time: reading.trigger_time,
        })
    }
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", expecting = "an ObjectMeta")]
struct Metadata {
    name: Option<String>,
    namespace: Option<String>,
    labels: Option<BTreeMap<String, String>>,
    annotations: Option<BTreeMap<String, String>>,
    creation_timestamp: Option<Time>,
}

/// The relevant fields of a service.
#[derive(Deserialize)]
#[serde(expecting = "a Service")]
pub struct ServiceFields {
    metadata: Option<Metadata>,
    spec: Option<ServiceSpec>,
    status: Option<ServiceStatus>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", expecting = "a ServiceSpec")]
struct ServiceSpec {
    #[serde(rename = "type")]
    kind: Option<String>,
    #[serde(rename = "clusterIP")]
    cluster_ip: Option<String>,
    #[serde(rename = "clusterIPs")]
    cluster_ips: Option<Members<String>>,
    #[serde(rename = "externalIPs")]
    external_ips: Option<Members<String>>,
    ports: Option<Members<ServicePort>>,
    load_balancer_source_ranges: Option<Members<String>>,
    session_affinity: Option<String>,
    session_affinity_config: Option<AffinityConfig>,
    external_traffic_policy: Option<String>,
    internal_traffic_policy: Option<String>,
    health_check_node_port: Option<i32>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", expecting = "a ServicePort")]
struct ServicePort {
    name: Option<String>,
    protocol: Option<String>,
    port: Option<i32>,
    node_port: Option<i32>,
}

#[derive(Deserialize)]
#[serde(expecting = "a SessionAffinityConfig")]
struct AffinityConfig {
    #[serde(rename = "clientIP")]
    client_ip: Option<ClientIp>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", expecting = "a ClientIPConfig")]
struct ClientIp {
    timeout_seconds: Option<i32>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", expecting = "a ServiceStatus")]
struct ServiceStatus {
    load_balancer: Option<LoadBalancer>,
}

#[derive(Deserialize)]
#[serde(expecting = "a LoadBalancerStatus")]
struct LoadBalancer {
    ingress: Option<Members<Ingress>>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", expecting = "a LoadBalancerIngress")]
struct Ingress {
    ip: Option<String>,
    ip_mode: Option<String>,
}

/// The relevant fields of a slice.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase", expecting = "an EndpointSlice")]
pub struct SliceFields {
    metadata: Option<Metadata>,
    address_type: Option<String>,
    ports: Option<Members<SlicePort>>,
    endpoints: Option<Members<Endpoint>>,
}

#[derive(Default, Deserialize)]
#[serde(expecting = "an EndpointPort")]
struct SlicePort {
    name: Option<String>,
    protocol: Option<String>,
    port: Option<i32>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", expecting = "an Endpoint")]
struct Endpoint {
    addresses: Option<Members<String>>,
    conditions: Option<Conditions>,
    node_name: Option<String>,
    zone: Option<String>,
    hints: Option<Hints>,
}

#[derive(Deserialize)]
#[serde(expecting = "an EndpointConditions")]
struct Conditions {
    ready: Option<bool>,
    serving: Option<bool>,
    terminating: Option<bool>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", expecting = "an EndpointHints")]
struct Hints {
    for_nodes: Option<Members<Named>>,
    for_zones: Option<Members<Named>>,
}

#[derive(Default, Deserialize)]
#[serde(expecting = "a name")]
struct Named {
    name: Option<String>,
}

impl From<Metadata> for ObjectMeta {
    fn from(metadata: Metadata) -> Self {
        Self {
            name: metadata.name,
            namespace: metadata.namespace,
            labels: metadata.labels,
            annotations: metadata.annotations,
            creation_timestamp: metadata.creation_timestamp,
            ..Self::default()
        }
    }
}

impl ServiceFields {
    /// Converts to an API object. Members of the wrong type are recorded, and have no value.
    fn into_object(self, wrong: &mut WrongTypes) -> core::Service {
        let ingress = |one: Ingress| core::LoadBalancerIngress {
            ip: one.ip,
            ip_mode: one.ip_mode,
            ..core::LoadBalancerIngress::default()
        };
        let balancer = self.status.map(|status| core::ServiceStatus {
            load_balancer: status
                .load_balancer
                .map(|balancer| core::LoadBalancerStatus {
                    ingress: balancer.ingress.map(|all| {
                        all.each(wrong, "status.loadBalancer.ingress", |_, one, _| {
                            ingress(one)
                        })
                    }),
                }),
            ..core::ServiceStatus::default()
        });
        core::Service {
            metadata: self.metadata.unwrap_or_default().into(),
            spec: self.spec.map(|spec| spec.into_object(wrong)),
            status: balancer,
        }
    }
}

impl ServiceSpec {
    fn into_object(self, wrong: &mut WrongTypes) -> core::ServiceSpec {
        let affinity = |config: AffinityConfig| core::SessionAffinityConfig {
            client_ip: config.client_ip.map(|client_ip| core::ClientIPConfig {
                timeout_seconds: client_ip.timeout_seconds,
            }),
        };
        let mut texts = |all: Option<Members<String>>, path: &str| {
            all.map(|all| all.each(wrong, path, |_, text, _| text))
        };
        let cluster_ips = texts(self.cluster_ips, "spec.clusterIPs");
        let external_ips = texts(self.external_ips, "spec.externalIPs");
        let load_balancer_source_ranges = texts(
            self.load_balancer_source_ranges,
            "spec.loadBalancerSourceRanges",
        );
        let ports = self.ports.map(|all| {
            all.each(wrong, "spec.ports", |_, port, _| core::ServicePort {
                name: port.name,
                protocol: port.protocol,
                port: port.port.unwrap_or_default(),
                node_port: port.node_port,
                ..core::ServicePort::default()
            })
        });
        core::ServiceSpec {
            type_: self.kind,
            cluster_ip: self.cluster_ip,
            cluster_ips,
            external_ips,
            ports,
            load_balancer_source_ranges,
            session_affinity: self.session_affinity,
            session_affinity_config: self.session_affinity_config.map(affinity),
            external_traffic_policy: self.external_traffic_policy,
            internal_traffic_policy: self.internal_traffic_policy,
            health_check_node_port: self.health_check_node_port,
            ..core::ServiceSpec::default()
        }
    }
}

impl SliceFields {
    /// Converts to an API object. Members of the wrong type are recorded, and have no value.
    fn into_object(self, wrong: &mut WrongTypes) -> discovery::EndpointSlice {
        let ports = self.ports.map(|all| {
            all.each(wrong, "ports", |_, port, _| discovery::EndpointPort {
                // The same default as in the API.
                name: port.name.or_else(|| Some(String::new())),
                protocol: port.protocol,
                port: port.port,
                ..discovery::EndpointPort::default()
            })
        });
        let endpoints = self.endpoints.unwrap_or_default();
        discovery::EndpointSlice {
            metadata: self.metadata.unwrap_or_default().into(),
            address_type: self.address_type.unwrap_or_default(),
            ports,
            endpoints: endpoints.each(wrong, "endpoints", |path, endpoint, wrong| {
                endpoint.into_object(path, wrong)
            }),
        }
    }
}

impl Endpoint {
    fn into_object(self, path: &str, wrong: &mut WrongTypes) -> discovery::Endpoint {
        let conditions = |conditions: Conditions| discovery::EndpointConditions {
            ready: conditions.ready,
            serving: conditions.serving,
            terminating: conditions.terminating,
        };
        let addresses = self.addresses.unwrap_or_default();
        let addresses = addresses.each(wrong, &format!("{path}.addresses"), |_, text, _| text);
        let hints = self.hints.map(|hints| {
            let mut names = |all: Option<Members<Named>>, field: &str| {
                let path = format!("{path}.hints.{field}");
                all.map(|all| all.each(wrong, &path, |_, one, _| one.name.unwrap_or_default()))
            };
            let for_nodes = names(hints.for_nodes, "forNodes");
            let for_zones = names(hints.for_zones, "forZones");
            let node = |name| discovery::ForNode { name };
            let zone = |name| discovery::ForZone { name };
            discovery::EndpointHints {
                for_nodes: for_nodes.map(|all| all.into_iter().map(node).collect()),
                for_zones: for_zones.map(|all| all.into_iter().map(zone).collect()),
            }
        });
        discovery::Endpoint {
            addresses,
            conditions: self.conditions.map(conditions),
            node_name: self.node_name,
            zone: self.zone,
            hints,
            ..discovery::Endpoint::default()
        }
    }
}

#[cfg(test)]
mod tests;

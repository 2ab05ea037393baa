//! Services and endpoint slices, as a text has them. Only the fields that matter are read: those of Kubernetes' own types
//! that nobody looks at would take much code to read.

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
use crate::spec::{
    EndpointSlice, Kind, Selection, Service, ServiceName, Skip, SliceName, SpecError, read_service,
    read_slice,
};

/// An object that can be read.
pub trait Readable: Sized + Eq {
    type Name: Ord + Clone + fmt::Display;
    /// The fields that matter.
    type Fields: DeserializeOwned;
    const KIND: Kind;
    /// What a text with one of them alone may hold.
    const KINDS: ObjectKinds;

    /// An error if it cannot be told from others.
    fn read(fields: Self::Fields, selection: &Selection) -> Result<Reading<Self>, SpecError>;
}

/// What was read of an object.
pub struct Reading<T: Readable> {
    pub(super) name: T::Name,
    /// It, or why it is not to be served.
    pub(super) object: Result<T, Skip>,
    pub(super) trigger_time: Option<Timestamp>,
    pub(super) errors: Vec<SpecError>,
}

/// Why an object is not read.
pub(super) struct Unreadable {
    /// Its `NAMESPACE/NAME`, if it has a name.
    pub(super) object: Option<String>,
    /// All that is wrong with it.
    pub(super) errors: Vec<SpecError>,
}

/// Reads an object of a manifest. It must have no error at all, as the API would not have taken it otherwise.
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
    if errors.is_empty() && reading.as_ref().is_some_and(lacks_address) {
        errors.push(SpecError {
            kind: T::KIND,
            object: title.clone(),
            path: "spec.clusterIP".to_owned(),
            problem: Problem::Required("nobody assigns an address to a service of a manifest"),
        });
    }
    match reading {
        Some(reading) if errors.is_empty() => Ok(reading),
        _ => {
            for error in &mut errors {
                error.path.insert_str(0, &object.prefix);
            }
            Err(Unreadable {
                object: is_named.then_some(title),
                errors,
            })
        }
    }
}

/// What was read of an object that may have errors.
pub(super) struct Lenient<T: Readable> {
    /// Its `NAMESPACE/NAME`, as far as it has them.
    pub(super) title: String,
    /// Whether it has a name.
    pub(super) is_named: bool,
    /// Whether all that it has is of the right type.
    pub(super) is_typed: bool,
    /// It, without the fields that have an error; none if that leaves nothing.
    pub(super) reading: Option<Reading<T>>,
    /// All that is wrong with it.
    pub(super) errors: Vec<SpecError>,
}

/// Reads an object as far as that is possible.
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
        })
        .collect();
    let is_typed = errors.is_empty();
    let reading = typed.value.take().map(|fields| T::read(fields, selection));
    // What is missing only because it was left out is no error of its own.
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
        let reading = read_service(&fields.into(), selection)?;
        Ok(Reading {
            name: reading.name,
            object: reading.service,
            trigger_time: None,
            errors: reading.errors,
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
        let reading = read_slice(&fields.into(), selection)?;
        Ok(Reading {
            name: reading.name,
            object: reading.slice,
            trigger_time: reading.trigger_time,
            errors: reading.errors,
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

/// A service.
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
    cluster_ips: Option<Vec<String>>,
    #[serde(rename = "externalIPs")]
    external_ips: Option<Vec<String>>,
    ports: Option<Vec<ServicePort>>,
    load_balancer_source_ranges: Option<Vec<String>>,
    session_affinity: Option<String>,
    session_affinity_config: Option<AffinityConfig>,
    external_traffic_policy: Option<String>,
    internal_traffic_policy: Option<String>,
    health_check_node_port: Option<i32>,
}

#[derive(Deserialize)]
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
    ingress: Option<Vec<Ingress>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", expecting = "a LoadBalancerIngress")]
struct Ingress {
    ip: Option<String>,
    ip_mode: Option<String>,
}

/// A slice.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase", expecting = "an EndpointSlice")]
pub struct SliceFields {
    metadata: Option<Metadata>,
    address_type: Option<String>,
    ports: Option<Vec<SlicePort>>,
    endpoints: Option<Vec<Endpoint>>,
}

#[derive(Deserialize)]
#[serde(expecting = "an EndpointPort")]
struct SlicePort {
    name: Option<String>,
    protocol: Option<String>,
    port: Option<i32>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", expecting = "an Endpoint")]
struct Endpoint {
    addresses: Option<Vec<String>>,
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
    for_nodes: Option<Vec<Named>>,
    for_zones: Option<Vec<Named>>,
}

#[derive(Deserialize)]
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

impl From<ServiceFields> for core::Service {
    fn from(service: ServiceFields) -> Self {
        let ingress = |one: Ingress| core::LoadBalancerIngress {
            ip: one.ip,
            ip_mode: one.ip_mode,
            ..core::LoadBalancerIngress::default()
        };
        let balancer = |balancer: LoadBalancer| core::LoadBalancerStatus {
            ingress: balancer
                .ingress
                .map(|all| all.into_iter().map(ingress).collect()),
        };
        Self {
            metadata: service.metadata.unwrap_or_default().into(),
            spec: service.spec.map(Into::into),
            status: service.status.map(|status| core::ServiceStatus {
                load_balancer: status.load_balancer.map(balancer),
                ..core::ServiceStatus::default()
            }),
        }
    }
}

impl From<ServiceSpec> for core::ServiceSpec {
    fn from(spec: ServiceSpec) -> Self {
        let port = |port: ServicePort| core::ServicePort {
            name: port.name,
            protocol: port.protocol,
            port: port.port.unwrap_or_default(),
            node_port: port.node_port,
            ..core::ServicePort::default()
        };
        let affinity = |config: AffinityConfig| core::SessionAffinityConfig {
            client_ip: config.client_ip.map(|client_ip| core::ClientIPConfig {
                timeout_seconds: client_ip.timeout_seconds,
            }),
        };
        Self {
            type_: spec.kind,
            cluster_ip: spec.cluster_ip,
            cluster_ips: spec.cluster_ips,
            external_ips: spec.external_ips,
            ports: spec.ports.map(|all| all.into_iter().map(port).collect()),
            load_balancer_source_ranges: spec.load_balancer_source_ranges,
            session_affinity: spec.session_affinity,
            session_affinity_config: spec.session_affinity_config.map(affinity),
            external_traffic_policy: spec.external_traffic_policy,
            internal_traffic_policy: spec.internal_traffic_policy,
            health_check_node_port: spec.health_check_node_port,
            ..Self::default()
        }
    }
}

impl From<SliceFields> for discovery::EndpointSlice {
    fn from(slice: SliceFields) -> Self {
        let port = |port: SlicePort| discovery::EndpointPort {
            // The API sets it so.
            name: port.name.or_else(|| Some(String::new())),
            protocol: port.protocol,
            port: port.port,
            ..discovery::EndpointPort::default()
        };
        let endpoints = slice.endpoints.unwrap_or_default();
        Self {
            metadata: slice.metadata.unwrap_or_default().into(),
            address_type: slice.address_type.unwrap_or_default(),
            ports: slice.ports.map(|all| all.into_iter().map(port).collect()),
            endpoints: endpoints.into_iter().map(Into::into).collect(),
        }
    }
}

impl From<Endpoint> for discovery::Endpoint {
    fn from(endpoint: Endpoint) -> Self {
        let conditions = |conditions: Conditions| discovery::EndpointConditions {
            ready: conditions.ready,
            serving: conditions.serving,
            terminating: conditions.terminating,
        };
        let name = |named: Named| named.name.unwrap_or_default();
        let node = |named| discovery::ForNode { name: name(named) };
        let zone = |named| discovery::ForZone { name: name(named) };
        let hints = |hints: Hints| discovery::EndpointHints {
            for_nodes: hints
                .for_nodes
                .map(|all| all.into_iter().map(node).collect()),
            for_zones: hints
                .for_zones
                .map(|all| all.into_iter().map(zone).collect()),
        };
        Self {
            addresses: endpoint.addresses.unwrap_or_default(),
            conditions: endpoint.conditions.map(conditions),
            node_name: endpoint.node_name,
            zone: endpoint.zone,
            hints: endpoint.hints.map(hints),
            ..Self::default()
        }
    }
}

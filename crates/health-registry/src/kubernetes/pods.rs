//! The pods of one node and the labels of namespaces, as the cluster's API server reports them.

use std::path::Path;

use health_model::labels::pod::{Labels, NamedPorts};
use health_model::manifest::{MIRROR_ANNOTATION, check_port_name};
use health_model::policy::{L4, Protocol};
use k8s_openapi::api::core::v1::{Namespace, Pod};
use kube::api::ApiResource;
use serde_json::Value;

use super::access::{Access, AccessError};
use super::objects::{Empty, ObjectWatch, Scope};

/// Follows the pods of one node and the labels of all namespaces, with a watch for each kind. Dropping it stops them.
#[derive(Debug)]
pub struct PodWatch<T> {
    /// The pods that the cluster has scheduled on the node.
    pub pods: ObjectWatch<T>,
    /// The labels of the namespaces.
    pub namespaces: ObjectWatch<Labels>,
}

impl<T: PartialEq + Send + Sync + 'static> PodWatch<T> {
    /// Starts to follow the pods and namespaces of a cluster. Uses the kubeconfig at the given path, else the service
    /// account of this process's pod, else the environment's kubeconfig. `read` converts a pod to the form that is
    /// kept; it is also passed the previous result for the pod of that name.
    ///
    /// Fails if there are no credentials. Does not wait for a response. Must be called in a tokio runtime.
    pub fn open(
        kubeconfig: Option<&Path>,
        node: &str,
        read: impl FnMut(Value, Option<&T>) -> T + Send + 'static,
    ) -> Result<Self, AccessError> {
        let access = Access::find(kubeconfig)?;
        let pods = Scope {
            resource: "pods",
            kind: ApiResource::erase::<Pod>(&()),
            labels: None,
            fields: Some(format!("spec.nodeName={node}")),
            empty: Empty::Believed,
            is_optional: false,
        };
        let namespaces = Scope {
            resource: "namespaces",
            kind: ApiResource::erase::<Namespace>(&()),
            labels: None,
            fields: None,
            empty: Empty::Lost,
            is_optional: false,
        };
        Ok(Self {
            pods: ObjectWatch::start(access.clone(), pods, read),
            namespaces: ObjectWatch::start(access, namespaces, |object, _| labels(&object)),
        })
    }
}

/// What the labels of a pod's identity depend on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PodMetadata {
    /// Its namespace.
    pub namespace: String,
    /// The UID of the object, and for the mirror of a pod that a kubelet has from its own folder also that of the pod.
    pub uids: Vec<String>,
    /// Its labels.
    pub labels: Labels,
    /// Its service account, if the server has set it.
    pub service_account: Option<String>,
    /// The named ports of its containers, and of the init containers that keep running beside them.
    pub ports: NamedPorts,
}

impl PodMetadata {
    /// Reads an object of kind `Pod`. The API server has validated it; fields with another type count as absent.
    pub fn read(object: &Value) -> Self {
        let text = |value: &Value| value.as_str().map(str::to_owned);
        let metadata = &object["metadata"];
        let uids = [
            &metadata["uid"],
            &metadata["annotations"][MIRROR_ANNOTATION],
        ];
        Self {
            namespace: text(&metadata["namespace"]).unwrap_or_default(),
            uids: uids.into_iter().filter_map(text).collect(),
            labels: labels(object),
            service_account: text(&object["spec"]["serviceAccountName"]),
            ports: named_ports(&object["spec"]),
        }
    }
}

fn named_ports(spec: &Value) -> NamedPorts {
    let is_sidecar = |container: &&Value| container["restartPolicy"] == "Always";
    let sidecars = items(&spec["initContainers"]).filter(is_sidecar);
    let containers = items(&spec["containers"]).chain(sidecars);
    let mut named = NamedPorts::new();
    for (name, port) in containers
        .flat_map(|container| items(&container["ports"]))
        .filter_map(named_port)
    {
        named.entry(name.to_owned()).or_default().insert(port);
    }
    named
}

/// The name and the port of a `ContainerPort`; `None` if it has no name.
fn named_port(port: &Value) -> Option<(&str, L4)> {
    let is_valid = |name: &&str| check_port_name(name).is_none();
    let name = port["name"].as_str().filter(is_valid)?;
    let number = u16::try_from(port["containerPort"].as_u64()?).ok();
    let protocol = match &port["protocol"] {
        Value::Null => Protocol::TCP,
        given => {
            let given = given.as_str()?;
            let mut known = Protocol::WITH_PORTS.into_iter();
            known.find(|protocol| protocol.to_string() == given)?
        }
    };
    let number = number.filter(|&number| number > 0)?;
    Some((name, L4::new(protocol, number)))
}

fn items(list: &Value) -> impl Iterator<Item = &Value> {
    list.as_array().into_iter().flatten()
}

/// The labels of an object.
fn labels(object: &Value) -> Labels {
    let labels = object["metadata"]["labels"].as_object();
    let labels = labels.into_iter().flatten();
    labels
        .filter_map(|(key, value)| Some((key.clone(), value.as_str()?.to_owned())))
        .collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_pod_names_ports_in_its_containers_and_sidecars() {
        let object = json!({"metadata": {"namespace": "shop"}, "spec": {
            "containers": [
                {"name": "a", "ports": [
                    {"name": "web", "containerPort": 8080, "protocol": "TCP"},
                    {"name": "dns", "containerPort": 53, "protocol": "UDP"},
                    {"containerPort": 9000},
                ]},
                {"name": "b", "ports": [{"name": "web", "containerPort": 8081}]},
                {"name": "c"},
            ],
            "initContainers": [
                {"name": "d", "restartPolicy": "Always",
                 "ports": [{"name": "proxy", "containerPort": 15001, "protocol": "SCTP"}]},
                {"name": "e", "ports": [{"name": "setup", "containerPort": 7}]},
            ],
        }});
        let ports = PodMetadata::read(&object).ports;
        let shown: Vec<String> = ports
            .iter()
            .flat_map(|(name, ports)| ports.iter().map(move |port| format!("{name} {port}")))
            .collect();
        let expected = [
            "dns 53/UDP",
            "proxy 15001/SCTP",
            "web 8080/TCP",
            "web 8081/TCP",
        ];
        assert_eq!(shown, expected);
    }

    #[test]
    fn what_is_no_port_of_a_container_has_no_name() {
        for port in [
            json!("web"),
            json!({"name": "Web", "containerPort": 80}),
            json!({"name": "a=b+c", "containerPort": 80}),
            json!({"name": 80, "containerPort": 80}),
            json!({"name": "web"}),
            json!({"name": "web", "containerPort": 0}),
            json!({"name": "web", "containerPort": 65536}),
            json!({"name": "web", "containerPort": "80"}),
            json!({"name": "web", "containerPort": 80, "protocol": "ICMP"}),
            json!({"name": "web", "containerPort": 80, "protocol": "tcp"}),
        ] {
            let object = json!({"spec": {"containers": [{"ports": [port]}]}});
            assert!(PodMetadata::read(&object).ports.is_empty(), "{object}");
        }
        for spec in [
            json!(null),
            json!({"containers": {}}),
            json!({"containers": [{"ports": 80}]}),
        ] {
            assert!(PodMetadata::read(&json!({ "spec": spec })).ports.is_empty());
        }
    }
}

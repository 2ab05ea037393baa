//! The services by which policies name peers.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::path::Path;
use std::sync::Arc;

use health_model::activity::{Controller, Problem};
use health_model::labels::pod::K8S;
use health_model::labels::{Label, LabelSet};
use health_policy::{ClusterServices, Service};
use health_registry::kubernetes::{AccessError, ObjectTable, ServiceScope, ServiceWatch};
use health_registry::nodes::Staleness;
use serde_json::{Map, Value};
use tokio::sync::watch;

/// Selects the slices of services that do not select pods, and of the API servers. Kubernetes makes all other slices.
const SLICES: &str = "endpointslice.kubernetes.io/managed-by!=endpointslice-controller.k8s.io";
/// Label of a slice with the name of its service.
const SERVICE_NAME: &str = "kubernetes.io/service-name";
/// The problem with a server that has no endpoint slices.
const NO_SLICES: &str = "the API server has no endpointslices of discovery.k8s.io/v1: rules for services that do not \
                         select pods, and for kube-apiserver, match nothing";

/// The endpoints of a service, or a part of them.
#[derive(Debug, PartialEq)]
struct Slice {
    /// The service, as `NAMESPACE/NAME`.
    service: String,
    addresses: BTreeSet<IpAddr>,
}

/// Follows the services until dropped.
pub(super) struct NamedServices {
    services: watch::Receiver<Arc<ObjectTable<Service>>>,
    slices: watch::Receiver<Arc<ObjectTable<Slice>>>,
    watch: ServiceWatch<Service, Slice>,
}

/// The services at one moment.
pub(super) struct ServiceTables {
    services: Arc<ObjectTable<Service>>,
    slices: Arc<ObjectTable<Slice>>,
}

impl NamedServices {
    pub(super) fn open(kubeconfig: Option<&Path>) -> Result<Self, AccessError> {
        let scope = ServiceScope {
            services: None,
            slices: SLICES.to_owned(),
            // A cluster always has a service for its own API.
            can_be_empty: false,
            may_lack_slices: true,
        };
        let watch = ServiceWatch::open(
            kubeconfig,
            &scope,
            |object, _| read_service(&object),
            |object, _| read_slice(&object),
        )?;
        Ok(Self {
            services: watch.services.table(),
            slices: watch.slices.table(),
            watch,
        })
    }

    /// What is known about the watches themselves. The services that this node serves have their own.
    pub(super) fn controllers(&self) -> [Controller; 2] {
        let watches = [
            self.watch.services.controller(),
            self.watch.slices.controller(),
        ];
        watches.map(|controller| Controller {
            name: format!("{}-of-policies", controller.name),
            ..controller
        })
    }

    pub(super) fn now(&mut self) -> ServiceTables {
        ServiceTables {
            services: self.services.borrow_and_update().clone(),
            slices: self.slices.borrow_and_update().clone(),
        }
    }

    /// Waits for a change. Returns whether the services are still followed.
    pub(super) async fn changed(&mut self) -> bool {
        tokio::select! {
            changed = self.services.changed() => changed.is_ok(),
            changed = self.slices.changed() => changed.is_ok(),
        }
    }
}

impl ServiceTables {
    /// Returns what is known now. `before` is what was known until now.
    pub(super) fn known(&self, before: &ClusterServices) -> ClusterServices {
        let all = || {
            let services = self.services.objects.iter();
            let services = services.map(|(name, service)| (name.clone(), service.clone()));
            Arc::new(services.collect::<BTreeMap<_, _>>())
        };
        let had_addresses = || before.addresses.as_ref().is_some_and(|had| !had.is_empty());
        let has_slices = self.slices.has_all(had_addresses);
        ClusterServices {
            services: self.services.is_complete.then(all),
            addresses: has_slices.then(|| Arc::new(self.addresses())),
        }
    }

    fn addresses(&self) -> BTreeMap<String, BTreeSet<IpAddr>> {
        let mut of_services: BTreeMap<String, BTreeSet<IpAddr>> = BTreeMap::new();
        for slice in self.slices.objects.values() {
            let known = of_services.entry(slice.service.clone()).or_default();
            known.extend(&slice.addresses);
        }
        of_services
    }

    fn stale(&self) -> Option<&Staleness> {
        self.services.stale.as_ref().or(self.slices.stale.as_ref())
    }

    /// Why the services may be outdated.
    pub(super) fn reason(&self) -> Option<String> {
        self.stale().map(|stale| stale.reason.clone())
    }

    /// The problem to report, if policies depend on services.
    pub(super) fn outcome(&self, needs_services: bool) -> Result<(), Problem> {
        let problem = match self.stale() {
            _ if !needs_services => return Ok(()),
            Some(stale) => stale.using("services"),
            None if self.slices.lacking.is_some() => NO_SLICES.to_owned(),
            None => return Ok(()),
        };
        Err(Problem::warning(problem))
    }
}

/// Reads an object of kind `Service`. The API server has validated it; labels that are too long for policy are left out.
fn read_service(object: &Value) -> Service {
    let labels = entries(&object["metadata"]["labels"]);
    let labels = labels.filter_map(|(key, value)| Label::new(K8S, key, value).ok());
    Service {
        namespace: text(&object["metadata"]["namespace"]),
        labels: LabelSet::new(labels).unwrap_or_default(),
        selector: entries(&object["spec"]["selector"])
            .map(|(key, value)| (key.to_owned(), value.to_owned()))
            .collect(),
    }
}

/// Reads an object of kind `EndpointSlice`: the endpoints that receive connections.
fn read_slice(object: &Value) -> Slice {
    let metadata = &object["metadata"];
    let endpoints = object["endpoints"].as_array();
    let serving = endpoints.into_iter().flatten().filter(|endpoint| {
        let conditions = &endpoint["conditions"];
        conditions["ready"] != false || conditions["serving"] == true
    });
    let addresses = serving.flat_map(|endpoint| endpoint["addresses"].as_array());
    let addresses = addresses.flatten().filter_map(|address| {
        let address: IpAddr = address.as_str()?.parse().ok()?;
        Some(address.to_canonical())
    });
    let service = text(&metadata["labels"][SERVICE_NAME]);
    Slice {
        service: format!("{}/{service}", text(&metadata["namespace"])),
        addresses: addresses.collect(),
    }
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

/// The entries of a map of strings.
fn entries(map: &Value) -> impl Iterator<Item = (&str, &str)> {
    let entries = map.as_object().into_iter().flat_map(Map::iter);
    entries.filter_map(|(key, value)| Some((key.as_str(), value.as_str()?)))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_slice_gives_the_addresses_that_receive_connections() {
        let slice = read_slice(&json!({
            "metadata": { "namespace": "shop", "name": "db-1", "labels": { SERVICE_NAME: "db" } },
            "addressType": "IPv4",
            "endpoints": [
                { "addresses": ["192.0.2.1"] },
                { "addresses": ["192.0.2.2"], "conditions": { "ready": true } },
                { "addresses": ["192.0.2.3"], "conditions": { "ready": false } },
                { "addresses": ["192.0.2.4"], "conditions": { "ready": false, "serving": true, "terminating": true } },
                { "addresses": ["a.example.com"] },
            ],
        }));
        let expected = ["192.0.2.1", "192.0.2.2", "192.0.2.4"];
        let expected = expected.map(|ip| ip.parse().unwrap());
        assert_eq!(
            (slice.service.as_str(), slice.addresses),
            ("shop/db", expected.into())
        );
        let none = read_slice(&json!({ "metadata": {}, "endpoints": null }));
        assert!(none.addresses.is_empty());
    }

    #[test]
    fn a_service_gives_its_labels_and_those_of_its_pods() {
        let service = read_service(&json!({
            "metadata": { "namespace": "shop", "name": "web", "labels": { "tier": "front" } },
            "spec": { "selector": { "app": "web" }, "ports": [{ "port": 80 }] },
        }));
        assert_eq!(service.namespace, "shop");
        assert_eq!(service.labels.get(K8S, "tier").unwrap().value(), "front");
        assert_eq!(
            service.selector,
            BTreeMap::from([("app".to_owned(), "web".to_owned())])
        );
        let external = read_service(&json!({
            "metadata": { "namespace": "shop", "name": "db" }, "spec": { "selector": null },
        }));
        assert!(external.selector.is_empty() && external.labels.is_empty());
    }
}

//! Peers that a rule names by services of the Kubernetes cluster.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use health_model::labels::LabelSet;
use health_model::labels::pod::{K8S, POD_NAMESPACE};
use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use super::error::{PolicyError, Problem};
use super::field::Field;
use super::peer::{CidrSet, Peer};
use super::selector::Selector;

/// The service of the cluster's own API servers.
const API_SERVERS: &str = "default/kubernetes";

/// A service: what rules can select it by, and which pods it selects.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Service {
    /// Its namespace.
    pub namespace: String,
    /// Its labels, with the source `k8s`.
    pub labels: LabelSet,
    /// The labels of its pods; none if it does not select pods.
    pub selector: BTreeMap<String, String>,
}

/// The services of a Kubernetes cluster, as far as they are known. Clones share the contents.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClusterServices {
    /// All services by `NAMESPACE/NAME`; `None` if they are not known yet.
    pub services: Option<Arc<BTreeMap<String, Arc<Service>>>>,
    /// The addresses of the endpoints of services that do not select pods, by the service's `NAMESPACE/NAME`; `None` if
    /// they are not known yet.
    pub addresses: Option<Arc<BTreeMap<String, BTreeSet<IpAddr>>>>,
}

impl ClusterServices {
    /// Whether everything is known.
    pub const fn is_known(&self) -> bool {
        self.services.is_some() && self.addresses.is_some()
    }

    /// Returns the addresses of the cluster's API servers.
    pub fn api_servers(&self) -> impl Iterator<Item = IpAddr> {
        self.addresses_of(API_SERVERS)
    }

    fn addresses_of(&self, name: &str) -> impl Iterator<Item = IpAddr> {
        let known = self.addresses.as_ref();
        let of_service = known.and_then(|known| known.get(name));
        of_service.into_iter().flatten().copied()
    }

    /// Replaces whatever `newer` knows.
    pub(super) fn update(&mut self, newer: &Self) {
        if newer.services.is_some() {
            self.services.clone_from(&newer.services);
        }
        if newer.addresses.is_some() {
            self.addresses.clone_from(&newer.addresses);
        }
    }

    /// Returns the services that these references name, and the addresses of the API servers.
    pub(super) fn named_by(&self, references: &[&ServiceReference]) -> SavedServices {
        let services = self.services.as_ref().map(|all| {
            let named = all.iter().filter(|(name, service)| {
                let mut references = references.iter();
                references.any(|reference| reference.names(name, service))
            });
            let named = named.map(|(name, service)| (name.clone(), Service::clone(service)));
            named.collect::<BTreeMap<_, _>>()
        });
        let addresses = self.addresses.as_ref().map(|all| {
            let is_named = |name: &String| {
                let mut services = services.iter();
                name == API_SERVERS || services.any(|services| services.contains_key(name))
            };
            let named = all.iter().filter(|(name, _)| is_named(name));
            let named = named.map(|(name, addresses)| (name.clone(), addresses.clone()));
            named.collect()
        });
        SavedServices {
            services,
            addresses,
        }
    }
}

/// The form in which services are saved.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct SavedServices {
    services: Option<BTreeMap<String, Service>>,
    addresses: Option<BTreeMap<String, BTreeSet<IpAddr>>>,
}

impl SavedServices {
    /// Whether nothing is known.
    pub(super) const fn is_empty(&self) -> bool {
        self.services.is_none() && self.addresses.is_none()
    }
}

impl From<&SavedServices> for ClusterServices {
    fn from(saved: &SavedServices) -> Self {
        let services = saved.services.as_ref().map(|services| {
            let services = services.iter();
            let shared = services.map(|(name, one)| (name.clone(), Arc::new(one.clone())));
            Arc::new(shared.collect())
        });
        Self {
            services,
            addresses: saved.addresses.clone().map(Arc::new),
        }
    }
}

/// How a rule names services.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ServiceReference {
    /// `None` stands for every namespace.
    namespace: Option<String>,
    services: NamedServices,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum NamedServices {
    /// The service of this name.
    Name(String),
    /// The services with these labels.
    Labels(Selector),
}

impl ServiceReference {
    /// Reads an item of `toServices`, in a policy of this namespace.
    fn read(field: &Field<'_>, own_namespace: Option<&str>) -> Result<Self, PolicyError> {
        let fields = field.fields(&["k8sService", "k8sServiceSelector"])?;
        let namespace = |field: Option<Field<'_>>| -> Result<Option<String>, PolicyError> {
            let named = field.map(|field| field.text()).transpose()?;
            let named = named.filter(|named| !named.is_empty());
            Ok(named.or(own_namespace).map(str::to_owned))
        };
        match (fields.get("k8sService"), fields.get("k8sServiceSelector")) {
            (Some(by_name), None) => {
                let fields = by_name.fields(&["serviceName", "namespace"])?;
                let name = fields.required("serviceName")?.text()?.to_owned();
                Ok(Self {
                    namespace: namespace(fields.get("namespace"))?,
                    services: NamedServices::Name(name),
                })
            }
            (None, Some(by_labels)) => {
                let fields = by_labels.fields(&["selector", "namespace"])?;
                let selector = Selector::read_k8s(&fields.required("selector")?, "")?;
                Ok(Self {
                    namespace: namespace(fields.get("namespace"))?,
                    services: NamedServices::Labels(selector),
                })
            }
            _ => {
                let problem = "expected one of k8sService and k8sServiceSelector".to_owned();
                Err(field.error(Problem::Conflict(problem)))
            }
        }
    }

    /// Whether this names the service, whose full name is `NAMESPACE/NAME`.
    fn names(&self, full_name: &str, service: &Service) -> bool {
        let is_in_namespace = |namespace: &String| *namespace == service.namespace;
        self.namespace.as_ref().is_none_or(is_in_namespace)
            && match &self.services {
                NamedServices::Name(name) => {
                    let own = full_name.split_once('/').map(|(_, own)| own);
                    own == Some(name)
                }
                NamedServices::Labels(selector) => selector.matches(&service.labels),
            }
    }

    /// Returns the named services with their full names.
    fn find<'a>(&'a self, services: &'a ClusterServices) -> Vec<(&'a String, &'a Service)> {
        let Some(all) = &services.services else {
            return Vec::new();
        };
        if let (Some(namespace), NamedServices::Name(name)) = (&self.namespace, &self.services) {
            let found = all.get_key_value(&format!("{namespace}/{name}"));
            return found
                .map(|(name, service)| (name, &**service))
                .into_iter()
                .collect();
        }
        let all = all.iter().map(|(name, service)| (name, &**service));
        all.filter(|(name, service)| self.names(name, service))
            .collect()
    }
}

/// The pods and addresses behind the services that a rule names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ServicePeers {
    reference: ServiceReference,
    /// Selects the pods of each service that selects pods.
    pods: Vec<Selector>,
    /// The addresses of the endpoints of the other services.
    addresses: CidrSet,
}

impl ServicePeers {
    /// Reads an item of `toServices`, in a policy of this namespace. The peers match nothing until they are bound.
    pub(super) fn read(
        field: &Field<'_>,
        own_namespace: Option<&str>,
    ) -> Result<Self, PolicyError> {
        Ok(Self {
            reference: ServiceReference::read(field, own_namespace)?,
            pods: Vec::new(),
            addresses: CidrSet::default(),
        })
    }

    pub(super) const fn reference(&self) -> &ServiceReference {
        &self.reference
    }

    /// Matches the peers behind these services from now on.
    pub(super) fn bind(&mut self, services: &ClusterServices) {
        self.pods.clear();
        self.addresses = CidrSet::default();
        for (name, service) in self.reference.find(services) {
            if service.selector.is_empty() {
                for address in services.addresses_of(name) {
                    self.addresses.insert(IpNet::from(address), Vec::new());
                }
                continue;
            }
            let mut pods = Selector::default();
            for (key, value) in &service.selector {
                pods.require(K8S, key, value);
            }
            pods.require(K8S, POD_NAMESPACE, &service.namespace);
            if !self.pods.contains(&pods) {
                self.pods.push(pods);
            }
        }
    }

    pub(super) fn selects(&self, peer: &Peer<'_>) -> bool {
        let mut pods = self.pods.iter();
        pods.any(|pods| pods.matches(peer.labels())) || self.addresses.selects(peer)
    }

    pub(super) fn prefixes(&self) -> impl Iterator<Item = IpNet> {
        self.addresses.prefixes()
    }
}

#[cfg(test)]
mod tests {
    use health_model::identity::Identity;
    use health_model::policy::PolicyOrigin;
    use serde_json::{Value, json};

    use super::*;
    use crate::{PolicySettings, Repository, parse, read_policy};

    fn service(namespace: &str, label: &str, selector: &[(&str, &str)]) -> Arc<Service> {
        let selector = selector.iter();
        let labels = [format!("k8s:team={label}").parse().unwrap()];
        Arc::new(Service {
            namespace: namespace.to_owned(),
            labels: LabelSet::new(labels).unwrap(),
            selector: selector
                .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
                .collect(),
        })
    }

    fn services(of: &[(&str, Arc<Service>)], addresses: &[(&str, &[&str])]) -> ClusterServices {
        let named = of.iter();
        let parsed = |texts: &[&str]| texts.iter().map(|text| text.parse().unwrap()).collect();
        let addresses = addresses.iter();
        ClusterServices {
            services: Some(Arc::new(
                named
                    .map(|(name, one)| ((*name).to_owned(), one.clone()))
                    .collect(),
            )),
            addresses: Some(Arc::new(
                addresses
                    .map(|(name, all)| ((*name).to_owned(), parsed(all)))
                    .collect(),
            )),
        }
    }

    fn policy(to: &Value) -> Value {
        json!({
            "apiVersion": "cilium.io/v2", "kind": "CiliumNetworkPolicy",
            "metadata": { "name": "p", "namespace": "shop" },
            "spec": { "endpointSelector": {}, "egress": [{ "toServices": to }] },
        })
    }

    /// Whether endpoints of the namespace `shop` may send to peers with these labels.
    fn passes(repository: &Repository, labels: &[&str]) -> bool {
        let set = |labels: &[&str]| {
            LabelSet::new(labels.iter().map(|label| label.parse().unwrap())).unwrap()
        };
        let subject = set(&["k8s:io.kubernetes.pod.namespace=shop"]);
        let resolved = repository.resolve(&subject, PolicySettings::default());
        let labels = set(labels);
        let peer = Peer::new(Identity(300), &labels);
        let l4 = "80/TCP".parse().unwrap();
        let egress = resolved.direction(health_model::policy::Direction::Egress);
        egress.decide(&peer, l4).verdict.passes()
    }

    const WEB: [&str; 2] = ["k8s:app=web", "k8s:io.kubernetes.pod.namespace=shop"];
    const BANK: [&str; 2] = ["k8s:app=web", "k8s:io.kubernetes.pod.namespace=bank"];
    const DB: [&str; 2] = ["cidr:192.0.2.1/32", "reserved:world"];

    fn known() -> ClusterServices {
        services(
            &[
                ("shop/web", service("shop", "a", &[("app", "web")])),
                ("bank/web", service("bank", "a", &[("app", "web")])),
                ("shop/db", service("shop", "b", &[])),
            ],
            &[
                ("shop/db", &["192.0.2.1", "2001:db8::1"]),
                ("shop/web", &["192.0.2.2"]),
                (API_SERVERS, &["192.0.2.3"]),
            ],
        )
    }

    #[test]
    fn a_rule_for_services_matches_their_pods_or_their_addresses() {
        let by_name = |name: &str| json!([{ "k8sService": { "serviceName": name } }]);
        let in_bank = json!([{ "k8sService": { "serviceName": "web", "namespace": "bank" } }]);
        let by_labels = |team: &str| {
            let selector = json!({ "matchLabels": { "team": team } });
            json!([{ "k8sServiceSelector": { "selector": selector } }])
        };
        for (to, web, bank, db) in [
            (by_name("web"), true, false, false),
            (in_bank, false, true, false),
            (by_name("db"), false, false, true),
            (by_name("absent"), false, false, false),
            (by_labels("a"), true, false, false),
            (by_labels("b"), false, false, true),
            (
                json!([{ "k8sServiceSelector": { "selector": {} } }]),
                true,
                false,
                true,
            ),
            (json!([]), false, false, false),
        ] {
            let mut repository = Repository::default();
            repository.import(&policy(&to).to_string()).unwrap();
            for peer in [&WEB, &BANK, &DB] {
                assert!(!passes(&repository, peer), "nothing is known yet: {to}");
            }
            repository.set_services(&known());
            assert_eq!(passes(&repository, &WEB), web, "{to}");
            assert_eq!(passes(&repository, &BANK), bank, "{to}");
            assert_eq!(passes(&repository, &DB), db, "{to}");
            assert!(!passes(
                &repository,
                &["cidr:192.0.2.2/32", "reserved:world"]
            ));
            let prefixes = repository.prefixes();
            assert_eq!(prefixes.contains(&"2001:db8::1/128".parse().unwrap()), db);
            // The rules of policies that come later are the same.
            let mut later = Repository::default();
            later.set_services(&known());
            later.import(&policy(&to).to_string()).unwrap();
            assert_eq!(passes(&later, &WEB), web, "{to}");
        }
    }

    #[test]
    fn a_policy_of_no_namespace_means_services_of_all() {
        let rule = json!([{
            "labels": ["r"], "endpointSelector": {},
            "egress": [{ "toServices": [{ "k8sService": { "serviceName": "web" } }] }],
        }]);
        let mut repository = Repository::default();
        repository.set_services(&known());
        repository.import(&rule.to_string()).unwrap();
        assert!(passes(&repository, &WEB) && passes(&repository, &BANK));
    }

    #[test]
    fn the_revision_changes_only_with_the_peers_of_rules_and_the_api_servers() {
        let mut repository = Repository::default();
        assert!(repository.set_services(&known()));
        let to = json!([{ "k8sService": { "serviceName": "web" } }]);
        repository.import(&policy(&to).to_string()).unwrap();
        let before = repository.revision();
        assert!(!repository.set_services(&known()));
        let mut other = known();
        let mut all = BTreeMap::clone(other.services.as_ref().unwrap());
        all.insert("shop/new".to_owned(), service("shop", "a", &[("app", "x")]));
        all.insert(
            "shop/web".to_owned(),
            service("shop", "other", &[("app", "web")]),
        );
        other.services = Some(Arc::new(all.clone()));
        assert!(!repository.set_services(&other));
        assert_eq!(repository.revision(), before);
        all.insert("shop/web".to_owned(), service("shop", "a", &[("app", "x")]));
        other.services = Some(Arc::new(all));
        assert!(repository.set_services(&other));
        assert_eq!(repository.revision(), before + 1);
        assert!(!passes(&repository, &WEB));
        // What is unknown stays as it was.
        assert!(!repository.set_services(&ClusterServices::default()));
        let servers = services(&[], &[(API_SERVERS, &["192.0.2.4"])]);
        let servers = ClusterServices {
            services: None,
            ..servers
        };
        assert!(repository.set_services(&servers));
        assert_eq!(repository.revision(), before + 2);
        assert!(passes(
            &repository,
            &["k8s:app=x", "k8s:io.kubernetes.pod.namespace=shop"]
        ));
        assert!(
            repository
                .prefixes()
                .contains(&"192.0.2.4/32".parse().unwrap())
        );
    }

    #[test]
    fn saved_policies_keep_the_services_that_they_name_and_no_others() {
        let mut repository = Repository::default();
        repository.set_services(&known());
        let to = json!([{ "k8sService": { "serviceName": "db" } }]);
        let object = Arc::new(read_policy(&policy(&to)).unwrap());
        repository.set_of_cluster(&object, jiff::Timestamp::UNIX_EPOCH);
        let saved = serde_json::to_value(repository.saved(PolicyOrigin::Kubernetes)).unwrap();
        assert!(!saved.to_string().contains("shop/web"), "{saved}");
        let mut read = Repository::default();
        let saved = serde_json::from_value(saved).unwrap();
        read.restore(&saved, PolicyOrigin::Kubernetes).unwrap();
        assert_eq!(read.revision(), repository.revision());
        assert!(passes(&read, &DB) && !passes(&read, &WEB));
        assert!(read.services().is_known());
        assert!(read.services().api_servers().eq(known().api_servers()));
        assert!(read.depends_on_services());
        let imported = repository.saved(PolicyOrigin::Imported);
        assert!(
            !serde_json::to_string(&imported)
                .unwrap()
                .contains("services")
        );
    }

    #[test]
    fn what_is_no_service_is_named() {
        for (to, message) in [
            (
                json!([{}]),
                "spec.egress[0].toServices[0]: expected one of k8sService",
            ),
            (
                json!([{ "k8sService": {} }]),
                "spec.egress[0].toServices[0].k8sService.serviceName: missing",
            ),
            (
                json!([{ "k8sService": { "serviceName": "a" }, "k8sServiceSelector": { "selector": {} } }]),
                "toServices[0]: expected one of",
            ),
            (
                json!([{ "k8sServiceSelector": { "selector": { "app": "a" } } }]),
                "k8sServiceSelector.selector.app: unknown field",
            ),
        ] {
            let error = parse(&policy(&to).to_string()).unwrap_err().to_string();
            assert!(error.contains(message), "{error}");
        }
        let mut combined = policy(&json!([]));
        combined["spec"]["egress"][0]["toCIDR"] = json!(["192.0.2.1"]);
        let error = parse(&combined.to_string()).unwrap_err().to_string();
        assert!(
            error.contains("toCIDR and toServices cannot be combined"),
            "{error}"
        );
        let mut ingress = policy(&json!([]));
        ingress["spec"]["ingress"] = ingress["spec"]["egress"].take();
        assert!(parse(&ingress.to_string()).is_err());
        let without = policy(&json!([{ "k8sService": { "serviceName": "a" } }]));
        let error = read_policy(&without)
            .unwrap()
            .check_without_cluster()
            .unwrap_err();
        assert_eq!(
            error.to_string(),
            "CiliumNetworkPolicy shop/p: spec.egress[0].toServices: matching by service needs a Kubernetes cluster; \
             follow one with --registry kubernetes or --policies-from-kubernetes"
        );
    }
}

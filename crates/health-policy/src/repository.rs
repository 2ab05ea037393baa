//! The policies of an agent, by origin and name.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use health_model::labels::{Label, LabelSet};
use health_model::policy::PolicyOrigin;
use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::document::{self, Documents, Policy};
use super::error::PolicyError;
use super::resolve::{PolicySettings, ResolvedPolicy};
use super::rule::{PolicyName, Rule};
use super::services::{ClusterServices, SavedServices};

/// The policies of an agent: those that were imported, and those of its Kubernetes cluster. Policies of the same name
/// but different origin are both in force.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Repository {
    imported: Policies,
    cluster: Policies,
    /// The services of the cluster, by which rules name peers.
    services: ClusterServices,
    revision: u64,
    /// Why stored policies could no longer be imported.
    outdated: Vec<PolicyError>,
}

type Policies = BTreeMap<PolicyName, HeldPolicy>;

/// A policy in a repository. Clones share the policy.
#[derive(Clone, Debug, PartialEq)]
pub struct HeldPolicy {
    policy: Arc<Policy>,
    /// The policy's rules, with the peers behind the services that they name.
    rules: Arc<[Arc<Rule>]>,
    origin: PolicyOrigin,
    since: Option<Timestamp>,
}

impl HeldPolicy {
    fn new(
        policy: Arc<Policy>,
        origin: PolicyOrigin,
        since: Option<Timestamp>,
        services: &ClusterServices,
    ) -> Self {
        let rules = policy.rules().iter();
        Self {
            rules: rules.map(|rule| rule.bound(services)).collect(),
            policy,
            origin,
            since,
        }
    }

    /// Matches the peers behind these services from now on. Returns whether any rule has changed.
    fn bind(&mut self, services: &ClusterServices) -> bool {
        let rules = self.policy.rules().iter();
        if rules.clone().all(|rule| rule.services().next().is_none()) {
            return false;
        }
        let rules: Arc<[_]> = rules.map(|rule| rule.bound(services)).collect();
        let has_changed = self.rules != rules;
        self.rules = rules;
        has_changed
    }

    /// Returns the policy's name.
    pub fn name(&self) -> &PolicyName {
        self.policy.name()
    }

    /// Returns the document from which the policy was read: an object, or the list of its bare rules.
    pub fn document(&self) -> &Value {
        self.policy.document()
    }

    /// Fails if the policy needs a Kubernetes cluster: see [`Policy::check_without_cluster`].
    pub fn check_without_cluster(&self) -> Result<(), PolicyError> {
        self.policy.check_without_cluster()
    }

    /// Returns where the policy comes from.
    pub const fn origin(&self) -> PolicyOrigin {
        self.origin
    }

    /// Returns when the repository got the policy in this form, if known.
    pub const fn since(&self) -> Option<Timestamp> {
        self.since
    }
}

/// The result of an import, by policy name.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct ImportOutcome {
    /// New policies.
    pub added: Vec<PolicyName>,
    /// Policies that replaced one of the same name.
    pub replaced: Vec<PolicyName>,
    /// Policies that already existed in identical form.
    pub unchanged: Vec<PolicyName>,
    /// Objects of other kinds, which are not policies.
    pub skipped: Vec<String>,
}

impl Repository {
    /// Imports all policies in a YAML or JSON document, or none if there is an error. A policy replaces an existing one
    /// of the same name.
    pub fn import(&mut self, text: &str) -> Result<ImportOutcome, PolicyError> {
        let Documents { policies, skipped } = document::parse(text)?;
        Ok(ImportOutcome {
            skipped,
            ..self.insert(policies, None)
        })
    }

    /// Inserts policies that were [parsed](super::parse) at this time. A policy replaces an imported one of the same
    /// name.
    pub fn insert(
        &mut self,
        policies: impl IntoIterator<Item = Policy>,
        at: Option<Timestamp>,
    ) -> ImportOutcome {
        let mut imported = ImportOutcome::default();
        for policy in policies {
            let name = policy.name().clone();
            let list = match self.imported.get(&name) {
                None => &mut imported.added,
                Some(there) if there.document() == policy.document() => {
                    imported.unchanged.push(name);
                    continue;
                }
                Some(_) => &mut imported.replaced,
            };
            list.push(name.clone());
            let policy = Arc::new(policy);
            let held = HeldPolicy::new(policy, PolicyOrigin::Imported, at, &self.services);
            self.imported.insert(name, held);
        }
        if !imported.added.is_empty() || !imported.replaced.is_empty() {
            self.revision += 1;
        }
        imported
    }

    /// Adds a policy of the cluster, or replaces it if it differs. Returns whether anything changed.
    pub fn set_of_cluster(&mut self, policy: &Arc<Policy>, now: Timestamp) -> bool {
        let known = self.cluster.get(policy.name());
        if known.is_some_and(|known| {
            Arc::ptr_eq(&known.policy, policy) || known.document() == policy.document()
        }) {
            return false;
        }
        let held = HeldPolicy::new(
            policy.clone(),
            PolicyOrigin::Kubernetes,
            Some(now),
            &self.services,
        );
        self.cluster.insert(policy.name().clone(), held);
        self.revision += 1;
        true
    }

    /// Removes the policies of the cluster whose names `stays` rejects. Returns whether there were any.
    pub fn retain_of_cluster(&mut self, stays: impl Fn(&PolicyName) -> bool) -> bool {
        let before = self.cluster.len();
        self.cluster.retain(|name, _| stays(name));
        let has_changed = self.cluster.len() < before;
        self.revision += u64::from(has_changed);
        has_changed
    }

    /// Replaces the known services of the cluster; those that are unknown now stay as they were. Returns whether this
    /// changes the peers of a rule, or the addresses of API servers.
    pub fn set_services(&mut self, known: &ClusterServices) -> bool {
        let mut next = self.services.clone();
        next.update(known);
        if next == self.services {
            return false;
        }
        let has_other_servers = !next.api_servers().eq(self.services.api_servers());
        self.services = next;
        let has_changed = self.bind() || has_other_servers;
        self.revision += u64::from(has_changed);
        has_changed
    }

    /// Makes all rules match the peers behind the known services. Returns whether any rule has changed.
    fn bind(&mut self) -> bool {
        let all = self.imported.values_mut().chain(self.cluster.values_mut());
        let changed = all.map(|held| held.bind(&self.services));
        changed.fold(false, |any, one| any | one)
    }

    /// Returns the known services of the cluster.
    pub const fn services(&self) -> &ClusterServices {
        &self.services
    }

    /// Whether the peers of a rule depend on the services of the cluster.
    pub fn depends_on_services(&self) -> bool {
        let mut entries = self.rules().flat_map(|rule| rule.entries());
        entries.any(|entry| entry.peers.depend_on_services())
    }

    /// Returns the keys of the labels of nodes by which rules name peers.
    pub fn node_keys(&self) -> BTreeSet<String> {
        let entries = self.rules().flat_map(|rule| rule.entries());
        let keys = entries.flat_map(|entry| entry.peers.node_keys());
        keys.map(str::to_owned).collect()
    }

    fn rules(&self) -> impl Iterator<Item = &Arc<Rule>> {
        self.iter().flat_map(|held| &*held.rules)
    }

    /// Returns a number that increases with every change of the policies.
    pub const fn revision(&self) -> u64 {
        self.revision
    }

    /// Returns the problems of policies that an earlier version accepted and this one would refuse. The policies keep
    /// their meaning.
    pub fn outdated(&self) -> &[PolicyError] {
        &self.outdated
    }

    /// Returns all policies: those that were imported, by name, then those of the cluster, by name.
    pub fn iter(&self) -> impl Iterator<Item = &HeldPolicy> {
        self.imported.values().chain(self.cluster.values())
    }

    /// Returns the policies of the cluster.
    pub fn of_cluster(&self) -> impl ExactSizeIterator<Item = &HeldPolicy> {
        self.cluster.values()
    }

    /// Returns the policies that have a rule with all of these labels.
    pub fn labelled<'a>(&'a self, labels: &'a [Label]) -> impl Iterator<Item = &'a HeldPolicy> {
        self.iter().filter(|held| held.is_labelled(labels))
    }

    /// Deletes the imported policy of this name. Returns whether it existed.
    pub fn delete(&mut self, name: &PolicyName) -> bool {
        let was_there = self.imported.remove(name).is_some();
        self.revision += u64::from(was_there);
        was_there
    }

    /// Deletes the imported policies that have a rule with all of these labels; without labels, all imported policies.
    pub fn delete_labelled(&mut self, labels: &[Label]) -> Vec<PolicyName> {
        let labelled = self.imported.values();
        let labelled = labelled.filter(|held| held.is_labelled(labels));
        let names: Vec<_> = labelled.map(|held| held.name().clone()).collect();
        for name in &names {
            self.imported.remove(name);
        }
        self.revision += u64::from(!names.is_empty());
        names
    }

    /// Returns the prefixes that need identities of their own so that the rules can distinguish their addresses: all
    /// selected and excepted CIDRs. A rule for all addresses of one family also adds all addresses of the other family,
    /// because the world's identity stands for both. The addresses of API servers are always included.
    pub fn prefixes(&self) -> BTreeSet<IpNet> {
        let mut prefixes: BTreeSet<IpNet> = self
            .rules()
            .flat_map(|rule| rule.entries())
            .flat_map(|entry| entry.peers.prefixes())
            .chain(self.services.api_servers().map(IpNet::from))
            .collect();
        let all = [
            IpNet::from(Ipv4Net::default()),
            IpNet::from(Ipv6Net::default()),
        ];
        if all.iter().any(|prefix| prefixes.contains(prefix)) {
            prefixes.extend(all);
        }
        prefixes
    }

    /// Resolves the policy of an endpoint with these labels.
    pub fn resolve(&self, subject: &LabelSet, settings: PolicySettings) -> ResolvedPolicy {
        let selecting = self.rules().filter(|rule| rule.subject.matches(subject));
        ResolvedPolicy::new(subject, settings, selecting.cloned().collect())
    }

    /// Returns the policies of one origin in the form in which they are saved. Those of the cluster include the services
    /// that policies of any origin name.
    pub fn saved(&self, origin: PolicyOrigin) -> SavedPolicies<'_> {
        let policies = match origin {
            PolicyOrigin::Imported => &self.imported,
            PolicyOrigin::Kubernetes => &self.cluster,
        };
        SavedPolicies {
            revision: self.revision,
            documents: policies
                .values()
                .map(|p| Cow::Borrowed(p.document()))
                .collect(),
            since: policies.values().map(|p| p.since).collect(),
            services: match origin {
                PolicyOrigin::Imported => SavedServices::default(),
                PolicyOrigin::Kubernetes => self.named_services(),
            },
        }
    }

    fn named_services(&self) -> SavedServices {
        let peers = self.rules().flat_map(|rule| rule.services());
        let references: Vec<_> = peers.map(|peers| peers.reference()).collect();
        self.services.named_by(&references)
    }

    /// Adds the saved policies of one origin, in the form in which an agent of this or an earlier version saved them.
    pub fn restore(
        &mut self,
        saved: &SavedPolicies<'_>,
        origin: PolicyOrigin,
    ) -> Result<(), PolicyError> {
        for (at, document) in saved.documents.iter().enumerate() {
            let (policy, refused) = document::read_stored(document)?;
            self.outdated.extend(refused);
            let policies = match origin {
                PolicyOrigin::Imported => &mut self.imported,
                PolicyOrigin::Kubernetes => &mut self.cluster,
            };
            let since = saved.since.get(at).copied().flatten();
            let held = HeldPolicy::new(Arc::new(policy), origin, since, &self.services);
            policies.insert(held.name().clone(), held);
        }
        self.services
            .update(&ClusterServices::from(&saved.services));
        self.bind();
        self.revision = self.revision.max(saved.revision);
        Ok(())
    }
}

impl HeldPolicy {
    fn is_labelled(&self, labels: &[Label]) -> bool {
        let has_all = |set: &LabelSet| {
            let mut wanted = labels.iter();
            wanted.all(|label| set.get(label.source(), label.key()) == Some(label))
        };
        self.policy.labels().any(has_all)
    }
}

/// Policies of one origin as the documents from which they were read.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavedPolicies<'a> {
    revision: u64,
    documents: Vec<Cow<'a, Value>>,
    /// Since when each of them is known.
    #[serde(default)]
    since: Vec<Option<Timestamp>>,
    /// The services that policies name.
    #[serde(default, skip_serializing_if = "SavedServices::is_empty")]
    services: SavedServices,
}

#[cfg(test)]
mod tests {
    use super::*;

    const WEB: &str = r"
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: web, namespace: shop}
spec:
  endpointSelector: {}
  ingress: [{}]
---
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: web, namespace: shop}
spec: {podSelector: {}}
";
    const BARE: &str = r#"[
        {"labels": ["team=a", "tier=1"], "endpointSelector": {}, "ingress": [{}]},
        {"labels": ["team=a"], "endpointSelector": {}, "egress": [{}]},
        {"labels": ["tier=1", {"key": "team", "value": "a"}], "endpointSelector": {}, "egress": [{}]}
    ]"#;

    fn names(repository: &Repository) -> Vec<String> {
        repository.iter().map(|p| p.name().to_string()).collect()
    }

    fn labels(texts: &[&str]) -> Vec<Label> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    #[test]
    fn an_import_replaces_what_has_its_name_and_leaves_the_rest() {
        let mut repository = Repository::default();
        let imported = repository.import(WEB).unwrap();
        assert_eq!((imported.added.len(), repository.revision()), (2, 1));

        let imported = repository.import(WEB).unwrap();
        assert_eq!((imported.unchanged.len(), repository.revision()), (2, 1));

        let changed = WEB.replace("ingress:", "egress:");
        let imported = repository.import(&changed).unwrap();
        assert_eq!(imported.replaced.len(), 1);
        assert_eq!((imported.unchanged.len(), repository.revision()), (1, 2));
        assert_eq!(
            names(&repository),
            ["CiliumNetworkPolicy shop/web", "NetworkPolicy shop/web"]
        );
    }

    #[test]
    fn an_import_with_one_bad_policy_changes_nothing() {
        let mut repository = Repository::default();
        repository.import(BARE).unwrap();
        let before = repository.clone();
        let bad = WEB.replace("{podSelector: {}}", "{podSelector: {}, order: 1}");
        let error = repository.import(&bad).unwrap_err();
        assert_eq!(
            error.to_string(),
            "NetworkPolicy shop/web: spec.order: rule order is not supported"
        );
        assert_eq!(repository, before);
        let twice = format!("{WEB}---{WEB}");
        let error = repository.import(&twice).unwrap_err().to_string();
        assert!(error.ends_with("shop/web: it appears twice"), "{error}");
    }

    #[test]
    fn an_error_in_a_bare_list_reports_the_place_in_the_list() {
        let bad = BARE.replace(r#""tier=1", {"key""#, r#""tier=1", {"kee""#);
        let error = Repository::default().import(&bad).unwrap_err();
        assert_eq!(error.to_string(), "[2].labels[1].kee: unknown field");
        let bad = BARE.replacen(
            r#""egress": [{}]}
    ]"#,
            r#""egress": [{"toports": []}]}
    ]"#,
            1,
        );
        let error = Repository::default().import(&bad).unwrap_err();
        assert_eq!(error.to_string(), "[2].egress[0].toports: unknown field");
    }

    #[test]
    fn bare_rules_are_known_by_their_labels() {
        let mut repository = Repository::default();
        let imported = repository.import(BARE).unwrap();
        assert_eq!(imported.added.len(), 2);
        assert_eq!(
            names(&repository),
            [
                "rules [unspec:team=a]",
                "rules [unspec:team=a, unspec:tier=1]"
            ]
        );
        let both = repository.labelled(&labels(&["team=a"])).count();
        assert_eq!(both, 2);
        assert_eq!(repository.delete_labelled(&labels(&["tier=1"])).len(), 1);
        assert_eq!(names(&repository), ["rules [unspec:team=a]"]);
        assert_eq!(repository.revision(), 2);
    }

    #[test]
    fn policies_are_deleted_by_name_by_label_and_all_at_once() {
        let mut repository = Repository::default();
        repository.import(WEB).unwrap();
        repository.import(BARE).unwrap();
        let name = repository.iter().next().unwrap().name().clone();
        assert!(repository.delete(&name));
        assert!(!repository.delete(&name));
        let of_object = labels(&["k8s:io.cilium.k8s.policy.namespace=shop"]);
        assert_eq!(repository.delete_labelled(&of_object).len(), 1);
        assert!(repository.delete_labelled(&of_object).is_empty());
        assert_eq!(repository.delete_labelled(&[]).len(), 2);
        assert_eq!(repository.iter().count(), 0);
        assert_eq!(repository.revision(), 5);
    }

    #[test]
    fn a_repository_that_was_written_is_the_same_when_read() {
        let mut repository = Repository::default();
        repository.import(WEB).unwrap();
        repository.import(BARE).unwrap();
        let written = serde_json::to_string(&repository.saved(PolicyOrigin::Imported)).unwrap();
        let mut read = Repository::default();
        let saved = serde_json::from_str(&written).unwrap();
        read.restore(&saved, PolicyOrigin::Imported).unwrap();
        assert_eq!(names(&read), names(&repository));
        assert_eq!(read.revision(), 2);
        assert_eq!(read, repository);
        let document = repository.iter().next().unwrap().document();
        assert_eq!(document["metadata"]["name"], "web");
    }

    #[test]
    fn prefixes_are_those_of_every_rule_with_their_exceptions() {
        let mut repository = Repository::default();
        let rules = r#"[{"labels": ["a"], "endpointSelector": {},
            "ingress": [{"fromCIDR": ["10.1.2.3", "fd00::1/64"]}],
            "egressDeny": [{"toCIDRSet": [{"cidr": "10.0.0.0/8", "except": ["10.9.0.0/16"]}]}]}]"#;
        repository.import(rules).unwrap();
        let shown = |repository: &Repository| -> Vec<String> {
            let prefixes = repository.prefixes();
            prefixes.iter().map(ToString::to_string).collect()
        };
        assert_eq!(
            shown(&repository),
            ["10.0.0.0/8", "10.1.2.3/32", "10.9.0.0/16", "fd00::/64"]
        );
        let all = r#"[{"labels": ["a"], "endpointSelector": {}, "ingress": [{"fromCIDR": ["0.0.0.0/0"]}]}]"#;
        repository.import(all).unwrap();
        assert_eq!(shown(&repository), ["0.0.0.0/0", "::/0"]);
    }

    fn web_of_cluster(spec: &str) -> Arc<Policy> {
        let object = format!(
            "apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\n\
             metadata: {{name: web, namespace: shop}}\nspec: {spec}"
        );
        Arc::new(document::parse(&object).unwrap().policies.remove(0))
    }

    #[test]
    fn a_policy_of_the_cluster_stands_beside_an_imported_one_of_its_name() {
        let mut repository = Repository::default();
        repository.import(WEB).unwrap();
        let (policy, now) = (web_of_cluster("{podSelector: {}}"), Timestamp::UNIX_EPOCH);
        assert!(repository.set_of_cluster(&policy, now));
        assert!(!repository.set_of_cluster(&policy, now));
        assert!(!repository.set_of_cluster(&web_of_cluster("{podSelector: {}}"), now));
        let origins = |repository: &Repository| -> Vec<PolicyOrigin> {
            repository.iter().map(HeldPolicy::origin).collect()
        };
        let [imported, of_cluster] = [PolicyOrigin::Imported, PolicyOrigin::Kubernetes];
        assert_eq!(origins(&repository), [imported, imported, of_cluster]);

        assert!(repository.delete(policy.name()));
        assert!(!repository.delete(policy.name()));
        assert_eq!(repository.delete_labelled(&[]).len(), 1);
        assert_eq!(origins(&repository), [of_cluster]);

        let before = repository.revision();
        assert!(repository.set_of_cluster(&web_of_cluster("{podSelector: {}, egress: [{}]}"), now));
        assert!(!repository.retain_of_cluster(|_| true));
        assert!(repository.retain_of_cluster(|_| false));
        assert_eq!(repository.revision(), before + 2);
        assert_eq!(repository.iter().count(), 0);
    }

    #[test]
    fn each_origin_is_saved_and_restored_on_its_own() {
        let mut repository = Repository::default();
        repository.import(BARE).unwrap();
        let now = Timestamp::UNIX_EPOCH;
        repository.set_of_cluster(&web_of_cluster("{podSelector: {}}"), now);
        let saved = [PolicyOrigin::Imported, PolicyOrigin::Kubernetes]
            .map(|origin| repository.saved(origin));
        let mut read = Repository::default();
        read.restore(&saved[1], PolicyOrigin::Kubernetes).unwrap();
        assert_eq!(names(&read), ["NetworkPolicy shop/web"]);
        assert_eq!(read.iter().next().unwrap().since(), Some(now));
        read.restore(&saved[0], PolicyOrigin::Imported).unwrap();
        assert_eq!(read, repository);
    }
}

//! The policies of an agent, by origin and name.

use std::borrow::Cow;
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::net::{Ipv4Addr, Ipv6Addr};
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

/// All addresses of each family.
const ALL_ADDRESSES: [IpNet; 2] = [
    IpNet::V4(Ipv4Net::new_assert(Ipv4Addr::UNSPECIFIED, 0)),
    IpNet::V6(Ipv6Net::new_assert(Ipv6Addr::UNSPECIFIED, 0)),
];

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

type Policies = BTreeMap<Arc<PolicyName>, HeldPolicy>;

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

    /// Returns the UID of the object from which the policy was read, if it has one.
    pub fn uid(&self) -> Option<&str> {
        self.policy.uid()
    }

    /// Returns the keys of the labels of nodes by which the policy's rules name peers.
    pub fn node_keys(&self) -> impl Iterator<Item = &str> {
        let entries = self.rules.iter().flat_map(|rule| rule.entries());
        entries.flat_map(|entry| entry.peers.node_keys())
    }

    fn prefixes(&self) -> impl Iterator<Item = IpNet> {
        let entries = self.rules.iter().flat_map(|rule| rule.entries());
        entries.flat_map(|entry| entry.peers.prefixes())
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
            let list = match self.imported.get(policy.name()) {
                None => &mut imported.added,
                Some(there) if there.document() == policy.document() => {
                    imported.unchanged.push(name);
                    continue;
                }
                Some(_) => &mut imported.replaced,
            };
            list.push(name);
            let policy = Arc::new(policy);
            let held = HeldPolicy::new(policy, PolicyOrigin::Imported, at, &self.services);
            self.imported.insert(held.shared_name(), held);
        }
        if !imported.added.is_empty() || !imported.replaced.is_empty() {
            self.revision += 1;
        }
        imported
    }

    /// Adds a policy of the cluster, or replaces it if it differs. Returns whether anything changed.
    pub fn set_of_cluster(&mut self, policy: &Arc<Policy>, now: Timestamp) -> bool {
        let set = self.try_set_of_cluster(policy, now, |_, _| Ok::<_, Infallible>(()));
        set.unwrap_or_else(|never| match never {})
    }

    /// Like [`Self::set_of_cluster`], but changes nothing if `accept` fails, which is passed the former policy of that
    /// name and the new one.
    pub fn try_set_of_cluster<E>(
        &mut self,
        policy: &Arc<Policy>,
        now: Timestamp,
        accept: impl FnOnce(Option<&HeldPolicy>, &HeldPolicy) -> Result<(), E>,
    ) -> Result<bool, E> {
        let known = self.cluster.get(policy.name());
        if known.is_some_and(|known| {
            Arc::ptr_eq(&known.policy, policy) || known.document() == policy.document()
        }) {
            return Ok(false);
        }
        let held = HeldPolicy::new(
            policy.clone(),
            PolicyOrigin::Kubernetes,
            Some(now),
            &self.services,
        );
        accept(known, &held)?;
        self.cluster.insert(held.shared_name(), held);
        self.revision += 1;
        Ok(true)
    }

    /// Removes the policies of the cluster that `stays` rejects. Returns whether there were any.
    pub fn retain_of_cluster(&mut self, stays: impl Fn(&HeldPolicy) -> bool) -> bool {
        let before = self.cluster.len();
        self.cluster.retain(|_, held| stays(held));
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
        let keys = self.iter().flat_map(HeldPolicy::node_keys);
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
            .iter()
            .flat_map(HeldPolicy::prefixes)
            .chain(self.services.api_servers().map(IpNet::from))
            .collect();
        if ALL_ADDRESSES.iter().any(|all| prefixes.contains(all)) {
            prefixes.extend(ALL_ADDRESSES);
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
            policies.insert(held.shared_name(), held);
        }
        self.services
            .update(&ClusterServices::from(&saved.services));
        self.bind();
        self.revision = self.revision.max(saved.revision);
        Ok(())
    }
}

/// How many policies name each of the [prefixes](Repository::prefixes) of a repository.
#[derive(Clone, Debug, Default)]
pub struct PrefixCount(BTreeMap<IpNet, usize>);

impl PrefixCount {
    /// Counts the prefixes of a repository.
    pub fn of(repository: &Repository) -> Self {
        let mut count = Self::default();
        count.add(repository.services.api_servers().map(IpNet::from));
        for held in repository.iter() {
            count.add(held.prefixes());
        }
        count
    }

    /// Counts another policy, or another form of one.
    pub fn replace(&mut self, before: Option<&HeldPolicy>, after: Option<&HeldPolicy>) {
        self.add(after.into_iter().flat_map(HeldPolicy::prefixes));
        for prefix in before.into_iter().flat_map(HeldPolicy::prefixes) {
            if let Entry::Occupied(mut policies) = self.0.entry(prefix) {
                match policies.get() {
                    1 => drop(policies.remove()),
                    _ => *policies.get_mut() -= 1,
                }
            }
        }
    }

    /// Returns the number of prefixes.
    pub fn prefixes(&self) -> usize {
        let all = ALL_ADDRESSES.map(|all| self.0.contains_key(&all));
        self.0.len() + usize::from(all[0] != all[1])
    }

    fn add(&mut self, prefixes: impl Iterator<Item = IpNet>) {
        for prefix in prefixes {
            *self.0.entry(prefix).or_default() += 1;
        }
    }
}

impl HeldPolicy {
    fn shared_name(&self) -> Arc<PolicyName> {
        self.policy.shared_name()
    }

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
    fn prefixes_are_counted_as_they_are_listed() {
        let now = Timestamp::UNIX_EPOCH;
        let policy = |name: &str, cidrs: &[&str]| {
            let object = serde_json::json!({
                "apiVersion": "cilium.io/v2", "kind": "CiliumNetworkPolicy",
                "metadata": { "name": name },
                "spec": { "endpointSelector": {}, "egress": [{ "toCIDR": cidrs }] },
            });
            Arc::new(document::read_policy(&object).unwrap())
        };
        let mut repository = Repository::default();
        let mut count = PrefixCount::of(&repository);
        for (name, cidrs) in [
            ("a", &["10.0.0.0/8", "10.0.0.0/8", "10.1.0.0/16"][..]),
            ("b", &["10.0.0.0/8", "0.0.0.0/0"]),
            ("a", &["10.1.0.0/16", "::/0"]),
            ("b", &["10.2.0.0/16"]),
            ("a", &[]),
        ] {
            let policy = policy(name, cidrs);
            let set = repository.try_set_of_cluster(&policy, now, |before, after| {
                count.replace(before, Some(after));
                Ok::<_, Infallible>(())
            });
            assert_eq!(set, Ok(true));
            assert_eq!(count.prefixes(), repository.prefixes().len(), "{cidrs:?}");
            assert_eq!(PrefixCount::of(&repository).prefixes(), count.prefixes());
        }
        let before = repository.clone();
        let refused = repository.try_set_of_cluster(&policy("b", &[]), now, |_, _| Err("full"));
        assert_eq!((refused, repository), (Err("full"), before));
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

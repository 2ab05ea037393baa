//! The policies of an agent, by name.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use health_model::labels::{Label, LabelSet};
use health_model::policy::Direction;
use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::document::{self, Documents, Policy};
use super::error::PolicyError;
use super::resolve::{PolicySettings, ResolvedPolicy};
use super::rule::PolicyName;

/// The policies of an agent. Serialized as the documents from which they were imported.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "StoredRepository", into = "StoredRepository")]
pub struct Repository {
    policies: BTreeMap<PolicyName, Arc<Policy>>,
    revision: u64,
    /// Why stored policies could no longer be imported.
    outdated: Vec<PolicyError>,
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
            ..self.insert(policies)
        })
    }

    /// Inserts policies that were already [parsed](super::parse). A policy replaces an existing one of the same name.
    pub fn insert(&mut self, policies: impl IntoIterator<Item = Policy>) -> ImportOutcome {
        let mut imported = ImportOutcome::default();
        for policy in policies {
            let name = policy.name().clone();
            let list = match self.policies.get(&name) {
                None => &mut imported.added,
                Some(there) if there.document() == policy.document() => {
                    imported.unchanged.push(name);
                    continue;
                }
                Some(_) => &mut imported.replaced,
            };
            list.push(name.clone());
            self.policies.insert(name, Arc::new(policy));
        }
        if !imported.added.is_empty() || !imported.replaced.is_empty() {
            self.revision += 1;
        }
        imported
    }

    /// Returns a number that increases with every change of the policies.
    pub const fn revision(&self) -> u64 {
        self.revision
    }

    /// Returns the problems of policies that an earlier version imported and this one would refuse. The policies keep
    /// their meaning.
    pub fn outdated(&self) -> &[PolicyError] {
        &self.outdated
    }

    /// Returns all policies, by name.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &Policy> {
        self.policies.values().map(|policy| &**policy)
    }

    /// Returns the policy of this name.
    pub fn get(&self, name: &PolicyName) -> Option<&Policy> {
        self.policies.get(name).map(|policy| &**policy)
    }

    /// Returns the policies that have a rule with all of these labels.
    pub fn labelled<'a>(&'a self, labels: &'a [Label]) -> impl Iterator<Item = &'a Policy> {
        let has_all = |set: &LabelSet| {
            let mut wanted = labels.iter();
            wanted.all(|label| set.get(label.source(), label.key()) == Some(label))
        };
        self.iter()
            .filter(move |policy| policy.labels().any(has_all))
    }

    /// Deletes the policy of this name. Returns whether it existed.
    pub fn delete(&mut self, name: &PolicyName) -> bool {
        let was_there = self.policies.remove(name).is_some();
        self.revision += u64::from(was_there);
        was_there
    }

    /// Deletes the policies that have a rule with all of these labels; without labels, deletes all policies.
    pub fn delete_labelled(&mut self, labels: &[Label]) -> Vec<PolicyName> {
        let names: Vec<_> = self
            .labelled(labels)
            .map(|policy| policy.name().clone())
            .collect();
        for name in &names {
            self.policies.remove(name);
        }
        self.revision += u64::from(!names.is_empty());
        names
    }

    /// Returns the prefixes that need identities of their own so that the rules can distinguish their addresses: all
    /// selected and excepted CIDRs. A rule for all addresses of one family also adds all addresses of the other family,
    /// because the world's identity stands for both.
    pub fn prefixes(&self) -> BTreeSet<IpNet> {
        let rules = self.policies.values().flat_map(|policy| policy.rules());
        let mut prefixes: BTreeSet<IpNet> = rules
            .flat_map(|rule| Direction::ALL.map(|direction| rule.section(direction)))
            .flat_map(|section| &section.entries)
            .flat_map(|entry| entry.peers.prefixes())
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
        let rules = self.policies.values().flat_map(|policy| policy.rules());
        let selecting = rules.filter(|rule| rule.subject.matches(subject));
        ResolvedPolicy::new(subject, settings, selecting.cloned().collect())
    }
}

/// The serialized form of a repository.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct StoredRepository {
    revision: u64,
    documents: Vec<Value>,
}

impl From<Repository> for StoredRepository {
    fn from(repository: Repository) -> Self {
        let documents = repository.iter().map(|policy| policy.document().clone());
        Self {
            revision: repository.revision,
            documents: documents.collect(),
        }
    }
}

impl TryFrom<StoredRepository> for Repository {
    type Error = PolicyError;

    fn try_from(stored: StoredRepository) -> Result<Self, PolicyError> {
        let mut repository = Self::default();
        for document in &stored.documents {
            let (policy, refused) = document::read_stored(document)?;
            repository.outdated.extend(refused);
            repository
                .policies
                .insert(policy.name().clone(), Arc::new(policy));
        }
        repository.revision = stored.revision;
        Ok(repository)
    }
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
        assert_eq!(repository.iter().len(), 0);
        assert_eq!(repository.revision(), 5);
    }

    #[test]
    fn a_repository_that_was_written_is_the_same_when_read() {
        let mut repository = Repository::default();
        repository.import(WEB).unwrap();
        repository.import(BARE).unwrap();
        let written = serde_json::to_string(&repository).unwrap();
        let read: Repository = serde_json::from_str(&written).unwrap();
        assert_eq!(names(&read), names(&repository));
        assert_eq!(read.revision(), 2);
        assert_eq!(serde_json::to_string(&read).unwrap(), written);
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
}

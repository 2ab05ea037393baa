//! Identities of the prefixes that policy names, and of other nodes by the labels that policy names. They are local to
//! this node; other nodes assign their own numbers.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::{fs, io};

use health_common::identity::{LOCAL, LOCAL_NODE};
use health_model::durable;
use health_model::identity::{Identity, KUBE_APISERVER, REMOTE_NODE};
use health_model::labels::{CIDR, Label, LabelError, LabelSet};
use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use super::view::Hub;

/// Name of the file in the state folder.
pub const FILE: &str = "cidr-identities.json";

/// The largest number, without the bits that mark local identities; the smallest is 1.
const LAST: u32 = LOCAL - 1;

/// The identities that policy needs on this node alone. Numbers are kept across restarts, so that an earlier agent's
/// entries in the kernel stay correct.
#[derive(Debug)]
pub struct LocalIdentities {
    path: PathBuf,
    kept: Mutex<Kept>,
    hub: Arc<Hub>,
}

/// What this node's own identities depend on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LocalNeeds {
    /// The prefixes that need an identity each. Host bits are ignored.
    pub prefixes: BTreeSet<IpNet>,
    /// The addresses of the cluster's API servers.
    pub api_servers: BTreeSet<IpAddr>,
    /// The labels of this host, besides `reserved:host`.
    pub host: LabelSet,
    /// The labels of other nodes that need an identity each, besides the reserved identities.
    pub nodes: BTreeSet<LabelSet>,
}

impl LocalNeeds {
    /// Adds the prefixes and nodes that have an identity.
    pub fn keep(&mut self, numbers: &LocalNumbers) {
        self.prefixes.extend(numbers.prefixes.keys());
        self.nodes.extend(numbers.nodes.keys().cloned());
    }
}

/// This node's own identities.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LocalNumbers {
    /// The identity of each prefix.
    pub prefixes: BTreeMap<IpNet, Identity>,
    /// The identity of other nodes with these labels.
    pub nodes: BTreeMap<LabelSet, Identity>,
}

impl LocalNumbers {
    /// Returns all identities.
    pub fn all(&self) -> impl Iterator<Item = Identity> {
        self.prefixes.values().chain(self.nodes.values()).copied()
    }
}

/// The numbers, and what the labels depend on besides.
#[derive(Debug)]
struct Kept {
    document: Document,
    api_servers: BTreeSet<IpAddr>,
    host: LabelSet,
}

/// The contents of the file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Document {
    /// The number to try next. Increases, so that a number is not reused immediately.
    next: u32,
    prefixes: BTreeMap<IpNet, Identity>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    nodes: BTreeMap<Identity, LabelSet>,
}

impl LocalIdentities {
    /// Reads the file that an earlier agent saved in `state_dir`. An unusable file is reported and renamed. Its numbers
    /// are then unlikely to be reused, because new numbers start at a random value.
    pub(super) fn open(state_dir: &Path, hub: Arc<Hub>) -> Self {
        let path = state_dir.join(FILE);
        let document = read(&path).unwrap_or_else(|error| {
            let aside = path.with_extension("json.damaged");
            tracing::error!(path = %path.display(), aside = %aside.display(), %error, "cannot read the saved identities of this node; assigning new ones");
            // The file is only of use for finding out what happened.
            let _ = fs::rename(&path, &aside);
            Document {
                next: rand::random_range(1..=LAST),
                ..Document::default()
            }
        });
        let kept = Kept {
            document,
            api_servers: BTreeSet::new(),
            host: LabelSet::default(),
        };
        hub.publish_local(kept.labels());
        Self {
            path,
            kept: Mutex::new(kept),
            hub,
        }
    }

    /// Gives each of the needed prefixes an identity with the labels `cidr:PREFIX` and `reserved:world`, for API servers
    /// also `reserved:kube-apiserver`, and releases all other prefixes. Prefixes of length 0 also get an identity,
    /// because [`Identity::WORLD`] covers both IP versions. Likewise gives each of the needed label sets of nodes an
    /// identity, and [`Identity::HOST`] its labels. Returns the identities.
    pub fn require(&self, needs: &LocalNeeds) -> LocalNumbers {
        let mut kept = self.kept();
        let next = kept.document.clone().with_just(needs);
        let has_other_numbers = kept.document != next;
        if has_other_numbers && let Err(error) = durable::write(&self.path, &next) {
            tracing::warn!(path = %self.path.display(), %error, "cannot save the identities of this node; a restart will lose them");
        }
        if has_other_numbers || kept.api_servers != needs.api_servers || kept.host != needs.host {
            *kept = Kept {
                document: next,
                api_servers: needs.api_servers.clone(),
                host: needs.host.clone(),
            };
            self.hub.publish_local(kept.labels());
        }
        kept.document.numbers()
    }

    /// Returns the current identities. Until the first call of [`Self::require`], these are an earlier agent's.
    pub fn numbers(&self) -> LocalNumbers {
        self.kept().document.numbers()
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Kept {
    /// Returns the labels of each identity.
    fn labels(&self) -> BTreeMap<Identity, Arc<LabelSet>> {
        let prefixes = self.document.prefixes.iter();
        let mut labelled: BTreeMap<_, _> = prefixes
            .filter_map(|(prefix, identity)| {
                let labels = self
                    .labels_of(*prefix)
                    .inspect_err(|error| tracing::error!(%prefix, %error, "cannot label a prefix"));
                Some((*identity, Arc::new(labels.ok()?)))
            })
            .collect();
        let nodes = self.document.nodes.iter();
        labelled.extend(nodes.map(|(identity, labels)| (*identity, Arc::new(labels.clone()))));
        let host = self.host.clone().with_reserved("host");
        labelled.insert(Identity::HOST, Arc::new(host));
        labelled
    }

    fn labels_of(&self, prefix: IpNet) -> Result<LabelSet, LabelError> {
        let cidr = Label::new(CIDR, &prefix.to_string(), "")?;
        let labels = LabelSet::new([cidr, Label::reserved("world")])?;
        let is_address = prefix.prefix_len() == prefix.max_prefix_len();
        Ok(
            match is_address && self.api_servers.contains(&prefix.addr()) {
                true => labels.with_reserved(KUBE_APISERVER),
                false => labels,
            },
        )
    }
}

impl Document {
    /// Returns the same document with exactly the needed identities.
    fn with_just(mut self, needs: &LocalNeeds) -> Self {
        // A number that is released in this step is not reused in the same step.
        let mut used: BTreeSet<Identity> = self.numbers().all().collect();
        let prefixes: BTreeSet<IpNet> = needs.prefixes.iter().map(IpNet::trunc).collect();
        self.prefixes.retain(|prefix, _| prefixes.contains(prefix));
        for prefix in prefixes {
            if !self.prefixes.contains_key(&prefix) {
                let identity = self.give(LOCAL, &mut used);
                self.prefixes.insert(prefix, identity);
            }
        }
        self.nodes.retain(|_, labels| needs.nodes.contains(labels));
        let known: BTreeSet<LabelSet> = self.nodes.values().cloned().collect();
        for labels in needs.nodes.difference(&known) {
            let identity = self.give(LOCAL_NODE, &mut used);
            self.nodes.insert(identity, labels.clone());
        }
        self
    }

    /// Returns a number that is not used yet, with this bit set.
    fn give(&mut self, bit: u32, used: &mut BTreeSet<Identity>) -> Identity {
        loop {
            // There are more numbers than entries that fit in a map.
            let identity = Identity(bit | self.next);
            self.next = following(self.next);
            if used.insert(identity) {
                return identity;
            }
        }
    }

    fn numbers(&self) -> LocalNumbers {
        let nodes = self.nodes.iter();
        LocalNumbers {
            prefixes: self.prefixes.clone(),
            nodes: nodes
                .map(|(identity, labels)| (labels.clone(), *identity))
                .collect(),
        }
    }
}

fn following(number: u32) -> u32 {
    if number >= LAST { 1 } else { number + 1 }
}

fn read(path: &Path) -> io::Result<Document> {
    let bytes = match fs::read(path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Ok(Document {
                next: 1,
                ..Document::default()
            });
        }
        Err(error) => return Err(error),
    };
    let kept: Document = serde_json::from_slice(&bytes)?;
    let invalid = |what: String| Err(io::Error::new(io::ErrorKind::InvalidData, what));
    if !(1..=LAST).contains(&kept.next) {
        return invalid(format!("invalid next number {}", kept.next));
    }
    let mut used = BTreeSet::new();
    for (prefix, identity) in &kept.prefixes {
        let is_local = (LOCAL | 1..=LOCAL | LAST).contains(&identity.0);
        if !is_local || prefix.trunc() != *prefix || !used.insert(*identity) {
            return invalid(format!("{prefix} cannot have identity {identity}"));
        }
    }
    for (identity, labels) in &kept.nodes {
        let is_of_nodes = (LOCAL_NODE | 1..=LOCAL_NODE | LAST).contains(&identity.0);
        if !is_of_nodes || !labels.has_reserved(REMOTE_NODE) {
            return invalid(format!("a node cannot have identity {identity}"));
        }
    }
    Ok(kept)
}

#[cfg(test)]
mod tests {
    use jiff::Timestamp;

    use super::*;
    use crate::nodes::Staleness;

    fn hub() -> Arc<Hub> {
        let stale = Staleness {
            since: Timestamp::UNIX_EPOCH,
            reason: String::new(),
        };
        Arc::new(Hub::new(String::new(), stale))
    }

    fn prefixes(texts: &[&str]) -> LocalNeeds {
        LocalNeeds {
            prefixes: texts.iter().map(|text| text.parse().unwrap()).collect(),
            ..LocalNeeds::default()
        }
    }

    #[test]
    fn a_prefix_keeps_its_identity_while_it_is_needed_and_over_restarts() {
        let dir = tempfile::tempdir().unwrap();
        let hub = hub();
        let cidrs = LocalIdentities::open(dir.path(), hub.clone());
        let first = cidrs.require(&prefixes(&["10.0.0.0/8", "fd00::/64", "0.0.0.0/0"]));
        let first = first.prefixes;
        let ten: IpNet = "10.0.0.0/8".parse().unwrap();
        let all: IpNet = "0.0.0.0/0".parse().unwrap();
        assert!(first[&all].is_local(), "the world is of both IP versions");
        assert!(first[&ten].is_local());
        let labels = hub.identities().borrow().labels[&first[&ten]].clone();
        assert_eq!(labels.get(CIDR, "10.0.0.0/8").unwrap().value(), "");
        assert!(labels.has_reserved("world"));

        let again = LocalIdentities::open(dir.path(), hub.clone());
        assert_eq!(again.numbers().prefixes.len(), 3);
        let second = again.require(&prefixes(&["10.0.0.0/8", "192.0.2.7/24"]));
        let second = second.prefixes;
        assert_eq!(second[&ten], first[&ten]);
        assert_eq!(second.len(), 2);
        // The removed prefix's number is not reused for the new one.
        assert!(
            first
                .values()
                .all(|old| *old != second[&"192.0.2.0/24".parse().unwrap()])
        );
        assert_eq!(hub.identities().borrow().labels.len(), 9 + 2);
    }

    #[test]
    fn an_api_server_has_its_label_besides_those_of_its_address() {
        let dir = tempfile::tempdir().unwrap();
        let hub = hub();
        let cidrs = LocalIdentities::open(dir.path(), hub.clone());
        let server: IpNet = "192.0.2.7/32".parse().unwrap();
        let mut needs = prefixes(&["192.0.2.0/24", "192.0.2.7/32"]);
        let numbers = cidrs.require(&needs);
        let has = |identity: Identity, label: &str| {
            let known = hub.identities().borrow().labels.clone();
            known[&identity].has_reserved(label)
        };
        let of_server = numbers.prefixes[&server];
        assert!(!has(of_server, "kube-apiserver"));
        needs.api_servers = [server.addr(), "192.0.2.0".parse().unwrap()].into();
        needs.host = LabelSet::reserved("kube-apiserver");
        assert_eq!(cidrs.require(&needs), numbers);
        for (identity, is_server) in numbers.all().zip([false, true]) {
            assert_eq!(has(identity, "kube-apiserver"), is_server);
            assert!(has(identity, "world"));
        }
        assert!(has(Identity::HOST, "kube-apiserver") && has(Identity::HOST, "host"));
        cidrs.require(&prefixes(&["192.0.2.7/32"]));
        assert!(!has(of_server, "kube-apiserver"));
        assert!(!has(Identity::HOST, "kube-apiserver") && has(Identity::HOST, "host"));
    }

    #[test]
    fn nodes_with_the_same_labels_share_an_identity_that_is_kept_over_restarts() {
        let dir = tempfile::tempdir().unwrap();
        let hub = hub();
        let zone = |zone: &str| {
            let label = format!("node:zone={zone}").parse().unwrap();
            LabelSet::new([label]).unwrap().with_reserved("remote-node")
        };
        let mut needs = prefixes(&["10.0.0.0/8"]);
        needs.nodes = [zone("a"), zone("b")].into();
        let first = LocalIdentities::open(dir.path(), hub.clone()).require(&needs);
        assert_eq!((first.nodes.len(), first.all().count()), (2, 3));
        let of_a = first.nodes[&zone("a")];
        assert!(of_a.is_local() && health_common::identity::is_remote_node(of_a.0));
        assert!(!health_common::identity::is_remote_node(
            first.prefixes.values().next().unwrap().0
        ));
        assert_eq!(*hub.identities().borrow().labels[&of_a], zone("a"));

        let again = LocalIdentities::open(dir.path(), hub.clone());
        assert_eq!(again.numbers(), first);
        needs.nodes = [zone("a"), zone("c")].into();
        let mut both = needs.clone();
        both.keep(&again.numbers());
        assert_eq!(again.require(&both).nodes.len(), 3);
        let last = again.require(&needs);
        assert_eq!(last.nodes[&zone("a")], of_a);
        assert!(
            !first
                .nodes
                .values()
                .any(|one| *one == last.nodes[&zone("c")])
        );
        assert!(
            !hub.identities()
                .borrow()
                .labels
                .contains_key(&first.nodes[&zone("b")])
        );
    }

    #[test]
    fn a_damaged_file_is_put_aside() {
        for damaged in [
            "{",
            r#"{"next":0,"prefixes":{}}"#,
            r#"{"next":1,"prefixes":{"10.0.0.0/8":2}}"#,
            r#"{"next":1,"prefixes":{"10.0.0.1/8":16777217}}"#,
            r#"{"next":1,"prefixes":{"10.0.0.0/8":16777217,"11.0.0.0/8":16777217}}"#,
            r#"{"next":1,"prefixes":{},"nodes":{"16777217":["reserved:remote-node"]}}"#,
            r#"{"next":1,"prefixes":{},"nodes":{"33554433":["node:zone=a"]}}"#,
        ] {
            let dir = tempfile::tempdir().unwrap();
            fs::write(dir.path().join(FILE), damaged).unwrap();
            let cidrs = LocalIdentities::open(dir.path(), hub());
            assert_eq!(cidrs.numbers(), LocalNumbers::default(), "{damaged}");
            let aside = fs::read_to_string(dir.path().join("cidr-identities.json.damaged"));
            assert_eq!(aside.unwrap(), damaged);
            assert_eq!(cidrs.require(&prefixes(&["10.0.0.0/8"])).all().count(), 1);
        }
    }
}

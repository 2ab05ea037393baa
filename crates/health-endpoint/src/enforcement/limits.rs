//! Limits on what all policies together may name.

use std::collections::BTreeSet;

use health_common::ipcache::IPCACHE_ENTRIES;
use health_model::labels::LABELS_MAX;
use health_policy::{HeldPolicy, PrefixCount, Repository};

use super::EnforceError;

/// Maximum number of networks that all policies may name together: half the capacity of the map of identities, so that
/// the addresses of endpoints and nodes always fit.
const NETWORKS_MAX: usize = IPCACHE_ENTRIES as usize / 2;
/// Maximum number of labels of nodes, by key. A node also has reserved labels.
const NODE_KEYS_MAX: usize = LABELS_MAX - 6;

/// Fails if the policies of a repository name too much.
pub(super) fn check(repository: &Repository) -> Result<(), EnforceError> {
    check_counts(repository.prefixes().len(), repository.node_keys().len())
}

fn check_counts(networks: usize, node_keys: usize) -> Result<(), EnforceError> {
    if networks > NETWORKS_MAX {
        return Err(EnforceError::TooManyNetworks {
            count: networks,
            max: NETWORKS_MAX,
        });
    }
    if node_keys > NODE_KEYS_MAX {
        return Err(EnforceError::TooManyNodeLabels {
            count: node_keys,
            max: NODE_KEYS_MAX,
        });
    }
    Ok(())
}

/// What the policies of a repository name, for changes of one policy after the other.
pub(super) struct Named {
    networks: PrefixCount,
    /// Includes those of former forms of policies.
    node_keys: BTreeSet<String>,
}

impl Named {
    pub(super) fn by(repository: &Repository) -> Self {
        Self {
            networks: PrefixCount::of(repository),
            node_keys: repository.node_keys(),
        }
    }

    /// Replaces a policy. Fails without a change if the new one does not fit.
    pub(super) fn replace(
        &mut self,
        before: Option<&HeldPolicy>,
        after: &HeldPolicy,
    ) -> Result<(), EnforceError> {
        self.networks.replace(before, Some(after));
        let new_keys: BTreeSet<&str> = after
            .node_keys()
            .filter(|key| !self.node_keys.contains(*key))
            .collect();
        let node_keys = self.node_keys.len() + new_keys.len();
        let checked = check_counts(self.networks.prefixes(), node_keys);
        match checked {
            Ok(()) => self
                .node_keys
                .extend(new_keys.into_iter().map(str::to_owned)),
            Err(_) => self.networks.replace(Some(after), before),
        }
        checked
    }
}

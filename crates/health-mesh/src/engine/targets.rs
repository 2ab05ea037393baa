//! The targets, derived from the registry, the local health endpoint and the reports of peers.

use std::collections::HashSet;
use std::net::IpAddr;
use std::time::Duration;

use health_common::probe::Path;

use super::Engine;
use crate::target::{NodePaths, Protocol, Target, TargetId, TargetKey};

/// Minimum time over which the first probes of new targets are spread.
const FIRST_SPREAD: Duration = Duration::from_millis(100);
/// Time during which changes of learned addresses are gathered before the targets are rebuilt: at least this, and at
/// least this multiple of the last rebuild's duration.
const LEARN_DELAY: Duration = Duration::from_millis(50);
const LEARN_DELAY_FACTOR: u32 = 20;

impl Engine {
    /// Records a node's report about its health endpoint, if the registry does not specify the endpoint. Returns
    /// whether the report is final: a node that is starting may not know its endpoint yet.
    pub(super) fn learn(&mut self, target: Target, reported: Option<&[IpAddr]>) -> bool {
        let Some(node) = self.set.nodes.get(target.node) else {
            return true;
        };
        let registry_says = !node.health_addresses.is_empty();
        if registry_says
            || node.full_name() == self.options.local
            || self.options.hosts_only.is_some()
        {
            return true;
        }
        let Some(reported) = reported else {
            return node.pod_cidrs.is_empty() || self.learned.get(node).is_some();
        };
        if self.learned.learn(node, reported) && self.rebuild_at.is_none() {
            let delay = LEARN_DELAY.max(self.rebuild_took * LEARN_DELAY_FACTOR);
            self.rebuild_at = Some(self.now() + delay);
        }
        true
    }

    /// Rebuilds the targets from the registry, the local endpoint and the learned addresses.
    pub(super) fn rebuild(&mut self) {
        let begun = self.now();
        self.rebuild_at = None;
        self.set = self.nodes.borrow_and_update().clone();
        let local_health = self.local_health.borrow_and_update().clone();
        let mut paths = Vec::with_capacity(self.set.nodes.len());
        for node in &self.set.nodes {
            let local = node.full_name() == self.options.local;
            let learned;
            let endpoint = if self.options.hosts_only.is_some() {
                None
            } else if local && !local_health.is_empty() {
                Some(&local_health[..])
            } else if !node.health_addresses.is_empty() {
                Some(&node.health_addresses[..])
            } else if node.pod_cidrs.is_empty() {
                // The node has no prefix from which its endpoint could get an address.
                None
            } else if local {
                Some(&[][..])
            } else {
                match self.learned.get(node) {
                    // The node has reported that it has no endpoint.
                    Some(known) if known.is_empty() => None,
                    known => {
                        learned = known.unwrap_or_default();
                        Some(&learned[..])
                    }
                }
            };
            paths.push(NodePaths::new(node, local, endpoint));
        }
        self.http.names = paths.iter().map(|node| node.name.as_str().into()).collect();
        self.accounts
            .set_peers(paths.iter().flat_map(NodePaths::addresses));
        let intervals = self.options.tuning.intervals;
        let is_probed = |key: &TargetKey| intervals.get(key.path, key.protocol).is_some();
        let wanted = paths.iter().enumerate().flat_map(|(index, node)| {
            node.targets()
                .filter(is_probed)
                .map(move |key| Target { key, node: index })
        });
        let changes = self.targets.replace(wanted);
        self.drop_targets(&changes.gone);
        self.add_targets(&changes.fresh);
        let leaves_this_host = |target: &Target| {
            let TargetKey {
                address,
                path,
                protocol,
            } = target.key;
            // An endpoint's packets take the same path as its host's.
            (path, protocol) == (Path::Host, Protocol::Icmp)
                && paths.get(target.node).is_some_and(|node| !node.local)
                && !self.options.local_addresses.contains(&address)
        };
        let paths_out = self.targets.iter();
        let paths_out = paths_out
            .filter(|(_, target)| leaves_this_host(target))
            .map(|(id, target)| (id, target.key.address));
        self.path_mtu.set_paths(paths_out, begun);
        if let Some(sweep) = &mut self.sweep {
            let targets = &self.targets;
            sweep.renumber(paths.len(), |id| targets.get(id).map(|target| target.node));
        }

        // An empty node list may come from a registry that has not been reached yet.
        if !self.set.nodes.is_empty() {
            let names: HashSet<&str> = paths.iter().map(|node| node.name.as_str()).collect();
            self.learned.retain(|name| names.contains(name));
        }
        let schedule = &self.schedule;
        self.shared
            .results_mut()
            .set_nodes(self.set.clone(), paths, &self.targets, |interval| {
                schedule.effective(interval)
            });
        self.rebuild_took = self.now().saturating_sub(begun);
    }

    pub(super) fn drop_targets(&mut self, gone: &[(TargetId, TargetKey)]) {
        let mut results = self.shared.results_mut();
        for (id, key) in gone {
            self.schedule.remove(*id);
            self.confirmation.remove(*id);
            self.relief.forget(*id);
            self.deferrals.remove(*id);
            if let Some(sweep) = &mut self.sweep {
                sweep.remove(*id);
            }
            results.remove(*id);
            self.accounts.close(*key);
        }
        if !gone.is_empty() {
            self.icmp.retain(|id| self.targets.get(id).is_some());
        }
    }

    pub(super) fn add_targets(&mut self, fresh: &[(TargetId, TargetKey)]) {
        let now = self.now();
        let spread = self.rate_time(fresh.len()).max(FIRST_SPREAD);
        self.accounts.open(fresh.iter().map(|(_, key)| *key));
        // Reserves exactly this capacity: growing on demand takes up to twice as much memory.
        self.schedule.reserve(self.targets.len());
        self.confirmation.reserve(self.targets.len());
        for (id, key) in fresh {
            let interval = self.options.tuning.intervals.get(key.path, key.protocol);
            if let Some(interval) = interval {
                self.schedule.insert(*id, key, interval, now, spread);
                self.confirmation.insert(*id);
            }
        }
    }

    /// How long probes of this many targets take at the probe rate.
    pub(super) fn rate_time(&self, targets: usize) -> Duration {
        Duration::from_secs(targets as u64) / self.options.tuning.rate.max(1)
    }
}

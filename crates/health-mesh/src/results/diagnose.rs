//! Interprets the results of one node, and of all nodes.

use std::sync::{Arc, PoisonError};
use std::time::Duration;

use health_common::arrivals;
use health_common::probe::Path;
use health_model::api;
use health_net::carrier;
use health_registry::nodes::Node;

use super::{LastDiagnosis, LastSurvey, NodeTargets, Results, SETTLING, SURVEY_AGE, TargetRecord};
use crate::diagnosis::isolation::{Isolation, Survey};
use crate::diagnosis::{Context, PeerFacts, ShiftWatch, TargetFacts, Verdict};
use crate::direction::{self, Passage};
use crate::history::Trend;
use crate::proof::KeyAge;
use crate::target::{Protocol, TargetKey};

impl Results {
    pub(super) fn context(&self) -> Context<'_> {
        Context {
            port: self.port,
            local_addresses: &self.local_addresses,
            thresholds: self.thresholds,
        }
    }

    /// Whether this node itself is cut off.
    pub(super) fn isolation(&self, now: Duration) -> Option<Arc<Isolation>> {
        let mut last = self
            .last_survey
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(last) = &*last {
            // An isolation also depends on the state of this node's devices, so it must be checked again.
            let stands = last.isolation.is_none() && last.revision == self.revision;
            if stands || now.saturating_sub(last.at) < SURVEY_AGE {
                return last.isolation.clone();
            }
        }
        let context = self.context();
        let mut survey = Survey::default();
        let mut facts = Vec::new();
        for (index, node) in self.nodes.iter().enumerate() {
            self.facts(node, now, &mut facts);
            survey.add(&context, &self.peer(index, node, &facts));
        }
        // The devices' state is read only if the survey finds an isolation.
        let isolation = survey
            .diagnose(&context, &self.local, &[])
            .and_then(|_| {
                let without_carrier = carrier::without(&self.uplinks);
                survey.diagnose(&context, &self.local, &without_carrier)
            })
            .map(Arc::new);
        *last = Some(LastSurvey {
            at: now,
            revision: self.revision,
            isolation: isolation.clone(),
        });
        isolation
    }

    /// Whether the node's results are recent enough to diagnose. They are if no target fails, if every target was
    /// probed since the latest verdict change began, or if that was at least [`SETTLING`] ago; otherwise some results
    /// may predate the change.
    pub(super) fn is_settled(&self, node: &NodeTargets, now: Duration) -> bool {
        let results = || {
            let known = node.targets().filter_map(|id| self.known.get(id));
            known.filter_map(|known| known.result.as_ref())
        };
        let failing = results().any(|result| result.outcome.is_err());
        let turned = results().map(|result| result.turned).max();
        let probed = results().map(|result| result.sent).min();
        !failing || probed >= turned || turned.is_none_or(|turned| now >= turned + SETTLING)
    }

    /// The revision that the node's diagnosis is based on; `None` before all its targets are known.
    pub(super) fn revision(&self, node: &NodeTargets) -> Option<u64> {
        let mut revisions = node.targets().map(|id| Some(self.known.get(id)?.revision));
        revisions.try_fold(0, |newest, revision| Some(revision?.max(newest)))
    }

    /// What is wrong with the node with this index.
    pub(super) fn diagnosis(
        &self,
        index: usize,
        node: &NodeTargets,
        isolation: Option<&Isolation>,
        now: Duration,
    ) -> Option<api::Diagnosis> {
        let revision = self.revision(node);
        let mut last = node
            .last_diagnosis
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        // The location of losses, as reported by peers, changes with every exchange.
        let lasts = isolation.is_none() && !self.is_node_followed(node);
        if lasts
            && let Some(last) = &*last
            && Some(last.revision) == revision
        {
            return last.diagnosis.clone();
        }
        *last = None;
        if !self.is_settled(node, now) {
            return None;
        }
        let mut facts = Vec::new();
        self.facts(node, now, &mut facts);
        let peer = self.peer(index, node, &facts);
        let diagnosis = self.context().diagnose(&peer, isolation);
        let diagnosis = diagnosis.map(super::report::shown);
        // The diagnosis of a degraded target includes recent probe results.
        if lasts
            && !self.is_degraded(node)
            && let Some(revision) = revision
        {
            *last = Some(LastDiagnosis {
                revision,
                diagnosis: diagnosis.clone(),
            });
        }
        diagnosis
    }

    pub(super) fn is_degraded(&self, node: &NodeTargets) -> bool {
        let mut known = node.targets().filter_map(|id| self.known.get(id));
        known.any(|known| known.degraded.is_some())
    }

    /// Fills `facts` with the facts by which a node's targets are judged.
    pub(super) fn facts<'a>(
        &'a self,
        node: &NodeTargets,
        now: Duration,
        facts: &mut Vec<TargetFacts<'a>>,
    ) {
        facts.clear();
        for (addresses, path) in [(&node.host, Path::Host), (&node.endpoint, Path::Endpoint)] {
            for targets in addresses {
                for (protocol, id) in targets.protocols() {
                    let known = id.and_then(|id| Some((id, self.known.get(id)?)));
                    facts.push(match known {
                        Some((id, known)) => TargetFacts {
                            passages: self.passages(node, known, now),
                            shift: self.shifts.get(id).map(ShiftWatch::shift),
                            path_mtu: self.path_mtu(id),
                            ..known.facts(now)
                        },
                        None => TargetFacts {
                            key: TargetKey {
                                address: targets.address,
                                path,
                                protocol,
                            },
                            verdict: Verdict::Off,
                            mesh_key: KeyAge::Current,
                            trend: Trend::default(),
                            passages: Default::default(),
                            shift: None,
                            path_mtu: None,
                        },
                    });
                }
            }
        }
    }

    /// What happened to a target's echo probes since its current verdict, in each window.
    pub(super) fn passages(
        &self,
        node: &NodeTargets,
        known: &TargetRecord,
        now: Duration,
    ) -> [Option<Passage>; direction::WINDOWS.len()] {
        let key = known.key;
        let way = arrivals::way(key.address.is_ipv4(), key.path as u8);
        let followed = || {
            let first = (!self.ways.is_empty()).then(|| node.way(way).next())??;
            Some((first, known.result.as_ref()?.turned))
        };
        let Some((first, turned)) = followed().filter(|_| key.protocol == Protocol::Icmp) else {
            return Default::default();
        };
        direction::WINDOWS.map(|window| {
            let from = now.saturating_sub(window).max(turned);
            self.ways.passage(first, from)
        })
    }

    pub(super) fn peer<'a>(
        &'a self,
        index: usize,
        node: &'a NodeTargets,
        targets: &'a [TargetFacts<'a>],
    ) -> PeerFacts<'a> {
        let expects_endpoint =
            |node: &Node| !node.pod_cidrs.is_empty() || !node.health_addresses.is_empty();
        PeerFacts {
            name: &node.paths.name,
            local: node.paths.local,
            endpoint_expected: !node.paths.hosts_only
                && self.set.nodes.get(index).is_some_and(expects_endpoint),
            targets,
        }
    }
}

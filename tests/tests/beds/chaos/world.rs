//! The expected endpoints and policies, and checks of the actual ones against them.

use std::fmt::Write as _;
use std::fs;
use std::process::Child;
use std::thread;

use anyhow::{Context as _, ensure};
use fastrand::Rng;
use health_model::api::Endpoint;
use tempfile::TempDir;
use tests::ping::is_answered;
use tests::{Bed, Node, PATIENCE, wait_for};

use crate::endpoint_report::{EndpointReport, Place, addresses, is_whole, spawn};

/// Labels of endpoints. Policy protects endpoints with the first one, and may confine those with the last one.
const APPS: [&str; 3] = [PROTECTED, "shop", CONFINED];
const PROTECTED: &str = "web";
const CONFINED: &str = "bot";
/// The only destination that confined endpoints may reach.
const REACHABLE: &str = "shop";
/// Minimum and maximum number of endpoints.
const FEWEST: usize = 4;
const MOST: usize = 12;
/// Number of changes made during a fault.
const CHANGES: usize = 3;

/// A node's policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Policy {
    /// The only client that may send to protected endpoints.
    client: &'static str,
    /// Whether the policy also restricts confined endpoints.
    confines: bool,
}

impl Policy {
    const ALL: [Self; 4] = [
        Self::new("shop", false),
        Self::new("shop", true),
        Self::new(CONFINED, false),
        Self::new(CONFINED, true),
    ];

    const fn new(client: &'static str, confines: bool) -> Self {
        Self { client, confines }
    }

    fn file(self) -> String {
        format!("{}-{}", self.client, self.confines)
    }
}

/// An endpoint.
struct Workload {
    place: Place,
    /// Index of the endpoint's node, from 0.
    node: usize,
    /// One of [`APPS`].
    app: &'static str,
    /// The endpoint's ID, once the agent has reported it.
    id: Option<u16>,
}

/// A change that was requested from an agent.
pub(super) struct Change {
    asker: Child,
    node: usize,
    words: String,
    /// Number of the place that is to get an endpoint.
    made: Option<usize>,
    /// The place whose endpoint is removed; dropped together with the change.
    _removed: Option<Place>,
}

/// The whole expected state.
pub(super) struct World<'a> {
    bed: &'a Bed,
    folder: TempDir,
    workloads: Vec<Workload>,
    /// Policy per node. Without one, every endpoint may send to every other.
    policies: Vec<Option<Policy>>,
    /// Number of places created so far.
    places: usize,
}

impl<'a> World<'a> {
    /// Starts without endpoints and policies.
    pub(super) fn new(bed: &'a Bed) -> anyhow::Result<Self> {
        let folder = tempfile::tempdir()?;
        for policy in Policy::ALL {
            fs::write(folder.path().join(policy.file()), document(policy))?;
        }
        Ok(Self {
            bed,
            folder,
            workloads: Vec::new(),
            policies: vec![None; bed.nodes().len()],
            places: 0,
        })
    }

    pub(super) fn node(&self, at: usize) -> &'a Node {
        &self.bed.nodes()[at]
    }

    /// Creates the first endpoints, of each kind and on each node, and the first policies.
    pub(super) fn populate(&mut self) -> anyhow::Result<()> {
        let mut changes = Vec::new();
        for number in 0..FEWEST {
            let (node, app) = (number % self.policies.len(), APPS[number % APPS.len()]);
            changes.push(self.create(node, app)?);
        }
        for node in 0..self.policies.len() {
            changes.push(self.protect(node, Some(Policy::ALL[0]))?);
        }
        self.finish(changes)
    }

    /// Starts changes without waiting for them. Since they may complete in any order, no two of them concern the same
    /// object.
    pub(super) fn begin_changes(&mut self, random: &mut Rng) -> anyhow::Result<Vec<Change>> {
        let mut nodes: Vec<usize> = (0..self.policies.len()).collect();
        random.shuffle(&mut nodes);
        (0..CHANGES)
            .map(|_| self.begin_change(random, &mut nodes))
            .collect()
    }

    /// Starts a change. A policy change takes its node from `unchanged`.
    fn begin_change(
        &mut self,
        random: &mut Rng,
        unchanged: &mut Vec<usize>,
    ) -> anyhow::Result<Change> {
        let node = random.usize(..self.policies.len());
        let app = APPS[random.usize(..APPS.len())];
        let settled: Vec<usize> = (0..self.workloads.len())
            .filter(|&one| self.workloads[one].id.is_some())
            .collect();
        let policy = random.usize(..=Policy::ALL.len()).checked_sub(1);
        let policy = policy.map(|one| Policy::ALL[one]);
        let is_crowded = self.workloads.len() >= MOST;
        match (random.usize(..4), random.choice(settled), unchanged.pop()) {
            (0, Some(one), _) if self.workloads.len() > FEWEST => self.delete(one),
            (1, Some(one), _) => self.relabel(one, app),
            (2, _, Some(node)) => self.protect(node, policy),
            (_, Some(one), _) if is_crowded => self.delete(one),
            _ => self.create(node, app),
        }
    }

    fn create(&mut self, node: usize, app: &'static str) -> anyhow::Result<Change> {
        self.places += 1;
        let place = Place::new(self.places)?;
        let words = format!("endpoint create --netns {} --label app={app}", place.path);
        self.workloads.push(Workload {
            place,
            node,
            app,
            id: None,
        });
        self.ask(node, words, Some(self.places), None)
    }

    fn delete(&mut self, one: usize) -> anyhow::Result<Change> {
        let Workload { place, node, .. } = self.workloads.remove(one);
        let words = format!("endpoint delete --netns {}", place.path);
        self.ask(node, words, None, Some(place))
    }

    fn relabel(&mut self, one: usize, app: &'static str) -> anyhow::Result<Change> {
        let workload = &mut self.workloads[one];
        let id = workload.id.take().context("its number is unknown")?;
        workload.app = app;
        let node = workload.node;
        let words = format!("endpoint labels {id} --add app={app}");
        self.ask(node, words, None, None)
    }

    fn protect(&mut self, node: usize, policy: Option<Policy>) -> anyhow::Result<Change> {
        self.policies[node] = policy;
        let words = match policy {
            Some(policy) => {
                let document = self.folder.path().join(policy.file());
                format!("policy import {}", document.display())
            }
            None => "policy delete --all".to_owned(),
        };
        self.ask(node, words, None, None)
    }

    fn ask(
        &self,
        node: usize,
        words: String,
        made: Option<usize>,
        removed: Option<Place>,
    ) -> anyhow::Result<Change> {
        println!("  {}: {words}", self.node(node).name());
        Ok(Change {
            asker: spawn(self.node(node), &words)?,
            node,
            words,
            made,
            _removed: removed,
        })
    }

    /// Waits for changes, and repeats the failed ones in order.
    pub(super) fn finish(&self, changes: Vec<Change>) -> anyhow::Result<()> {
        for mut change in changes {
            if change.asker.wait()?.success() {
                continue;
            }
            let node = self.node(change.node);
            println!("  again: {}", change.words);
            wait_for(&change.words, PATIENCE, || {
                if let Some(number) = change.made
                    && EndpointReport::by(node)?.has(number)
                {
                    return Ok(Some(()));
                }
                node.cli(&change.words)?.success().map(Some)?;
                Ok(Some(()))
            })?;
        }
        Ok(())
    }

    /// Removes the device of one of a node's endpoints, if it has any. The endpoint is removed with it.
    pub(super) fn remove_a_device(&mut self, at: usize) -> anyhow::Result<()> {
        let is_there = |one: &Workload| one.node == at && one.id.is_some();
        let Some(one) = self.workloads.iter().position(is_there) else {
            return Ok(());
        };
        let workload = self.workloads.remove(one);
        let reported = EndpointReport::by(self.node(at))?;
        let endpoint = reported.at(&workload.place).context("it is not reported")?;
        println!("  {} goes", endpoint.interface);
        self.node(at)
            .exec(&format!("ip link delete {}", endpoint.interface))
            .map(drop)
    }

    /// Waits until everything matches the expected state.
    pub(super) fn wait_true(&mut self) -> anyhow::Result<()> {
        wait_for("all to be as it should", PATIENCE, || {
            self.check().map(Some)
        })
    }

    fn check(&mut self) -> anyhow::Result<()> {
        let mut reports = Vec::new();
        for (at, node) in self.bed.nodes().iter().enumerate() {
            let report = EndpointReport::by(node)?;
            let wanted = self.workloads.iter().filter(|one| one.node == at);
            ensure!(
                report.endpoints.len() == wanted.count(),
                "{}: {:?}",
                node.name(),
                report.endpoints
            );
            let policy = self.policies[at];
            let enforced = |one: &Endpoint| {
                let is = |app| one.labels == [label(app)];
                [
                    policy.is_some() && is(PROTECTED),
                    policy.is_some_and(|policy| policy.confines) && is(CONFINED),
                ]
            };
            report
                .is_all_there_is(node, enforced)
                .with_context(|| node.name().to_owned())?;
            reports.push(report);
        }
        let mut reported = Vec::new();
        for workload in &mut self.workloads {
            let endpoint = reports[workload.node].at(&workload.place);
            is_whole(&workload.place, endpoint)?;
            let endpoint = endpoint.with_context(|| format!("none in {}", workload.place.path))?;
            ensure!(endpoint.labels == [label(workload.app)], "{endpoint:?}");
            workload.id = Some(endpoint.id);
            reported.push(endpoint.clone());
        }
        self.check_packets(&reported)
    }

    /// Sends an echo request from each endpoint to every other one, and compares the results with what the policy
    /// allows.
    fn check_packets(&self, reported: &[Endpoint]) -> anyhow::Result<()> {
        let pairs = self.workloads.iter().flat_map(|from| {
            let others = self.workloads.iter().zip(reported);
            let others = others.filter(|(to, _)| to.place.path != from.place.path);
            others.flat_map(move |(to, endpoint)| {
                addresses(endpoint).map(move |address| (from, to, address))
            })
        });
        let wrong = thread::scope(|scope| {
            let pings: Vec<_> = pairs
                .map(|(from, to, address)| {
                    let ping = scope.spawn(move || is_answered(&from.place.name, address));
                    (from, to, address, ping)
                })
                .collect();
            let mut wrong = String::new();
            for (from, to, address, ping) in pings {
                let is_answered = ping.join().expect("a ping does not panic")?;
                if is_answered != self.allows(from, to) {
                    let passed = if is_answered { "passes" } else { "is dropped" };
                    // Writing to a string cannot fail.
                    let _ = writeln!(
                        wrong,
                        "from {} ({}) to {address} ({}) {passed}",
                        from.place.name, from.app, to.app
                    );
                }
            }
            anyhow::Ok(wrong)
        })?;
        ensure!(wrong.is_empty(), "{wrong}");
        Ok(())
    }

    fn allows(&self, from: &Workload, to: &Workload) -> bool {
        let may_send = self.policies[from.node]
            .is_none_or(|policy| !policy.confines || from.app != CONFINED || to.app == REACHABLE);
        let may_get = self.policies[to.node]
            .is_none_or(|policy| to.app != PROTECTED || policy.client == from.app);
        may_send && may_get
    }

    /// Deletes all endpoints and policies.
    pub(super) fn clear(&mut self) -> anyhow::Result<()> {
        let mut changes = Vec::new();
        while !self.workloads.is_empty() {
            changes.push(self.delete(0)?);
        }
        for node in 0..self.policies.len() {
            changes.push(self.protect(node, None)?);
        }
        self.finish(changes)
    }
}

fn label(app: &str) -> String {
    format!("unspec:app={app}")
}

/// The policy document to import.
fn document(policy: Policy) -> String {
    let Policy { client, confines } = policy;
    let mut rules = format!(
        r#"[{{"labels": ["name=chaos"], "endpointSelector": {{"matchLabels": {{"app": "{PROTECTED}"}}}},
             "ingress": [{{"fromEndpoints": [{{"matchLabels": {{"app": "{client}"}}}}]}}]}}"#
    );
    if confines {
        rules += &format!(
            r#", {{"labels": ["name=chaos"], "endpointSelector": {{"matchLabels": {{"app": "{CONFINED}"}}}},
                 "egress": [{{"toEndpoints": [{{"matchLabels": {{"app": "{REACHABLE}"}}}}]}}]}}"#
        );
    }
    rules + "]"
}

//! Random changes of pods, namespaces and policies, with outages of the API server and restarts of the agent. In each
//! quiet period, labels, identities, verdicts and packets of all endpoints are compared with a plain model.

mod policy;

use std::collections::{BTreeMap, BTreeSet};
use std::{fs, thread};

use anyhow::{Context as _, ensure};
use fastrand::Rng;
use health_common::identity::INIT;
use health_model::api::Endpoint;
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use tests::apiserver::{Behaviour, Kind, OUTAGES};
use tests::namespace::Namespace;
use tests::ping::is_answered;
use tests::{PATIENCE, is_long, seed, wait_for};

use self::policy::{APPS, App, DIRECTIONS, Facts, NAMESPACES, Name, Policy, TIERS, Tier, allow};
use crate::endpoint_report::{EndpointReport, rows};
use crate::kubernetes_labels::{Stand, namespace};

/// Namespace and pod whose labels show that the agent has heard of everything before.
const MARKER: &str = "marker";
/// Number of policies to keep.
const POLICIES: usize = 10;
/// Number of changes between two quiet periods.
const TURN: usize = 50;
/// Number of pairs of endpoints that exchange packets in each quiet period.
const PAIRS: usize = 30;

/// The numbers of pods to keep and of changes. A long run takes several minutes.
fn size() -> (usize, usize) {
    if is_long() { (100, 1000) } else { (15, 100) }
}

/// A pod, which has an object, a container or both.
#[derive(Default)]
struct Pod {
    namespace: Name,
    name: String,
    uid: String,
    app: App,
    has_object: bool,
    /// The apps that its object has named since the last quiet period.
    recent: BTreeSet<App>,
    container: Option<Namespace>,
    /// What the labels of its endpoint said in the last quiet period; `None` if the agent did not know the pod.
    settled: Option<Facts>,
}

impl Pod {
    /// Returns what the labels of its endpoint say. Fails if they may not say it.
    fn facts_of(&self, endpoint: &Endpoint, tiers: &Tiers) -> anyhow::Result<Option<Facts>> {
        let namespace = self.namespace;
        let facts = |tier: Tier, app: App| Facts {
            namespace,
            tier,
            app,
        };
        let tiers = tiers[namespace].iter().copied();
        let allowed: BTreeSet<Option<Facts>> = match self.has_object {
            true => tiers
                .last()
                .map(|tier| Some(facts(tier, self.app)))
                .into_iter()
                .collect(),
            // The agent may have missed the last versions of the object, or all of them.
            false => {
                let recent = tiers.flat_map(|tier| self.recent.iter().map(move |app| (tier, *app)));
                let recent = recent.map(|(tier, app)| Some(facts(tier, app)));
                recent.chain([self.settled]).collect()
            }
        };
        let found = endpoint.labels.iter().cloned().collect();
        let says = |facts: &Option<Facts>| match facts {
            Some(facts) => facts.labels() == found && endpoint.identity >= 256,
            None => endpoint.labels == ["reserved:init"] && endpoint.identity == INIT,
        };
        let said = allowed.iter().copied().find(says);
        said.with_context(|| format!("{} may say {allowed:?}; found {endpoint:?}", self.uid))
    }
}

/// The tiers of each namespace since the last quiet period; the last one is the present one.
type Tiers = BTreeMap<Name, Vec<Tier>>;

/// An endpoint of a container, with what its labels say.
type Known<'a> = (&'a Namespace, Endpoint, Option<Facts>);

struct World {
    stand: Stand,
    pods: Vec<Pod>,
    policies: Vec<Policy>,
    tiers: Tiers,
    is_out: bool,
    /// Number of names given so far.
    named: usize,
    random: Rng,
}

impl World {
    fn start(random: Rng) -> anyhow::Result<Self> {
        let mut world = Self {
            stand: Stand::start()?,
            pods: Vec::new(),
            policies: Vec::new(),
            tiers: BTreeMap::new(),
            is_out: false,
            named: 0,
            random,
        };
        for name in NAMESPACES {
            world.label_namespace(name, None);
        }
        let netns = world.stand.connect_container(MARKER, MARKER, MARKER)?;
        world.stand.namespaces.push(netns);
        Ok(world)
    }

    fn name(&mut self, prefix: &str) -> String {
        self.named += 1;
        format!("{prefix}{}", self.named)
    }

    /// Makes one random change.
    fn change(&mut self, most: usize) -> anyhow::Result<()> {
        let name = NAMESPACES[self.random.usize(..3)];
        let app = APPS[self.random.usize(..3)];
        let kind = self.random.u8(..100);
        if self.pods.len() < most / 2 || kind < 15 && self.pods.len() < most {
            let pod = self.name("pod-");
            return self.create(name, pod, app);
        }
        let at = self.random.usize(..self.pods.len());
        match kind {
            0..30 if self.pods[at].has_object => {
                self.pods[at].app = app;
                self.put_object(at);
            }
            30..40 if self.pods[at].has_object => {
                // Another pod gets the name, perhaps without an event in between.
                let (namespace, pod) = (self.pods[at].namespace, self.pods[at].name.clone());
                match self.random.bool() {
                    true => self.toggle_object(at),
                    false => self.pods[at].has_object = false,
                }
                let next = self.add(namespace, pod, app);
                self.put_object(next);
                self.toggle_container(next)?;
            }
            0..55 => self.toggle_object(at),
            55..70 => self.toggle_container(at)?,
            70..76 => {
                if self.random.u8(..3) == 0 {
                    println!("  namespace {name} is deleted");
                    self.stand.server.delete_of(Kind::Namespace, name);
                }
                let tier = TIERS[self.random.usize(..3)];
                self.label_namespace(name, tier);
            }
            76..92 => self.change_policies()?,
            92..97 => self.change_outage()?,
            97.. => {
                let signal = [Signal::SIGKILL, Signal::SIGTERM][self.random.usize(..2)];
                println!("  the agent gets {signal}");
                self.stand.node().kill_agent(signal)?;
                self.stand.start_agent("")?;
            }
        }
        let exists = |pod: &Pod| pod.has_object || pod.container.is_some();
        self.pods.retain(exists);
        Ok(())
    }

    /// Creates a pod: its object, its container, or both in either order.
    fn create(&mut self, namespace: Name, name: String, app: App) -> anyhow::Result<()> {
        let at = self.add(namespace, name, app);
        let order = self.random.u8(..6);
        if order > 2 {
            self.put_object(at);
        }
        if order != 3 {
            self.toggle_container(at)?;
        }
        if matches!(order, 1 | 2) {
            self.put_object(at);
        }
        Ok(())
    }

    fn add(&mut self, namespace: Name, name: String, app: App) -> usize {
        let uid = self.name("uid-");
        println!("  {uid} is {namespace}/{name}");
        self.pods.push(Pod {
            namespace,
            name,
            uid,
            app,
            ..Pod::default()
        });
        self.pods.len() - 1
    }

    fn toggle_object(&mut self, at: usize) {
        let pod = &self.pods[at];
        let key = format!("{}/{}", pod.namespace, pod.name);
        if pod.has_object {
            println!("  {} is deleted", pod.uid);
            self.stand.server.delete_pod(&key);
            self.pods[at].has_object = false;
            return;
        }
        let has_name =
            |one: &Pod| one.has_object && key == format!("{}/{}", one.namespace, one.name);
        if !self.pods.iter().any(has_name) {
            self.put_object(at);
        }
    }

    fn put_object(&mut self, at: usize) {
        let pod = &mut self.pods[at];
        println!("  {} has {:?}", pod.uid, pod.app);
        let labels = json!({ "app": pod.app, "pod-template-hash": self.random.u8(..).to_string() });
        pod.has_object = true;
        pod.recent.insert(pod.app);
        self.stand
            .put_pod_in(pod.namespace, &pod.name, &pod.uid, &labels);
    }

    fn toggle_container(&mut self, at: usize) -> anyhow::Result<()> {
        let (stand, pod) = (&self.stand, &mut self.pods[at]);
        println!("  the container of {} comes or goes", pod.uid);
        if let Some(netns) = pod.container.take() {
            let deleted = stand.plugin.call("DEL", &pod.uid, &netns.path())?;
            ensure!(deleted.is_success, "{}", deleted.json);
        } else {
            let netns = stand.connect_container(pod.namespace, &pod.name, &pod.uid)?;
            pod.container = Some(netns);
        }
        pod.settled = None;
        Ok(())
    }

    fn label_namespace(&mut self, name: Name, tier: Tier) {
        println!("  namespace {name} has {tier:?}");
        self.tiers.entry(name).or_default().push(tier);
        let labels = tier.map_or_else(|| json!({}), |tier| json!({ "tier": tier }));
        self.stand.server.put(namespace(name, &labels));
    }

    fn change_policies(&mut self) -> anyhow::Result<()> {
        let words = if self.policies.len() < POLICIES {
            let name = self.name("policy-");
            let policy = Policy::random(&mut self.random, name);
            println!("  {policy:?}");
            let file = self.stand.folder.path().join("policy.json");
            fs::write(&file, policy.document().to_string())?;
            self.policies.push(policy);
            format!("policy import {}", file.display())
        } else {
            let policy = self.policies.remove(self.random.usize(..POLICIES));
            println!("  {} is deleted", policy.name);
            format!("policy delete {}/{}", policy.namespace, policy.name)
        };
        // A starting agent refuses it.
        let change = || Ok(Some(self.stand.node().cli(&words)?.success()?));
        wait_for("a change of policy", PATIENCE, change).map(drop)
    }

    fn change_outage(&mut self) -> anyhow::Result<()> {
        if self.is_out {
            return self.end_outage();
        }
        let outage = OUTAGES[self.random.usize(..OUTAGES.len())].clone();
        println!("  outage: {outage:?}");
        self.is_out = true;
        match outage {
            Some(behaviour) => self.stand.server.behave(behaviour),
            None => self.stand.server.stop(),
        }
        Ok(())
    }

    fn end_outage(&mut self) -> anyhow::Result<()> {
        if std::mem::take(&mut self.is_out) {
            println!("  end of the outage");
            if self.random.bool() {
                self.stand.server.compact();
            }
            self.stand.server.behave(Behaviour::Serve);
            self.stand.server.stop();
            self.stand.server.resume()?;
        }
        Ok(())
    }

    /// Waits until the agent has heard of all changes, and compares everything with the model.
    fn settle(&mut self) -> anyhow::Result<()> {
        self.end_outage()?;
        let mark = self.name("");
        let labels = json!({ "mark": mark });
        self.stand.server.put(namespace(MARKER, &labels));
        self.stand.put_pod_in(MARKER, MARKER, MARKER, &labels);
        let pairs: Vec<_> = (0..PAIRS)
            .map(|_| [self.random.usize(..), self.random.usize(..)])
            .collect();
        let found = wait_for("the model", PATIENCE, || self.compare(&mark).map(Some))?;
        self.exchange_packets(&found, &pairs)?;
        let settled: Vec<_> = found.into_iter().map(|(_, _, facts)| facts).collect();
        let with_container = self.pods.iter_mut().filter(|pod| pod.container.is_some());
        for (pod, facts) in with_container.zip(settled) {
            pod.settled = facts;
        }
        for pod in &mut self.pods {
            pod.recent.clear();
            pod.recent.extend(pod.has_object.then_some(pod.app));
        }
        for tiers in self.tiers.values_mut() {
            tiers.drain(..tiers.len() - 1);
        }
        Ok(())
    }

    /// Compares endpoints, identities and maps with the model.
    fn compare(&self, mark: &str) -> anyhow::Result<Vec<Known<'_>>> {
        let report = EndpointReport::by(self.stand.node())?;
        let of_container = |id: &str| {
            let mut endpoints = report.endpoints.iter();
            let found = endpoints.find(|one| one.container_id.as_deref() == Some(id));
            found.with_context(|| format!("no endpoint of {id}"))
        };
        let marker = &of_container(MARKER)?.labels;
        let marks = marker
            .iter()
            .filter(|label| label.ends_with(&format!("mark={mark}")));
        ensure!(marks.count() == 2, "{marker:?}");
        let containers = self
            .pods
            .iter()
            .filter_map(|pod| Some((pod, pod.container.as_ref()?)));
        let found = containers.map(|(pod, netns)| {
            let endpoint = of_container(&pod.uid)?.clone();
            let facts = pod.facts_of(&endpoint, &self.tiers)?;
            anyhow::Ok((netns, endpoint, facts))
        });
        let found: Vec<Known<'_>> = found.collect::<anyhow::Result<_>>()?;
        ensure!(
            report.endpoints.len() == found.len() + 1,
            "{:#?}",
            report.endpoints
        );

        let (mut labels, mut numbers) = (BTreeMap::new(), BTreeMap::new());
        for one in &report.endpoints {
            let same_labels = *labels.entry(one.identity).or_insert(&one.labels) == &one.labels;
            let same_number = *numbers.entry(&one.labels).or_insert(one.identity) == one.identity;
            ensure!(
                same_labels && same_number,
                "the identity of {one:?} is not its own"
            );
        }
        let lag = self.stand.node().status()?.local.policy_lag;
        ensure!(lag.is_none(), "{lag:?}");
        report.is_all_there_is(self.stand.node(), |endpoint| {
            let facts = found.iter().find(|(_, one, _)| one.id == endpoint.id);
            let facts = facts.and_then(|(_, _, facts)| *facts);
            DIRECTIONS.map(|direction| {
                self.policies
                    .iter()
                    .any(|one| one.selects(facts, direction))
            })
        })?;
        self.compare_maps(&found)?;
        Ok(found)
    }

    /// Compares the verdicts in the agent's maps with the model.
    fn compare_maps(&self, found: &[Known<'_>]) -> anyhow::Result<()> {
        let number = |row: &Value, key: &str| row[key].as_u64().unwrap_or_default();
        let listed = self.stand.node().listing("bpf endpoint list")?;
        let endpoints: BTreeMap<u64, &Value> =
            rows(&listed).map(|row| (number(row, "id"), row)).collect();
        let listed = self.stand.node().listing("bpf policy get")?;
        let verdicts = rows(&listed).map(|row| {
            let key = (
                number(row, "table"),
                row["direction"].as_str(),
                number(row, "identity"),
            );
            (key, &row["policy"])
        });
        let verdicts: BTreeMap<_, &Value> = verdicts.collect();
        for (_, subject, facts) in found {
            let entry = endpoints.get(&subject.id.into()).context("no entry")?;
            let table = number(entry, "policy");
            for (_, peer, of_peer) in found {
                for direction in DIRECTIONS {
                    let is_open = entry[format!("enforces-{direction}")] == false;
                    let verdict = verdicts.get(&(table, Some(direction), peer.identity.into()));
                    let is_allowed = is_open || verdict.is_some_and(|one| **one == "allow");
                    let wanted = allow(&self.policies, *facts, direction, *of_peer);
                    ensure!(
                        is_allowed == wanted,
                        "{direction} allowed: {is_allowed}, at {subject:?} for {peer:?}"
                    );
                }
            }
        }
        Ok(())
    }

    /// Sends an echo request between some pairs of endpoints, and compares the results with what the policies allow.
    fn exchange_packets(&self, found: &[Known<'_>], pairs: &[[usize; 2]]) -> anyhow::Result<()> {
        let pairs = pairs
            .iter()
            .map(|pair| pair.map(|at| &found[at % found.len()]));
        let pairs = pairs.filter(|[from, to]| from.1.id != to.1.id);
        thread::scope(|scope| {
            let pings = pairs.map(|[from, to]| {
                let address = to.1.ipv4.context("no IPv4 address");
                let ping = scope.spawn(move || is_answered(from.0.name(), address?));
                (from, to, ping)
            });
            for ((_, from, sender), (_, to, receiver), ping) in pings.collect::<Vec<_>>() {
                let is_answered = ping.join().expect("a ping does not panic")?;
                let [ingress, egress] = DIRECTIONS;
                let wanted = allow(&self.policies, *sender, egress, *receiver)
                    && allow(&self.policies, *receiver, ingress, *sender);
                ensure!(
                    is_answered == wanted,
                    "answered: {is_answered}, from {from:?} to {to:?}"
                );
            }
            Ok(())
        })
    }
}

#[test]
#[ignore = "needs root"]
fn endpoints_are_those_of_a_plain_model_after_random_changes() -> anyhow::Result<()> {
    let (seed, (pods, changes)) = (seed(), size());
    println!("the changes of seed {seed}");
    let mut world = World::start(Rng::with_seed(seed))?;
    for step in 1..=changes {
        println!("step {step}");
        let mut changed = world.change(pods);
        if changed.is_ok() && (step % TURN == 0 || step == changes) {
            changed = world.settle();
        }
        changed.with_context(|| format!("step {step} of seed {seed}, {:#?}", world.policies))?;
    }
    Ok(())
}

//! Random requests of agents that keep identities in Kubernetes, with failures of the API server, restarts of agents and
//! losses of objects. In each quiet period, the store and all agents are compared with a plain model.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use fastrand::Rng;
use health_model::identity::Identity;
use health_registry::identity::{IdentityAllocator, IdentityError, OnOutage, Timing};
use ipnet::IpNet;
use tests::apiserver::{Behaviour, Kind, OUTAGES};
use tests::{PATIENCE, is_long, seed};
use tokio::task::JoinHandle;

use crate::identities::app;
use crate::kubernetes_identities::Cluster;

const NODES: [&str; 3] = ["a", "b", "c"];
/// Number of label sets.
const SETS: usize = 8;
/// Number of changes between two quiet periods.
const TURN: usize = 15;

/// Timing short enough to see collections, which take agents minutes.
fn timing() -> Timing {
    Timing {
        settle_seen: Duration::from_millis(200),
        settle_unseen: Duration::from_secs(2),
        collect_after: Duration::from_secs(2),
        look_period: Duration::from_millis(100),
        reuse_after: Duration::from_secs(4),
        ..Timing::default()
    }
}

/// A node's agent, and what it should hold.
struct Agent {
    name: &'static str,
    allocator: Arc<IdentityAllocator>,
    /// How often each label set was acquired.
    held: [usize; SETS],
    /// Requests that have no answer yet.
    waiting: Vec<(usize, JoinHandle<Result<Identity, IdentityError>>)>,
}

impl Agent {
    fn acquire(&mut self, set: usize) {
        let allocator = self.allocator.clone();
        let request = async move { allocator.acquire(&app(set), OnOutage::Wait).await };
        self.waiting.push((set, tokio::spawn(request)));
    }

    /// Waits for all answers.
    async fn finish(&mut self) -> anyhow::Result<()> {
        for (set, request) in self.waiting.drain(..) {
            let answer = tokio::time::timeout(PATIENCE, request).await;
            let answer = answer.with_context(|| format!("{}: no number for {set}", self.name))?;
            answer?.with_context(|| format!("{}: set {set}", self.name))?;
            self.held[set] += 1;
        }
        Ok(())
    }

    fn release(&mut self, set: usize) {
        if self.held[set] > 0 {
            self.held[set] -= 1;
            self.allocator.release(&app(set));
        }
    }
}

struct World {
    cluster: Cluster,
    agents: Vec<Agent>,
    is_out: bool,
    /// The numbers of the last quiet period, unless the store has lost objects since.
    settled: Option<BTreeMap<usize, Identity>>,
    random: Rng,
}

impl World {
    fn start(random: Rng) -> anyhow::Result<Self> {
        let cluster = Cluster::start()?;
        let agent = |name| -> anyhow::Result<Agent> {
            Ok(Agent {
                name,
                allocator: cluster.open(name, timing())?,
                held: [0; SETS],
                waiting: Vec::new(),
            })
        };
        let agents: Result<Vec<_>, _> = NODES.into_iter().map(agent).collect();
        Ok(Self {
            agents: agents?,
            cluster,
            is_out: false,
            settled: Some(BTreeMap::new()),
            random,
        })
    }

    /// Makes one random change.
    fn change(&mut self) -> anyhow::Result<()> {
        let agent = self.random.usize(..NODES.len());
        let set = self.random.usize(..SETS);
        match self.random.u8(..20) {
            0..9 => self.agents[agent].acquire(set),
            9..15 => self.agents[agent].release(set),
            15 => self.restart(agent)?,
            16 => self.fail(),
            17 => self.recover()?,
            18 => self.cluster.server.compact(),
            _ => {
                let kind = match self.random.bool() {
                    true => Kind::HealthIdentity,
                    false => Kind::HealthEndpointSlice,
                };
                self.cluster.server.lose_all(kind);
                self.settled = None;
            }
        }
        Ok(())
    }

    /// Ends an agent, and starts the next one, which acquires what its predecessor had.
    fn restart(&mut self, agent: usize) -> anyhow::Result<()> {
        let agent = &mut self.agents[agent];
        let asked = std::mem::take(&mut agent.waiting);
        for (_, request) in &asked {
            request.abort();
        }
        agent.allocator = self.cluster.open(agent.name, timing())?;
        for (set, held) in std::mem::take(&mut agent.held).into_iter().enumerate() {
            for _ in 0..held {
                agent.acquire(set);
            }
        }
        agent.allocator.forget_earlier();
        Ok(())
    }

    fn fail(&mut self) {
        self.is_out = true;
        match &OUTAGES[self.random.usize(..OUTAGES.len())] {
            None => self.cluster.server.stop(),
            Some(behaviour) => self.cluster.server.behave(behaviour.clone()),
        }
    }

    fn recover(&mut self) -> anyhow::Result<()> {
        if std::mem::take(&mut self.is_out) {
            self.cluster.server.behave(Behaviour::Serve);
            self.cluster.server.stop();
            self.cluster.server.resume()?;
        }
        Ok(())
    }

    /// Waits until the store and all agents are as the model says, and remembers the numbers.
    async fn settle(&mut self) -> anyhow::Result<()> {
        self.recover()?;
        for agent in &mut self.agents {
            agent.finish().await?;
        }
        let mut last = None;
        let settled = async {
            loop {
                match self.numbers() {
                    Ok(numbers) => return numbers,
                    Err(error) => last = Some(error),
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        let Ok(numbers) = tokio::time::timeout(PATIENCE, settled).await else {
            return Err(last.context("no time to look")?.context("never at rest"));
        };
        for (set, number) in self.settled.iter().flatten() {
            let now = numbers.get(set).unwrap_or(number);
            ensure!(now == number, "set {set} had {number:?}, and has {now:?}");
        }
        self.announce(&numbers).await?;
        self.settled = Some(numbers);
        Ok(())
    }

    /// The numbers of the label sets in use. Fails if an agent or the store says something else.
    fn numbers(&self) -> anyhow::Result<BTreeMap<usize, Identity>> {
        let stored = self.cluster.stored();
        let mut numbers = BTreeMap::new();
        for agent in &self.agents {
            let (held, known) = (agent.allocator.held(), agent.allocator.identities());
            let (held, known) = (held.borrow(), known.borrow());
            ensure!(known.stale.is_none(), "{}: {:?}", agent.name, known.stale);
            let wanted = (0..SETS).filter(|set| agent.held[*set] > 0);
            let wanted: BTreeSet<usize> = wanted.collect();
            ensure!(held.len() == wanted.len(), "{}: {held:?}", agent.name);
            for set in wanted {
                let labels = app(set);
                let number = held.get(&labels).copied();
                let number = number.with_context(|| format!("{}: lacks {set}", agent.name))?;
                let one = *numbers.entry(set).or_insert(number);
                ensure!(one == number, "set {set} has {one:?} and {number:?}");
            }
        }
        let distinct: BTreeSet<_> = numbers.values().collect();
        ensure!(distinct.len() == numbers.len(), "a number twice");
        for (set, number) in &numbers {
            let named = format!("k8s:app=a{set}");
            let with_labels = stored
                .iter()
                .filter(|(_, spec)| spec["labels"][0] == *named);
            let with_labels: Vec<_> = with_labels.map(|(number, _)| number.as_str()).collect();
            ensure!(
                with_labels == [number.to_string()],
                "set {set} is {number}; stored: {with_labels:?}"
            );
            for agent in &self.agents {
                let known = agent.allocator.identities();
                let known = known.borrow();
                let labels = known.labels.get(number);
                let is_known = labels.is_some_and(|labels| **labels == app(*set));
                ensure!(is_known, "{}: {number} is {labels:?}", agent.name);
            }
        }
        Ok(numbers)
    }

    /// Announces an address of each agent and label set, and waits until all agents know them.
    async fn announce(&self, numbers: &BTreeMap<usize, Identity>) -> anyhow::Result<()> {
        let mut announced = BTreeMap::new();
        for (node, agent) in (1..).zip(&self.agents) {
            for (set, last) in (0..SETS).zip(1..) {
                let address = IpAddr::V4(Ipv4Addr::new(10, 244, node, last));
                match numbers.get(&set).filter(|_| agent.held[set] > 0) {
                    Some(number) => {
                        let host = Ipv4Addr::new(172, 30, 0, node).into();
                        let addresses = [(address, host)];
                        agent
                            .allocator
                            .announce(u16::from(last), *number, &addresses);
                        announced.insert(IpNet::from(address), *number);
                    }
                    None => agent.allocator.withdraw(address),
                }
            }
        }
        for agent in &self.agents {
            let mut addresses = agent.allocator.addresses();
            let known = addresses.wait_for(|now| {
                let now = now.0.iter().map(|(ip, known)| (*ip, known.identity));
                now.collect::<BTreeMap<_, _>>() == announced
            });
            let known = tokio::time::timeout(PATIENCE, known).await.map(drop);
            known.with_context(|| {
                let now = agent.allocator.addresses().borrow().clone();
                format!("{} knows {now:?}, not {announced:?}", agent.name)
            })?;
        }
        Ok(())
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn agents_and_the_store_agree_after_random_requests_and_failures() -> anyhow::Result<()> {
    let (seed, changes) = (seed(), if is_long() { 1500 } else { 60 });
    println!("the changes of seed {seed}");
    let mut world = World::start(Rng::with_seed(seed))?;
    for step in 1..=changes {
        let mut changed = world.change();
        if changed.is_ok() && step % TURN == 0 {
            changed = world.settle().await;
        }
        changed.with_context(|| format!("step {step} of seed {seed}"))?;
    }

    for agent in &mut world.agents {
        for set in 0..SETS {
            while agent.held[set] > 0 {
                agent.release(set);
            }
        }
    }
    world.settle().await?;
    let empty = async {
        while !world.cluster.stored().is_empty() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let empty = tokio::time::timeout(PATIENCE, empty).await;
    empty.with_context(|| format!("unused ones stay: {:?}", world.cluster.stored()))
}

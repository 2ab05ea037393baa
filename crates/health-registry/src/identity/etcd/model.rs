//! Random sequences of events at nodes, their agents and the store, with the agents' real code and a store in memory.
//! No number ever stands for two label sets, and held identities stay the same.

mod memory;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::future::join_all;
use health_model::identity::Identity;
use health_model::labels::LabelSet;
use proptest::prelude::*;
use proptest::test_runner::TestCaseResult;
use tokio::time::{Instant, advance};

use self::memory::{Failure, Memory, MemoryStore};
use super::super::OnOutage;
use super::super::allocator::{Shared, Timing};
use super::super::testing::sequences;
use super::SharedRecords;
use super::keeper::Keeper;
use super::keys::{Key, Keys, digest_of, read_labels, read_number, read_text};
use super::records::Records;
use super::requests::Holder;
use crate::etcd::{Change, Mirror as _};

const NODES: usize = 3;
const SETS: u8 = 5;
/// Maximum number of turns until agents without failures have all that they want.
const TURNS: usize = 40;
const SECOND: Duration = Duration::from_secs(1);

#[derive(Clone, Debug)]
enum Step {
    /// A node gets another endpoint with these labels.
    Acquire(usize, u8),
    /// A node loses an endpoint with these labels.
    Release(usize, u8),
    /// Agents do their pending work concurrently, each with an optional failure.
    Work(Vec<(usize, Option<Failure>)>, u64),
    /// An agent reads some changes.
    Hear(usize, usize),
    /// This many seconds pass, in which agents that can reach the store do all their work.
    Wait(u64),
    CutOff(usize),
    Reconnect(usize),
    /// An agent's lease is revoked.
    LoseLease(usize),
    /// The store comes back without its data. The flag says whether all agents had written and read everything before.
    Wipe(bool),
    /// Another agent takes over a node, with all endpoints or none.
    Restart(usize, bool),
    /// An agent checks for unused identities.
    Collect(usize, Option<Failure>),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let node = || 0..NODES;
    let set = || 0..SETS;
    let failure = || {
        let failure =
            (0_usize..6, any::<bool>()).prop_map(|(after, is_made)| Failure { after, is_made });
        proptest::option::weighted(0.3, failure)
    };
    let seconds = prop_oneof![1_u64..15, 60_u64..200, 800_u64..5000];
    let work = proptest::collection::vec((node(), failure()), 1..=NODES);
    let step = prop_oneof![
        8 => (node(), set()).prop_map(|(node, set)| Step::Acquire(node, set)),
        5 => (node(), set()).prop_map(|(node, set)| Step::Release(node, set)),
        9 => (work, any::<u64>()).prop_map(|(work, seed)| Step::Work(work, seed)),
        4 => (node(), 1_usize..8).prop_map(|(node, most)| Step::Hear(node, most)),
        5 => seconds.prop_map(Step::Wait),
        1 => node().prop_map(Step::CutOff),
        2 => node().prop_map(Step::Reconnect),
        1 => node().prop_map(Step::LoseLease),
        1 => any::<bool>().prop_map(Step::Wipe),
        1 => (node(), any::<bool>()).prop_map(|(node, keeps)| Step::Restart(node, keeps)),
        3 => (node(), failure()).prop_map(|(node, failure)| Step::Collect(node, failure)),
    ];
    proptest::collection::vec(step, 1..50)
}

fn labels(set: u8) -> LabelSet {
    let label = format!("k8s:app=a{set}").parse().expect("a label");
    LabelSet::new([label]).expect("a set")
}

/// The part of a node's agent that allocates identities.
struct Agent {
    name: String,
    shared: Arc<Shared>,
    known: Arc<SharedRecords>,
    keeper: Keeper,
    lease: i64,
    /// How often the store had lost its data when the agent last read it, and how many changes since that loss the
    /// agent has read.
    heard: Option<(u64, usize)>,
    is_connected: bool,
    /// The number of endpoints with each label set.
    uses: BTreeMap<u8, usize>,
}

impl Agent {
    fn new(name: &str, timing: Timing, started: Instant) -> Self {
        let keys = Keys::of("default");
        let known = Arc::new(SharedRecords {
            records: Mutex::new(Records::new(keys.clone(), name, timing.settle())),
            started,
        });
        let (shared, _) = Shared::new("a store in memory".to_owned());
        let shared = Arc::new(shared);
        let mut keeper = Keeper::new(shared.clone(), known.clone(), keys, name, timing);
        // Makes as many agents as possible want the same number at the same time.
        keeper.random = || 0;
        keeper.collect_after = timing.collect_after;
        Self {
            name: name.to_owned(),
            shared,
            known,
            keeper,
            lease: 0,
            heard: None,
            is_connected: true,
            uses: BTreeMap::new(),
        }
    }

    fn acquire(&mut self, set: u8) {
        *self.uses.entry(set).or_default() += 1;
        // The answer will appear among the held identities.
        drop(self.shared.wants().want(&labels(set), OnOutage::Wait));
    }

    /// Releases the identity for one endpoint. Returns whether no endpoint with these labels is left.
    fn release(&mut self, set: u8) -> bool {
        let Some(uses) = self.uses.get_mut(&set) else {
            return false;
        };
        *uses -= 1;
        let is_last = *uses == 0;
        if is_last {
            self.uses.remove(&set);
        }
        self.shared.wants().unwant(&labels(set));
        is_last
    }

    fn held(&self) -> BTreeMap<u8, Identity> {
        let held = self.shared.wants().held();
        let sets = (0..SETS).filter_map(|set| Some((set, *held.get(&labels(set))?)));
        sets.collect()
    }

    fn hear(&mut self, memory: &Memory, most: usize) {
        let now = self.known.now();
        let mut records = self.known.records();
        let (epoch, from) = match self.heard {
            Some(heard) if heard.0 == memory.epoch => heard,
            _ => {
                records.replace(memory.list(), now);
                records.resume(now);
                (memory.epoch, memory.log.len())
            }
        };
        let to = memory.log.len().min(from.saturating_add(most));
        for change in &memory.log[from..to] {
            records.apply(change, now);
        }
        self.heard = Some((epoch, to));
        records.expire(now);
    }

    /// Gets a lease that the store knows, and reads the state that a new connection starts with.
    fn connect(&mut self, memory: &mut Memory) {
        let lease = self.lease;
        self.lease = memory.extend(lease).unwrap_or_else(|| memory.grant_agent());
        if self.heard.is_none_or(|(epoch, _)| epoch != memory.epoch) {
            self.hear(memory, usize::MAX);
        }
    }

    fn holder(&self) -> Holder {
        Holder {
            keys: Keys::of("default"),
            node: self.name.clone(),
            lease: self.lease,
        }
    }

    /// Does the pending work. Returns whether there was any, or will be.
    async fn work(&self, store: MemoryStore) -> bool {
        let holder = self.holder();
        let (jobs, waits) = self.keeper.jobs(&holder);
        let is_idle = jobs.is_empty() && !waits;
        let jobs = jobs
            .into_iter()
            .map(|job| self.keeper.run(&holder, store.clone(), job));
        // Failed jobs are repeated next time.
        join_all(jobs).await;
        !is_idle
    }
}

/// The numbers in the store.
#[derive(Default)]
struct Stored {
    /// The label sets by number, and the numbers by the digest of a label set.
    numbers: BTreeMap<Identity, LabelSet>,
    digests: BTreeMap<String, Identity>,
    /// Sessions by number and node.
    references: BTreeMap<(Identity, String), String>,
}

struct Model {
    memory: Arc<Mutex<Memory>>,
    agents: Vec<Agent>,
    timing: Timing,
    started: Instant,
    /// Identities that agents held when the store lost its data, and have held since.
    kept: BTreeMap<u8, Identity>,
    /// Identities that agents hold and the store has, by node, lease and label set.
    firm: BTreeMap<(usize, i64, u8), Identity>,
    /// Numbers in the store, and numbers that left the store, with the time until which they are reserved.
    numbers: BTreeSet<Identity>,
    resting: BTreeMap<Identity, Duration>,
}

impl Model {
    fn new() -> Self {
        let timing = Timing::default();
        let started = Instant::now();
        let agents = (0..NODES).map(|node| Agent::new(&format!("n{node}"), timing, started));
        Self {
            memory: Arc::new(Mutex::new(Memory::new(timing.lease, started))),
            agents: agents.collect(),
            timing,
            started,
            kept: BTreeMap::new(),
            firm: BTreeMap::new(),
            numbers: BTreeSet::new(),
            resting: BTreeMap::new(),
        }
    }

    fn memory<T>(&self, ask: impl FnOnce(&mut Memory) -> T) -> T {
        ask(&mut self.memory.lock().expect("nobody panicked"))
    }

    fn store(&self, failure: Option<Failure>, seed: u64) -> MemoryStore {
        MemoryStore::new(self.memory.clone(), failure, seed)
    }

    async fn take(&mut self, step: Step) -> TestCaseResult {
        match step {
            Step::Acquire(node, set) => self.agents[node].acquire(set),
            Step::Release(node, set) => {
                if self.agents[node].release(set) {
                    self.kept.remove(&set);
                }
            }
            Step::Work(nodes, seed) => self.work(&nodes, seed).await,
            Step::Hear(node, most) => {
                let memory = self.memory.lock().expect("nobody panicked");
                let agent = &mut self.agents[node];
                if agent.is_connected {
                    agent.hear(&memory, most);
                }
            }
            Step::Wait(seconds) => {
                self.settle().await?;
                self.pass(SECOND * seconds as u32).await;
                self.settle().await?;
            }
            Step::CutOff(node) => {
                self.agents[node].is_connected = false;
                self.kept.clear();
            }
            Step::Reconnect(node) => self.reconnect(node),
            Step::LoseLease(node) => {
                let lease = self.agents[node].lease;
                self.memory(|memory| memory.revoke(lease));
            }
            Step::Wipe(is_calm) => {
                self.kept.clear();
                if is_calm {
                    (0..NODES).for_each(|node| self.reconnect(node));
                    self.settle().await?;
                    self.kept = self.agents.iter().flat_map(Agent::held).collect();
                }
                self.memory(Memory::wipe);
                self.numbers.clear();
                self.resting.clear();
            }
            Step::Restart(node, keeps) => {
                let next = Agent::new(&format!("n{node}"), self.timing, self.started);
                let former = std::mem::replace(&mut self.agents[node], next);
                let agent = &mut self.agents[node];
                agent.is_connected = former.is_connected;
                for (set, uses) in former.uses.into_iter().filter(|_| keeps) {
                    (0..uses).for_each(|_| agent.acquire(set));
                }
                agent.shared.wants().forget_earlier();
                self.kept.clear();
            }
            Step::Collect(node, failure) => self.collect(node, failure).await,
        }
        self.check()
    }

    fn reconnect(&mut self, node: usize) {
        let agent = &mut self.agents[node];
        if !std::mem::replace(&mut agent.is_connected, true) {
            let now = agent.known.now();
            agent.hear(&self.memory.lock().expect("nobody panicked"), usize::MAX);
            agent.known.records().resume(now);
        }
    }

    /// Runs the agents that can reach the store.
    async fn work(&mut self, nodes: &[(usize, Option<Failure>)], seed: u64) {
        let mut at_work = BTreeMap::new();
        for (node, failure) in nodes {
            let agent = &mut self.agents[*node];
            if agent.is_connected {
                agent.connect(&mut self.memory.lock().expect("nobody panicked"));
                at_work.insert(*node, *failure);
            }
        }
        let work = at_work.into_iter().map(|(node, failure)| {
            let store = self.store(failure, seed.wrapping_add(node as u64));
            self.agents[node].work(store)
        });
        join_all(work).await;
    }

    async fn collect(&mut self, node: usize, failure: Option<Failure>) {
        let agent = &mut self.agents[node];
        if agent.is_connected {
            agent.connect(&mut self.memory.lock().expect("nobody panicked"));
            let agent = &self.agents[node];
            let mut store = self.store(failure, 0);
            // A failed collection is tried again at the next check.
            let _ = agent.keeper.collect(&agent.holder(), &mut store).await;
        }
    }

    /// Makes all agents that can reach the store do all their work without failures, and read everything.
    async fn settle(&mut self) -> TestCaseResult {
        for _ in 0..TURNS {
            let mut is_busy = false;
            for node in 0..NODES {
                let agent = &mut self.agents[node];
                if agent.is_connected {
                    let mut memory = self.memory.lock().expect("nobody panicked");
                    agent.connect(&mut memory);
                    agent.hear(&memory, usize::MAX);
                }
            }
            let agents = self.agents.iter().filter(|agent| agent.is_connected);
            let work = agents.map(|agent| agent.work(self.store(None, 0)));
            for had_work in join_all(work).await {
                is_busy |= had_work;
            }
            self.check()?;
            if !is_busy {
                return self.check_settled();
            }
            self.advance(SECOND).await;
        }
        Err(TestCaseError::fail("agents do not come to rest"))
    }

    /// Lets time pass, in which agents that can reach the store keep their leases and read everything.
    async fn pass(&mut self, mut time: Duration) {
        while !time.is_zero() {
            let slice = time.min(self.timing.lease / 3);
            time -= slice;
            self.advance(slice).await;
            for agent in self.agents.iter_mut().filter(|agent| agent.is_connected) {
                let mut memory = self.memory.lock().expect("nobody panicked");
                agent.connect(&mut memory);
                agent.hear(&memory, usize::MAX);
            }
        }
    }

    async fn advance(&mut self, time: Duration) {
        advance(time).await;
        self.memory(Memory::expire);
    }

    fn stored(&self) -> Stored {
        let keys = Keys::of("default");
        let mut stored = Stored::default();
        for pair in self.memory(|memory| memory.list()) {
            match keys.read(&pair.key).expect("a key of agents") {
                Key::Number(identity) => {
                    let labels = read_labels(&pair.value).expect("labels");
                    stored.numbers.insert(identity, labels);
                }
                Key::Labels(digest) => {
                    let identity = read_number(&pair.value).expect("a number");
                    stored.digests.insert(digest, identity);
                }
                Key::Reference(identity, node) => {
                    let session = read_text(&pair.value).expect("a session");
                    stored.references.insert((identity, node), session);
                }
                Key::Freed(_) | Key::Address(..) => {}
            }
        }
        stored
    }

    /// Checks the invariants that always hold.
    fn check(&mut self) -> TestCaseResult {
        let stored = self.stored();
        // Numbers and label sets correspond one to one, and every reference is to an existing number.
        prop_assert_eq!(stored.numbers.len(), stored.digests.len());
        for (identity, labels) in &stored.numbers {
            prop_assert_eq!(stored.digests.get(&digest_of(labels)), Some(identity));
        }
        for (identity, node) in stored.references.keys() {
            let is_there = stored.numbers.contains_key(identity);
            prop_assert!(is_there, "{node} refers to {identity}");
        }
        // A number that left the store is reserved for a while.
        let now = self.started.elapsed();
        self.resting.retain(|_, until| *until > now);
        for identity in &self.numbers {
            if !stored.numbers.contains_key(identity) {
                let until = now + self.timing.reuse_after;
                self.resting.insert(*identity, until);
            }
        }
        self.numbers = stored.numbers.keys().copied().collect();
        for identity in self.resting.keys() {
            prop_assert!(!self.numbers.contains(identity), "{identity} rests");
        }
        self.check_held(&stored)
    }

    /// Checks that identities which are held and in the store stay the same while the lease lasts.
    fn check_held(&mut self, stored: &Stored) -> TestCaseResult {
        let mut firm = BTreeMap::new();
        for (node, agent) in self.agents.iter().enumerate() {
            let session = agent.lease.to_string();
            let has_lease = self.memory(|memory| memory.has_lease(agent.lease));
            for (set, identity) in agent.held() {
                if let Some(kept) = self.kept.get(&set) {
                    prop_assert_eq!(identity, *kept, "{} had another one", &agent.name);
                }
                if !has_lease {
                    continue;
                }
                // The agent may not have read yet that the number now belongs to another label set.
                let has_number = stored.numbers.get(&identity) == Some(&labels(set));
                let reference = stored.references.get(&(identity, agent.name.clone()));
                let is_firm = has_number && reference == Some(&session);
                if is_firm {
                    firm.insert((node, agent.lease, set), identity);
                }
                let before = self.firm.get(&(node, agent.lease, set));
                prop_assert!(
                    before.is_none() || is_firm && before == Some(&identity),
                    "{} held {before:?} and holds {identity} for {set}",
                    &agent.name
                );
            }
        }
        self.firm = firm;
        Ok(())
    }

    /// Checks the invariants that hold once agents that can reach the store have done all their work.
    fn check_settled(&self) -> TestCaseResult {
        let mut by_set = BTreeMap::new();
        for agent in self.agents.iter().filter(|agent| agent.is_connected) {
            let held = agent.held();
            prop_assert!(held.keys().eq(agent.uses.keys()), "{held:?}");
            for (set, identity) in held {
                let firm = self.firm.iter();
                let is_firm = firm.clone().any(|((node, _, known), number)| {
                    self.agents[*node].name == agent.name && (*known, *number) == (set, identity)
                });
                prop_assert!(is_firm, "{} lacks {set}", &agent.name);
                prop_assert_eq!(*by_set.entry(set).or_insert(identity), identity);
            }
        }
        let distinct: BTreeSet<_> = by_set.values().collect();
        prop_assert_eq!(distinct.len(), by_set.len());
        Ok(())
    }

    /// Checks that everything is eventually removed once nothing is held.
    async fn end(&mut self) -> TestCaseResult {
        (0..NODES).for_each(|node| self.reconnect(node));
        self.settle().await?;
        for agent in &mut self.agents {
            while let Some(set) = agent.uses.keys().next().copied() {
                agent.release(set);
            }
            agent.shared.wants().forget_earlier();
        }
        self.kept.clear();
        self.settle().await?;
        self.pass(self.timing.collect_after + SECOND).await;
        self.collect(0, None).await;
        self.check()?;
        let stored = self.stored();
        prop_assert_eq!(stored.numbers, BTreeMap::new());
        prop_assert_eq!(stored.references, BTreeMap::new());
        self.pass(self.timing.reuse_after + SECOND).await;
        prop_assert_eq!(self.memory(|memory| memory.list()), []);
        Ok(())
    }
}

/// Runs a future with a model, in simulated time.
fn with_model<T>(work: impl AsyncFnOnce(&mut Model) -> T) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .expect("a runtime");
    runtime.block_on(async { work(&mut Model::new()).await })
}

proptest! {
    #![proptest_config(sequences())]

    #[test]
    fn no_sequence_gives_a_number_two_label_sets_or_takes_one_that_is_held(steps in steps()) {
        with_model(async |model| {
            for step in steps {
                model.take(step).await?;
            }
            model.end().await
        })?;
    }
}

#[test]
fn a_node_that_comes_first_to_an_empty_store_takes_the_number_that_others_have() {
    let renumbered = with_model(async |model| {
        model.take(Step::Acquire(0, 0)).await?;
        // All agents know the identity, and then the store loses it.
        model.take(Step::Wipe(true)).await?;
        model.take(Step::Acquire(1, 0)).await?;
        model.take(Step::Work(vec![(1, None)], 0)).await?;
        model.take(Step::Work(vec![(0, None)], 0)).await
    });
    renumbered.expect("the same number");
}

#[test]
fn a_label_set_gets_the_number_that_it_had_last_though_an_earlier_one_is_still_known() {
    let renumbered = with_model(async |model| {
        let collected_after = 1800;
        let steps = [
            Step::Acquire(0, 3),
            Step::Acquire(1, 0),
            Step::Wait(1),
            // The other agents collect the agent's number, and it gets another number when it is back.
            Step::CutOff(0),
            Step::Wait(collected_after),
            Step::Collect(1, None),
            Step::Wipe(true),
            Step::Acquire(1, 3),
            Step::Work(vec![(1, None)], 0),
            Step::Work(vec![(0, None)], 0),
        ];
        for step in steps {
            model.take(step).await?;
        }
        Ok::<_, TestCaseError>(())
    });
    renumbered.expect("the same number");
}

#[test]
fn a_node_gives_no_number_that_it_holds_to_another_label_set() {
    for seed in 0..20 {
        let [before, after] = with_model(async |model| {
            let work = || Step::Work(vec![(0, None)], seed);
            model.take(Step::Acquire(0, 0)).await.expect("a number");
            model.take(work()).await.expect("a number");
            let before = model.agents[0].held()[&0];
            // The agent has not read back its own writes.
            model.take(Step::Wipe(false)).await.expect("a loss");
            model.take(Step::Acquire(0, 1)).await.expect("a number");
            model.take(work()).await.expect("a number");
            [before, model.agents[0].held()[&0]]
        });
        assert_eq!(before, after, "seed {seed}");
    }
}

#[test]
fn a_label_set_that_lost_its_number_to_another_of_the_node_gets_one_at_once() {
    let held = with_model(async |model| {
        let work = |node| Step::Work(vec![(node, None)], 0);
        // The second node gives the first node's number to another label set, and the first node does not know that.
        for step in [Step::Acquire(0, 0), work(0), Step::Wipe(false)] {
            model.take(step).await.expect("a number");
        }
        for step in [Step::Acquire(1, 1), work(1), Step::Acquire(0, 1)] {
            model.take(step).await.expect("a number");
        }
        // No time passes.
        for step in [work(0), work(0)] {
            model.take(step).await.expect("a number");
        }
        model.agents[0].held()
    });
    assert_eq!(held.len(), 2);
    assert_ne!(held[&0], held[&1]);
}

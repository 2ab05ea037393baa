//! Random sequences of agents' wishes for a file, failed writes, losses of the file and passing time.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use proptest::test_runner::TestCaseResult;

use super::super::super::testing::sequences;
use super::tests::{at, set, timing, writer};
use super::*;

const NODES: u8 = 3;
const SETS: u8 = 6;

#[derive(Clone, Debug)]
enum Step {
    /// An agent wants these label sets; the flag says whether the write fails.
    Wish(u8, Vec<u8>, bool),
    /// This many seconds pass.
    Wait(u16),
    /// The file is lost.
    Wipe,
    /// Another agent takes over, without knowledge of numbers.
    Restart(u8),
    /// The machine's clock jumps by this many seconds.
    Jump(i64),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let node = || 0..NODES;
    let sets = proptest::collection::vec(0..SETS, 0..5);
    let fails = proptest::bool::weighted(0.2);
    let step = prop_oneof![
        12 => (node(), sets, fails).prop_map(|(node, sets, fails)| Step::Wish(node, sets, fails)),
        6 => (1..50_u16).prop_map(Step::Wait),
        2 => Just(Step::Wipe),
        2 => node().prop_map(Step::Restart),
        1 => prop_oneof![Just(86_400), Just(-86_400)].prop_map(Step::Jump),
    ];
    proptest::collection::vec(step, 1..60)
}

/// An agent, and the identities that it was last granted.
struct Agent {
    writer: Writer,
    seen: i64,
    held: BTreeMap<u8, Identity>,
    /// Whether the file contains the granted identities: the file was not lost since, and the clock did not jump.
    is_written: bool,
}

impl Agent {
    fn new(node: u8, start: usize) -> Self {
        let writer = Writer {
            session: format!("n{node}-{start}"),
            ..writer(&format!("n{node}"))
        };
        Self {
            writer,
            seen: 0,
            held: BTreeMap::new(),
            is_written: false,
        }
    }

    /// Whether the agent's session cannot have expired, given that it is renewed after a third of its duration.
    fn counts(&self, now: i64) -> bool {
        self.is_written && now - self.seen < 20
    }
}

struct Model {
    document: Document,
    now: i64,
    agents: Vec<Agent>,
    starts: usize,
    /// Until when the numbers of collected identities are reserved.
    resting: BTreeMap<Identity, i64>,
}

impl Model {
    fn new() -> Self {
        Self {
            document: Document::default(),
            now: 0,
            agents: (0..NODES).map(|node| Agent::new(node, 0)).collect(),
            starts: 0,
            resting: BTreeMap::new(),
        }
    }

    fn take(&mut self, step: Step) -> TestCaseResult {
        match step {
            Step::Wait(seconds) => self.now += i64::from(seconds),
            Step::Wipe => {
                self.document = Document::default();
                self.unsettle();
            }
            Step::Restart(node) => {
                self.starts += 1;
                self.agents[usize::from(node)] = Agent::new(node, self.starts);
            }
            Step::Jump(seconds) => {
                self.now += seconds;
                self.unsettle();
            }
            Step::Wish(node, sets, fails) => self.wish(node, &sets, fails)?,
        }
        self.check()
    }

    /// Drops all expectations about the file.
    fn unsettle(&mut self) {
        self.agents
            .iter_mut()
            .for_each(|agent| agent.is_written = false);
        self.resting.clear();
    }

    fn wish(&mut self, node: u8, sets: &[u8], fails: bool) -> TestCaseResult {
        let agent = &mut self.agents[usize::from(node)];
        let wish = Wish {
            sets: sets
                .iter()
                .map(|one| (set(*one), agent.held.get(one).copied()))
                .collect(),
            forgets_earlier: true,
            ..Wish::default()
        };
        let before = self.document.clone();
        let mut document = before.clone();
        let granted = document.grant(&agent.writer, &wish, at(self.now));
        if fails {
            // The agent gets an error, and continues with its previous identities.
            return Ok(());
        }
        let granted = granted.into_iter().map(|one| one.expect("one"));
        let held: BTreeMap<u8, Identity> = sets.iter().copied().zip(granted).collect();
        for (one, identity) in &held {
            let Some(preferred) = agent.held.get(one) else {
                continue;
            };
            let labels = set(*one);
            let mut others = before.identities.iter();
            let is_elsewhere =
                others.any(|(other, entry)| other != preferred && entry.labels == labels);
            let known = before.identities.get(preferred);
            let is_taken = known.is_some_and(|entry| entry.labels != labels);
            let rests = before.freed.contains_key(preferred);
            prop_assert!(
                identity == preferred || is_elsewhere || is_taken || rests,
                "{labels:?} had {preferred}"
            );
            prop_assert!(identity == preferred || !agent.counts(self.now));
        }
        for identity in before.identities.keys() {
            if !document.identities.contains_key(identity) {
                let reuse_after = agent.writer.timing.reuse_after.as_secs().cast_signed();
                self.resting.insert(*identity, self.now + reuse_after);
            }
        }
        self.document = document;
        agent.seen = self.now;
        agent.held = held;
        agent.is_written = true;
        Ok(())
    }

    fn check(&mut self) -> TestCaseResult {
        let text = serde_json::to_vec(&self.document).expect("plain data");
        // Parsing also checks that no two numbers have the same labels.
        prop_assert_eq!(Document::parse(&text), Ok(self.document.clone()));
        let now = self.now;
        self.resting.retain(|_, until| *until > now);
        for identity in self.resting.keys() {
            let is_there = self.document.identities.contains_key(identity);
            prop_assert!(!is_there, "{identity} rests");
        }
        let mut in_force = BTreeMap::new();
        for agent in self.agents.iter().filter(|agent| agent.counts(now)) {
            for (one, identity) in &agent.held {
                prop_assert_eq!(&self.document.identities[identity].labels, &set(*one));
                prop_assert_eq!(*in_force.entry(*one).or_insert(*identity), *identity);
            }
        }
        let distinct: BTreeSet<_> = in_force.values().collect();
        prop_assert_eq!(distinct.len(), in_force.len());
        Ok(())
    }

    /// Checks that everything is eventually removed once nothing is wanted. Entries written while a clock was ahead
    /// stay longer by that much.
    fn end(&mut self) -> TestCaseResult {
        const DAY: i64 = 86_400;
        let times = timing();
        let days = 60 * DAY;
        let [collect, reuse] =
            [times.collect_after, times.reuse_after].map(|time| time.as_secs().cast_signed() + 1);
        for wait in [
            0,
            days + times.lease.as_secs().cast_signed(),
            collect,
            reuse,
        ] {
            self.now += wait;
            for node in 0..NODES {
                self.wish(node, &[], false)?;
            }
        }
        prop_assert!(self.document.identities.is_empty());
        self.now += days + reuse;
        self.wish(0, &[], false)?;
        prop_assert!(self.document.freed.is_empty());
        Ok(())
    }
}

proptest! {
    #![proptest_config(sequences())]

    #[test]
    fn no_sequence_gives_a_live_set_two_numbers_or_a_number_two_sets(steps in steps()) {
        let mut model = Model::new();
        for step in steps {
            model.take(step)?;
        }
        model.end()?;
    }
}

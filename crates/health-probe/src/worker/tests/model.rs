//! Random sequences, checked against a simple reference and for invariants.

use std::collections::{HashMap, HashSet};

use jiff::SignedDuration;
use proptest::prelude::*;
use proptest::sample::select;

use super::*;

/// The number of sequences: large on request.
fn sequences() -> ProptestConfig {
    let is_long = std::env::var_os("HEALTH_AGENT_LONG").is_some_and(|value| value == "1");
    ProptestConfig::with_cases(if is_long { 100_000 } else { 400 })
}

/// One attempt of a probe.
#[derive(Clone, Copy, Debug)]
enum Attempt {
    Well,
    Odd,
    Ill,
    Unclear,
    Error,
    NotSent,
}

impl Attempt {
    fn report(self) -> Report {
        match self {
            Self::Well => success(),
            Self::Odd => Report::Outcome(outcome(RawResult::Warning)),
            Self::Ill => failure(),
            Self::Unclear => Report::Outcome(outcome(RawResult::Unknown)),
            Self::Error => Report::Outcome(error()),
            Self::NotSent => Report::NotSent,
        }
    }
}

fn attempt() -> impl Strategy<Value = Attempt> {
    use Attempt::{Error, Ill, NotSent, Odd, Unclear, Well};
    select(vec![
        Well, Well, Well, Odd, Ill, Ill, Ill, Unclear, Error, Error, NotSent,
    ])
}

/// An event.
#[derive(Clone, Debug)]
enum Event {
    /// The status changes to this one.
    Status(Option<PodStatus>),
    /// The worker is due, with these outcomes of its attempts.
    Tick([Attempt; 3]),
    /// Time passes, in milliseconds.
    Pass(u64),
    /// The wall clock is set, by this many seconds.
    Clock(i64),
    /// The agent is gone for this many milliseconds; the flag says whether the next agent gets the saved state.
    Restart(u64, bool),
}

fn container_status() -> impl Strategy<Value = ContainerStatus> {
    let state = prop_oneof![
        1 => Just(ContainerState::Waiting),
        6 => prop::option::weighted(0.95, -30_000_i64..100_000).prop_map(|age| {
            ContainerState::Running {
                started_at: age.map(|age| agent_start() - SignedDuration::from_millis(age)),
            }
        }),
        1 => (0_i32..2).prop_map(|exit_code| ContainerState::Terminated { exit_code }),
    ];
    let name = select(vec!["app", "app", "app", "app", "app", "other"]);
    let id = select(vec![
        None,
        Some(""),
        Some("1"),
        Some("1"),
        Some("2"),
        Some("3"),
    ]);
    let started = select(vec![None, Some(false), Some(true), Some(true)]);
    (name, id, state, started, any::<bool>()).prop_map(|(name, id, state, started, ready)| {
        ContainerStatus {
            name: name.into(),
            id: id.map(Arc::from),
            state,
            ready,
            started,
        }
    })
}

fn pod_status() -> impl Strategy<Value = PodStatus> {
    let phase = prop_oneof![
        1 => select(vec![Phase::Failed, Phase::Succeeded]),
        20 => select(vec![Phase::Pending, Phase::Running, Phase::Unknown]),
    ];
    let containers = || prop::collection::vec(container_status(), 0..2);
    let deleting = prop::bool::weighted(0.08);
    (phase, deleting, any::<bool>(), containers(), containers()).prop_map(
        |(phase, deleting, ready, containers, init_containers)| PodStatus {
            phase,
            deleting,
            ready,
            containers,
            init_containers,
        },
    )
}

fn event() -> impl Strategy<Value = Event> {
    let time = prop_oneof![0_u64..12_000, 0_u64..60_000];
    prop_oneof![
        3 => prop::option::weighted(0.95, pod_status()).prop_map(Event::Status),
        12 => [attempt(), attempt(), attempt()].prop_map(Event::Tick),
        2 => time.clone().prop_map(Event::Pass),
        1 => (-5000_i64..5000).prop_map(Event::Clock),
        1 => (time, prop::bool::weighted(0.8)).prop_map(|(away, kept)| Event::Restart(away, kept)),
    ]
}

/// The specification line by line, without regard for speed or style.
#[derive(Clone, Debug)]
struct Reference {
    kind: ProbeType,
    sidecar: bool,
    never: bool,
    delay: i64,
    successes: u32,
    failures: u32,
    id: String,
    cache: Option<ProbeResult>,
    last: Option<ProbeResult>,
    count: u32,
    hold: bool,
    /// When the container was first seen running, and its age at that time, in ms.
    seen: Option<(i128, i128)>,
    agent_start: Timestamp,
    /// An earlier agent's state, by container.
    old: Option<Box<Reference>>,
    reported: Vec<(String, ProbeResult)>,
}

impl Reference {
    fn write(&mut self, result: ProbeResult) {
        if self.cache != Some(result) {
            self.reported.push((self.id.clone(), result));
        }
        self.cache = Some(result);
    }

    /// Runs the worker once. Returns whether the worker stays, and how many attempts were made.
    fn do_probe(
        &mut self,
        status: Option<&PodStatus>,
        now: Duration,
        wall: Timestamp,
        attempts: [Attempt; 3],
    ) -> (bool, usize) {
        // 1, 2
        let Some(status) = status else {
            return (true, 0);
        };
        if matches!(status.phase, Phase::Failed | Phase::Succeeded) {
            return (false, 0);
        }
        // 3
        let mut found = None;
        for container in status.init_containers.iter().chain(&status.containers) {
            let is_regular = status
                .containers
                .iter()
                .any(|one| std::ptr::eq(one, container));
            if &*container.name == "app" && (found.is_none() || is_regular) {
                found = Some(container);
            }
        }
        let Some(container) = found else {
            return (true, 0);
        };
        let id = container.id.as_deref().unwrap_or("").to_owned();
        if id.is_empty() {
            return (true, 0);
        }
        // 4
        let started_at = match container.state {
            ContainerState::Running { started_at } => started_at,
            _ => None,
        };
        if id != self.id {
            self.id = id.clone();
            self.cache = None;
            self.hold = false;
            self.last = None;
            self.count = 0;
            self.seen = None;
            let old = self.old.take();
            let survived = started_at
                .is_some_and(|at| self.agent_start.duration_since(at).as_millis() > 10_000);
            if let Some(old) = old.filter(|old| old.id == id) {
                self.last = old.last;
                self.count = old.count;
                self.hold = old.hold;
                if let Some(result) = old.cache {
                    self.write(result);
                }
            } else if !survived {
                let started_sidecar = self.sidecar && container.started == Some(true);
                self.write(match self.kind {
                    Readiness => Failure,
                    Liveness => Success,
                    Startup if started_sidecar => Success,
                    Startup => Unknown,
                });
            }
        }
        // 5
        if self.hold {
            return (true, 0);
        }
        // 6
        match container.state {
            ContainerState::Running { .. } => {}
            ContainerState::Waiting => {
                self.write(Failure);
                return (true, 0);
            }
            ContainerState::Terminated { .. } => {
                self.write(Failure);
                return (!self.never || self.sidecar, 0);
            }
        }
        // 7
        if status.deleting && self.kind != Readiness {
            self.write(Success);
            return (false, 0);
        }
        // 8
        let ms = now.as_millis() as i128;
        let age = started_at.map_or(0, |at| wall.duration_since(at).as_millis().max(0));
        let (since, age) = *self.seen.get_or_insert((ms, age));
        if (age + ms - since).div_euclid(1000) < i128::from(self.delay) {
            return (true, 0);
        }
        // 9
        if (container.started == Some(true)) == (self.kind == Startup) {
            return (true, 0);
        }
        // 10
        let mut made = 0;
        let mut result = None;
        for attempt in attempts {
            made += 1;
            match attempt {
                Attempt::Error => continue,
                Attempt::Well | Attempt::Odd => result = Some(Success),
                Attempt::Ill | Attempt::Unclear => result = Some(Failure),
                Attempt::NotSent => {}
            }
            break;
        }
        let Some(result) = result else {
            return (true, made);
        };
        // 11
        self.count = if self.last == Some(result) {
            self.count + 1
        } else {
            1
        };
        self.last = Some(result);
        // 12
        let enough = if result == Failure {
            self.failures
        } else {
            self.successes
        };
        if self.count < enough {
            return (true, made);
        }
        // 13, 14
        self.write(result);
        if self.kind == Startup || (self.kind == Liveness && result == Failure) {
            self.hold = true;
            self.count = 0;
        }
        (true, made)
    }
}

/// The start of a sequence.
#[derive(Clone, Debug)]
struct Setting {
    kind: ProbeType,
    role: Role,
    policy: RestartPolicy,
    probe: Probe,
}

fn setting() -> impl Strategy<Value = Setting> {
    let policy = select(vec![
        RestartPolicy::Always,
        RestartPolicy::OnFailure,
        RestartPolicy::Never,
    ]);
    let role = select(vec![Role::Regular, Role::Regular, Role::Sidecar]);
    let kind = select(ProbeType::ALL.to_vec());
    (kind, role, policy, -5_i32..20, 1_u32..4, 1_u32..4).prop_map(
        |(kind, role, policy, delay, successes, failures)| Setting {
            kind,
            role,
            policy,
            probe: Probe {
                initial_delay_seconds: delay,
                success_threshold: if kind == Readiness { successes } else { 1 },
                failure_threshold: failures,
                ..probe()
            },
        },
    )
}

fn reference(setting: &Setting, agent_start: Timestamp, old: Option<Box<Reference>>) -> Reference {
    Reference {
        kind: setting.kind,
        sidecar: setting.role == Role::Sidecar,
        never: setting.policy == RestartPolicy::Never,
        delay: setting.probe.initial_delay_seconds.into(),
        successes: setting.probe.success_threshold,
        failures: setting.probe.failure_threshold,
        id: String::new(),
        cache: None,
        last: None,
        count: 0,
        hold: false,
        seen: None,
        agent_start,
        old,
        reported: Vec::new(),
    }
}

proptest! {
    #![proptest_config(sequences())]

    #[test]
    fn a_worker_does_what_the_specification_says(
        setting in setting(),
        events in prop::collection::vec(event(), 1..50),
    ) {
        let new = |saved| Worker::new(setting.kind, setting.role, Arc::new(setting.probe.clone()), saved);
        let mut start = agent_start();
        let (mut now, mut clock) = (Duration::ZERO, SignedDuration::ZERO);
        let mut worker = new(None);
        let mut plain = reference(&setting, start, None);
        let mut status: Option<PodStatus> = None;
        for event in events {
            let wall = start + clock + SignedDuration::try_from(now).unwrap();
            match event {
                Event::Status(reported) => status = reported,
                Event::Pass(ms) => now += millis(ms),
                Event::Clock(seconds) => clock += SignedDuration::from_secs(seconds),
                Event::Restart(away, is_kept) => {
                    start = wall + SignedDuration::from_millis(away as i64);
                    (now, clock) = (Duration::ZERO, SignedDuration::ZERO);
                    worker = new(worker.save("a", "app").filter(|_| is_kept));
                    // An agent that has seen no container passes on the state that it inherited.
                    let old = if plain.id.is_empty() { plain.old } else { Some(Box::new(plain)) };
                    plain = reference(&setting, start, old.filter(|_| is_kept));
                }
                Event::Tick(attempts) => {
                    let mut news = Vec::new();
                    let situation = Situation {
                        status: status.as_ref(),
                        container: "app",
                        restart_policy: setting.policy,
                        now,
                        wall,
                        agent_start: start,
                    };
                    let decision = worker.decide(&situation, &mut news);
                    let mut made = 0;
                    if decision == Decision::Run {
                        loop {
                            let report = attempts[made].report();
                            made += 1;
                            if let Conclusion::Done(_) = worker.conclude(&report, &mut news) {
                                break;
                            }
                        }
                    }
                    let stays = !matches!(decision, Decision::Exit(_));
                    plain.reported.clear();
                    let expected = plain.do_probe(status.as_ref(), now, wall, attempts);
                    prop_assert_eq!((stays, made), expected);
                    let news: Vec<_> = news.into_iter().map(|(id, result)| (id.to_string(), result)).collect();
                    prop_assert_eq!(news, plain.reported.clone());
                    prop_assert_eq!(worker.result(), plain.cache);
                    prop_assert_eq!(worker.run(), (plain.last, plain.count));
                    prop_assert_eq!(worker.is_on_hold(), plain.hold);
                    if !stays {
                        worker = new(None);
                        plain = reference(&setting, start, None);
                    }
                }
            }
        }
    }
}

/// The number of slots held by a pod plus the number held by its namespace.
fn share(under_way: &[Start], pod: &PodSpec) -> usize {
    let of_pod = under_way.iter().filter(|one| one.pod.uid == pod.uid);
    let namespace = under_way
        .iter()
        .filter(|one| one.pod.namespace == pod.namespace);
    of_pod.count() + namespace.count()
}

/// An event for a manager.
#[derive(Clone, Debug)]
enum Act {
    Add(usize, Vec<ProbeType>),
    Remove(usize),
    Status(usize, PodStatus),
    Pass(u64),
    /// This many of the runs under way end, each with this result.
    End(usize, Attempt),
}

fn act() -> impl Strategy<Value = Act> {
    let pod = 0_usize..4;
    let kinds = prop::sample::subsequence(ProbeType::ALL.to_vec(), 0..=3);
    prop_oneof![
        3 => (pod.clone(), kinds).prop_map(|(pod, kinds)| Act::Add(pod, kinds)),
        1 => pod.clone().prop_map(Act::Remove),
        4 => (pod, pod_status()).prop_map(|(pod, status)| Act::Status(pod, status)),
        6 => prop_oneof![0_u64..300, 0_u64..30_000].prop_map(Act::Pass),
        8 => (1_usize..5, attempt()).prop_map(|(count, attempt)| Act::End(count, attempt)),
    ]
}

proptest! {
    #![proptest_config(sequences())]

    #[test]
    fn a_manager_keeps_its_promises(
        concurrent in 1_usize..6,
        acts in prop::collection::vec(act(), 1..60),
    ) {
        let mut bed = Bed::with(Limits { per_second: 50, concurrent, pod_per_second: 20 });
        let mut under_way: Vec<Start> = Vec::new();
        let mut reported: HashMap<_, ProbeResult> = HashMap::new();
        let mut sent: HashMap<Arc<str>, Vec<Duration>> = HashMap::new();
        for act in acts {
            match act {
                Act::Add(uid, kinds) => {
                    let probes: Vec<_> = kinds.into_iter().map(|kind| (kind, thresholds(1, 2))).collect();
                    bed.add(PodSpec {
                        namespace: (uid % 2).to_string(),
                        ..pod(&uid.to_string(), vec![container("app", Role::Regular, &probes)])
                    });
                }
                Act::Remove(uid) => bed.manager.remove_pod(&uid.to_string()),
                Act::Status(uid, status) => bed.set_status(&uid.to_string(), status),
                Act::Pass(ms) => bed.now += millis(ms),
                Act::End(count, attempt) => {
                    for _ in 0..count.min(under_way.len()) {
                        let start = under_way.remove(0);
                        if let Finished::Again(again) = bed.finish(start.worker, attempt.report()) {
                            prop_assert_eq!(again.worker, start.worker);
                            prop_assert_eq!(again.attempt, start.attempt + 1);
                            under_way.push(again);
                        }
                    }
                }
            }
            while let Some(start) = bed.poll() {
                prop_assert!(start.due <= bed.now, "early");
                prop_assert!(start.probe.handler == probe().handler);
                let share = share(&under_way, &start.pod);
                prop_assert!(share < concurrent - under_way.len(), "more than its share");
                let sent = sent.entry(start.pod.uid.clone()).or_default();
                sent.push(bed.now);
                let last_second = sent.iter().filter(|at| **at + secs(1) > bed.now).count();
                prop_assert!(last_second <= 41, "{} a second", last_second);
                under_way.push(start);
            }
            // No worker has two runs at a time, and the number of runs does not exceed the limit.
            let ids: HashSet<_> = under_way.iter().map(|start| start.worker).collect();
            prop_assert_eq!(ids.len(), under_way.len());
            prop_assert_eq!(bed.manager.in_flight(), under_way.len());
            prop_assert!(under_way.len() <= concurrent);
            prop_assert!(bed.manager.queued() <= bed.manager.workers());
            // Every worker that is not in a run has a time, and a wake-up for that time.
            let wake = bed.manager.next_wake();
            for view in bed.manager.list() {
                prop_assert!(view.in_flight == view.next.is_none());
                let holds = share(&under_way, view.pod);
                let is_awaited = view.in_flight || wake.is_some() || holds >= concurrent - under_way.len();
                prop_assert!(is_awaited);
                // If the first run uses the budget's advance, the second run is that much later.
                let latest = bed.now + secs(10) + millis(50);
                let in_period = view.next.is_none_or(|next| next <= latest);
                prop_assert!(in_period, "{:?} at {:?}", view.next, bed.now);
            }
            // Readiness agrees with the results.
            for uid in 0..4 {
                let uid = uid.to_string();
                let Some(status) = bed.manager.status(&uid) else { continue };
                for container in &status.containers {
                    if container.ready {
                        prop_assert!(container.state.is_running());
                    }
                    prop_assert!(container.started.is_some());
                }
            }
            for update in bed.manager.take_updates() {
                let key = (update.pod_uid, update.container, update.kind, update.container_id);
                reported.insert(key, update.result);
            }
            for view in bed.manager.list() {
                if let (Some(id), Some(result)) = (view.container_id, view.result) {
                    let key = (view.pod.uid.clone(), view.container.clone(), view.kind, id.clone());
                    prop_assert_eq!(reported.get(&key), Some(&result), "what is known was reported");
                }
            }
        }
        bed.manager.cleanup_pods(bed.now, |_| false);
        for start in under_way {
            prop_assert_eq!(bed.finish(start.worker, failure()), Finished::Dropped);
        }
        prop_assert_eq!(bed.manager.in_flight(), 0);
        prop_assert_eq!(bed.manager.queued(), 0);
        prop_assert_eq!(bed.manager.next_wake(), None);
        prop_assert!(bed.manager.shares.is_empty());
        prop_assert!(bed.manager.snapshot(bed.now).workers.is_empty());
    }
}

//! Compares the manager, the enforcer and the state folder with a plain list of endpoints and policies, through any
//! faults and with the agent killed at any time.

mod plain;
mod steps;

use std::collections::BTreeMap;
use std::fs;
use std::future::Future;
use std::path::PathBuf;

use health_model::api::Endpoint;
use proptest::prelude::*;
use tokio::runtime::{Builder, Runtime};
use tokio::task::yield_now;
use tokio::time::{sleep, timeout};

use self::plain::{Plain, PlainEndpoint, labels_of};
use self::steps::{Change, Fault, LABELS, Step, steps};
pub(super) use self::steps::{policy_name, policy_text};
use super::*;
use crate::error::{EndpointError, ErrorKind};

/// How long the agent is left alone to finish all that it can: longer than any pause between two attempts.
const QUIET: Duration = Duration::from_secs(100);

/// Result of a change.
enum Outcome {
    Created(Result<Arc<Endpoint>, EndpointError>),
    Relabelled(Result<(), EndpointError>),
    Deleted(Result<(), EndpointError>),
    Imported(Result<(), EnforceError>),
    /// There was nothing to change.
    Nothing,
}

/// A machine with an agent, and the expected state.
struct Model {
    site: Site,
    plain: Plain,
    faults: BTreeSet<Fault>,
    agent: Option<(Runtime, Agent)>,
}

impl Model {
    fn new() -> Self {
        let mut model = Self {
            site: Site::new(),
            plain: Plain::default(),
            faults: BTreeSet::new(),
            agent: None,
        };
        model.start();
        model
    }

    fn start(&mut self) {
        let runtime = Builder::new_current_thread()
            .enable_time()
            .start_paused(true)
            .build()
            .unwrap();
        let agent = runtime.block_on(self.site.start());
        self.agent = Some((runtime, agent));
    }

    /// Kills the agent, and starts the next one.
    fn restart(&mut self) {
        self.agent = None;
        // An agent cannot start with an unreadable folder, or if it cannot remove half-created endpoints.
        self.set(Fault::Files, false);
        self.set(Fault::Device("remove"), false);
        self.start();
        // Endpoints that could not be deleted remain alive.
        for shown in self.agent().manager.endpoints() {
            let n = shown.netns.trim_start_matches("/n").parse().unwrap();
            // If several devices disappeared while no file could record the deletion of their endpoints, nothing else
            // deletes those endpoints.
            let reason = shown.reason.as_deref().unwrap_or_default();
            if reason.starts_with("its device is gone") {
                let manager = self.agent().manager;
                let deleted = self.run(async { manager.delete(&Selector::Id(shown.id)).await });
                assert!(deleted.is_ok() || !self.faults.is_empty(), "{deleted:?}");
                continue;
            }
            if self.plain.leaving.remove(&n) {
                let endpoint = PlainEndpoint::of(&shown, labels_of(&shown));
                self.plain.add(n, endpoint);
            }
        }
    }

    fn agent(&self) -> Agent {
        self.agent.as_ref().expect("an agent").1.clone()
    }

    fn run<T>(&self, work: impl Future<Output = T>) -> T {
        let (runtime, _) = self.agent.as_ref().expect("an agent");
        runtime.block_on(work)
    }

    fn pass(&self, time: Duration) {
        self.run(async { sleep(time).await });
    }

    fn take(&mut self, step: &Step) {
        match step {
            Step::Change(change) => {
                let outcome = self.run(perform(self.agent(), change.clone()));
                self.note(change, outcome);
            }
            Step::Pair(one, other) if one.object() != other.object() => {
                let agent = self.agent();
                let both = async {
                    let one = tokio::spawn(perform(agent.clone(), one.clone()));
                    let other = perform(agent, other.clone()).await;
                    (one.await.unwrap(), other)
                };
                let (of_one, of_other) = self.run(both);
                self.note(one, of_one);
                self.note(other, of_other);
            }
            Step::Pair(..) => {}
            Step::Killed(change, yields) => {
                let agent = self.agent();
                self.run(async {
                    tokio::spawn(perform(agent, change.clone()));
                    for _ in 0..*yields {
                        yield_now().await;
                    }
                });
                self.restart();
                self.find_out(change);
            }
            Step::Kill => self.restart(),
            Step::Fault(fault, is_on) => self.set(*fault, *is_on),
            Step::Detach(n) => {
                if let Some(endpoint) = self.plain.endpoints.get(n) {
                    let ids = BTreeSet::from([endpoint.id]);
                    self.site.kernel.now().attached.remove(&endpoint.id);
                    let manager = self.agent().manager;
                    self.run(async { manager.regenerate(Some(&ids), "detached") });
                }
            }
            Step::DeviceGone(n) => {
                if let Some(endpoint) = self.plain.endpoints.remove(n) {
                    let mut devices = self.site.devices.devices.lock().unwrap();
                    devices.retain(|_, (id, _)| *id != endpoint.id);
                    drop(devices);
                    self.plain.leaving.insert(*n);
                    self.pass(Duration::from_secs(11));
                }
            }
            Step::Swap(one, other) => {
                let agent = self.agent();
                let (one, other) = (labels(LABELS[*one]), labels(LABELS[*other]));
                self.run(async { agent.session.swap(&one, &other) });
            }
            Step::Collect => {
                self.pass(QUIET);
                self.collect();
            }
            Step::Wait(ms) => self.pass(Duration::from_millis(*ms)),
            Step::Settle => {
                self.pass(QUIET);
                self.check_through_faults();
            }
        }
        assert_eq!(self.site.kernel.now().mistakes, [""; 0]);
        assert_eq!(self.site.store.now().mistakes, [""; 0]);
    }

    /// Checks the result of a change, and records it.
    fn note(&mut self, change: &Change, outcome: Outcome) {
        let may_fail = !self.faults.is_empty();
        match (change, outcome) {
            (Change::Create(n, with), Outcome::Created(created)) => {
                let is_there = self.plain.endpoints.contains_key(n);
                match created {
                    Ok(endpoint) => {
                        assert!(!is_there, "/n{n} has two endpoints");
                        self.plain.leaving.remove(n);
                        let with = labels(LABELS[*with]);
                        self.plain.add(*n, PlainEndpoint::of(&endpoint, with));
                    }
                    Err(error) if is_there => {
                        assert_eq!(error.kind(), ErrorKind::Conflict, "{error}");
                    }
                    Err(error) => {
                        assert!(may_fail, "{error}");
                        self.plain.leaving.insert(*n);
                    }
                }
            }
            (Change::Relabel(n, with), Outcome::Relabelled(changed)) => match changed {
                Ok(()) => {
                    let endpoint = self.plain.endpoints.get_mut(n).expect("it is there");
                    endpoint.labels = labels(LABELS[*with]);
                }
                Err(error) => assert!(
                    may_fail || error.kind() == ErrorKind::Unavailable,
                    "{error}"
                ),
            },
            (Change::Delete(n), Outcome::Deleted(deleted)) => {
                if let Err(error) = deleted {
                    assert!(may_fail, "{error}");
                    self.plain.leaving.insert(*n);
                } else {
                    self.plain.leaving.remove(n);
                }
                self.plain.endpoints.remove(n);
            }
            (Change::Import(policy, variant), Outcome::Imported(imported)) => match imported {
                Ok(()) => {
                    let text = policy_text(*policy, *variant);
                    self.plain.policies.insert(*policy, text);
                }
                Err(error) => assert!(may_fail, "{error}"),
            },
            (Change::DeletePolicy(policy), Outcome::Imported(deleted)) => match deleted {
                Ok(()) => {
                    let text = self.plain.policies.remove(policy);
                    assert!(text.is_some(), "a policy that was not there was deleted");
                }
                Err(EnforceError::NoPolicy(_)) => {
                    assert!(!self.plain.policies.contains_key(policy));
                }
                Err(error) => assert!(may_fail, "{error}"),
            },
            (_, Outcome::Nothing) => {}
            (change, _) => panic!("not the outcome of {change:?}"),
        }
    }

    /// Finds out whether a change was made before the agent was killed. It must have been made completely or not at
    /// all.
    fn find_out(&mut self, change: &Change) {
        let agent = self.agent();
        let shown = |n: u16| {
            let netns = format!("/n{n}");
            let endpoints = agent.manager.endpoints();
            endpoints.into_iter().find(|one| one.netns == netns)
        };
        match *change {
            Change::Create(n, with) => {
                let was_there = self.plain.endpoints.contains_key(&n);
                if let Some(made) = shown(n).filter(|_| !was_there) {
                    self.plain.leaving.remove(&n);
                    let with = labels(LABELS[with]);
                    self.plain.add(n, PlainEndpoint::of(&made, with));
                }
            }
            Change::Relabel(n, with) => {
                if let (Some(shown), Some(endpoint)) = (shown(n), self.plain.endpoints.get_mut(&n))
                {
                    let after = labels(LABELS[with]);
                    if labels_of(&shown) == after {
                        endpoint.labels = after;
                    }
                }
            }
            Change::Delete(n) => {
                if shown(n).is_none() {
                    self.plain.endpoints.remove(&n);
                }
            }
            Change::Import(policy, variant) => {
                let mut after = self.plain.policies.clone();
                after.insert(policy, policy_text(policy, variant));
                self.find_out_policies(after);
            }
            Change::DeletePolicy(policy) => {
                let mut after = self.plain.policies.clone();
                after.remove(&policy);
                self.find_out_policies(after);
            }
        }
    }

    fn find_out_policies(&mut self, after: BTreeMap<usize, String>) {
        let now = self.agent().enforcer.repository();
        let after = Plain {
            policies: after,
            ..Plain::default()
        };
        if after.has_policies_of(&now) {
            self.plain.policies = after.policies;
        }
    }

    fn set(&mut self, fault: Fault, is_on: bool) {
        if is_on == self.faults.contains(&fault) {
            return;
        }
        if fault == Fault::Files && self.agent.is_some() {
            // Let time pass only once no task uses the files, as a task might create the folder again.
            self.pass(Duration::from_millis(1));
        }
        let Site {
            kernel,
            store,
            devices,
            dir,
            follows_cluster: _,
            nodes: _,
        } = &self.site;
        match fault {
            Fault::Store => store.now().is_away = is_on,
            Fault::NoIdentity => store.now().is_full = is_on,
            Fault::Programs => kernel.now().refuses_programs = is_on,
            Fault::Prefixes => kernel.now().refuses_prefixes = is_on,
            Fault::Room(room) => {
                kernel.now().filled = match is_on {
                    true => filled_but(kernel.used() + usize::from(room)),
                    false => 0,
                };
            }
            Fault::Device(step) => {
                let mut failing = devices.failing.lock().unwrap();
                *failing = is_on.then_some(step);
                let is_device = |fault: &Fault| matches!(fault, Fault::Device(_));
                self.faults.retain(|fault| !is_device(fault));
            }
            Fault::Files => block(StateDir::of(dir.path()).path().to_owned(), is_on),
            Fault::Rules => {
                let unfinished = dir.path().join(format!(".{FILE}.new"));
                match is_on {
                    true => fs::create_dir(unfinished).unwrap(),
                    false => fs::remove_dir(unfinished).unwrap(),
                }
            }
        }
        match is_on {
            true => self.faults.insert(fault),
            false => self.faults.remove(&fault),
        };
        if let (Fault::Store, Some((runtime, agent))) = (fault, &self.agent) {
            runtime.block_on(async { agent.session.publish() });
        }
    }

    /// Makes the store forget identities that nobody holds. None of them may be in use.
    fn collect(&self) {
        let collected = self.site.store.collect();
        let kernel = self.site.kernel.now();
        for endpoint in self.plain.endpoints.values() {
            if let Some(served) = kernel.served.get(&endpoint.id) {
                let identity = Identity(served.info.identity);
                assert!(
                    self.faults.contains(&Fault::Store) || !collected.contains(&identity),
                    "endpoint {} goes by {identity}, which nobody holds",
                    endpoint.id
                );
            }
        }
        drop(kernel);
        let session = self.agent().session;
        self.run(async { session.publish() });
    }

    /// Checks the invariants that hold even during faults: the existing endpoints and their addresses, and that no
    /// endpoint is reported as healthy when it is not.
    fn check_through_faults(&self) {
        let (agent, kernel) = (self.agent(), &self.site.kernel);
        let shown = self.plain.check_shown(&agent.manager);
        let numbers = self.site.store.now().numbers.clone();
        for (endpoint, shown) in shown {
            let identity = endpoint.identity(&numbers);
            let is_reported = agent.enforcer.lag().is_some()
                || self.faults.contains(&Fault::Store)
                || shown.state != "ready"
                || identity != Some(Identity(shown.identity));
            if !is_reported {
                let found = kernel.found(endpoint.id);
                let wanted = self.plain.wanted(endpoint, &self.site.store);
                assert_eq!(found, Some(wanted), "of {endpoint:?}");
            }
            let served = kernel.now().served[&endpoint.id].addresses.clone();
            assert_eq!(served, endpoint.addresses);
        }
    }

    /// Ends all faults. Then everything must be as expected, and nothing else may exist.
    fn check_at_rest(&mut self) {
        for fault in self.faults.clone() {
            self.set(fault, false);
        }
        let agent = self.agent();
        self.run(async {
            sleep(QUIET).await;
            for n in &self.plain.leaving {
                let meant = Selector::Netns(format!("/n{n}").into());
                agent.manager.delete(&meant).await.unwrap();
            }
            sleep(QUIET).await;
        });
        self.plain.leaving.clear();
        self.check_through_faults();
        self.plain.check_site(&self.site, &agent);
        self.collect();
    }

    fn end(&mut self) {
        self.check_at_rest();
        let agent = self.agent();
        for n in self.plain.endpoints.keys().copied().collect::<Vec<_>>() {
            let change = Change::Delete(n);
            let outcome = self.run(perform(agent.clone(), change.clone()));
            self.note(&change, outcome);
        }
        self.check_at_rest();
        assert_eq!(self.site.kernel.now().tables.len(), 0);
        self.site.store.collect();
        assert_eq!(self.site.store.now().numbers.len(), 0);
    }
}

impl Drop for Model {
    fn drop(&mut self) {
        // Otherwise, the remaining tasks of a failed sequence would end it with another message.
        if let Some((runtime, _)) = self.agent.take() {
            runtime.shutdown_background();
        }
    }
}

/// Replaces a folder with a file, or restores it.
fn block(folder: PathBuf, is_on: bool) {
    let aside = folder.with_extension("aside");
    match is_on {
        true => {
            fs::create_dir_all(&folder).unwrap();
            fs::rename(&folder, &aside).unwrap();
            fs::write(&folder, "").unwrap();
        }
        false => {
            fs::remove_file(&folder).unwrap();
            fs::rename(&aside, &folder).unwrap();
        }
    }
}

/// Requests a change from the agent and waits for the result.
async fn perform(agent: Agent, change: Change) -> Outcome {
    let done = timeout(LONG, ask(&agent, &change)).await;
    done.unwrap_or_else(|_| panic!("{change:?} has no answer"))
}

async fn ask(agent: &Agent, change: &Change) -> Outcome {
    let manager = &agent.manager;
    match *change {
        Change::Create(n, with) => Outcome::Created(manager.create(new(n, LABELS[with])).await),
        Change::Relabel(n, with) => {
            let netns = format!("/n{n}");
            let mut endpoints = manager.endpoints().into_iter();
            let is_meant = |one: &Arc<Endpoint>| {
                one.netns == netns && !["disconnecting", "disconnected"].contains(&&*one.state)
            };
            let Some(endpoint) = endpoints.find(is_meant) else {
                return Outcome::Nothing;
            };
            let after = labels(LABELS[with]);
            let changed = manager.change_labels(
                endpoint.id,
                after.iter().cloned().collect(),
                labels_of(&endpoint).iter().cloned().collect(),
            );
            Outcome::Relabelled(changed.await.map(drop))
        }
        Change::Delete(n) => {
            let meant = Selector::Netns(format!("/n{n}").into());
            Outcome::Deleted(manager.delete(&meant).await.map(drop))
        }
        Change::Import(policy, variant) => {
            let imported = agent.enforcer.import(&policy_text(policy, variant));
            Outcome::Imported(imported.map(drop))
        }
        Change::DeletePolicy(policy) => {
            Outcome::Imported(agent.enforcer.delete(&policy_name(policy)).map(drop))
        }
    }
}

fn check(steps: &[Step]) {
    let mut model = Model::new();
    for step in steps {
        model.take(step);
    }
    model.end();
}

proptest! {
    #![proptest_config(ProptestConfig { max_shrink_iters: 2_000, ..ProptestConfig::with_cases(cases(48)) })]

    #[test]
    fn endpoints_and_policy_are_those_of_a_plain_list_whatever_fails(steps in steps()) {
        check(&steps);
    }
}

use std::collections::VecDeque;
use std::{fmt, fs};

use health_model::api::ServiceProblem;
use tokio::sync::mpsc;
use tokio::time::{sleep, timeout};

use super::*;
use crate::forwarding::Forwarding;
use crate::source::testing::{ServiceText, service_set};
use crate::source::{Folder, Probed, Readiness, Synced};
use crate::spec::{PortKey, Selection, ServiceName};

/// A record of one sync by a provider.
#[derive(Debug, PartialEq)]
struct Done {
    /// Time since the start.
    at: Duration,
    is_full: bool,
    /// The services whose ports changed.
    changed: Vec<String>,
    deleted: Vec<String>,
}

/// Records its work, and ends as scripted (`None`: with a panic); all later syncs succeed.
struct Recorder {
    start: Instant,
    results: VecDeque<Option<bool>>,
    done: mpsc::UnboundedSender<Done>,
}

impl Provider for Recorder {
    type Error = &'static str;

    async fn sync(&mut self, work: Work<'_>) -> Result<(), &'static str> {
        let changed = work.changes.ports.iter();
        let done = Done {
            at: self.start.elapsed(),
            is_full: work.is_full,
            changed: changed
                .map(|port| port.name.service.name.to_string())
                .collect(),
            deleted: work
                .changes
                .deleted
                .iter()
                .map(ToString::to_string)
                .collect(),
        };
        self.done.send(done).unwrap();
        match self.results.pop_front().unwrap_or(Some(true)) {
            Some(true) => Ok(()),
            Some(false) => Err("no room"),
            None => panic!("a sync that panics"),
        }
    }
}

/// A source's services on the node `here`.
struct Bed {
    source: watch::Sender<Arc<ServiceSet>>,
    topology: watch::Sender<Topology>,
    services: Services,
    view: watch::Receiver<Arc<View>>,
    done: mpsc::UnboundedReceiver<Done>,
}

impl Bed {
    fn new(results: &[Option<bool>]) -> Self {
        let (source, set) = watch::channel(Arc::<ServiceSet>::default());
        Self::of(results, source, vec![set])
    }

    fn of(
        results: &[Option<bool>],
        source: watch::Sender<Arc<ServiceSet>>,
        sources: Vec<watch::Receiver<Arc<ServiceSet>>>,
    ) -> Self {
        let settings = SyncSettings {
            intervals: Intervals {
                min: s(1),
                retry: s(5),
                max: s(60),
            },
            families: vec![Family::V4],
            health_timeout: s(20),
            clock: || Timestamp::UNIX_EPOCH,
        };
        let (sender, done) = mpsc::unbounded_channel();
        let provider = Recorder {
            start: Instant::now(),
            results: results.iter().copied().collect(),
            done: sender,
        };
        let (topology, place) = watch::channel(Topology {
            node: "here".into(),
            zone: None,
        });
        let services = Services::start(settings, place, sources, provider).unwrap();
        Self {
            source,
            topology,
            view: services.handle().view(),
            services,
            done,
        }
    }

    fn set(&self, texts: &[ServiceText]) {
        let set = service_set("test", texts);
        self.source.send_replace(Arc::new(set));
    }

    async fn done(&mut self) -> Done {
        self.done.recv().await.expect("a sync")
    }

    /// Waits until the view meets a condition.
    async fn until(&mut self, is_so: impl FnMut(&Arc<View>) -> bool) -> Arc<View> {
        self.view.wait_for(is_so).await.unwrap().clone()
    }
}

const fn s(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn done(at: u64, is_full: bool, changed: &[&str]) -> Done {
    Done {
        at: s(at),
        is_full,
        changed: changed.iter().map(|&name| name.to_owned()).collect(),
        deleted: Vec::new(),
    }
}

fn web() -> ServiceText {
    ServiceText::new("web", "10.96.0.1")
        .endpoint("10.1.0.1", "here", "{}")
        .endpoint(
            "10.1.0.2",
            "there",
            "{serving: true, ready: false, terminating: true}",
        )
}

/// The backends of a service: the last byte of each address, and whether new flows go there.
fn backends(view: &View, service: &str) -> Vec<(String, bool)> {
    let Some(entry) = view.service(&ServiceName::new("shop", service), &Forwarding::default())
    else {
        return Vec::new();
    };
    let backends = entry.ports[0].backends.iter();
    backends
        .map(|one| (one.address.to_string(), one.in_cluster_list))
        .collect()
}

#[tokio::test(start_paused = true)]
async fn whoever_asks_gets_a_sync_though_nothing_has_changed() {
    let mut bed = Bed::new(&[]);
    bed.services.handle().sync();
    assert!(timeout(s(100), bed.done()).await.is_err());
    bed.set(&[web()]);
    let first = bed.done().await;
    assert!(first.is_full);
    bed.services.handle().sync();
    let second = bed.done().await;
    assert_eq!((second.at - first.at, second.is_full), (s(1), false));
}

#[tokio::test(start_paused = true)]
async fn nothing_is_done_before_both_kinds_are_read_but_problems_are_shown() {
    let mut bed = Bed::new(&[]);
    let mut set = service_set("test", &[web()]);
    set.synced = Synced {
        services: true,
        slices: false,
    };
    set.problems = Arc::new([ServiceProblem {
        subject: "test".to_owned(),
        problem: "half of it".to_owned(),
    }]);
    bed.source.send_replace(Arc::new(set.clone()));
    let view = bed.until(|view| !view.problems.is_empty()).await;
    assert!(!view.is_synced && view.names().next().is_none(), "{view:?}");
    assert!(timeout(s(100), bed.done()).await.is_err());

    set.synced.slices = true;
    bed.source.send_replace(Arc::new(set.clone()));
    let first = bed.done().await;
    assert_eq!(
        (first.is_full, &*first.changed),
        (true, &["web".to_owned()][..])
    );
    assert!(bed.until(|view| view.is_synced).await.names().count() == 1);
    // A source that rereads everything does not hold up syncs.
    set.synced = Synced::default();
    set.services.clear();
    bed.source.send_replace(Arc::new(set));
    assert_eq!(bed.done().await.deleted, ["shop/web"]);
}

#[tokio::test(start_paused = true)]
async fn changes_are_gathered_and_all_is_looked_at_now_and_then() {
    let mut bed = Bed::new(&[]);
    bed.set(&[web()]);
    assert_eq!(bed.done().await, done(0, true, &["web"]));
    for count in 1..=3 {
        sleep(Duration::from_millis(100)).await;
        let name = format!("more-{count}");
        bed.set(&[web(), ServiceText::new(&name, "10.96.0.9")]);
    }
    assert_eq!(bed.done().await, done(1, false, &["more-3"]));
    // There is one sync per maximum interval, and some of these syncs find that a full one is due.
    assert_eq!(bed.done().await, done(61, true, &[]));
    assert_eq!(bed.done().await, done(121, true, &[]));
}

#[tokio::test(start_paused = true)]
async fn what_failed_is_done_again_as_a_whole_with_all_that_came_since() {
    let results = [Some(true), Some(false), None, Some(true)];
    let mut bed = Bed::new(&results);
    let other = || ServiceText::new("other", "10.96.0.2");
    bed.set(&[web(), other()]);
    bed.done().await;

    bed.set(&[other()]);
    let failed = bed.done().await;
    assert_eq!(
        (failed.is_full, &*failed.deleted),
        (false, &["shop/web".to_owned()][..])
    );
    let view = bed.until(|view| view.failure.is_some()).await;
    assert_eq!(view.failure.as_ref().unwrap().error, "no room");
    let counts = |bed: &Bed| {
        let counts = bed.services.handle().changes();
        [
            (counts.services, counts.pending_services),
            (counts.endpoints, counts.pending_endpoints),
        ]
    };
    assert_eq!(counts(&bed), [(3, 1), (3, 1)]);
    // The provider panics now, and is called again. A service that is back does not count as deleted.
    bed.set(&[web(), other().endpoint("10.1.0.3", "there", "{}")]);
    assert_eq!(bed.done().await, done(2, true, &["other", "web"]));
    assert_eq!(bed.done().await, done(7, true, &["other", "web"]));
    bed.until(|view| view.failure.is_none()).await;
    assert_eq!(counts(&bed).map(|(_, pending)| pending), [0, 0]);
    assert_eq!(bed.done().await, done(67, true, &[]));
}

#[tokio::test(start_paused = true)]
async fn the_node_is_ill_while_a_change_waits_too_long() {
    let mut bed = Bed::new(&[
        Some(true),
        Some(false),
        Some(false),
        Some(false),
        Some(false),
    ]);
    bed.set(&[web()]);
    bed.done().await;
    bed.until(|view| view.is_synced).await;
    sleep(s(30)).await;
    assert!(bed.services.handle().livez().healthy, "nothing waits");
    bed.set(&[]);
    bed.done().await;
    sleep(s(19)).await;
    assert!(
        bed.services.handle().livez().healthy,
        "it does not wait too long yet"
    );
    sleep(s(1)).await;
    let answer = bed.services.handle().healthz();
    assert_eq!((answer.healthy, answer.code()), (false, 503));
    assert_eq!(answer.status.len(), 1);
    for _ in 0..4 {
        bed.done().await;
    }
    bed.until(|view| view.failure.is_none()).await;
    assert!(bed.services.handle().livez().healthy);
}

#[tokio::test(start_paused = true)]
async fn an_endpoint_that_probes_find_unready_leaves_at_once() {
    let (source, services) = watch::channel(Arc::<ServiceSet>::default());
    let (probes, readiness) = watch::channel(Arc::<Readiness>::default());
    let probed = Probed::of(services, "here".into(), readiness);
    let mut bed = Bed::of(&[], source, vec![probed.services()]);
    bed.set(&[web()]);
    assert_eq!(bed.done().await, done(0, true, &["web"]));
    let all = |first, second| {
        vec![
            ("10.1.0.1:8080".to_owned(), first),
            ("10.1.0.2:8080".to_owned(), second),
        ]
    };
    bed.until(|view| backends(view, "web") == all(true, false))
        .await;

    sleep(s(10)).await;
    let ill = Readiness::from([([10, 1, 0, 1].into(), false)]);
    probes.send_replace(Arc::new(ill));
    assert_eq!(bed.done().await, done(10, false, &["web"]));
    // The terminating endpoint serves while there is no other.
    let view = bed
        .until(|view| backends(view, "web") == all(false, true))
        .await;
    let entry = view
        .service(&ServiceName::new("shop", "web"), &Forwarding::default())
        .unwrap();
    let backend = &entry.ports[0].backends[0];
    assert!(
        backend.local && !backend.ready && !backend.serving,
        "{backend:?}"
    );
    probes.send_replace(Arc::default());
    assert_eq!(bed.done().await, done(11, false, &["web"]));
}

#[tokio::test(start_paused = true)]
async fn it_is_shown_for_which_services_the_probes_of_this_node_count() {
    for (source, is_annotated, follows_probes) in [
        ("kubernetes", false, false),
        ("kubernetes", true, true),
        ("/services/web.yaml", false, true),
    ] {
        let set = service_set(source, &[web().local_readiness(is_annotated)]);
        let mut bed = Bed::new(&[]);
        bed.source.send_replace(Arc::new(set));
        let view = bed.until(|view| view.is_synced).await;
        assert_eq!(
            view.follows_probes(&ServiceName::new("shop", "web")),
            follows_probes,
            "{source}"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn services_are_shown_with_frontends_and_conflicts() {
    let mut bed = Bed::new(&[]);
    bed.set(&[web(), ServiceText::new("late", "10.96.0.1")]);
    let view = bed.until(|view| view.is_synced).await;
    let entry = view
        .service(&ServiceName::new("shop", "web"), &Forwarding::default())
        .unwrap();
    assert_eq!((&*entry.kind, &*entry.source), ("ClusterIP", "test"));
    let conflicts: Vec<_> = view.conflicts().collect();
    let [conflict] = &conflicts[..] else {
        panic!("{view:?}")
    };
    assert_eq!(conflict.service, "shop/web");
    assert!(conflict.problem.contains("10.96.0.1:80"), "{conflict:?}");
    assert_eq!(entry.ports[0].frontends, []);
    let late = view
        .service(&ServiceName::new("shop", "late"), &Forwarding::default())
        .unwrap();
    let frontend = &late.ports[0].frontends[0];
    assert_eq!(
        [
            &*frontend.kind,
            &frontend.listen,
            &frontend.family,
            &frontend.outside
        ],
        ["ClusterIP", "10.96.0.1:80", "IPv4", "reject"]
    );

    // The address moves to the service that has been waiting for it.
    bed.set(&[web()]);
    let view = bed.until(|view| view.conflicts().next().is_none()).await;
    let entry = view
        .service(&ServiceName::new("shop", "web"), &Forwarding::default())
        .unwrap();
    assert_eq!(entry.ports[0].frontends[0].outside, "cluster");
    assert_eq!(view.names().count(), 1);
}

/// A provider with space for the service `web` only. Reports for each sync whether it was full, and the number of
/// ports.
struct NoRoom(mpsc::UnboundedSender<(bool, usize)>);

/// The ports for which there is no space.
struct Refused(Vec<PortKey>);

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "no room for {} ports", self.0.len())
    }
}

impl Provider for NoRoom {
    type Error = Refused;

    fn refused(Refused(ports): &Refused) -> impl Iterator<Item = (PortKey, String)> {
        ports.iter().map(|key| (key.clone(), "no room".to_owned()))
    }

    async fn sync(&mut self, work: Work<'_>) -> Result<(), Refused> {
        self.0
            .send((work.is_full, work.changes.ports.len()))
            .unwrap();
        let ports = work.state.ports().map(|(key, _)| key);
        let others = ports.filter(|key| *key.name.service.name != *"web");
        match others.cloned().collect::<Vec<_>>() {
            none if none.is_empty() => Ok(()),
            others => Err(Refused(others)),
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_port_without_room_is_shown_with_the_reason_and_makes_no_node_ill() {
    let (source, set) = watch::channel(Arc::<ServiceSet>::default());
    let bed = Bed::of(&[], source, Vec::new());
    let (_topology, place) = watch::channel(bed.topology.borrow().clone());
    let settings = SyncSettings {
        intervals: Intervals {
            min: s(1),
            retry: s(5),
            max: s(60),
        },
        families: vec![Family::V4],
        health_timeout: s(20),
        clock: || Timestamp::UNIX_EPOCH,
    };
    let (done, mut syncs) = mpsc::unbounded_channel();
    let services = Services::start(settings, place, vec![set], NoRoom(done)).unwrap();
    let mut view = services.handle().view();
    let failures = |view: &View, name: &str| {
        let entry = view.service(&ServiceName::new("shop", name), &Forwarding::default());
        entry.map(|entry| entry.ports[0].failures.clone())
    };
    bed.set(&[web(), ServiceText::new("other", "10.96.0.2")]);
    let seen = view.wait_for(|view| view.failure.is_some()).await.unwrap();
    assert_eq!(failures(&seen, "web"), Some(Vec::new()));
    assert_eq!(
        failures(&seen, "other"),
        Some(vec!["IPv4: no room".to_owned()])
    );
    drop(seen);
    // The other port is in force: only this one is retried, and the node is healthy.
    assert_eq!(syncs.recv().await, Some((true, 2)));
    for _ in 0..5 {
        assert_eq!(syncs.recv().await, Some((false, 1)));
    }
    assert!(services.handle().livez().healthy);
    bed.set(&[web()]);
    let seen = view.wait_for(|view| view.failure.is_none()).await.unwrap();
    assert_eq!(failures(&seen, "web"), Some(Vec::new()));
}

#[tokio::test(start_paused = true)]
async fn a_node_that_is_elsewhere_prefers_other_endpoints() {
    let mut bed = Bed::new(&[]);
    let text = ServiceText::new("web", "10.96.0.1")
        .endpoint("10.1.0.1", "here", "{}, hints: {forZones: [{name: z1}]}")
        .endpoint("10.1.0.2", "there", "{}, hints: {forZones: [{name: z2}]}");
    bed.set(&[text]);
    let used = |view: &Arc<View>| {
        let backends = backends(view, "web");
        backends
            .into_iter()
            .map(|(_, used)| used)
            .collect::<Vec<_>>()
    };
    bed.until(|view| used(view) == [true, true]).await;
    bed.topology
        .send_modify(|topology| topology.zone = Some("z2".into()));
    bed.until(|view| used(view) == [false, true]).await;
    assert_eq!(bed.done().await, done(0, true, &["web"]));
    assert_eq!(bed.done().await, done(1, false, &["web"]));
}

#[tokio::test(start_paused = true)]
async fn manifests_of_a_folder_are_served() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("web.yaml");
    fs::write(&file, web().to_string()).unwrap();
    let folder = Folder::watch(dir.path(), Selection::default());
    let (unused, _) = watch::channel(Arc::default());
    let mut bed = Bed::of(&[], unused, vec![folder.services()]);
    let first = bed.done().await;
    assert_eq!(
        (first.is_full, &*first.changed),
        (true, &["web".to_owned()][..])
    );

    fs::write(&file, web().to_string().replace("port: 80}", "port: 0}")).unwrap();
    let view = bed.until(|view| !view.problems.is_empty()).await;
    let problem = &view.problems[0].problem;
    assert!(
        problem.starts_with("service shop/web: spec.ports[0].port: Invalid value: 0"),
        "{problem}"
    );
    assert_eq!(backends(&view, "web").len(), 2, "it stays as it was");

    fs::remove_file(&file).unwrap();
    bed.until(|view| view.names().next().is_none() && view.problems.is_empty())
        .await;
    let mut last = bed.done().await;
    while last.deleted.is_empty() {
        last = bed.done().await;
    }
    assert_eq!(last.deleted, ["shop/web"]);
}

#[tokio::test(start_paused = true)]
async fn after_the_end_nothing_is_done_and_intervals_that_exclude_each_other_are_refused() {
    let mut bed = Bed::new(&[]);
    bed.set(&[web()]);
    bed.done().await;
    bed.services.stop().await;
    assert_eq!(bed.done.recv().await, None);

    let settings = SyncSettings {
        intervals: Intervals {
            min: s(2),
            retry: s(1),
            max: s(1),
        },
        families: Vec::new(),
        health_timeout: s(1),
        clock: || Timestamp::UNIX_EPOCH,
    };
    let (_topology, place) = watch::channel(Topology {
        node: "here".into(),
        zone: None,
    });
    let (done, _) = mpsc::unbounded_channel();
    let provider = Recorder {
        start: Instant::now(),
        results: VecDeque::new(),
        done,
    };
    let refused = Services::start(settings, place, Vec::new(), provider).unwrap_err();
    let reported = RunnerError::MaxBelowMin {
        min: s(2),
        max: s(1),
    };
    assert_eq!(refused, reported);
}

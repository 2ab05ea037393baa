use std::fs;
use std::io::Write as _;
use std::time::{Duration, Instant};

use tokio::sync::watch;

use super::super::testing::ServiceText;
use super::*;

struct Watched {
    dir: tempfile::TempDir,
    _folder: Folder,
    services: watch::Receiver<Arc<ServiceSet>>,
}

impl Watched {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let folder = Folder::watch(dir.path(), Selection::default());
        Self {
            services: folder.services(),
            _folder: folder,
            dir,
        }
    }

    fn write(&self, file: &str, text: impl ToString) {
        fs::write(self.dir.path().join(file), text.to_string()).unwrap();
    }

    async fn until(&mut self, is_so: impl FnMut(&Arc<ServiceSet>) -> bool) -> Arc<ServiceSet> {
        // Long enough for busy machines.
        let waited = tokio::time::timeout(Duration::from_secs(120), self.services.wait_for(is_so));
        waited.await.expect("a change").unwrap().clone()
    }

    async fn until_services(&mut self, names: &[&str]) -> Arc<ServiceSet> {
        self.until(|set| set.synced.is_complete() && shown(set) == names)
            .await
    }
}

/// Returns the services, each with its first ClusterIP.
fn shown(set: &ServiceSet) -> Vec<String> {
    let served = set.services.iter().map(|(name, sourced)| {
        let ip = sourced.object.as_ref().map(|one| one.common.cluster_ips[0]);
        ip.map_or_else(|| name.name.to_string(), |ip| format!("{} {ip}", name.name))
    });
    served.collect()
}

/// Returns the problems, each with the file's name.
fn problems(set: &ServiceSet) -> Vec<String> {
    let problem = |one: &ServiceProblem| {
        let (_, file) = one.subject.rsplit_once('/').unwrap();
        format!("{file}: {}", one.problem)
    };
    set.problems.iter().map(problem).collect()
}

#[tokio::test]
async fn services_and_slices_come_change_and_go_with_their_files() {
    let mut watched = Watched::new();
    watched.until_services(&[]).await;
    let a = ServiceText::new("a", "10.96.0.1").endpoint("10.1.0.1", "here", "{}");
    watched.write("a.yaml", &a);
    let json = r#"{"apiVersion": "v1", "kind": "ServiceList", "items": [
        {"metadata": {"namespace": "shop", "name": "b"}, "spec": {"clusterIP": "10.96.0.2", "ports": [{"port": 80}]}},
        {"metadata": {"namespace": "shop", "name": "headless"}, "spec": {"clusterIP": "None"}}
    ]}"#;
    watched.write("b.json", json);
    let set = watched
        .until_services(&["a 10.96.0.1", "b 10.96.0.2", "headless"])
        .await;
    assert_eq!(problems(&set), [""; 0]);
    let slice = &set.slices[&SliceName::new("shop", "a")];
    assert!(slice.source.ends_with("a.yaml"));
    let slice = slice.object.as_ref().unwrap();
    assert_eq!(&*slice.ports[0].name, "", "a port without a name has none");
    assert_eq!(slice.endpoints.len(), 1);

    watched.write("a.yaml", ServiceText::new("c", "10.96.0.3"));
    let now = ["b 10.96.0.2", "c 10.96.0.3", "headless"];
    watched.until_services(&now).await;
    fs::remove_file(watched.dir.path().join("b.json")).unwrap();
    watched.until_services(&["c 10.96.0.3"]).await;
}

#[tokio::test]
async fn an_object_with_an_error_is_named_and_stays_as_it_was_and_its_neighbours_go_on() {
    let mut watched = Watched::new();
    let a = ServiceText::new("a", "10.96.0.1").endpoint("10.1.0.1", "here", "{}");
    let b = ServiceText::new("b", "10.96.0.2");
    watched.write("all.yaml", format!("{a}{b}"));
    let before = watched
        .until_services(&["a 10.96.0.1", "b 10.96.0.2"])
        .await;

    let broken = a.to_string().replace("port: 80}", "port: often}");
    let broken = broken.replace("10.1.0.1]", "10.1.0.1000]");
    let c = ServiceText::new("c", "10.96.0.3");
    watched.write("all.yaml", format!("{broken}{c}"));
    let set = watched
        .until_services(&["a 10.96.0.1", "c 10.96.0.3"])
        .await;
    assert_eq!(
        problems(&set),
        [
            r#"all.yaml: service shop/a: spec.ports[0].port: Invalid value: invalid type: string "often", expected i32"#,
            r#"all.yaml: endpoint slice shop/a: endpoints[0].addresses[0]: Invalid value: "10.1.0.1000": must be a valid IP address"#,
        ]
    );
    let a = SliceName::new("shop", "a");
    assert_eq!(set.slices[&a], before.slices[&a]);

    // An object that was never read without an error does not exist.
    let list = "---\n{apiVersion: v1, kind: List, items: [{apiVersion: v1, kind: Service, metadata: {name: d}, spec: {ports: [{port: 80}]}}]}";
    watched.write("list.yaml", list);
    let set = watched.until(|set| set.problems.len() == 3).await;
    assert_eq!(shown(&set), ["a 10.96.0.1", "c 10.96.0.3"]);
    assert_eq!(
        problems(&set)[2],
        "list.yaml: service default/d: items[0].spec.clusterIP: Required value: nothing assigns an address to a service in a manifest"
    );
}

#[tokio::test]
async fn what_cannot_be_read_changes_nothing_but_objects_of_other_kinds_hold_up_nothing() {
    let mut watched = Watched::new();
    let [a, b, c] = ["a", "b", "c"].map(|name| ServiceText::new(name, "10.96.0.1"));
    watched.write("all.yaml", format!("{a}{b}"));
    let both = ["a 10.96.0.1", "b 10.96.0.1"];
    watched.until_services(&both).await;

    watched.write("all.yaml", "kind: [");
    let set = watched.until(|set| !set.problems.is_empty()).await;
    assert_eq!(shown(&set), both);
    // The unnamed object may stand for the earlier service.
    watched.write("all.yaml", format!("{c}{{kind: Service}}"));
    watched
        .until_services(&[both[0], both[1], "c 10.96.0.1"])
        .await;

    let other = "{apiVersion: apps/v1, kind: Deployment, metadata: {name: b}}";
    watched.write("all.yaml", format!("{a}{other}"));
    let set = watched.until_services(&both[..1]).await;
    let [problem] = &problems(&set)[..] else {
        panic!("{set:?}")
    };
    let reported =
        r#"all.yaml: kind: Unsupported value: "Deployment": supported values: "Service", "#;
    assert!(problem.starts_with(reported), "{problem}");
}

#[tokio::test]
async fn a_file_that_keeps_changing_is_named_and_holds_up_no_others() {
    let dir = tempfile::tempdir().unwrap();
    let put = |file: &str, text: ServiceText| {
        // Always replace the file by renaming another one, so that it is complete at any time.
        let hidden = dir.path().join(".new");
        fs::write(&hidden, text.to_string()).unwrap();
        fs::rename(&hidden, dir.path().join(file)).unwrap();
    };
    put("busy.yaml", ServiceText::new("busy", "10.96.0.1"));
    put("calm.yaml", ServiceText::new("calm", "10.96.0.2"));
    let folder = Folder::watch(dir.path(), Selection::default());
    let mut services = folder.services();
    let begin = Instant::now();
    let mut turn = 0;
    let mut change = async |services: &mut watch::Receiver<Arc<ServiceSet>>| loop {
        turn += 1;
        let ip = format!("10.96.1.{}", turn % 250);
        put("busy.yaml", ServiceText::new("busy", &ip));
        let soon = Duration::from_millis(5);
        match tokio::time::timeout(soon, services.changed()).await {
            Ok(changed) => return changed.unwrap(),
            Err(_) => assert!(begin.elapsed() < Duration::from_secs(120), "no change"),
        }
    };
    // All objects are known, including later states of the busy file and of its neighbour.
    let set = loop {
        change(&mut services).await;
        let set = services.borrow_and_update().clone();
        if set.synced.is_complete() {
            break set;
        }
    };
    let reported = "busy.yaml: keeps changing; reading it less often";
    assert_eq!(set.services.len(), 2, "{set:?}");
    assert!(problems(&set)[0].starts_with(reported), "{set:?}");
    put("calm.yaml", ServiceText::new("calm", "10.96.0.3"));
    let first = shown(&set)[0].clone();
    loop {
        change(&mut services).await;
        let now = shown(&services.borrow_and_update());
        if now[0] != first && now[1] == "calm 10.96.0.3" {
            break;
        }
    }
    // Once it no longer changes, it is read like any other file.
    put("busy.yaml", ServiceText::new("busy", "10.96.0.4"));
    let mut watched = Watched {
        dir,
        _folder: folder,
        services,
    };
    let set = watched
        .until_services(&["busy 10.96.0.4", "calm 10.96.0.3"])
        .await;
    assert_eq!(problems(&set), [""; 0]);
}

#[tokio::test]
async fn of_a_file_that_is_still_being_copied_nothing_is_taken() {
    let dir = tempfile::tempdir().unwrap();
    let mut copied = fs::File::create(dir.path().join("slow.yaml")).unwrap();
    write!(copied, "{}", ServiceText::new("first", "10.96.0.1")).unwrap();
    let folder = Folder::watch(dir.path(), Selection::default());
    let mut services = folder.services();
    // Long enough for many checks, each of which could happen right after one object is written.
    let begin = Instant::now();
    let (mut written, mut longest_rest) = (begin, Duration::ZERO);
    while begin.elapsed() < Duration::from_secs(4) {
        longest_rest = longest_rest.max(written.elapsed());
        writeln!(copied, "# more").unwrap();
        written = Instant::now();
        let soon = Duration::from_millis(5);
        if let Ok(changed) = tokio::time::timeout(soon, services.changed()).await {
            changed.unwrap();
            let set = services.borrow_and_update().clone();
            // On a machine this slow, the file did stop changing for long enough.
            let is_taken = set.synced.is_complete() || !set.services.is_empty();
            assert!(
                !is_taken || longest_rest > Duration::from_millis(200),
                "{set:?}"
            );
        }
    }
    write!(copied, "---\n{}", ServiceText::new("second", "10.96.0.2")).unwrap();
    let mut watched = Watched {
        dir,
        _folder: folder,
        services,
    };
    watched
        .until_services(&["first 10.96.0.1", "second 10.96.0.2"])
        .await;
}

#[tokio::test]
async fn two_files_with_one_object_are_reported_and_the_first_counts() {
    let mut watched = Watched::new();
    watched.write("1.yaml", ServiceText::new("a", "10.96.0.1"));
    let second = ServiceText::new("a", "10.96.0.2");
    watched.write("2.yaml", format!("{second}{second}"));
    let set = watched.until_services(&["a 10.96.0.1"]).await;
    let reported = problems(&set);
    let duplicate =
        |kind| format!(r#"2.yaml: {kind} shop/a: metadata.name: Duplicate value: "shop/a""#);
    assert_eq!(
        reported[..2],
        [duplicate("service"), duplicate("endpoint slice")]
    );
    let begins = format!("{}: also used in ", duplicate("service"));
    assert!(
        reported[2].starts_with(&begins) && reported[2].ends_with("1.yaml"),
        "{reported:?}"
    );
    assert_eq!(reported.len(), 4);

    fs::remove_file(watched.dir.path().join("1.yaml")).unwrap();
    let set = watched.until_services(&["a 10.96.0.2"]).await;
    assert_eq!(set.problems.len(), 2, "{set:?}");
}

use std::fs;
use std::time::Duration;

use super::*;

fn manifest(name: &str, port: u32) -> String {
    format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}}}\nspec:\n  containers:\n  - name: app\n    livenessProbe: {{tcpSocket: {{port: {port}}}}}\n"
    )
}

struct Watched {
    dir: tempfile::TempDir,
    _folder: Folder,
    pods: watch::Receiver<Arc<PodSet>>,
}

impl Watched {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let folder = Folder::watch(dir.path());
        Self {
            pods: folder.pods(),
            _folder: folder,
            dir,
        }
    }

    fn write(&self, file: &str, text: &str) {
        fs::write(self.dir.path().join(file), text).unwrap();
    }

    async fn until(&mut self, is_so: impl FnMut(&Arc<PodSet>) -> bool) -> Arc<PodSet> {
        // Long enough for the busiest machine.
        let waited = tokio::time::timeout(Duration::from_secs(120), self.pods.wait_for(is_so));
        waited.await.expect("a change").unwrap().clone()
    }

    async fn until_pods(&mut self, names: &[&str]) -> Arc<PodSet> {
        self.until(|set| {
            let all: Vec<_> = set.pods.iter().map(|pod| pod.spec.name.as_str()).collect();
            set.is_complete && all == names
        })
        .await
    }
}

#[tokio::test]
async fn pods_come_change_and_go_with_their_files() {
    let mut watched = Watched::new();
    watched.until_pods(&[]).await;
    watched.write("b.yaml", &manifest("b", 80));
    watched.write("a.json", &manifest("a", 80));
    watched.write(".hidden.yaml", &manifest("hidden", 80));
    watched.write("notes.txt", "hello");
    let set = watched.until_pods(&["a", "b"]).await;
    assert!(set.problems.is_empty(), "{set:?}");
    assert!(set.pods[0].source.ends_with("a.json"));

    watched.write("b.yaml", &manifest("c", 80));
    watched.until_pods(&["a", "c"]).await;
    fs::remove_file(watched.dir.path().join("a.json")).unwrap();
    watched.until_pods(&["c"]).await;
}

#[tokio::test]
async fn a_pod_with_an_error_stays_as_it_was_and_the_others_go_on() {
    let mut watched = Watched::new();
    let both = format!("{}---\n{}", manifest("a", 80), manifest("b", 80));
    watched.write("pods.yaml", &both);
    let before = watched.until_pods(&["a", "b"]).await;

    let broken = format!("{}---\n{}", manifest("a", 0), manifest("c", 80));
    watched.write("pods.yaml", &broken);
    let set = watched.until_pods(&["c", "a"]).await;
    assert_eq!(set.pods[1], before.pods[0]);
    let [problem] = &*set.problems else {
        panic!("{set:?}")
    };
    assert!(problem.subject.ends_with("pods.yaml"), "{problem:?}");
    let field = "pod default/a, container app: spec.containers[0].livenessProbe.tcpSocket.port: Invalid value: 0";
    assert!(problem.problem.starts_with(field), "{problem:?}");

    watched.write("pods.yaml", "kind: [");
    let set = watched
        .until(|set| {
            set.problems
                .iter()
                .any(|one| !one.problem.starts_with("pod"))
        })
        .await;
    assert_eq!(set.pods.len(), 2, "{set:?}");
}

#[tokio::test]
async fn a_link_to_nothing_is_named_until_there_is_something() {
    let mut watched = Watched::new();
    let link = watched.dir.path().join("pods.yaml");
    std::os::unix::fs::symlink("elsewhere", &link).unwrap();
    std::os::unix::fs::symlink("loop.yml", watched.dir.path().join("loop.yml")).unwrap();
    let set = watched.until(|set| set.problems.len() == 2).await;
    let reported = |of: usize| (&*set.problems[of].subject, &*set.problems[of].problem);
    let (subject, problem) = reported(0);
    assert!(subject.ends_with("loop.yml"), "{set:?}");
    assert!(
        problem.starts_with("cannot be read: Too many levels"),
        "{set:?}"
    );
    let (subject, problem) = reported(1);
    assert!(subject.ends_with("pods.yaml"), "{set:?}");
    assert!(
        problem.starts_with("cannot be read: No such file"),
        "{set:?}"
    );

    watched.write("elsewhere", &manifest("a", 80));
    let set = watched.until_pods(&["a"]).await;
    assert_eq!(set.problems.len(), 1, "{set:?}");
    fs::remove_file(watched.dir.path().join("elsewhere")).unwrap();
    let set = watched.until(|set| set.problems.len() == 2).await;
    assert_eq!(set.pods.len(), 1, "its last pods stay");
}

#[tokio::test]
async fn two_files_with_one_pod_are_reported_and_the_first_counts() {
    let mut watched = Watched::new();
    watched.write("1.yaml", &manifest("a", 80));
    watched.write("2.yaml", &manifest("a", 81));
    let set = watched.until(|set| set.is_complete).await;
    assert_eq!(set.pods.len(), 1);
    assert!(set.pods[0].source.ends_with("1.yaml"));
    let problem = &set.problems[0].problem;
    assert!(
        problem.contains("metadata.uid: Duplicate value: \"default/a\""),
        "{problem}"
    );
    assert!(
        problem.contains(": also used in ") && problem.ends_with("1.yaml"),
        "{problem}"
    );
}

#[tokio::test]
async fn what_is_no_file_or_no_folder_is_named_and_holds_up_nothing() {
    let mut watched = Watched::new();
    let pipe = watched.dir.path().join("pipe.yaml");
    nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
    fs::create_dir(watched.dir.path().join("folder.yaml")).unwrap();
    watched.write("a.yaml", &manifest("a", 80));
    let set = watched.until_pods(&["a"]).await;
    let reported: Vec<_> = set.problems.iter().map(|one| &*one.problem).collect();
    assert_eq!(reported, ["cannot be read: not a regular file"; 2]);

    fs::remove_dir_all(watched.dir.path()).unwrap();
    let set = watched
        .until(|set| {
            set.problems
                .iter()
                .any(|one| one.problem.contains("No such file"))
        })
        .await;
    assert_eq!(set.pods.len(), 1, "its last pods stay");
}

#[tokio::test]
async fn templates_are_pods_and_other_kinds_beside_them_are_no_problem() {
    let mut watched = Watched::new();
    watched.until_pods(&[]).await;
    let deployment = "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: web, namespace: shop}\nspec:\n  template: {spec: {containers: [{name: app, livenessProbe: {tcpSocket: {port: 80}}}]}}\n";
    let service = "apiVersion: v1\nkind: Service\nmetadata: {name: web}\n";
    watched.write("web.yaml", &format!("{service}---\n{deployment}"));
    let set = watched.until_pods(&["web"]).await;
    assert_eq!(set.problems, []);
    assert_eq!(&*set.pods[0].spec.uid, "shop/web");
    // By itself it is a problem: nothing in the file is usable.
    watched.write("service.yaml", service);
    let set = watched.until(|set| !set.problems.is_empty()).await;
    assert!(set.problems[0].subject.ends_with("service.yaml"), "{set:?}");
    assert_eq!(set.pods.len(), 1);
}

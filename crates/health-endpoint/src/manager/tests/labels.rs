//! Endpoints of pods: their labels follow Kubernetes.

use health_model::api::PodName;
use health_model::labels::pod::IdentityLabels;
use health_model::labels::{LABELS_MAX, LabelError};

use super::*;
use crate::error::ErrorKind;
use crate::lifecycle::State;
use crate::pods::LabelledPod;

const POD: &str = "shop/web-1";
const UID: &str = "u-1";

struct Pods(watch::Sender<Arc<PodLabels>>);

impl Pods {
    fn unknown() -> Self {
        Self(watch::Sender::default())
    }

    /// Makes the pod with this UID known, with these labels.
    fn set(&self, uid: &str, labels: &[&str], problem: Option<LabelError>) {
        let pod = LabelledPod {
            uids: vec![uid.to_owned()],
            identity: IdentityLabels {
                labels: set(labels),
                problem,
            },
        };
        let pods = [(POD.to_owned(), Arc::new(pod))];
        self.0.send_replace(Arc::new(pods.into_iter().collect()));
    }

    fn label(&self, labels: &[&str]) {
        self.set(UID, labels, None);
    }

    async fn start(&self, world: Arc<World>, dir: TempDir) -> Bed {
        let identities = world.clone();
        Bed::with_sources(world, dir, identities, Some(self.0.subscribe())).await
    }

    async fn bed(&self) -> Bed {
        let world = Arc::new(World::with_namespaces());
        self.start(world, tempfile::tempdir().unwrap()).await
    }
}

fn set(labels: &[&str]) -> LabelSet {
    LabelSet::new(labels.iter().map(|label| label.parse().unwrap())).unwrap()
}

fn of_pod(n: u16, labels: &[&str]) -> NewEndpoint {
    let (namespace, name) = POD.split_once('/').unwrap();
    NewEndpoint {
        pod: Some(PodName {
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            uid: Some(UID.to_owned()),
        }),
        ..new(n, labels)
    }
}

/// Waits until an endpoint has these labels and is ready.
async fn labelled(bed: &Bed, id: u16, labels: &[&str]) -> Arc<Endpoint> {
    let wait = bed.manager.wait_until(|table| {
        let shown = table.entries.get(&id)?.shown();
        (shown.labels == labels && shown.state == "ready").then_some(shown)
    });
    let found = tokio::time::timeout(Duration::from_secs(3600), wait).await;
    found.unwrap_or_else(|_| panic!("{:?}", bed.living()))
}

#[tokio::test(start_paused = true)]
async fn a_pod_that_is_not_known_is_init_until_its_labels_are() {
    let pods = Pods::unknown();
    let bed = pods.bed().await;
    // Labels that were given must not make an identity without those of the pod.
    let made = bed
        .manager
        .create(of_pod(1, &["x=y", "k8s:app=given"]))
        .await
        .unwrap();
    assert_eq!(made.identity, Identity::INIT.0);
    assert_eq!(made.state, "ready");
    let reason = made.reason.clone().unwrap();
    assert_eq!(reason, "the labels of pod shop/web-1 are not known yet");
    assert!(bed.manager.problem().unwrap().contains(&reason));
    let edited = bed
        .manager
        .change_labels(made.id, vec!["a=b".parse().unwrap()], vec![])
        .await;
    assert_eq!(edited.unwrap_err().kind(), ErrorKind::Unavailable);

    pods.label(&["k8s:app=web"]);
    let known = labelled(&bed, made.id, &["k8s:app=web", "unspec:x=y"]).await;
    assert!(known.identity >= 300, "{known:?}");
    assert_eq!(
        (known.reason.as_deref(), bed.manager.problem()),
        (None, None)
    );
}

#[tokio::test(start_paused = true)]
async fn a_known_pod_starts_with_its_labels() {
    let pods = Pods::unknown();
    pods.label(&["k8s:app=web"]);
    let bed = pods.bed().await;
    let made = bed
        .manager
        .create(of_pod(1, &["k8s:app=given"]))
        .await
        .unwrap();
    assert_eq!(
        (made.identity, made.labels.as_slice()),
        (300, &["k8s:app=web".to_owned()][..])
    );
    // Another endpoint is not concerned.
    let other = bed.create(2, &["k8s:app=other"]).await.unwrap();
    assert_eq!(other.labels, ["k8s:app=other"]);
}

#[tokio::test(start_paused = true)]
async fn labels_of_kubernetes_are_the_pods_and_others_are_the_requests() {
    let pods = Pods::unknown();
    pods.label(&["k8s:app=web"]);
    let bed = pods.bed().await;
    let id = bed.manager.create(of_pod(1, &[])).await.unwrap().id;
    let refused = bed
        .manager
        .change_labels(id, vec!["k8s:app=db".parse().unwrap()], vec![])
        .await;
    let refused = refused.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Invalid);
    assert!(
        refused
            .to_string()
            .contains("k8s:app=db comes from pod shop/web-1"),
        "{refused}"
    );
    bed.manager
        .change_labels(id, vec!["zone=a".parse().unwrap()], vec![])
        .await
        .unwrap();
    let before = labelled(&bed, id, &["k8s:app=web", "unspec:zone=a"]).await;
    pods.label(&["k8s:app=web", "k8s:tier=gold"]);
    let after = labelled(&bed, id, &["k8s:app=web", "k8s:tier=gold", "unspec:zone=a"]).await;
    assert_ne!(before.identity, after.identity);
}

#[tokio::test(start_paused = true)]
async fn an_endpoint_has_the_named_ports_that_its_pod_has_now() {
    let pods = Pods::unknown();
    pods.label(&["k8s:app=web", "port:admin=9000/TCP", "port:web=80/TCP"]);
    let bed = pods.bed().await;
    let id = bed.manager.create(of_pod(1, &[])).await.unwrap().id;
    let expected = ["k8s:app=web", "port:admin=9000/TCP", "port:web=80/TCP"];
    let before = labelled(&bed, id, &expected).await;
    pods.label(&["k8s:app=web", "port:web=81/TCP"]);
    let after = labelled(&bed, id, &["k8s:app=web", "port:web=81/TCP"]).await;
    assert_ne!(before.identity, after.identity);
}

#[tokio::test(start_paused = true)]
async fn another_pod_of_the_same_name_and_a_pod_that_is_gone_change_nothing() {
    let pods = Pods::unknown();
    pods.label(&["k8s:app=web"]);
    let bed = pods.bed().await;
    let made = bed.manager.create(of_pod(1, &[])).await.unwrap();
    pods.set("u-2", &["k8s:app=other"], None);
    pods.0.send_replace(Arc::default());
    // A later change shows that the earlier ones were seen.
    pods.label(&["k8s:app=web", "k8s:last=1"]);
    labelled(&bed, made.id, &["k8s:app=web", "k8s:last=1"]).await;
    let built = bed.world.built.lock().unwrap();
    let seen: Vec<Identity> = built.iter().map(|build| build.identity).collect();
    assert_eq!(seen, [300, 301].map(Identity));
}

#[tokio::test(start_paused = true)]
async fn an_endpoint_keeps_its_identity_until_the_policies_of_others_cover_the_next() {
    let pods = Pods::unknown();
    pods.label(&["k8s:app=web"]);
    let bed = pods.bed().await;
    let id = bed.manager.create(of_pod(1, &[])).await.unwrap().id;
    let next = Identity(301);
    bed.world.uncovered.send_replace(Some(next));
    pods.label(&["k8s:app=next"]);
    let waits = bed.manager.wait_until(|table| {
        let state = table.entries.get(&id)?.state();
        (state == State::WaitingForIdentity).then_some(())
    });
    waits.await;
    tokio::time::sleep(Duration::from_secs(60)).await;
    let built = |bed: &Bed| {
        bed.world
            .built
            .lock()
            .unwrap()
            .iter()
            .any(|one| one.identity == next)
    };
    assert!(!built(&bed));
    bed.world.uncovered.send_replace(None);
    labelled(&bed, id, &["k8s:app=next"]).await;
    assert!(built(&bed));
}

#[tokio::test(start_paused = true)]
async fn labels_that_cannot_be_kept_are_named_and_the_others_count() {
    let pods = Pods::unknown();
    let bed = pods.bed().await;
    let id = bed.manager.create(of_pod(1, &[])).await.unwrap().id;
    pods.set(UID, &["k8s:ns=shop"], Some(LabelError::TooMany(300)));
    let found = labelled(&bed, id, &["k8s:ns=shop"]).await;
    // No policy for the namespace misses it.
    assert_eq!(found.identity, 300);
    let reason = found.reason.clone().unwrap();
    assert!(
        reason.contains("shop/web-1") && reason.contains("too many labels: 300"),
        "{reason}"
    );
    assert!(bed.manager.problem().unwrap().contains(&reason));
    pods.label(&["k8s:app=web"]);
    labelled(&bed, id, &["k8s:app=web"]).await;
    assert_eq!(bed.manager.problem(), None);
}

#[tokio::test(start_paused = true)]
async fn too_many_given_labels_do_not_displace_those_of_the_pod() {
    let pods = Pods::unknown();
    pods.label(&["k8s:app=web", "k8s:ns=shop"]);
    let bed = pods.bed().await;
    let given: Vec<String> = (0..LABELS_MAX - 1).map(|i| format!("k{i}=v")).collect();
    let given: Vec<&str> = given.iter().map(String::as_str).collect();
    let made = bed.manager.create(of_pod(1, &given)).await.unwrap();
    assert_eq!(made.labels, ["k8s:app=web", "k8s:ns=shop"]);
    assert_eq!(made.identity, 300);
}

#[tokio::test(start_paused = true)]
async fn a_restarted_agent_keeps_labels_until_the_pod_is_known_again() {
    let pods = Pods::unknown();
    pods.label(&["k8s:app=web"]);
    let bed = pods.bed().await;
    let made = bed.manager.create(of_pod(1, &[])).await.unwrap();
    let Bed { world, dir, .. } = bed;
    let pods = Pods::unknown();
    let bed = pods.start(world, dir).await;
    let kept = bed.ready(made.id).await;
    assert_eq!((kept.identity, &kept.labels), (made.identity, &made.labels));
    pods.label(&["k8s:app=next"]);
    labelled(&bed, made.id, &["k8s:app=next"]).await;
}

#[tokio::test(start_paused = true)]
async fn an_agent_that_follows_no_pods_uses_the_labels_that_were_given() {
    let pods = Pods::unknown();
    let bed = pods.bed().await;
    let made = bed
        .manager
        .create(of_pod(1, &["k8s:app=given"]))
        .await
        .unwrap();
    assert_eq!(made.identity, Identity::INIT.0);
    let bed = bed.restarted().await;
    let given = labelled(&bed, made.id, &["k8s:app=given"]).await;
    assert_eq!(given.identity, 300);
    let edited = bed
        .manager
        .change_labels(given.id, vec!["k8s:app=b".parse().unwrap()], vec![])
        .await;
    assert!(edited.is_ok());
}

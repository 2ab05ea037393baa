//! Merges several sources into one.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;

use health_model::api::PodProblem;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::{Keeper, PodSet, SourcedPod};
use crate::spec::PodSpec;

/// Several sources merged into one. Dropping it stops merging.
#[derive(Debug)]
pub struct Merged {
    pods: watch::Receiver<Arc<PodSet>>,
    task: JoinHandle<()>,
}

impl Merged {
    /// Merges these sources, in order of precedence. Must be called in a tokio runtime.
    pub fn of(mut sources: Vec<watch::Receiver<Arc<PodSet>>>) -> Self {
        let (sender, pods) = watch::channel(Arc::default());
        let task = tokio::spawn(async move {
            loop {
                let sets: Vec<_> = sources
                    .iter_mut()
                    .map(|source| source.borrow_and_update().clone())
                    .collect();
                sender.send_replace(Arc::new(merge(&sets)));
                changed(&mut sources).await;
            }
        });
        Self { pods, task }
    }

    /// The pods, now and whenever they change.
    pub fn pods(&self) -> watch::Receiver<Arc<PodSet>> {
        self.pods.clone()
    }
}

impl Drop for Merged {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Merges these sets; each pod appears once. If two sets have the same pod, the first set decides on its probes, and a
/// kubelet on the state of its containers. A pod in two sets is a problem, unless one set only mirrors the other set's
/// pod, as a kubelet mirrors the pods of its own folder in the API.
pub fn merge(sets: &[Arc<PodSet>]) -> PodSet {
    let mut merged = PodSet {
        is_complete: sets.iter().all(|set| set.is_complete),
        ..PodSet::default()
    };
    let mut uids: HashMap<Arc<str>, usize> = HashMap::new();
    let mut names: HashMap<(String, String), usize> = HashMap::new();
    for set in sets {
        merged.problems.extend(set.problems.iter().cloned());
        // Within one set, pods differ only by UID.
        let earlier = merged.pods.len();
        for pod in &set.pods {
            let spec = &pod.spec;
            let name = (spec.namespace.clone(), spec.name.clone());
            let named = names
                .get(&name)
                .copied()
                .filter(|&i| i < earlier && may_be_one(&merged.pods[i].spec, spec));
            match uids.get(&spec.uid).copied().or(named) {
                None => {
                    let index = merged.pods.len();
                    uids.insert(spec.uid.clone(), index);
                    names.entry(name).or_insert(index);
                    merged.pods.push(pod.clone());
                }
                Some(index) => {
                    let problem = join(&mut merged.pods[index], pod);
                    merged.problems.extend(problem);
                }
            }
        }
    }
    merged
}

/// Adds to a pod whatever another set says about it.
fn join(first: &mut SourcedPod, other: &SourcedPod) -> Option<PodProblem> {
    let spec = &other.spec;
    let is_one = |one: &PodSpec| (&one.namespace, &one.name) == (&spec.namespace, &spec.name);
    let mut is_mirror = false;
    if is_one(&first.spec) {
        is_mirror = [first.keeper, other.keeper].contains(&Keeper::Kubelet { is_mirror: true });
        if first.keeper == Keeper::Agent && other.keeper != Keeper::Agent {
            first.keeper = other.keeper;
            first.status.clone_from(&other.status);
            if first.spec.ips.is_empty() && !spec.ips.is_empty() {
                first.spec = Arc::new(PodSpec {
                    ips: spec.ips.clone(),
                    ..PodSpec::clone(&first.spec)
                });
            }
        }
    }
    if is_mirror {
        return None;
    }
    let name = format!("{}/{}", spec.namespace, spec.name);
    let problem = format!(
        "pod {name}: metadata.uid: Duplicate value: {:?}: also used in {}",
        first.spec.uid, first.source
    );
    Some(PodProblem {
        subject: match other.keeper {
            Keeper::Agent => other.source.to_string(),
            Keeper::Kubelet { .. } => format!("{}: {name}", other.source),
        },
        problem,
    })
}

/// Whether two pods with the same name may be one pod: no source gave them different UIDs.
fn may_be_one(one: &PodSpec, other: &PodSpec) -> bool {
    match (one.known_uid(), other.known_uid()) {
        (Some(one), Some(other)) => one == other,
        _ => true,
    }
}

/// Waits until a source changes. A closed source never changes again.
async fn changed(sources: &mut [watch::Receiver<Arc<PodSet>>]) {
    let mut waiting: Vec<Pin<Box<_>>> = sources
        .iter_mut()
        .map(|source| {
            Box::pin(async move {
                if source.changed().await.is_err() {
                    std::future::pending::<()>().await;
                }
            })
        })
        .collect();
    std::future::poll_fn(|context| {
        let is_ready = waiting
            .iter_mut()
            .any(|one| one.as_mut().poll(context).is_ready());
        match is_ready {
            true => Poll::Ready(()),
            false => Poll::Pending,
        }
    })
    .await;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec;
    use crate::worker::PodStatus;

    const MIRROR: Keeper = Keeper::Kubelet { is_mirror: true };
    const KUBELET: Keeper = Keeper::Kubelet { is_mirror: false };

    fn pod(source: &str, name: &str, uid: Option<&str>, keeper: Keeper) -> SourcedPod {
        let uid = uid.map(|uid| format!(", uid: '{uid}'")).unwrap_or_default();
        let text = format!(
            "apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}{uid}}}\nspec: {{containers: [{{name: c}}]}}"
        );
        let mut spec = spec::read(&text).pods.remove(0);
        if keeper == MIRROR {
            let uid = spec.uid.clone();
            spec.mirror(&uid);
        }
        SourcedPod {
            spec: Arc::new(spec),
            status: None,
            source: Arc::from(source),
            keeper,
        }
    }

    fn set(pods: &[SourcedPod]) -> Arc<PodSet> {
        Arc::new(PodSet {
            pods: pods.to_vec(),
            is_complete: true,
            ..PodSet::default()
        })
    }

    fn shown(set: &PodSet) -> Vec<(&str, &str)> {
        let pods = set.pods.iter();
        pods.map(|pod| (pod.spec.name.as_str(), &*pod.source))
            .collect()
    }

    #[test]
    fn the_first_source_has_its_way_and_a_duplicate_is_reported() {
        let folder = set(&[pod("a.yaml", "a", Some("u"), Keeper::Agent)]);
        let kubernetes = set(&[
            pod("kubernetes", "a", Some("u"), KUBELET),
            pod("kubernetes", "b", Some("v"), KUBELET),
        ]);
        let merged = merge(&[folder, kubernetes]);
        assert_eq!(shown(&merged), [("a", "a.yaml"), ("b", "kubernetes")]);
        assert_eq!(merged.pods[0].keeper, KUBELET, "a kubelet runs it");
        let [problem] = &*merged.problems else {
            panic!("{:?}", merged.problems);
        };
        assert_eq!(problem.subject, "kubernetes: default/a");
        assert!(
            problem.problem.ends_with(": also used in a.yaml"),
            "{problem:?}"
        );
    }

    #[test]
    fn a_mirror_is_no_problem_and_reports_how_the_static_pod_does() {
        let folder = set(&[
            pod("a.yaml", "a-n1", None, Keeper::Agent),
            pod("b.yaml", "b-n1", Some("hash"), Keeper::Agent),
        ]);
        let mut a = pod("kubernetes", "a-n1", Some("0123"), MIRROR);
        a.status = Some(PodStatus::default());
        let b = pod("kubernetes", "b-n1", Some("hash"), MIRROR);
        let merged = merge(&[folder, set(&[a, b])]);
        assert_eq!(shown(&merged), [("a-n1", "a.yaml"), ("b-n1", "b.yaml")]);
        assert_eq!(merged.problems, []);
        assert_eq!(merged.pods[0].status, Some(PodStatus::default()));
        assert_eq!(&*merged.pods[0].spec.uid, "default/a-n1");
    }

    #[test]
    fn a_pod_of_another_name_has_no_say_whatever_uid_it_claims() {
        let folder = set(&[pod("a.yaml", "a", Some("u"), Keeper::Agent)]);
        let mut claims = pod("kubernetes", "evil", Some("u"), MIRROR);
        claims.status = Some(PodStatus {
            deleting: true,
            ..PodStatus::default()
        });
        let merged = merge(&[folder, set(&[claims])]);
        // This is a separate pod next to the folder's.
        assert_eq!(shown(&merged), [("a", "a.yaml"), ("evil", "kubernetes")]);
        assert_eq!(merged.pods[0].keeper, Keeper::Agent);
        assert_eq!(merged.pods[0].status, None);
        assert_ne!(merged.pods[0].spec.uid, merged.pods[1].spec.uid);
    }

    #[test]
    fn no_mirror_takes_the_place_of_another_that_claims_the_same_uid() {
        let mirror = |name| pod("kubernetes", name, Some("u"), MIRROR);
        for names in [["evil", "static-n1"], ["static-n1", "evil"]] {
            let merged = merge(&[set(&names.map(mirror))]);
            assert_eq!(shown(&merged), names.map(|name| (name, "kubernetes")));
            assert_ne!(merged.pods[0].spec.uid, merged.pods[1].spec.uid);
        }
        // The folder's own pod is merged with the mirror of the same name, whatever other pods claim.
        let folder = set(&[pod("a.yaml", "static-n1", Some("u"), Keeper::Agent)]);
        let merged = merge(&[folder, set(&["evil", "static-n1"].map(mirror))]);
        assert_eq!(
            shown(&merged),
            [("static-n1", "a.yaml"), ("evil", "kubernetes")]
        );
        assert_eq!(merged.pods[0].keeper, MIRROR);
        assert_eq!(merged.pods[1].keeper, MIRROR);
        assert_eq!(merged.problems, []);
    }

    #[test]
    fn pods_of_one_name_with_uids_of_their_own_are_two() {
        let old = set(&[pod("a.yaml", "a", Some("u"), Keeper::Agent)]);
        let new = set(&[pod("kubernetes", "a", Some("v"), KUBELET)]);
        let merged = merge(&[old, new]);
        assert_eq!(shown(&merged), [("a", "a.yaml"), ("a", "kubernetes")]);
        assert_eq!(merged.problems, []);
    }

    #[tokio::test]
    async fn a_change_of_any_source_is_reported_and_all_must_be_complete() {
        let (folder, first) = watch::channel(Arc::<PodSet>::default());
        let (kubernetes, second) = watch::channel(Arc::<PodSet>::default());
        let merged = Merged::of(vec![first, second]);
        let mut pods = merged.pods();
        folder.send_replace(set(&[pod("a.yaml", "a", None, Keeper::Agent)]));
        let seen = pods.wait_for(|set| shown(set) == [("a", "a.yaml")]).await;
        assert!(!seen.unwrap().is_complete);
        kubernetes.send_replace(set(&[]));
        pods.wait_for(|set| set.is_complete).await.unwrap();
        // A closed source keeps its last state.
        drop(kubernetes);
        folder.send_replace(set(&[]));
        let seen = pods.wait_for(|set| set.pods.is_empty()).await;
        assert!(seen.unwrap().is_complete);
    }
}

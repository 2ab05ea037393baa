//! Which endpoints of this node are ready, as its own probes say.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;

use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::{ServiceSet, Sourced};
use crate::spec::EndpointSlice;

/// Whether who has an address can serve, as far as it is known.
pub type Readiness = HashMap<IpAddr, bool>;

/// What a source of manifests has: people wrote them, so nobody else says which of their endpoints are ready. Endpoints
/// of the API are no such: a controller of the cluster says it of them, from what all kubelets tell.
#[derive(Clone, Debug)]
pub struct Manifests(watch::Receiver<Arc<ServiceSet>>);

impl Manifests {
    /// Those of a source that people write.
    pub const fn new(services: watch::Receiver<Arc<ServiceSet>>) -> Self {
        Self(services)
    }

    /// As they were written, for a node that probes nothing.
    pub fn unprobed(self) -> watch::Receiver<Arc<ServiceSet>> {
        self.0
    }
}

/// A source of manifests whose endpoints on this node are ready as probes say. Dropping it ends that.
#[derive(Debug)]
pub struct Probed {
    services: watch::Receiver<Arc<ServiceSet>>,
    task: JoinHandle<()>,
}

impl Probed {
    /// The same source, with what the probes of the node of this name say. Must be called in a tokio runtime.
    pub fn of(
        Manifests(mut source): Manifests,
        node: Arc<str>,
        mut readiness: watch::Receiver<Arc<Readiness>>,
    ) -> Self {
        let (sender, services) = watch::channel(Arc::default());
        let task = tokio::spawn(async move {
            loop {
                let set = source.borrow_and_update().clone();
                let known = readiness.borrow_and_update().clone();
                sender.send_replace(Arc::new(with_readiness(&set, &node, &known)));
                // One that has ended says nothing more.
                tokio::select! {
                    Ok(()) = source.changed() => {}
                    Ok(()) = readiness.changed() => {}
                    else => std::future::pending().await,
                }
            }
        });
        Self { services, task }
    }

    /// The services and endpoint slices, now and whenever they change.
    pub fn services(&self) -> watch::Receiver<Arc<ServiceSet>> {
        self.services.clone()
    }
}

impl Drop for Probed {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// The set, with endpoints on the node of this name that are not ready if its probes say so. An endpoint that nobody
/// probes is as its slice says, and so is one that the slice calls not ready: that is how a person takes it out.
pub fn with_readiness(set: &ServiceSet, node: &str, readiness: &Readiness) -> ServiceSet {
    let mut set = set.clone();
    for Sourced { object, .. } in set.slices.values_mut() {
        if let Some(slice) = object {
            take_out(slice, node, readiness);
        }
    }
    set
}

fn take_out(slice: &mut Arc<EndpointSlice>, node: &str, readiness: &Readiness) {
    let endpoints = slice.endpoints.iter().enumerate();
    let ill: Vec<_> = endpoints
        .filter(|(_, endpoint)| {
            endpoint.node.as_deref() == Some(node)
                && readiness.get(&endpoint.address) == Some(&false)
        })
        .map(|(i, _)| i)
        .collect();
    if ill.is_empty() {
        return;
    }
    let slice = Arc::make_mut(slice);
    for i in ill {
        let conditions = &mut slice.endpoints[i].conditions;
        conditions.ready = false;
        conditions.serving = false;
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{ServiceText, service_set};
    use super::*;
    use crate::spec::SliceName;

    fn set() -> ServiceSet {
        let web = ServiceText::new("web", "10.96.0.1")
            .endpoint("10.1.0.1", "here", "{}")
            .endpoint("10.1.0.2", "here", "{}")
            .endpoint("10.1.0.3", "there", "{}")
            .endpoint("10.1.0.4", "here", "{ready: false}");
        service_set("a", &[web])
    }

    /// Which of the endpoints are ready, and which can serve.
    fn conditions(set: &ServiceSet) -> Vec<(bool, bool)> {
        let slice = &set.slices[&SliceName::new("shop", "web")];
        let endpoints = slice.object.as_ref().unwrap().endpoints.iter();
        endpoints
            .map(|one| (one.conditions.ready, one.conditions.serving))
            .collect()
    }

    fn known(told: &[(u8, bool)]) -> Arc<Readiness> {
        let told = told.iter();
        Arc::new(
            told.map(|&(last, ready)| ([10, 1, 0, last].into(), ready))
                .collect(),
        )
    }

    #[test]
    fn only_endpoints_of_this_node_follow_its_probes_and_one_taken_out_stays_out() {
        let all_ill = known(&[(1, true), (2, false), (3, false), (4, true)]);
        let seen = with_readiness(&set(), "here", &all_ill);
        let well = (true, true);
        assert_eq!(
            conditions(&seen),
            [well, (false, false), well, (false, true)]
        );
        let unknown = with_readiness(&set(), "here", &Readiness::new());
        assert_eq!(unknown, set());
    }

    #[tokio::test]
    async fn a_change_of_the_probes_or_of_the_source_is_told() {
        let (source, services) = watch::channel(Arc::<ServiceSet>::default());
        let (probes, readiness) = watch::channel(Arc::<Readiness>::default());
        let probed = Probed::of(Manifests::new(services), "here".into(), readiness);
        let mut seen = probed.services();
        source.send_replace(Arc::new(set()));
        seen.wait_for(|seen| **seen == set()).await.unwrap();
        probes.send_replace(known(&[(1, false)]));
        let is_out = |seen: &Arc<ServiceSet>| conditions(seen)[0] == (false, false);
        seen.wait_for(is_out).await.unwrap();
        // One that has ended keeps what it said.
        drop(source);
        probes.send_replace(known(&[(1, true)]));
        seen.wait_for(|seen| **seen == set()).await.unwrap();
    }
}

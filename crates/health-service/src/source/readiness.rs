//! Decides which endpoints of this node are ready, according to its own probes.

use std::collections::{BTreeSet, HashMap};
use std::net::IpAddr;
use std::sync::Arc;

use imbl::OrdMap;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::{ServiceSet, Sourced};
use crate::difference::differences;
use crate::spec::{EndpointSlice, Service, ServiceName, SliceName};

/// Whether the owner of each address can serve, as far as is known.
pub type Readiness = HashMap<IpAddr, bool>;

/// A source whose endpoints on this node that are not ready according to probes are taken out of service: those from
/// manifests, which people write, and those of services from the API whose annotation asks for it. For other endpoints
/// from the API, a controller of the cluster decides alone, based on reports from all kubelets. Dropping it stops the
/// updates.
#[derive(Debug)]
pub struct Probed {
    services: watch::Receiver<Arc<ServiceSet>>,
    task: JoinHandle<()>,
}

impl Probed {
    /// Combines a source with the probes of the node with this name. Must be called in a tokio runtime.
    pub fn of(
        mut source: watch::Receiver<Arc<ServiceSet>>,
        node: Arc<str>,
        mut readiness: watch::Receiver<Arc<Readiness>>,
    ) -> Self {
        let (sender, services) = watch::channel(Arc::default());
        let task = tokio::spawn(async move {
            let mut overlay = Overlay::of(node);
            loop {
                let set = source.borrow_and_update().clone();
                let known = readiness.borrow_and_update().clone();
                sender.send_replace(Arc::new(overlay.update(&set, known)));
                // A closed source never changes again.
                tokio::select! {
                    Ok(()) = source.changed() => {}
                    Ok(()) = readiness.changed() => {}
                    else => std::future::pending().await,
                }
            }
        });
        Self { services, task }
    }

    /// Returns the services and endpoint slices, with their changes.
    pub fn services(&self) -> watch::Receiver<Arc<ServiceSet>> {
        self.services.clone()
    }
}

impl Drop for Probed {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Slices combined with a node's probes: endpoints on the node with this name are not ready if its probes say so.
/// Endpoints that are not probed keep the state in their slice. Endpoints that the slice marks as not ready stay out of
/// service whatever the probes say, so that an operator or the cluster can take an endpoint out of service.
#[derive(Debug)]
struct Overlay {
    node: Arc<str>,
    /// The services, which say whether probes count.
    services: OrdMap<ServiceName, Sourced<Service>>,
    /// The slices as written.
    written: OrdMap<SliceName, Sourced<EndpointSlice>>,
    readiness: Arc<Readiness>,
    /// The slices that contain each address on this node.
    by_address: HashMap<IpAddr, BTreeSet<SliceName>>,
    /// The slices as published.
    slices: OrdMap<SliceName, Sourced<EndpointSlice>>,
}

impl Overlay {
    fn of(node: Arc<str>) -> Self {
        Self {
            node,
            services: OrdMap::new(),
            written: OrdMap::new(),
            readiness: Arc::default(),
            by_address: HashMap::new(),
            slices: OrdMap::new(),
        }
    }

    /// Returns the set combined with the probes. Checks only slices that differ from the last ones, and slices with
    /// addresses whose readiness has changed.
    fn update(&mut self, set: &ServiceSet, readiness: Arc<Readiness>) -> ServiceSet {
        let mut touched = self.index(&set.slices);
        touched.extend(self.take_services(&set.services));
        let former = std::mem::replace(&mut self.readiness, readiness);
        let all = former.keys().chain(self.readiness.keys());
        let changed = all.filter(|ip| former.get(ip) != self.readiness.get(ip));
        let changed = changed.filter_map(|ip| self.by_address.get(ip));
        touched.extend(changed.flatten().cloned());
        for name in touched {
            let Some(written) = self.written.get(&name) else {
                self.slices.remove(&name);
                continue;
            };
            let mut sourced = written.clone();
            if self.follows_probes(written)
                && let Some(slice) = &mut sourced.object
            {
                take_out(slice, &self.node, &self.readiness);
            }
            self.slices.insert(name, sourced);
        }
        ServiceSet {
            slices: self.slices.clone(),
            ..set.clone()
        }
    }

    /// Whether probes count for the endpoints of a slice.
    fn follows_probes(&self, slice: &Sourced<EndpointSlice>) -> bool {
        let service = slice.object.as_ref().map(|slice| &slice.service);
        let service = service.and_then(|name| self.services.get(name));
        service.map_or(!slice.is_of_api(), Sourced::follows_probes)
    }

    /// Takes over the current services. Returns the slices of those for which probes have begun or ceased to count.
    fn take_services(&mut self, now: &OrdMap<ServiceName, Sourced<Service>>) -> Vec<SliceName> {
        let before = std::mem::replace(&mut self.services, now.clone());
        let changed: BTreeSet<&ServiceName> = differences(&before, now)
            .filter(|(_, before, now)| {
                let any = before.or(*now);
                // As for a slice without a service.
                let default = any.is_some_and(|one| !one.is_of_api());
                let follows =
                    |one: &Option<&Sourced<Service>>| one.map_or(default, Sourced::follows_probes);
                follows(before) != follows(now)
            })
            .map(|(name, ..)| name)
            .collect();
        if changed.is_empty() {
            return Vec::new();
        }
        let slices = self.written.iter().filter(|(_, slice)| {
            let slice = slice.object.as_ref();
            slice.is_some_and(|slice| changed.contains(&slice.service))
        });
        slices.map(|(name, _)| name.clone()).collect()
    }

    /// Takes over the current slices. Returns those that have changed.
    fn index(&mut self, now: &OrdMap<SliceName, Sourced<EndpointSlice>>) -> BTreeSet<SliceName> {
        let mut touched = BTreeSet::new();
        let before = std::mem::replace(&mut self.written, now.clone());
        for (name, before, now) in differences(&before, now) {
            for ip in before
                .into_iter()
                .flat_map(|slice| local(slice, &self.node))
            {
                if let Some(names) = self.by_address.get_mut(&ip) {
                    names.remove(name);
                    if names.is_empty() {
                        self.by_address.remove(&ip);
                    }
                }
            }
            for ip in now.into_iter().flat_map(|slice| local(slice, &self.node)) {
                self.by_address.entry(ip).or_default().insert(name.clone());
            }
            touched.insert(name.clone());
        }
        touched
    }
}

/// Returns the addresses of a slice on a node.
fn local<'a>(
    slice: &'a Sourced<EndpointSlice>,
    node: &'a str,
) -> impl Iterator<Item = IpAddr> + 'a {
    let endpoints = slice.object.iter().flat_map(|slice| &slice.endpoints);
    let local = endpoints.filter(move |endpoint| endpoint.node.as_deref() == Some(node));
    local.map(|endpoint| endpoint.address)
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

    fn with_readiness(set: &ServiceSet, readiness: Arc<Readiness>) -> ServiceSet {
        Overlay::of("here".into()).update(set, readiness)
    }

    fn set() -> ServiceSet {
        let web = ServiceText::new("web", "10.96.0.1")
            .endpoint("10.1.0.1", "here", "{}")
            .endpoint("10.1.0.2", "here", "{}")
            .endpoint("10.1.0.3", "there", "{}")
            .endpoint("10.1.0.4", "here", "{ready: false}");
        service_set("a", &[web])
    }

    /// For each endpoint, whether it is ready, and whether it can serve.
    fn conditions(set: &ServiceSet) -> Vec<(bool, bool)> {
        let slice = &set.slices[&SliceName::new("shop", "web")];
        let endpoints = slice.object.as_ref().unwrap().endpoints.iter();
        endpoints
            .map(|one| (one.conditions.ready, one.conditions.serving))
            .collect()
    }

    fn known(reported: &[(u8, bool)]) -> Arc<Readiness> {
        let reported = reported.iter();
        Arc::new(
            reported
                .map(|&(last, ready)| ([10, 1, 0, last].into(), ready))
                .collect(),
        )
    }

    #[test]
    fn only_endpoints_of_this_node_follow_its_probes_and_one_taken_out_stays_out() {
        let all_ill = known(&[(1, true), (2, false), (3, false), (4, true)]);
        let seen = with_readiness(&set(), all_ill);
        let well = (true, true);
        assert_eq!(
            conditions(&seen),
            [well, (false, false), well, (false, true)]
        );
        let unknown = with_readiness(&set(), Arc::default());
        assert_eq!(unknown, set());
    }

    /// The set as read from the API, with the annotation on its service or without it.
    fn of_api(is_annotated: bool) -> ServiceSet {
        let web = ServiceText::new("web", "10.96.0.1")
            .local_readiness(is_annotated)
            .endpoint("10.1.0.1", "here", "{}")
            .endpoint("10.1.0.2", "here", "{}")
            .endpoint("10.1.0.3", "there", "{}")
            .endpoint("10.1.0.4", "here", "{ready: false}");
        service_set("kubernetes", &[web])
    }

    #[test]
    fn probes_count_for_services_of_the_api_that_ask_for_it_and_bring_no_endpoint_in() {
        let ill = known(&[(1, true), (2, false), (3, false), (4, true)]);
        let mut overlay = Overlay::of("here".into());
        let (well, out) = ((true, true), (false, false));
        let unready = (false, true);
        for (is_annotated, expected) in [
            (false, [well, well, well, unready]),
            (true, [well, out, well, unready]),
            (false, [well, well, well, unready]),
        ] {
            let seen = overlay.update(&of_api(is_annotated), ill.clone());
            assert_eq!(conditions(&seen), expected, "annotated: {is_annotated}");
        }
        overlay.update(&of_api(true), ill);
        let again = overlay.update(&of_api(true), known(&[(1, true), (2, true), (4, true)]));
        assert_eq!(conditions(&again), [well, well, well, unready]);
    }

    #[tokio::test]
    async fn a_change_of_the_probes_or_of_the_source_is_reported() {
        let (source, services) = watch::channel(Arc::<ServiceSet>::default());
        let (probes, readiness) = watch::channel(Arc::<Readiness>::default());
        let probed = Probed::of(services, "here".into(), readiness);
        let mut seen = probed.services();
        source.send_replace(Arc::new(set()));
        seen.wait_for(|seen| **seen == set()).await.unwrap();
        probes.send_replace(known(&[(1, false)]));
        let is_out = |seen: &Arc<ServiceSet>| conditions(seen)[0] == (false, false);
        seen.wait_for(is_out).await.unwrap();
        // A closed source keeps its last state.
        drop(source);
        probes.send_replace(known(&[(1, true)]));
        seen.wait_for(|seen| **seen == set()).await.unwrap();
    }

    #[test]
    fn sets_and_readiness_that_change_one_after_the_other_come_to_what_they_would_at_once() {
        let text = |name: &str, endpoints: &[(u8, &str)]| {
            let text = ServiceText::new(name, "10.96.0.1");
            endpoints.iter().fold(text, |text, (last, node)| {
                text.endpoint(&format!("10.1.0.{last}"), node, "{}")
            })
        };
        let web = text("web", &[(1, "here"), (2, "here"), (3, "there")]);
        let api = text("api", &[(2, "here"), (4, "here")]);
        let moved = text("api", &[(3, "here"), (2, "there")]);
        let sets = [
            vec![],
            vec![web.clone()],
            vec![web.clone(), api.clone()],
            vec![web, moved],
            vec![api],
        ];
        let sets = sets.map(|texts| service_set("a", &texts));
        let readiness = [
            known(&[]),
            known(&[(2, false)]),
            known(&[(2, true), (3, false)]),
            known(&[(1, false), (2, false), (3, false), (4, false)]),
        ];
        let mut overlay = Overlay::of("here".into());
        // Try every transition between two states.
        let count = sets.len() * readiness.len();
        for step in 0..count * count {
            let [from, to] = [step / count, step % count];
            for at in [from, to] {
                let (set, known) = (&sets[at % sets.len()], &readiness[at / sets.len()]);
                let seen = overlay.update(set, known.clone());
                assert_eq!(seen, with_readiness(set, known.clone()), "{from} to {to}");
            }
        }
    }
}

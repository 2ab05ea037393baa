use std::sync::Arc;

use health_model::ipam::Family;
use health_model::policy::Protocol;
use jiff::Timestamp;
use k8s_openapi::api::core::v1 as core;
use k8s_openapi::api::discovery::v1 as discovery;
use serde_json::{Value, json};

use super::*;
use crate::spec::{
    EndpointSlice, PortKey, Selection, Service, ServiceName, ServicePortName, SliceName,
    read_service, read_slice,
};

fn service(name: &str, ports: &[(&str, u16)]) -> Arc<Service> {
    let ports = ports
        .iter()
        .map(|(name, port)| json!({ "name": name, "port": port }));
    let ports: Vec<_> = ports.collect();
    let object: core::Service = serde_json::from_value(json!({
        "metadata": { "namespace": "shop", "name": name },
        "spec": { "clusterIP": "10.96.0.1", "ports": ports },
    }))
    .unwrap();
    let reading = read_service(&object, &Selection::default()).unwrap();
    assert_eq!(reading.errors, []);
    Arc::new(reading.service.unwrap())
}

fn slice(service: &str, name: &str, endpoints: Value) -> Arc<EndpointSlice> {
    let object: discovery::EndpointSlice = serde_json::from_value(json!({
        "metadata": {
            "namespace": "shop", "name": name,
            "labels": { "kubernetes.io/service-name": service },
        },
        "addressType": "IPv4",
        "ports": [{ "name": "http", "port": 8080 }],
        "endpoints": endpoints,
    }))
    .unwrap();
    let reading = read_slice(&object, &Selection::default()).unwrap();
    assert_eq!(reading.errors, []);
    Arc::new(reading.slice.unwrap())
}

fn on(node: &str, address: &str) -> Value {
    json!({ "addresses": [address], "nodeName": node })
}

fn name(service: &str) -> ServiceName {
    ServiceName::new("shop", service)
}

fn port(service: &str, port: &str) -> ServicePortName {
    ServicePortName {
        service: name(service),
        port: port.into(),
        protocol: Protocol::TCP,
    }
}

fn key(service: &str) -> PortKey {
    PortKey {
        name: port(service, "http"),
        family: Family::V4,
    }
}

fn second(second: i64) -> Timestamp {
    Timestamp::from_second(second).unwrap()
}

fn slices() -> EndpointsChangeTracker {
    EndpointsChangeTracker::new("here", second(100))
}

/// Returns each endpoint's address, and whether the endpoint is local.
fn list(map: &EndpointsMap, service: &str) -> Vec<(String, bool)> {
    let endpoints = map.get(&key(service)).iter();
    endpoints
        .map(|endpoint| (endpoint.address.to_string(), endpoint.is_local))
        .collect()
}

#[test]
fn a_service_that_was_not_there_and_is_not_is_no_change() {
    let mut tracker = ServiceChangeTracker::default();
    assert!(!tracker.update(&name("a"), None));
    assert!(tracker.update(&name("b"), Some(service("b", &[("http", 80)]))));
    assert!(!tracker.update(&name("a"), None));
    assert_eq!((tracker.pending(), tracker.total()), (1, 1));
}

#[test]
fn a_service_that_changes_back_before_a_sync_has_not_changed() {
    let mut tracker = ServiceChangeTracker::default();
    let mut map = ServicePortMap::default();
    let (first, other) = (service("a", &[("http", 80)]), service("a", &[("http", 81)]));
    assert!(tracker.update(&name("a"), Some(first.clone())));
    tracker.apply(&mut map);
    assert!(tracker.update(&name("a"), Some(other)));
    assert!(!tracker.update(&name("a"), Some(first)));
    assert_eq!((tracker.pending(), tracker.total()), (0, 3));
    assert_eq!(tracker.apply(&mut map), ServiceUpdates::default());
    // Nor has a service that was added and removed again.
    assert!(tracker.update(&name("b"), Some(service("b", &[("http", 80)]))));
    assert!(!tracker.update(&name("b"), None));
    assert_eq!(map.len(), 1);
}

#[test]
fn a_service_tracker_returns_whether_any_service_has_changed() {
    let mut tracker = ServiceChangeTracker::default();
    let first = service("a", &[("http", 80)]);
    tracker.update(&name("a"), Some(first.clone()));
    tracker.apply(&mut ServicePortMap::default());
    assert!(!tracker.update(&name("a"), Some(first.clone())));
    assert!(tracker.update(&name("b"), Some(service("b", &[("http", 80)]))));
    assert!(tracker.update(&name("a"), Some(first)));
    assert_eq!(tracker.pending(), 1);
}

#[test]
fn the_ports_of_a_service_are_merged_and_those_that_went_are_taken_out() {
    let mut tracker = ServiceChangeTracker::default();
    let mut map = ServicePortMap::default();
    tracker.update(&name("a"), Some(service("a", &[("http", 80), ("dns", 53)])));
    tracker.update(&name("b"), Some(service("b", &[("http", 80)])));
    tracker.apply(&mut map);
    assert_eq!(map.len(), 3);
    // The state before the first event counts, not the states in between.
    tracker.update(&name("a"), Some(service("a", &[("mail", 25)])));
    tracker.update(&name("a"), Some(service("a", &[("http", 81), ("new", 90)])));
    tracker.update(&name("b"), None);
    let updates = tracker.apply(&mut map);
    assert_eq!(updates.services, [name("a"), name("b")].into());
    assert_eq!(updates.deleted, [name("b")].into());
    let touched = [("a", "dns"), ("a", "http"), ("a", "new"), ("b", "http")];
    assert_eq!(
        updates.ports,
        touched.map(|(service, name)| port(service, name)).into()
    );
    let left: Vec<_> = map
        .iter()
        .map(|(name, port)| (name.to_string(), port.port))
        .collect();
    let expected = [
        ("shop/a:http/TCP".to_owned(), 81),
        ("shop/a:new/TCP".to_owned(), 90),
    ];
    assert_eq!(left, expected);
    assert_eq!(map.of_service(&name("a")).count(), 2);
    assert_eq!(map.of_service(&name("b")).count(), 0);
}

#[test]
fn a_slice_tracker_returns_whether_this_slice_has_changed() {
    let mut tracker = slices();
    let (first, other) = (
        slice("a", "s", json!([on("there", "10.1.0.1")])),
        slice("a", "s", json!([on("there", "10.1.0.2")])),
    );
    assert!(tracker.update(first.clone(), None));
    assert!(!tracker.update(first.clone(), None));
    assert!(!tracker.remove(&SliceName::new("shop", "unknown")));
    assert!(tracker.update(other.clone(), None));
    assert!(!tracker.update(other.clone(), None));
    assert_eq!((tracker.pending(), tracker.total()), (2, 5));
    tracker.apply(&mut EndpointsMap::default());
    assert_eq!(tracker.pending(), 0);
    assert!(!tracker.update(other, None));
    assert!(tracker.remove(&SliceName::new("shop", "s")));
    assert!(!tracker.remove(&SliceName::new("shop", "s")));
    // The slice is back before its removal was applied.
    assert!(tracker.update(first, None));
}

#[test]
fn a_slice_that_changes_back_before_a_sync_stays_a_change_but_no_port_has_changed() {
    let mut tracker = slices();
    let mut map = EndpointsMap::default();
    let first = slice("a", "s", json!([on("there", "10.1.0.1")]));
    tracker.update(first.clone(), None);
    assert_eq!(tracker.apply(&mut map).ports, [key("a")].into());
    assert!(tracker.update(slice("a", "s", json!([])), None));
    assert!(tracker.update(first, None));
    let updates = tracker.apply(&mut map);
    assert_eq!(updates.services, [name("a")].into());
    assert!(updates.ports.is_empty());
    assert_eq!(list(&map, "a"), [("10.1.0.1:8080".to_owned(), false)]);
}

#[test]
fn slices_of_a_service_are_merged_sorted_as_text_and_a_local_endpoint_wins() {
    let mut tracker = slices();
    let mut map = EndpointsMap::default();
    let there = json!([
        on("there", "10.1.0.9"),
        on("there", "10.1.0.10"),
        on("here", "10.1.0.3")
    ]);
    tracker.update(slice("a", "s1", there), None);
    let both = json!([
        on("here", "10.1.0.10"),
        on("there", "10.1.0.3"),
        on("there", "10.1.0.2")
    ]);
    tracker.update(slice("a", "s2", both), None);
    tracker.apply(&mut map);
    let expected = [
        ("10.1.0.10:8080", true),
        ("10.1.0.2:8080", false),
        ("10.1.0.3:8080", true),
        ("10.1.0.9:8080", false),
    ];
    let expected = expected.map(|(address, is_local)| (address.to_owned(), is_local));
    assert_eq!(list(&map, "a"), expected);
    // Addresses that only this slice had disappear with it; those in both slices stay.
    tracker.remove(&SliceName::new("shop", "s1"));
    tracker.apply(&mut map);
    let left = [
        ("10.1.0.10:8080", true),
        ("10.1.0.2:8080", false),
        ("10.1.0.3:8080", false),
    ];
    let left = left.map(|(address, is_local)| (address.to_owned(), is_local));
    assert_eq!(list(&map, "a"), left);
    tracker.remove(&SliceName::new("shop", "s2"));
    assert_eq!(tracker.apply(&mut map).ports, [key("a")].into());
    assert_eq!(map, EndpointsMap::default());
}

/// Returns all permutations of a list.
fn orders<T: Clone>(list: &[T]) -> Vec<Vec<T>> {
    if list.is_empty() {
        return vec![Vec::new()];
    }
    (0..list.len())
        .flat_map(|first| {
            let mut rest = list.to_vec();
            let taken = rest.remove(first);
            orders(&rest).into_iter().map(move |mut order| {
                order.insert(0, taken.clone());
                order
            })
        })
        .collect()
}

#[test]
fn the_best_of_several_entries_with_one_address_counts_in_all_orders_and_slices() {
    // Terminating, serving, ready, and on this node; from best to worst.
    let ranks: Vec<[bool; 4]> = (0..16)
        .map(|bits| [bits & 8 != 0, bits & 4 == 0, bits & 2 == 0, bits & 1 == 0])
        .collect();
    let entry = |[terminating, serving, ready, is_local]: [bool; 4]| {
        json!({
            "addresses": ["10.1.0.1"],
            "nodeName": if is_local { "here" } else { "there" },
            "conditions": { "ready": ready, "serving": serving, "terminating": terminating },
        })
    };
    let counted = |slices: &[Arc<EndpointSlice>]| {
        let mut tracker = tracker_of(slices);
        let mut map = EndpointsMap::default();
        tracker.apply(&mut map);
        let [endpoint] = map.get(&key("a")) else {
            panic!("not one endpoint: {map:?}")
        };
        let conditions = endpoint.conditions;
        [
            conditions.terminating,
            conditions.serving,
            conditions.ready,
            endpoint.is_local,
        ]
    };
    for (best, first) in ranks.iter().enumerate() {
        for (second, third) in (best..16).flat_map(|two| (two..16).map(move |three| (two, three))) {
            for order in orders(&[*first, ranks[second], ranks[third]]) {
                let entries: Vec<_> = order.iter().map(|one| entry(*one)).collect();
                let one_slice = slice("a", "s", json!(entries));
                assert_eq!(counted(&[one_slice]), *first, "one slice: {order:?}");
                let several: Vec<_> = entries
                    .iter()
                    .enumerate()
                    .map(|(i, entry)| slice("a", &format!("s{i}"), json!([entry])))
                    .collect();
                assert_eq!(counted(&several), *first, "three slices: {order:?}");
            }
        }
    }
}

fn tracker_of(slices: &[Arc<EndpointSlice>]) -> EndpointsChangeTracker {
    let mut tracker = self::slices();
    for slice in slices {
        tracker.update(slice.clone(), None);
    }
    tracker
}

#[test]
fn a_slice_that_gets_another_service_leaves_the_first() {
    let mut tracker = slices();
    let mut map = EndpointsMap::default();
    let endpoints = json!([on("there", "10.1.0.1")]);
    tracker.update(slice("a", "s", endpoints.clone()), None);
    tracker.apply(&mut map);
    tracker.update(slice("b", "s", endpoints), None);
    let updates = tracker.apply(&mut map);
    assert_eq!(updates.ports, [key("a"), key("b")].into());
    assert!(list(&map, "a").is_empty());
    assert_eq!(list(&map, "b").len(), 1);
}

#[test]
fn trigger_times_are_of_changes_since_the_start_and_go_with_a_slice() {
    let mut tracker = slices();
    let mut map = EndpointsMap::default();
    let first = slice("a", "s1", json!([on("there", "10.1.0.1")]));
    tracker.update(first.clone(), Some(second(200)));
    // No time is recorded for unchanged slices, for times before the start, or without a time.
    tracker.update(first, Some(second(300)));
    tracker.update(slice("a", "s2", json!([])), Some(second(100)));
    tracker.update(slice("a", "s3", json!([])), None);
    tracker.update(slice("a", "s4", json!([])), Some(second(400)));
    tracker.update(slice("b", "s5", json!([])), Some(second(500)));
    let times = tracker.apply(&mut map).trigger_times;
    let expected = [
        (name("a"), vec![second(200), second(400)]),
        (name("b"), vec![second(500)]),
    ];
    assert_eq!(times, expected.into());
    assert!(tracker.apply(&mut map).trigger_times.is_empty());
    tracker.update(slice("a", "s6", json!([])), Some(second(600)));
    tracker.update(slice("b", "s7", json!([])), Some(second(600)));
    tracker.remove(&SliceName::new("shop", "s1"));
    let times = tracker.apply(&mut map).trigger_times;
    assert_eq!(times, [(name("b"), vec![second(600)])].into());
}

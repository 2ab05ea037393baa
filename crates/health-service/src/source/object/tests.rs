//! Tests of reading API objects.

use std::sync::Arc;

use health_model::manifest::objects;
use serde_json::json;

use super::super::folder::KINDS;
use super::*;

fn service() -> Value {
    json!({
        "apiVersion": "v1", "kind": "Service",
        "metadata": { "namespace": "shop", "name": "web" },
        "spec": {
            "type": "LoadBalancer", "clusterIP": "10.96.0.1", "clusterIPs": ["10.96.0.1", "fd00::1"],
            "externalIPs": ["192.0.2.1", "192.0.2.2", "192.0.2.3"],
            "loadBalancerSourceRanges": ["10.0.0.0/8", "fd00::/8", "192.168.0.0/16"],
            "ports": [{ "name": "a", "port": 80 }, { "name": "b", "port": 81 }, { "name": "c", "port": 82 }],
        },
        "status": { "loadBalancer": { "ingress": [
            { "ip": "198.51.100.1" }, { "ip": "198.51.100.2" }, { "ip": "198.51.100.3" },
        ] } },
    })
}

fn slice() -> Value {
    let endpoint = |last: u8| {
        json!({
            "addresses": [format!("10.1.0.{last}")],
            "conditions": { "ready": true },
            "hints": { "forZones": [{ "name": "z1" }, { "name": "z2" }], "forNodes": [{ "name": "n1" }] },
        })
    };
    json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
        "metadata": {
            "namespace": "shop", "name": "web-1", "labels": { "kubernetes.io/service-name": "web" },
        },
        "addressType": "IPv4",
        "ports": [{ "name": "a", "port": 8080 }, { "name": "b", "port": 8081 }],
        "endpoints": [endpoint(1), endpoint(2), endpoint(3)],
    })
}

fn reading<T: Readable>(object: &Value) -> Result<Reading<T>, Vec<String>> {
    let found = objects(&object.to_string(), &KINDS).pop();
    let object = found.expect("an object").expect("an object of ours");
    read::<T>(object, &Selection::default())
        .map_err(|bad| bad.errors.iter().map(ToString::to_string).collect())
}

fn reported<T: Readable>(reading: &Reading<T>) -> Vec<&str> {
    reading.errors.iter().map(|error| &*error.path).collect()
}

/// Invalid values for a member.
const NO_MEMBERS: [&str; 5] = ["null", "5", "[]", "true", r#""no member""#];

/// The lists in both objects: each with its JSON pointer and the start of its path.
const SERVICE_LISTS: [(&str, &str); 4] = [
    ("/spec/externalIPs", "spec.externalIPs"),
    (
        "/spec/loadBalancerSourceRanges",
        "spec.loadBalancerSourceRanges",
    ),
    ("/spec/ports", "spec.ports"),
    (
        "/status/loadBalancer/ingress",
        "status.loadBalancer.ingress",
    ),
];
const SLICE_LISTS: [(&str, &str); 2] = [("/ports", "ports"), ("/endpoints", "endpoints")];

/// Breaks each member of each list in each way. The object must then equal the one without that member, and the error
/// must name the member.
fn each_bad_member_is_left_out_alone<T: Readable + fmt::Debug>(
    object: &Value,
    lists: &[(&str, &str)],
    change: impl Fn(&str, &mut T),
) {
    let whole = reading::<T>(object).expect("a sound object");
    assert_eq!(reported(&whole), [""; 0]);
    for (pointer, path) in lists {
        let members = object.pointer(pointer).and_then(Value::as_array);
        for place in 0..members.expect("a list").len() {
            for bad in NO_MEMBERS {
                let mut broken = object.clone();
                let list = broken.pointer_mut(pointer).expect("a list");
                list[place] = serde_json::from_str(bad).expect("JSON");
                let mut without = object.clone();
                let list = without.pointer_mut(pointer).and_then(Value::as_array_mut);
                list.expect("a list").remove(place);

                let read = reading::<T>(&broken);
                let read = read.unwrap_or_else(|errors| panic!("{path}[{place}]: {errors:?}"));
                let paths = reported(&read);
                assert_eq!(paths.len(), 1, "{paths:?}");
                assert!(
                    paths[0].starts_with(&format!("{path}[{place}]")),
                    "{paths:?}"
                );
                let mut expected = reading::<T>(&without).ok().and_then(|one| one.object.ok());
                if let Some(expected) = &mut expected {
                    change(path, expected);
                }
                assert_eq!(read.object.ok(), expected, "{path}[{place}]: {bad}");
            }
        }
    }
}

#[test]
fn a_bad_member_of_a_list_is_left_out_alone() {
    each_bad_member_is_left_out_alone::<Service>(&service(), &SERVICE_LISTS, |path, service| {
        // An unreadable source range must not admit anyone.
        if path == "spec.loadBalancerSourceRanges" {
            let mut common = (*service.common).clone();
            common.source_ranges.has_error = true;
            let common = Arc::new(common);
            for port in &mut service.ports {
                port.service = common.clone();
            }
            service.common = common;
        }
    });
    each_bad_member_is_left_out_alone::<EndpointSlice>(&slice(), &SLICE_LISTS, |_, _| {});
}

#[test]
fn a_bad_hint_is_for_nobody_and_the_other_hints_count() {
    for bad in [
        json!(5),
        json!({}),
        json!({ "name": 5 }),
        json!({ "name": "" }),
    ] {
        let mut object = slice();
        object["endpoints"][1]["hints"]["forZones"][0] = bad;
        object["endpoints"][1]["hints"]["forNodes"] = json!([null]);
        let read = reading::<EndpointSlice>(&object).expect("a slice");
        let paths = reported(&read);
        assert_eq!(paths.len(), 2, "{paths:?}");
        let is_reported = |field| paths.iter().any(|path| path.starts_with(field));
        assert!(is_reported("endpoints[1].hints.forZones[0]"), "{paths:?}");
        assert!(is_reported("endpoints[1].hints.forNodes[0]"), "{paths:?}");
        let slice = read.object.expect("a slice");
        let hints: Vec<_> = slice
            .endpoints
            .iter()
            .map(|one| one.hints.clone())
            .collect();
        assert_eq!(hints[0], hints[2]);
        let hints = hints[1].as_ref().expect("hints");
        assert_eq!(&*hints.zones[1], "z2");
        assert!(
            !hints.nodes.is_empty(),
            "an endpoint without hints would turn them off"
        );
    }
}

#[test]
fn an_object_of_which_a_list_is_left_empty_or_whose_own_fields_are_bad_is_refused() {
    type Change = fn(&mut Value);
    let changes: [Change; 5] = [
        |service| service["spec"]["ports"] = json!([{ "port": "often" }]),
        |service| service["spec"]["ports"] = json!([{ "port": 0 }]),
        |service| service["spec"]["ports"] = json!("http"),
        |service| service["spec"]["type"] = json!("Magic"),
        |service| {
            service["spec"]["clusterIP"] = json!("10.96.0");
            service["spec"]["clusterIPs"] = json!(["fd00::g"]);
        },
    ];
    for change in changes {
        let mut object = service();
        change(&mut object);
        assert!(reading::<Service>(&object).is_err(), "{object}");
    }
    let changes: [Change; 3] = [
        |slice| slice["endpoints"] = json!([{ "addresses": ["10.1.0.1000"] }]),
        |slice| slice["ports"] = json!([{ "name": "a" }]),
        |slice| slice["addressType"] = json!("IPv5"),
    ];
    for change in changes {
        let mut object = slice();
        change(&mut object);
        assert!(reading::<EndpointSlice>(&object).is_err(), "{object}");
    }
}

#[test]
fn an_address_of_a_family_that_the_service_lacks_is_left_out_alone() {
    let mut object = service();
    object["spec"]["clusterIPs"] = json!(["10.96.0.1"]);
    object["spec"]["externalIPs"] = json!(["192.0.2.1", "2001:db8:1::11"]);
    object["status"]["loadBalancer"]["ingress"] =
        json!([{ "ip": "192.0.2.12" }, { "ip": "2001:db8:1::12" }]);
    let read = reading::<Service>(&object).expect("a service");
    assert_eq!(
        reported(&read),
        ["spec.externalIPs[1]", "status.loadBalancer.ingress[1].ip"]
    );
    let common = read.object.expect("a service").common;
    assert_eq!(common.external_ips.len(), 1);
    assert_eq!(common.load_balancer_ips.len(), 1);
}

use k8s_openapi::api::core::v1 as core;
use k8s_openapi::api::discovery::v1 as discovery;
use serde_json::{Value, json};

use super::*;

/// A service object with this spec and status.
fn object(spec: Value, status: Value) -> Value {
    json!({
        "metadata": { "namespace": "shop", "name": "web" },
        "spec": spec,
        "status": status,
    })
}

fn reading(object: Value) -> ServiceReading {
    let object: core::Service = serde_json::from_value(object).unwrap();
    read_service(&object, &Selection::default()).unwrap()
}

fn read(spec: Value) -> (Result<Service, Skip>, Vec<String>) {
    let reading = reading(object(spec, json!({})));
    (reading.service, texts(&reading.errors))
}

fn texts(errors: &[SpecError]) -> Vec<String> {
    errors.iter().map(ToString::to_string).collect()
}

fn ips(addresses: &[IpAddr]) -> Vec<String> {
    addresses.iter().map(ToString::to_string).collect()
}

/// A spec with a port and these fields.
fn spec(fields: Value) -> Value {
    let mut spec = json!({ "clusterIP": "10.96.0.1", "ports": [{ "port": 80 }] });
    for (name, value) in fields.as_object().unwrap() {
        spec[name] = value.clone();
    }
    spec
}

#[test]
fn a_service_that_says_little_has_the_defaults() {
    let (service, errors) = read(spec(json!({})));
    assert_eq!(errors, Vec::<String>::new());
    let service = service.unwrap();
    let common = &service.common;
    assert_eq!(common.name.to_string(), "shop/web");
    assert_eq!(common.created, None);
    assert_eq!(common.affinity, None);
    assert_eq!(common.internal_policy, TrafficPolicy::Cluster);
    assert_eq!(common.algorithm, None);
    let port = &service.ports[0];
    assert_eq!(
        (port.port, port.node_port, port.protocol),
        (80, None, Protocol::TCP)
    );
    assert_eq!(port.full_name().to_string(), "shop/web/TCP");
    assert!(!port.is_external() && port.uses_cluster_endpoints() && !port.uses_local_endpoints());
}

#[test]
fn a_service_without_a_name_is_an_error_and_one_without_a_namespace_is_in_the_default_one() {
    let error = read_service(&core::Service::default(), &Selection::default()).unwrap_err();
    assert_eq!(
        error.to_string(),
        "service default/: metadata.name: Required value"
    );
    let mut object = object(spec(json!({})), json!({}));
    object["metadata"]["namespace"] = Value::Null;
    assert_eq!(reading(object).name.to_string(), "default/web");
}

#[test]
fn services_without_addresses_are_skipped() {
    for (fields, skip) in [
        (json!({ "clusterIP": "None" }), Skip::Headless),
        (
            json!({ "clusterIP": "None", "clusterIPs": ["None"] }),
            Skip::Headless,
        ),
        (json!({ "clusterIP": "" }), Skip::NoClusterIp),
        (json!({ "clusterIP": null }), Skip::NoClusterIp),
        (
            json!({ "type": "ExternalName", "externalName": "a.b" }),
            Skip::ExternalName,
        ),
    ] {
        assert_eq!(
            read(spec(fields.clone())),
            (Err(skip), Vec::new()),
            "{fields}"
        );
    }
    let (service, errors) = read(spec(json!({ "clusterIP": "10.96.0" })));
    assert_eq!(service, Err(Skip::NoClusterIp));
    assert_eq!(
        errors,
        [
            "service shop/web: spec.clusterIP: Invalid value: \"10.96.0\": must be a valid IP address"
        ]
    );
}

#[test]
fn labels_say_whose_an_object_is() {
    const PROXY: &str = "service.kubernetes.io/service-proxy-name";
    const HEADLESS: &str = "service.kubernetes.io/headless";
    for (labels, own, skip) in [
        (json!({}), None, None),
        (json!({ PROXY: "other" }), None, Some(Skip::OtherProxy)),
        (json!({ PROXY: "" }), None, Some(Skip::OtherProxy)),
        (json!({ PROXY: "ours" }), Some("ours"), None),
        (
            json!({ PROXY: "other" }),
            Some("ours"),
            Some(Skip::OtherProxy),
        ),
        (json!({}), Some("ours"), Some(Skip::OtherProxy)),
        (json!({ HEADLESS: "" }), None, Some(Skip::HeadlessLabel)),
    ] {
        let selection = Selection {
            proxy_name: own.map(str::to_owned),
        };
        let mut service = object(spec(json!({})), json!({}));
        service["metadata"]["labels"] = labels.clone();
        let service: core::Service = serde_json::from_value(service).unwrap();
        let reading = read_service(&service, &selection).unwrap();
        assert_eq!(reading.service.err(), skip, "{labels} {own:?}");
        let mut slice = slice(json!({}));
        for (key, value) in labels.as_object().unwrap() {
            slice["metadata"]["labels"][key] = value.clone();
        }
        let slice: discovery::EndpointSlice = serde_json::from_value(slice).unwrap();
        let reading = read_slice(&slice, &selection).unwrap();
        assert_eq!(reading.slice.err(), skip, "{labels} {own:?}");
    }
}

#[test]
fn addresses_with_an_error_are_left_out_and_the_others_go_on() {
    let spec = spec(json!({
        "clusterIPs": ["10.96.0.1", "10.96.0.2", "x"],
        "externalIPs": ["192.0.2.1", "fd00::1", "127.0.0.1", "169.254.0.1", "192.0.2.1", "::ffff:192.0.2.2"],
        "loadBalancerSourceRanges": [" 10.1.2.3/8 ", "10.0.0.0", "fd00::/8", "10.0.0.0/8"],
    }));
    let status = json!({ "loadBalancer": { "ingress": [
        { "ip": "198.51.100.1" }, { "hostname": "a.b" }, { "ip": "198.51.100.2", "ipMode": "Proxy" },
        { "ip": "198.51.100.3", "ipMode": "VIP" }, { "ip": "198.51.100.4", "ipMode": "x" }, { "ip": "y" },
    ] } });
    let reading = reading(object(spec, status));
    let service = reading.service.unwrap().common;
    assert_eq!(ips(&service.cluster_ips), ["10.96.0.1"]);
    assert_eq!(ips(&service.external_ips), ["192.0.2.1", "192.0.2.2"]);
    assert_eq!(
        ips(&service.load_balancer_ips),
        ["198.51.100.1", "198.51.100.3"]
    );
    let networks: Vec<_> = service
        .source_ranges
        .networks
        .iter()
        .map(ToString::to_string)
        .collect();
    assert_eq!(networks, ["10.0.0.0/8", "fd00::/8"]);
    let paths: Vec<_> = reading
        .errors
        .iter()
        .map(|error| error.path.as_str())
        .collect();
    assert_eq!(
        paths,
        [
            "spec.clusterIPs[1]",
            "spec.clusterIPs[2]",
            "spec.externalIPs[1]",
            "spec.externalIPs[2]",
            "spec.externalIPs[3]",
            "status.loadBalancer.ingress[4].ipMode",
            "status.loadBalancer.ingress[5].ip",
            "spec.loadBalancerSourceRanges[1]",
        ]
    );
    assert_eq!(
        reading.errors[2].to_string(),
        "service shop/web: spec.externalIPs[1]: Invalid value: \"fd00::1\": the service has no IPv6 ClusterIP"
    );
}

#[test]
fn source_ranges_with_an_error_let_nobody_in_whom_no_other_has() {
    for (texts, v4) in [
        (json!([]), None),
        (json!(["fd00::/8"]), None),
        (json!(["10.0.0.0/8"]), Some(1)),
        (json!(["10.0.0/8"]), Some(0)),
    ] {
        let fields = json!({ "loadBalancerSourceRanges": texts });
        let ranges = read(spec(fields)).0.unwrap().common.source_ranges.clone();
        assert_eq!(ranges.of(Family::V4).map(|list| list.len()), v4, "{texts}");
    }
}

#[test]
fn ports_with_an_error_are_left_out_and_the_others_go_on() {
    let ports = json!([
        { "name": "http", "port": 80, "nodePort": 30_080 },
        { "port": 81 },
        { "name": "zero", "port": 0 },
        { "name": "large", "port": 65_536 },
        { "name": "odd", "port": 82, "protocol": "tcp" },
        { "name": "http", "port": 83 },
        { "name": "same", "port": 80 },
        { "name": "dns", "port": 80, "protocol": "UDP", "nodePort": 70_000 },
        { "name": "A", "port": 84 },
    ]);
    let (service, errors) = read(spec(json!({ "ports": ports })));
    let ports: Vec<_> = service
        .unwrap()
        .ports
        .iter()
        .map(|port| (port.full_name().to_string(), port.node_port))
        .collect();
    let expected = [
        ("shop/web:http/TCP", Some(30_080)),
        ("shop/web:dns/UDP", None),
    ];
    assert_eq!(ports, expected.map(|(name, port)| (name.to_owned(), port)));
    let range = "must be between 1 and 65535, inclusive";
    assert_eq!(
        errors,
        [
            "service shop/web: spec.ports[1].name: Required value".to_owned(),
            format!("service shop/web: spec.ports[2].port: Invalid value: 0: {range}"),
            format!("service shop/web: spec.ports[3].port: Invalid value: 65536: {range}"),
            "service shop/web: spec.ports[4].protocol: Unsupported value: \"tcp\": supported values: \"TCP\", \"UDP\", \"SCTP\"".to_owned(),
            "service shop/web: spec.ports[5].name: Duplicate value: \"http\"".to_owned(),
            "service shop/web: spec.ports[6]: Duplicate value: \"80/TCP\"".to_owned(),
            format!("service shop/web: spec.ports[7].nodePort: Invalid value: 70000: {range}"),
            "service shop/web: spec.ports[8].name: Invalid value: \"A\": must be at most 63 lower-case letters, digits and '-', with no '-' at either end".to_owned(),
        ]
    );
}

#[test]
fn policies_of_external_traffic_hold_where_there_is_some() {
    for (fields, policy, health_check) in [
        (
            json!({ "type": "LoadBalancer", "healthCheckNodePort": 31_000 }),
            TrafficPolicy::Local,
            Some(31_000),
        ),
        (
            json!({ "type": "NodePort", "healthCheckNodePort": 31_000 }),
            TrafficPolicy::Local,
            None,
        ),
        (
            json!({ "externalIPs": ["192.0.2.1"] }),
            TrafficPolicy::Local,
            None,
        ),
        (json!({}), TrafficPolicy::Cluster, None),
    ] {
        let mut spec = spec(fields.clone());
        spec["externalTrafficPolicy"] = "Local".into();
        let (service, errors) = read(spec);
        let common = service.unwrap().common;
        assert_eq!(
            (common.external_policy, common.health_check_node_port),
            (policy, health_check),
            "{fields}"
        );
        assert!(errors.is_empty(), "{errors:?}");
    }
    let fields = json!({ "type": "LoadBalancer", "externalTrafficPolicy": "Local", "internalTrafficPolicy": "x" });
    let (_, errors) = read(spec(fields));
    assert_eq!(errors.len(), 2, "{errors:?}");
    assert!(
        errors[1].contains("spec.healthCheckNodePort: Required value"),
        "{errors:?}"
    );
}

#[test]
fn an_affinity_has_a_legal_time_or_the_default() {
    for (seconds, expected, count) in [
        (Value::Null, 10_800, 0),
        (json!(1), 1, 0),
        (json!(86_400), 86_400, 0),
        (json!(86_401), 10_800, 1),
        (json!(0), 10_800, 1),
    ] {
        let fields = json!({
            "sessionAffinity": "ClientIP",
            "sessionAffinityConfig": { "clientIP": { "timeoutSeconds": seconds } },
        });
        let (service, errors) = read(spec(fields));
        let affinity = service.unwrap().common.affinity;
        assert_eq!(
            (affinity, errors.len()),
            (Some(Duration::from_secs(expected)), count)
        );
    }
}

#[test]
fn annotations_choose_the_algorithm_and_others_of_ours_are_errors() {
    let with = |annotations: Value| {
        let mut object = object(spec(json!({})), json!({}));
        object["metadata"]["annotations"] = annotations;
        let reading = reading(object);
        (
            reading.service.unwrap().common.algorithm,
            texts(&reading.errors),
        )
    };
    for algorithm in Algorithm::ALL {
        let annotations = json!({ "service.health-agent.io/algorithm": algorithm.name(), "other/algorithm": "x" });
        assert_eq!(with(annotations), (Some(algorithm), Vec::new()));
        assert_eq!(serde_json::to_value(algorithm).unwrap(), algorithm.name());
    }
    let (algorithm, errors) = with(
        json!({ "service.health-agent.io/algorithm": "rr", "service.health-agent.io/weight": "1" }),
    );
    assert_eq!(algorithm, None);
    assert_eq!(
        errors,
        [
            "service shop/web: metadata.annotations[service.health-agent.io/weight]: unknown field",
            "service shop/web: metadata.annotations[service.health-agent.io/algorithm]: Unsupported value: \"rr\": \
             supported values: \"random\", \"round-robin\", \"maglev\", \"least-connection\"",
        ]
    );
}

#[test]
fn a_service_may_let_probes_of_the_node_count() {
    let with = |value: Option<&str>| {
        let mut object = object(spec(json!({})), json!({}));
        if let Some(value) = value {
            let annotation = json!({ "service.health-agent.io/local-readiness": value });
            object["metadata"]["annotations"] = annotation;
        }
        let reading = reading(object);
        let common = reading.service.unwrap().common;
        (common.local_readiness, texts(&reading.errors))
    };
    for (value, expected) in [(None, false), (Some("false"), false), (Some("true"), true)] {
        assert_eq!(with(value), (expected, Vec::new()), "{value:?}");
    }
    assert_eq!(
        with(Some("yes")),
        (
            false,
            vec![
                "service shop/web: metadata.annotations[service.health-agent.io/local-readiness]: Unsupported value: \"yes\": \
                 supported values: \"true\", \"false\""
                    .to_owned()
            ]
        )
    );
}

#[test]
fn a_service_may_say_how_it_is_forwarded() {
    let with = |forwarding: &str| {
        let mut object = object(spec(json!({})), json!({}));
        let annotation = json!({ "service.health-agent.io/forwarding": forwarding });
        object["metadata"]["annotations"] = annotation;
        let reading = reading(object);
        let common = reading.service.unwrap().common;
        (common.forwarding, texts(&reading.errors))
    };
    for forwarding in ServiceForwarding::ALL {
        assert_eq!(with(forwarding.name()), (Some(forwarding), Vec::new()));
    }
    assert_eq!(
        with("direct"),
        (
            None,
            vec![
                "service shop/web: metadata.annotations[service.health-agent.io/forwarding]: Unsupported value: \"direct\": \
                 supported values: \"snat\", \"dsr\", \"hybrid\""
                    .to_owned()
            ]
        )
    );
}

/// A slice of the service `web` with these fields.
fn slice(fields: Value) -> Value {
    let mut slice = json!({
        "metadata": {
            "namespace": "shop", "name": "web-1",
            "labels": { "kubernetes.io/service-name": "web" },
        },
        "addressType": "IPv4",
        "ports": [{ "name": "http", "port": 8080 }],
        "endpoints": [],
    });
    for (name, value) in fields.as_object().unwrap() {
        slice[name] = value.clone();
    }
    slice
}

fn read_one(object: Value) -> SliceReading {
    let object: discovery::EndpointSlice = serde_json::from_value(object).unwrap();
    read_slice(&object, &Selection::default()).unwrap()
}

#[test]
fn conditions_that_are_not_reported_are_those_of_a_ready_endpoint() {
    let endpoints = json!([
        { "addresses": ["10.1.0.1", "10.1.0.9"] },
        { "addresses": ["10.1.0.2"], "conditions": { "ready": false, "terminating": true } },
        { "addresses": ["10.1.0.3"], "conditions": { "serving": false },
          "nodeName": "n1", "zone": "z1", "hints": { "forZones": [{ "name": "z1" }], "forNodes": [{ "name": "n1" }] } },
        { "addresses": ["10.1.0.4"], "hints": {} },
    ]);
    let reading = read_one(slice(json!({ "endpoints": endpoints })));
    assert_eq!(reading.errors, []);
    let slice = reading.slice.unwrap();
    let conditions: Vec<_> = slice
        .endpoints
        .iter()
        .map(|endpoint| {
            let all = endpoint.conditions;
            (
                endpoint.address.to_string(),
                [all.ready, all.serving, all.terminating],
            )
        })
        .collect();
    let expected = [
        ("10.1.0.1", [true, true, false]),
        ("10.1.0.2", [false, true, true]),
        ("10.1.0.3", [true, false, false]),
        ("10.1.0.4", [true, true, false]),
    ];
    assert_eq!(conditions, expected.map(|(ip, all)| (ip.to_owned(), all)));
    let third = &slice.endpoints[2];
    assert_eq!(
        (third.node.as_deref(), third.zone.as_deref()),
        (Some("n1"), Some("z1"))
    );
    let hints = third.hints.as_ref().unwrap();
    assert_eq!((&*hints.nodes[0], &*hints.zones[0]), ("n1", "z1"));
    assert_eq!(slice.endpoints[3].hints, None);
    assert_eq!(
        (slice.service.to_string(), slice.weight),
        ("shop/web".to_owned(), 1)
    );
}

#[test]
fn ports_and_endpoints_of_a_slice_with_an_error_are_left_out_and_the_others_go_on() {
    let reading = read_one(slice(json!({
        "ports": [{ "port": 1 }, { "name": "a" }, { "name": "b", "port": 0 }, { "name": "", "port": 2 },
                  { "name": "c", "port": 3, "protocol": "x" }],
        "endpoints": [{ "addresses": [] }, { "addresses": ["x"] }, { "addresses": ["fd00::1"] },
                      { "addresses": ["127.0.0.1"] }, { "addresses": ["10.1.0.1"] }],
    })));
    let paths: Vec<_> = reading
        .errors
        .iter()
        .map(|error| error.path.as_str())
        .collect();
    assert_eq!(
        paths,
        [
            "ports[0].name",
            "ports[1].port",
            "ports[2].port",
            "ports[4].protocol",
            "endpoints[0].addresses",
            "endpoints[1].addresses[0]",
            "endpoints[2].addresses[0]",
            "endpoints[3].addresses[0]",
        ]
    );
    assert_eq!(
        reading.errors[6].to_string(),
        "endpoint slice shop/web-1: endpoints[2].addresses[0]: Invalid value: \"fd00::1\": \
         must be an IPv4 address, to match addressType"
    );
    let slice = reading.slice.unwrap();
    assert_eq!(slice.ports.len(), 1);
    assert_eq!((&*slice.ports[0].name, slice.ports[0].port), ("", 2));
    assert_eq!(slice.endpoints.len(), 1);
}

#[test]
fn slices_of_names_or_of_no_service_are_skipped() {
    let reading = read_one(slice(json!({ "addressType": "FQDN" })));
    assert_eq!(
        (reading.slice, reading.errors.len()),
        (Err(Skip::NoIpAddresses), 0)
    );
    let reading = read_one(slice(json!({ "addressType": "x" })));
    assert_eq!(
        (reading.slice, reading.errors.len()),
        (Err(Skip::NoIpAddresses), 1)
    );
    let mut object = slice(json!({}));
    object["metadata"]["labels"] = json!({});
    let reading = read_one(object);
    assert_eq!(
        (reading.slice, reading.errors.len()),
        (Err(Skip::NoService), 1)
    );
}

#[test]
fn a_slice_reports_when_it_changed_and_the_weight_of_its_endpoints() {
    let with = |time: &str, weight: &str| {
        let mut object = slice(json!({}));
        object["metadata"]["annotations"] = json!({
            "endpoints.kubernetes.io/last-change-trigger-time": time,
            "service.health-agent.io/weight": weight,
        });
        let reading = read_one(object);
        let time = reading.trigger_time.map(|time| time.to_string());
        (time, reading.slice.unwrap().weight, reading.errors.len())
    };
    let time = "2026-01-02T03:04:05.000000006Z";
    assert_eq!(with(time, "1000"), (Some(time.to_owned()), 1000, 0));
    assert_eq!(with("yesterday", "0"), (None, 1, 2));
    assert_eq!(with(time, "1001"), (Some(time.to_owned()), 1, 1));
}

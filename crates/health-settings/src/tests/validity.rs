//! Which settings are valid.

use std::time::Duration;

use health_model::settings::ServiceForwarding;
use ipnet::IpNet;

use super::*;

fn settings() -> Settings {
    let mut settings = Settings::default();
    settings.node.node_name = "hnode1".into();
    settings
}

fn cidrs(texts: &[&str]) -> Vec<IpNet> {
    texts.iter().map(|text| text.parse().expect(text)).collect()
}

#[test]
fn the_defaults_are_valid() {
    assert_eq!(settings().validated(), Ok(settings()));
}

#[test]
fn dsr_and_hybrid_need_a_private_mesh_key() {
    let mut settings = settings();
    settings.node.mesh_key_file = Some("/key".into());
    for forwarding in [ServiceForwarding::Dsr, ServiceForwarding::Hybrid] {
        settings.services.service_forwarding = forwarding;
        assert_eq!(settings.clone().validated(), Ok(settings.clone()));
        assert!(settings.services.check_forwarding_key(true).is_err());
        assert_eq!(settings.services.check_forwarding_key(false), Ok(()));
    }
}

#[test]
fn an_invalid_setting_is_reported_with_flag_and_value() {
    type Change = fn(&mut Settings);
    let cases: [(&str, &str, Change); 51] = [
        ("--pod-manifests", "pods", |c| {
            c.containers.pod_manifests = Some("pods".into());
        }),
        ("--service-manifests", "services", |c| {
            c.services.service_manifests = Some("services".into());
        }),
        ("--service-node-zone", "", |c| {
            c.services.service_node_zone = Some(String::new());
        }),
        ("--service-node-zone", "a/b", |c| {
            c.services.service_node_zone = Some("a/b".into());
        }),
        ("--service-forwarding", "dsr", |c| {
            c.services.service_forwarding = ServiceForwarding::Dsr;
        }),
        ("--service-forwarding", "hybrid", |c| {
            c.node.mesh_key_file = Some("/key".into());
            c.services.service_proxy_mode = ServiceProxyMode::Ipvs;
            c.services.service_forwarding = ServiceForwarding::Hybrid;
        }),
        ("--service-sync-max", "1s", |c| {
            c.services.service_sync_min = Duration::from_secs(2);
            c.services.service_sync_max = Duration::from_secs(1);
        }),
        ("--service-node-port-cidr", "10.1.2.3/8", |c| {
            c.services.service_node_port_cidrs = cidrs(&["10.1.2.3/8"]);
        }),
        ("--ipvs-scheduler", "", |c| {
            c.services.ipvs.ipvs_scheduler.clear();
        }),
        ("--ipvs-scheduler", "round robin", |c| {
            c.services.ipvs.ipvs_scheduler = "round robin".into();
        }),
        ("--ipvs-exclude-cidr", "fd00::1/64", |c| {
            c.services.ipvs.ipvs_exclude_cidrs = cidrs(&["fd00::1/64"]);
        }),
        ("--service-healthz-address", "0.0.0.0:0", |c| {
            c.services.service_manifests = Some("/services".into());
            c.services.service_healthz_address = "0.0.0.0:0".parse().expect("an address");
        }),
        ("--service-metrics-address", "127.0.0.1:9962", |c| {
            c.services.service_manifests = Some("/services".into());
            c.services.service_metrics_address = c.api.metrics_address;
        }),
        ("--services-from-etcd", "default", |c| {
            c.services.sources.services_from_etcd = Some(EtcdAccess::Default);
        }),
        ("--service-proxy-name", "-own", |c| {
            c.services.sources.service_proxy_name = Some("-own".into());
        }),
        ("--instance", "", |c| c.location.instance.clear()),
        ("--instance", "Node", |c| {
            c.location.instance = "Node".into()
        }),
        ("--instance", "../x", |c| {
            c.location.instance = "../x".into()
        }),
        ("--instance", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", |c| {
            c.location.instance = "a".repeat(33);
        }),
        ("--runtime-dir", "run", |c| {
            c.location.runtime_dir = "run".into();
        }),
        ("--state-dir", "", |c| c.location.state_dir = "".into()),
        ("--bpf-root", "./bpf", |c| {
            c.location.bpf_root = "./bpf".into();
        }),
        ("--node-name", "", |c| c.node.node_name.clear()),
        ("--node-name", "a/b", |c| c.node.node_name = "a/b".into()),
        ("--node-name", "a\\nb", |c| c.node.node_name = "a\nb".into()),
        ("--cluster-name", "a b", |c| {
            c.node.cluster_name = "a b".into()
        }),
        ("--remote-cluster", "default=kubernetes", |c| {
            c.node.remote_clusters = vec!["default=kubernetes".parse().expect("a registry")];
        }),
        ("--remote-cluster", "a b", |c| {
            c.node.remote_clusters = vec!["a b=kubernetes".parse().expect("a registry")];
        }),
        ("--node-condition", "Ready", |c| {
            c.node.registry = "kubernetes".parse().expect("a registry");
            c.node.node_condition = Some("Ready".into());
        }),
        ("--node-condition", "Agent Ready", |c| {
            c.node.registry = "kubernetes".parse().expect("a registry");
            c.node.node_condition = Some("Agent Ready".into());
        }),
        ("--node-condition", "HealthAgentReady", |c| {
            c.node.node_condition = Some("HealthAgentReady".into());
        }),
        ("--node-address", "127.0.0.1", |c| {
            c.node.node_addresses = vec!["127.0.0.1".parse().expect("an address")];
        }),
        ("--pod-cidr", "10.244.1.1/24", |c| {
            c.endpoints.pod_cidrs = vec!["10.244.1.1/24".parse().expect("a prefix")];
        }),
        ("--device", "", |c| c.node.devices = vec!["".into()]),
        ("--device", "interface-number-1", |c| {
            c.node.devices = vec!["interface-number-1".into()];
        }),
        ("--device", "a/b", |c| c.node.devices = vec!["a/b".into()]),
        ("--device", "eth0", |c| {
            c.node.devices = vec!["eth0".into(), "eth1".into(), "eth0".into()];
        }),
        ("--passive-relief", "2", |c| {
            c.mesh.passive_rtt = false;
            c.mesh.passive_relief = 2;
        }),
        ("--native-routing-cidr", "10.1.2.3/8", |c| {
            c.masquerade.native_routing_cidrs = cidrs(&["10.1.2.3/8"]);
        }),
        ("--native-routing-cidr", "10.16.0.0/16", |c| {
            c.masquerade.native_routing_cidrs = (0..17)
                .map(|i| format!("10.{i}.0.0/16").parse().expect("a prefix"))
                .collect();
        }),
        ("--masquerade-exclude", "fd00::/8", |c| {
            c.masquerade.native_routing_cidrs = cidrs(&["10.0.0.0/8"]);
            c.masquerade.masquerade_excludes = cidrs(&["fd00::/8"]);
        }),
        ("--masquerade-exclude", "192.168.15.0/24", |c| {
            c.masquerade.native_routing_cidrs = cidrs(&["10.0.0.0/8", "fd00::/8"]);
            c.masquerade.masquerade_excludes = (0..16)
                .map(|i| format!("192.168.{i}.0/24").parse().expect("a prefix"))
                .collect();
        }),
        ("--gateway-cidr", "192.168.0.0/16", |c| {
            c.masquerade.gateway_cidrs = cidrs(&["192.168.0.0/16"]);
        }),
        ("--gateway-cidr", "192.168.8.0/24", |c| {
            c.masquerade.native_routing_cidrs = cidrs(&["10.0.0.0/8"]);
            c.masquerade.gateway_cidrs = (0..9)
                .map(|i| format!("192.168.{i}.0/24").parse().expect("a prefix"))
                .collect();
        }),
        ("--probe-timeout", "1s", |c| {
            c.mesh.probes = vec!["icmp=500ms".parse().expect("a choice")];
        }),
        ("--probe-timeout", "11s", |c| {
            c.mesh.probe_timeout = Duration::from_secs(11);
        }),
        ("--metrics-address", "localhost:0", |c| {
            c.api.metrics_address = ListenAddress::Localhost(0);
        }),
        ("--healthz-address", "localhost:0", |c| {
            c.api.healthz_address = ListenAddress::Localhost(0);
        }),
        ("--healthz-address", "127.0.0.1:9962", |c| {
            c.api.healthz_address = c.api.metrics_address;
        }),
        ("--api-address", "[::1]:0", |c| {
            c.api = api_over_tls("[::1]:0");
        }),
        ("--api-address", "127.0.0.1:9962", |c| {
            c.api = api_over_tls("127.0.0.1:9962");
        }),
    ];
    for (flag, value, change) in cases {
        let mut bad = settings();
        change(&mut bad);
        let error = bad.validated().expect_err(value);
        let name = flag.trim_start_matches('-');
        assert_eq!((&*error.name, &*error.value), (name, value));
        assert!(
            error
                .to_string()
                .starts_with(&format!("{flag} '{value}': "))
        );
    }
}

/// The API on one address over TLS, for clients that may do everything.
fn api_over_tls(address: &str) -> ApiSettings {
    ApiSettings {
        api_addresses: vec![address.parse().expect("an address")],
        api_certificate: Some("/tls.crt".into()),
        api_key: Some("/tls.key".into()),
        api_client_ca: Some("/ca.crt".into()),
        ..settings().api
    }
}

#[test]
fn the_api_over_tls_needs_a_certificate_a_key_and_a_client_ca() {
    let complete = api_over_tls("[fd00::1]:4245");
    let missing = |change: fn(&mut ApiSettings)| {
        let mut bad = settings();
        bad.api = complete.clone();
        change(&mut bad.api);
        bad.validated().map_err(|error| error.to_string())
    };
    assert!(missing(|_| {}).is_ok());
    for (change, named) in [
        (
            (|c| c.api_certificate = None) as fn(&mut ApiSettings),
            "--api-certificate",
        ),
        (|c| c.api_key = None, "--api-key"),
        (|c| c.api_client_ca = None, "--api-client-ca, "),
    ] {
        let error = missing(change).expect_err(named);
        let expected = format!("--api-address '[fd00::1]:4245': needs {named}");
        assert!(error.starts_with(&expected), "{error}");
    }
    let readers = missing(|c| c.api_client_ca_read_only = c.api_client_ca.take());
    assert!(readers.is_ok(), "{readers:?}");
}

#[test]
fn without_services_nobody_listens_for_them() {
    let mut none = settings();
    none.services.service_metrics_address = none.api.metrics_address;
    assert_eq!(none.clone().validated(), Ok(none));
}

#[test]
fn a_socket_must_fit_into_its_address() {
    let mut fits = settings();
    fits.location.runtime_dir = format!("/{}", "r".repeat(94)).into();
    assert_eq!(fits.location.socket().as_os_str().len(), 107);
    assert!(fits.clone().validated().is_ok());
    fits.location.runtime_dir = format!("/{}", "r".repeat(95)).into();
    let error = fits.validated().expect_err("one byte too long");
    assert_eq!(&*error.name, "runtime-dir");
    assert!(error.reason.contains("1 bytes too long"), "{error}");
}

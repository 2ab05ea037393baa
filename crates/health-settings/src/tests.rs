//! Which settings are valid, and that a setting is the same wherever it is written.

use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::time::Duration;

use clap::Arg;
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
    let cases: [(&str, &str, Change); 72] = [
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
        ("--service-sync-min", "10.001s", |c| {
            c.services.service_sync_min = Duration::from_millis(10_001);
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
        ("--ipvs-masquerade-bit", "32", |c| {
            c.services.ipvs.ipvs_masquerade_bit = 32;
        }),
        ("--ipvs-drain-interval", "99ms", |c| {
            c.services.ipvs.ipvs_drain_interval = Duration::from_millis(99);
        }),
        ("--service-healthz-address", "0.0.0.0:0", |c| {
            c.services.service_manifests = Some("/services".into());
            c.services.service_healthz_address = "0.0.0.0:0".parse().expect("an address");
        }),
        ("--service-backend-max-entries", "1023", |c| {
            c.services.maps.service_backend_max_entries = 1023;
        }),
        ("--service-flow-any-max-entries", "16777217", |c| {
            c.services.maps.service_flow_any_max_entries = 16_777_217;
        }),
        ("--service-socket-max-entries", "1023", |c| {
            c.services.maps.service_socket_max_entries = 1023;
        }),
        ("--service-maglev-tables", "0", |c| {
            c.services.maps.service_maglev_tables = 0;
        }),
        ("--service-metrics-address", "127.0.0.1:9962", |c| {
            c.services.service_manifests = Some("/services".into());
            c.services.service_metrics_address = c.api.metrics_address;
        }),
        ("--container-probe-rate", "0", |c| {
            c.containers.container_probe_rate = 0;
        }),
        ("--container-probe-concurrency", "100001", |c| {
            c.containers.container_probe_concurrency = 100_001;
        }),
        ("--container-probe-pod-rate", "0", |c| {
            c.containers.container_probe_pod_rate = 0;
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
        ("--identity-store", "kubernetes", |c| {
            c.node.identity_store = Some(RegistrySpec::Kubernetes(None));
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
        ("--health-port", "0", |c| c.mesh.health_port = 0),
        ("--probe-interval", "99ms", |c| {
            c.mesh.probe_interval = Duration::from_millis(99);
        }),
        ("--probe-interval", "1h0m1s", |c| {
            c.mesh.probe_interval = Duration::from_secs(3601);
        }),
        ("--probe", "http=99ms", |c| {
            c.mesh.probes = vec!["http=99ms".parse().expect("a choice")];
        }),
        ("--probe-rate", "0", |c| c.mesh.probe_rate = 0),
        ("--path-mtu-interval", "999ms", |c| {
            c.mesh.path_mtu_interval = Interval(Some(Duration::from_millis(999)));
        }),
        ("--loss-threshold", "101", |c| c.mesh.loss_threshold = 101),
        ("--passive-relief", "6", |c| c.mesh.passive_relief = 6),
        ("--passive-relief", "2", |c| {
            c.mesh.passive_rtt = false;
            c.mesh.passive_relief = 2;
        }),
        ("--conntrack-gc-interval", "12h0m1s", |c| {
            c.conntrack.conntrack_gc_interval = GcInterval::Fixed(Duration::from_secs(43_201));
        }),
        ("--conntrack-gc-max-interval", "9s", |c| {
            c.conntrack.conntrack_gc_max_interval = Duration::from_secs(9);
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
        ("--conntrack-max-entries", "1023", |c| {
            c.conntrack.conntrack_max_entries = Some(1023);
        }),
        ("--conntrack-any-max-entries", "0", |c| {
            c.conntrack.conntrack_any_max_entries = 0;
        }),
        ("--nat-max-entries", "16777217", |c| {
            c.conntrack.nat_max_entries = 16_777_217;
        }),
        ("--nat-any-max-entries", "1023", |c| {
            c.conntrack.nat_any_max_entries = 1023;
        }),
        ("--probe-timeout", "1s", |c| {
            c.mesh.probes = vec!["icmp=500ms".parse().expect("a choice")];
        }),
        ("--probe-timeout", "0s", |c| {
            c.mesh.probe_timeout = Duration::ZERO;
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
    ];
    for (flag, value, change) in cases {
        let mut bad = settings();
        change(&mut bad);
        let error = bad.validated().expect_err(value);
        assert_eq!((error.flag, error.value.as_str()), (flag, value));
        assert!(
            error
                .to_string()
                .starts_with(&format!("{flag} '{value}': "))
        );
    }
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
    assert_eq!(error.flag, "--runtime-dir");
    assert!(error.reason.contains("1 bytes too long"), "{error}");
}

/// The command `run`, as far as settings go.
fn run() -> Command {
    with_one_form(Settings::augment_args(
        Command::new("run").no_binary_name(true),
    ))
}

fn settings_of(run: &Command) -> Vec<&Arg> {
    let settings = run.get_arguments().filter(|arg| form::group(arg).is_some());
    settings.collect()
}

/// The settings in force with these files and words.
fn loaded(file: &Path, words: &[&str]) -> Result<Settings, SettingsError> {
    let layers = Layers::read_files(&run(), Some(file))?;
    let layered = layers.apply(run());
    let matches = layered.try_get_matches_from(words).expect("valid words");
    let settings = Settings::from_arg_matches(&matches).expect("valid settings");
    let location = Location::default();
    layers.finish(&run(), &matches, settings, location)
}

/// A value of a setting that is valid and not its default.
fn another_value(arg: &Arg) -> &'static str {
    let default = arg.get_default_values().first();
    let candidates = [
        "true",
        "false",
        "7",
        "2000",
        "31s",
        "5m",
        "10.9.0.0/16",
        "192.0.2.7",
        "1025-2000",
        "http=30s",
        "west=kubernetes",
        "kubernetes",
        "etcd:http://192.0.2.1:2379",
        "/a/path",
        "http://192.0.2.1:2379",
        "127.0.0.1:9999",
        "always",
        "clsact",
        "ipvs",
        "dsr",
        "native",
        "kernel",
        "json",
        "debug",
        "none",
        "name",
    ];
    let usable = candidates.into_iter().find(|candidate| {
        default.is_none_or(|default| default != candidate)
            && form::check_value(arg, candidate).is_ok()
    });
    usable.unwrap_or_else(|| panic!("no value for {}", form::name(arg)))
}

#[test]
fn each_setting_is_the_same_by_flag_variable_and_file() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("config.yaml");
    let run = run();
    assert!(settings_of(&run).len() > 80);
    let schema = schema(&run);
    let (example, reference) = (example(&run), reference(&run));
    for arg in settings_of(&run) {
        let (group, name, value) = (
            form::group(arg).expect("a group"),
            form::name(arg),
            another_value(arg),
        );
        let shown = |settings: &Settings| {
            let values = settings.values.iter();
            let shown = values.clone().find(|one| one.name == name).expect(name);
            assert_eq!(shown.group, group);
            (shown.value.clone(), shown.origin.clone())
        };
        // What other settings say of it is not the question here.
        let unchecked = |words: &[String], layers: &Layers| {
            let matches = layers
                .apply(run.clone())
                .try_get_matches_from(words)
                .expect(name);
            let settings = Settings::from_arg_matches(&matches).expect(name);
            let source = |wanted: &str| {
                let arg = run.get_arguments().find(|arg| form::name(arg) == wanted);
                layers.source(&matches, arg.expect(wanted))
            };
            let values = SettingValue::all(&run, &matches, &settings, source);
            Settings {
                values: values.into(),
                ..settings
            }
        };
        let by_flag = unchecked(&[format!("--{name}={value}")], &Layers::default());
        fs::write(&file, format!("{group}:\n  {name}: {value}\n")).expect("a file");
        let layers = Layers::read_files(&run, Some(&file)).expect(name);
        let by_file = unchecked(&[], &layers);
        let variable = form::variable(arg);
        let layers = Layers::with_environment(Layers::default(), &run, |wanted| {
            (wanted == variable).then(|| value.into())
        });
        let by_variable = unchecked(&[], &layers.expect(name));

        let (shown_by_flag, origin) = shown(&by_flag);
        assert_eq!(origin, Origin::CommandLine, "{name}");
        let path = file.display().to_string();
        assert_eq!(
            shown(&by_file),
            (shown_by_flag.clone(), Origin::File { path, line: 2 })
        );
        assert_eq!(
            shown(&by_variable),
            (shown_by_flag.clone(), Origin::Environment { variable })
        );
        for settings in [&by_file, &by_variable] {
            let values = by_flag.values.clone();
            assert_eq!(
                by_flag,
                Settings {
                    values,
                    ..settings.clone()
                },
                "{name}"
            );
        }
        let of_default = unchecked(&[], &Layers::default());
        assert_ne!(shown(&of_default).0, shown_by_flag, "{name}");

        let described = &schema["properties"][&group]["properties"][name];
        assert!(
            described["description"].is_string(),
            "{name} is not in the schema"
        );
        assert!(
            example.contains(&format!("\n  # {name}:")),
            "{name} is not in the example"
        );
        assert!(
            reference.contains(&format!("\n| `{name}` | `")),
            "{name} is not in the reference"
        );
    }
}

#[test]
fn each_argument_belongs_to_a_group() {
    for arg in run().get_arguments() {
        assert!(form::group(arg).is_some(), "{}", arg.get_id());
    }
    for name in form::COMMON {
        assert!(
            settings_of(&run())
                .iter()
                .any(|arg| form::name(arg) == name),
            "{name}"
        );
    }
}

#[test]
fn values_in_files_are_read_as_they_are_written() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("config.yaml");
    let text = "node:\n  node-name: 1e3\n  cluster-name: True\n  device: [eth0, 10, True]\n\
                services: {service-node-zone: 1.10}\n";
    fs::write(&file, text).expect("a file");
    let settings = loaded(&file, &[]).expect("valid settings");
    assert_eq!(settings.node.node_name, "1e3");
    assert_eq!(settings.node.cluster_name, "True");
    assert_eq!(settings.node.devices, ["eth0", "10", "True"]);
    assert_eq!(settings.services.service_node_zone.as_deref(), Some("1.10"));
    fs::write(&file, "node: {device: 'a, b'}\n").expect("a file");
    assert_eq!(
        loaded(&file, &[]).expect("valid settings").node.devices,
        ["a", "b"]
    );
}

#[test]
fn a_flag_wins_over_a_variable_and_that_over_files_of_which_the_last_wins() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("config.yaml");
    let fragments = folder.path().join("config.d");
    fs::create_dir(&fragments).expect("a folder");
    fs::write(&file, "mesh:\n  probe-rate: 1\n  probe-timeout: 1ms\n").expect("a file");
    fs::write(
        fragments.join("10.yaml"),
        "mesh: {probe-rate: 2, probe-interval: 2s}\n",
    )
    .expect("a file");
    fs::write(fragments.join("20.yaml"), "# nothing\n").expect("a file");
    fs::write(fragments.join("30.yaml"), "mesh: {probe-rate: 3}\n").expect("a file");
    fs::write(fragments.join("README"), "no settings").expect("a file");
    let layers = Layers::read_files(&run(), Some(&file)).expect("valid files");
    let layers = Layers::with_environment(layers, &run(), |name| match name {
        "HEALTH_AGENT_PROBE_INTERVAL" => Some("3s".into()),
        "HEALTH_AGENT_HEALTH_PORT" => Some("4".into()),
        _ => None,
    });
    let layers = layers.expect("valid variables");
    let matches = layers
        .apply(run())
        .try_get_matches_from(["--health-port", "5"]);
    let mesh = Settings::from_arg_matches(&matches.expect("valid words"))
        .expect("valid settings")
        .mesh;
    assert_eq!(mesh.probe_rate, 3);
    assert_eq!(mesh.probe_timeout, Duration::from_millis(1));
    assert_eq!(mesh.probe_interval, Duration::from_secs(3));
    assert_eq!(mesh.health_port, 5);
}

#[test]
fn what_is_wrong_in_a_file_is_named_with_its_place() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("config.yaml");
    for (text, says) in [
        (
            "mesh:\n  probe-intervall: 1s\n",
            ":2:3: unknown setting 'probe-intervall'; did you mean probe-interval?",
        ),
        (
            "mesch:\n  probe-interval: 1s\n",
            ":1:1: unknown group 'mesch'; did you mean mesh?",
        ),
        (
            "node:\n  probe-interval: 1s\n",
            ":2:3: probe-interval belongs to the group mesh",
        ),
        (
            "mesh:\n  probe-interval: 10\n",
            ":2:19: probe-interval '10': ",
        ),
        (
            "mesh:\n  health-port: 70000\n",
            ":2:16: health-port '70000': 70000 is not in 0..=65535",
        ),
        (
            "mesh:\n  health-port: [1, 2]\n",
            ":2:16: health-port has one value, not a list",
        ),
        (
            "mesh:\n  probe:\n  - http=1s\n  - bogus\n",
            ":4:5: probe 'bogus': ",
        ),
        (
            "services:\n  services-from-kubernetes: true\n",
            ":2:29: services-from-kubernetes 'true': not a kubeconfig; give its absolute path, or default",
        ),
        (
            "node:\n  registry: etcd:http://root:secret@a:2379\n",
            ":2:13: registry 'etcd:http://root:secret@a:2379': ",
        ),
        (
            "mesh:\n  health-port: 0x10\n",
            ":2:16: health-port '0x10': ",
        ),
        (
            "mesh:\n  one-way: maybe\n",
            ":2:12: one-way 'maybe': expected true or false",
        ),
        (
            "policy:\n  policy-mode: sometimes\n",
            ":2:16: policy-mode 'sometimes': expected default, always, never",
        ),
        (
            "node:\n  node-name: \"\"\n",
            ":2: node-name '': must be 1 to 253 bytes",
        ),
        (
            "mesh:\n  probe-timeout: 11s\n",
            ":2: probe-timeout '11s': must not exceed the shortest interval",
        ),
        ("mesh: {probe-rate: 1}\nmesh: {probe-rate: 2}\n", ":2:1: "),
        ("mesh:\n\tprobe-rate: 1\n", ":2:"),
        ("mesh: 5\n", ":1:"),
        ("[mesh]\n", ":1:"),
    ] {
        fs::write(&file, text).expect("a file");
        let error = loaded(&file, &[]).expect_err(text).to_string();
        let start = format!("{}{says}", file.display());
        assert!(error.starts_with(&start), "{text:?}: {error}");
        assert!(!error.contains('\n'), "{error:?}");
    }
    for text in [
        "",
        "# nothing\n",
        "mesh:\n",
        "mesh:\n  probe-rate:\n",
        "{}",
        "node: {device: []}\n",
    ] {
        fs::write(&file, text).expect("a file");
        loaded(&file, &[]).expect(text);
    }
    let missing = loaded(&folder.path().join("none.yaml"), &[]).expect_err("no file");
    assert!(
        missing.to_string().contains("none.yaml: No such file"),
        "{missing}"
    );
}

#[test]
fn of_registry_and_nodes_file_the_one_of_higher_precedence_applies() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("config.yaml");
    fs::write(&file, "node: {registry: kubernetes}\n").expect("a file");
    let registry = |words: &[&str]| loaded(&file, words).map(|settings| settings.node.registry);
    let nodes = RegistrySpec::File("/n".into());
    assert_eq!(
        registry(&[]).expect("valid"),
        RegistrySpec::Kubernetes(None)
    );
    assert_eq!(registry(&["--nodes-file=/n"]).expect("valid"), nodes);
    let refused = |result: Result<RegistrySpec, SettingsError>| {
        let error = result.expect_err("both are given").to_string();
        assert!(error.contains("cannot be used with --registry"), "{error}");
    };
    refused(registry(&["--nodes-file=/n", "--registry=kubernetes"]));
    fs::write(&file, "node: {nodes-file: /n}\n").expect("a file");
    assert_eq!(loaded(&file, &[]).expect("valid").node.registry, nodes);
    let by_flag = loaded(&file, &["--registry=kubernetes"]).expect("valid");
    assert_eq!(by_flag.node.registry, RegistrySpec::Kubernetes(None));
    fs::write(&file, "node: {nodes-file: /n, registry: kubernetes}\n").expect("a file");
    refused(registry(&[]));
}

#[test]
fn booleans_have_one_form() {
    for (words, is_on) in [
        (&["--one-way"][..], true),
        (&["--one-way=true"], true),
        (&["--one-way", "off"], false),
        (&["--one-way=no"], false),
        (&[], false),
    ] {
        let matches = run().try_get_matches_from(words).expect("valid words");
        let settings = Settings::from_arg_matches(&matches).expect("valid settings");
        assert_eq!(settings.mesh.one_way, is_on, "{words:?}");
    }
    assert!(run().try_get_matches_from(["--one-way=1"]).is_err());
}

#[test]
fn lists_are_repeated_or_have_commas() {
    let lists = ["--device=a,b", "--device", "c"];
    let matches = run().try_get_matches_from(lists).expect("valid words");
    let settings = Settings::from_arg_matches(&matches).expect("valid settings");
    assert_eq!(settings.node.devices, ["a", "b", "c"]);
}

#[test]
fn the_example_is_valid_with_and_without_its_comments() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("config.yaml");
    let text = example(&run());
    fs::write(&file, &text).expect("a file");
    let settings = loaded(&file, &[]).expect("the example");
    assert!(
        settings
            .values
            .iter()
            .all(|value| value.origin == Origin::Default)
    );
    let is_setting = |line: &str| {
        let name = line
            .strip_prefix("  # ")
            .and_then(|line| line.split_once(':'));
        name.is_some_and(|(name, _)| {
            settings_of(&run())
                .iter()
                .any(|arg| form::name(arg) == name)
        })
    };
    let lines = text.lines().map(|line| match is_setting(line) {
        true => line.replacen("# ", "", 1),
        false => line.to_owned(),
    });
    fs::write(&file, lines.collect::<Vec<_>>().join("\n")).expect("a file");
    let set = loaded(&file, &[]).expect("the example with all defaults set");
    let Settings { values, files, .. } = settings.clone();
    assert_eq!(
        Settings {
            values,
            files,
            ..set
        },
        settings
    );
}

#[test]
fn what_is_no_file_of_bounded_length_is_refused_at_once() {
    let folder = tempfile::tempdir().expect("a folder");
    let pipe = folder.path().join("pipe");
    nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).expect("a pipe");
    let long = folder.path().join("long");
    fs::write(&long, "#".repeat(2 << 20)).expect("a file");
    let bytes = folder.path().join("bytes");
    fs::write(&bytes, [0xff, 0xfe]).expect("a file");
    for (path, says) in [
        (pipe.as_path(), "not a regular file"),
        (Path::new("/dev/zero"), "not a regular file"),
        (folder.path(), "not a regular file"),
        (&long, "longer than 1048576 bytes"),
        (&bytes, "UTF-8"),
        (&folder.path().join("none"), "No such file"),
    ] {
        let error = loaded(path, &[]).expect_err(says).to_string();
        let start = format!("cannot read {}: ", path.display());
        assert!(error.starts_with(&start) && error.contains(says), "{error}");
    }
    let file = folder.path().join("config.yaml");
    fs::write(&file, "").expect("a file");
    symlink("nowhere", folder.path().join("config.d")).expect("a link");
    let error = loaded(&file, &[]).expect_err("a dangling link").to_string();
    assert!(error.contains("config.d: No such file"), "{error}");
}

#[test]
fn null_resets_a_setting_and_an_empty_variable_does_not_count() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("config.yaml");
    let later = folder.path().join("config.d/1.yaml");
    fs::create_dir(folder.path().join("config.d")).expect("a folder");
    let base =
        "services: {services-from-kubernetes: default}\nnode: {device: [a], nodes-file: /n}\n";
    fs::write(&file, base).expect("a file");
    fs::write(
        &later,
        "services: {services-from-kubernetes: ~}\nnode: {device: }\n",
    )
    .expect("a file");
    let settings = loaded(&file, &[]).expect("valid settings");
    assert!(!settings.services.has_services());
    assert!(settings.node.devices.is_empty());
    // A later file decides between the two forms, too.
    fs::write(&later, "node: {registry: kubernetes}\n").expect("a file");
    let settings = loaded(&file, &[]).expect("valid settings");
    assert_eq!(settings.node.registry, RegistrySpec::Kubernetes(None));
    assert_eq!(settings.node.nodes_file, None);
    let empty = Layers::default().with_environment(&run(), |_| Some(OsString::new()));
    let matches = empty
        .expect("nothing")
        .apply(run())
        .try_get_matches_from([""; 0]);
    let read = Settings::from_arg_matches(&matches.expect("the defaults"));
    assert_eq!(read.ok(), Some(Settings::default()));
}

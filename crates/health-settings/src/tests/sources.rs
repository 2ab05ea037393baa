//! A setting has the same effect wherever it is set.

use std::ffi::OsString;
use std::time::Duration;

use super::*;

/// A valid value of a setting other than its default.
fn another_value(arg: &Arg) -> &'static str {
    let default = arg.get_default_values().first();
    let candidates = [
        "true",
        "false",
        "7",
        "3",
        "2000",
        "31s",
        "7s",
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
            && invalid::check_value(arg, candidate).is_ok()
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
        // Conflicts with other settings do not matter here.
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
            (
                shown_by_flag.clone(),
                Origin::File {
                    path,
                    line: 2,
                    column: 3
                }
            )
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
    // A later file also decides between the two forms.
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
fn values_of_files_that_flags_or_variables_override_are_listed_with_what_overrides_them() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("config.yaml");
    let text = "mesh:\n  probe-rate: 7\n  probe-timeout: 2s\n  one-way: true\n";
    fs::write(&file, text).expect("a file");
    let run = run();
    let variables = |name: &str| {
        let values = [
            ("HEALTH_AGENT_PROBE_TIMEOUT", "1s"),
            ("HEALTH_AGENT_LOSS_THRESHOLD", "9"),
        ];
        let found = values.into_iter().find(|(variable, _)| *variable == name);
        found.map(|(_, value)| value.into())
    };
    let layers = Layers::read_files(&run, Some(&file)).expect("valid files");
    let layers = layers.with_environment(&run, variables);
    let layers = layers.expect("valid variables");
    let overridden = |words: &[&str]| -> Vec<(String, String, String)> {
        let matches = layers.apply(run.clone()).try_get_matches_from(words);
        let matches = matches.expect("valid words");
        let settings = Settings::from_arg_matches(&matches).expect("valid settings");
        let location = Location::default();
        let settings = layers.finish(&run, &matches, settings, location);
        let overridden = settings.expect("valid settings").overridden;
        let shown = overridden.iter().map(|one| {
            let value = one.values.join(",");
            (
                format!("{}={value}", one.name),
                one.file.to_string(),
                one.by.clone(),
            )
        });
        shown.collect()
    };
    let one = |setting: &str, line: u64, by: &str| {
        let place = format!("{}:{line}:3", file.display());
        (setting.to_owned(), place, by.to_owned())
    };
    let timeout = "probe-timeout=2s";
    assert_eq!(
        overridden(&[]),
        [one(timeout, 3, "HEALTH_AGENT_PROBE_TIMEOUT")]
    );
    assert_eq!(
        overridden(&["--probe-rate=3", "--probe-timeout=500ms"]),
        [
            one("probe-rate=7", 2, "--probe-rate"),
            one(timeout, 3, "--probe-timeout")
        ]
    );
}

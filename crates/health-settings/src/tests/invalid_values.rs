//! Errors for values that are invalid by themselves or together with others.

use super::*;

/// Settings that accept any text.
const ANY: [&str; 2] = ["read-only-socket-group", "socket-group"];

#[test]
fn a_bad_value_of_any_setting_is_named_in_one_line_with_its_place() {
    let run = run();
    for arg in settings_of(&run) {
        let name = form::name(arg);
        let mut refusals = 0;
        for value in ["nonsense", "a b", ""] {
            for source in SOURCES {
                if (source, value) == (Source::Variable, "") {
                    // An empty variable does not count.
                    continue;
                }
                let mut written = Written::new();
                written.write(source, name, value);
                let Err(error) = written.load() else {
                    continue;
                };
                refusals += 1;
                let start = match written.origin(source, name) {
                    Origin::Environment { variable } => format!("{variable} '{value}': "),
                    Origin::File { path, line, .. } => format!("{path}:{line}:"),
                    _ => format!("--{name} '{value}': "),
                };
                assert!(error.starts_with(&start), "{error}");
                assert!(error.contains(&format!("'{value}': ")), "{error}");
                assert!(!error.contains('\n'), "{error:?}");
            }
        }
        assert_eq!(refusals == 0, ANY.contains(&name), "{name}");
    }
}

#[test]
fn a_word_that_is_almost_valid_is_suggested() {
    for source in SOURCES {
        let mut written = Written::new();
        written.write(source, "log-format", "jsn");
        let error = written.load().expect_err("no such format");
        assert!(
            error.ends_with("'jsn': expected text, json; did you mean json?"),
            "{error}"
        );
    }
}

#[test]
fn of_two_settings_that_contradict_each_other_both_places_are_named() {
    for ((name, value), (other, other_value)) in [
        (("passive-relief", "2"), ("passive-rtt", "false")),
        (("probe-timeout", "2s"), ("probe-interval", "1s")),
        (("probe-timeout", "2s"), ("probe", "icmp=1s")),
        (("service-sync-max", "1s"), ("service-sync-min", "2s")),
        (
            ("healthz-address", "192.0.2.1:7"),
            ("metrics-address", "192.0.2.1:7"),
        ),
        (
            ("service-forwarding", "dsr"),
            ("service-proxy-mode", "ipvs"),
        ),
        (
            ("services-from-etcd", "default"),
            ("registry", "kubernetes"),
        ),
        (
            ("gateway-cidr", "10.0.0.0/8"),
            ("native-routing-cidr", "fd00::/8"),
        ),
        (
            ("remote-cluster", "west=kubernetes"),
            ("cluster-name", "west"),
        ),
    ] {
        for source in SOURCES {
            for other_source in SOURCES {
                if (source, other_source) == (Source::File, Source::File) {
                    // The file can hold only one setting.
                    continue;
                }
                let mut written = Written::new();
                written.write(source, name, value);
                written.write(other_source, other, other_value);
                let error = written.load().expect_err(name);
                let start = match written.origin(source, name) {
                    Origin::Environment { variable } => format!("{variable} '"),
                    file @ Origin::File { .. } => format!("{file}: {name} '"),
                    _ => format!("--{name} '"),
                };
                assert!(error.starts_with(&start), "{error}");
                let origin = written.origin(other_source, other);
                let end = format!("; {other} is '{other_value}' ({origin})");
                assert!(error.ends_with(&end), "{error}");
                assert!(!error.contains('\n'), "{error:?}");
            }
        }
    }
}

#[test]
fn a_default_that_contradicts_a_setting_is_named_too() {
    let mut written = Written::new();
    written.write(Source::File, "probe-timeout", "11s");
    let error = written.load().expect_err("too long");
    assert!(
        error.ends_with("; probe-interval is '10s' (default)"),
        "{error}"
    );
    let mut written = Written::new();
    written.write(Source::Variable, "probe-interval", "500ms");
    let error = written.load().expect_err("too short");
    assert_eq!(
        error,
        "probe-timeout '1s' (default): must not exceed the shortest interval of --probe-interval and --probe, which is \
         500ms; probe-interval is '500ms' (HEALTH_AGENT_PROBE_INTERVAL)"
    );
    let mut written = Written::new();
    written.write(Source::File, "service-forwarding", "dsr");
    let error = written.load().expect_err("no key");
    assert!(error.ends_with("in the name of a service"), "{error}");
}

//! The chart is that of the manifests, and renders their objects.

use serde_json::{Map, Value, json};

use super::{Chart, Inputs, components, objects, removal, template};

/// Makes the first test write the chart instead of comparing it.
const WRITE: &str = "HEALTH_AGENT_WRITE_CHART";
const INPUTS: Inputs<'_> = Inputs {
    api_server: "10.0.0.1",
    mesh_key: "a key\nof \"two\" lines",
};

/// Objects in an order that does not depend on where they come from.
fn sorted(mut objects: Vec<Value>) -> Vec<Value> {
    objects.sort_by_key(|object| format!("{} {}", object["kind"], object["metadata"]["name"]));
    objects
}

/// The values that turn these components on.
fn with_components(components: &[&str]) -> Value {
    let on = components
        .iter()
        .map(|name| ((*name).to_owned(), true.into()));
    json!({ "components": on.collect::<Map<_, _>>() })
}

/// The only object of a kind.
fn of_kind<'a>(objects: &'a [Value], kind: &str) -> &'a Value {
    let mut found = objects.iter().filter(|object| object["kind"] == kind);
    let object = found.next().expect(kind);
    assert!(found.next().is_none(), "one {kind}");
    object
}

fn pod(objects: &[Value]) -> &Value {
    &of_kind(objects, "DaemonSet")["spec"]["template"]["spec"]
}

#[test]
fn the_chart_in_the_repository_is_that_of_the_manifests() {
    let chart = Chart::generate().unwrap();
    if std::env::var_os(WRITE).is_some() {
        chart.write().unwrap();
    }
    let committed = Chart::committed().unwrap();
    assert!(committed == chart, "run: cargo xtask helm");
}

#[test]
fn the_chart_renders_the_objects_of_the_manifests_with_each_set_of_components() {
    let chart = Chart::committed().unwrap();
    let all = components().unwrap();
    assert!(all.contains(&"cni".to_owned()) && all.contains(&"services".to_owned()));
    for set in 0..1_usize << all.len() {
        let on = all
            .iter()
            .enumerate()
            .filter(|(bit, _)| set >> bit & 1 == 1);
        let on: Vec<_> = on.map(|(_, name)| name.as_str()).collect();
        let mut values = with_components(&on);
        values["meshKey"] = INPUTS.mesh_key.into();
        values["apiServer"] = json!({ "host": INPUTS.api_server });
        let rendered = sorted(chart.render(&values).unwrap());
        let wanted = sorted(objects(&on, INPUTS).unwrap());
        for (rendered, wanted) in rendered.iter().zip(&wanted) {
            assert_eq!(rendered, wanted, "{on:?}");
        }
        assert_eq!(rendered.len(), wanted.len(), "{on:?}");
    }
}

#[test]
fn values_change_what_they_name() {
    let chart = Chart::committed().unwrap();
    let mut values = with_components(&["cni"]);
    json_patch::merge(
        &mut values,
        &json!({
            "image": { "repository": "registry.example.com:5000/agent", "tag": "7", "pullPolicy": "Always" },
            "priorityClassName": "system-cluster-critical",
            "tolerations": [{ "key": "gpu", "operator": "Exists" }],
            "resources": { "limits": { "memory": "1Gi" } },
            "config": "mesh:\n  probe-interval: 5s\n",
        }),
    );
    let rendered = chart.render(&values).unwrap();
    let pod = pod(&rendered);
    for container in [&pod["containers"][0], &pod["initContainers"][0]] {
        assert_eq!(container["image"], "registry.example.com:5000/agent:7");
        assert_eq!(container["imagePullPolicy"], "Always");
    }
    assert_eq!(pod["priorityClassName"], "system-cluster-critical");
    assert_eq!(pod["tolerations"], values["tolerations"]);
    assert_eq!(pod["containers"][0]["resources"], values["resources"]);
    let settings = of_kind(&rendered, "ConfigMap");
    assert_eq!(settings["data"]["config.yaml"], values["config"]);
    let secret = rendered.iter().any(|object| object["kind"] == "Secret");
    assert!(!secret, "the user has made the Secret");
    values["tolerations"] = json!([]);
    let rendered = chart.render(&values).unwrap();
    assert_eq!(self::pod(&rendered)["tolerations"], json!([]));
}

#[test]
fn a_bad_template_is_named_with_its_line() {
    let values = json!({ "a": { "b": 1 } });
    for (text, expected) in [
        (
            "x: {{ .Values.a.c }}",
            "line 1: .Values.a.c: no value .Values.a.c",
        ),
        (
            "\nx: {{ range .Values.a }}",
            "line 2: range .Values.a: unsupported action `range .Values.a`",
        ),
        (
            "x: {{ .Values.a.b | upper }}",
            "line 1: .Values.a.b | upper: unsupported function `upper`",
        ),
        (
            "{{- if .Values.a }}\nx: 1\n",
            "line 1: if .Values.a: `if` without `end`",
        ),
        ("x: 1\n{{- end }}\n", "line 2: `end` without `if`"),
        ("x: {{ .Values.a.b", "line 1: `{{` without `}}`"),
        // Also in a branch that is not taken.
        (
            "{{ if .Values.a }}{{ else }}{{ .Values.c }}{{ end }}",
            "no value .Values.c",
        ),
    ] {
        let error = format!(
            "{:#}",
            template::render("t.yaml", text, &values).unwrap_err()
        );
        assert!(error.contains("t.yaml: "), "{error}");
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn the_agents_are_first_to_run_and_last_to_go() {
    let objects = objects(&["cni"], INPUTS).unwrap();
    let pod = pod(&objects);
    assert_eq!(pod["priorityClassName"], "system-node-critical");
    // Without key and effect: all taints.
    assert_eq!(pod["tolerations"], json!([{ "operator": "Exists" }]));
    let update = &of_kind(&objects, "DaemonSet")["spec"]["updateStrategy"];
    assert_eq!(update["rollingUpdate"]["maxSurge"], Value::Null, "{update}");
    let container = &pod["containers"][0];
    for (probe, path) in [
        ("startupProbe", "/livez"),
        ("livenessProbe", "/livez"),
        ("readinessProbe", "/readyz"),
    ] {
        let page = &container[probe]["httpGet"];
        assert_eq!(page["path"], path, "{probe}");
        assert_eq!(page["host"], "127.0.0.1", "{probe}");
    }
    assert!(
        container["resources"]["limits"]["cpu"].is_null(),
        "its probes would be late"
    );
}

#[test]
fn the_removal_takes_the_place_of_the_agents_and_reaches_all_that_they_made() {
    let (agents, removal) = (objects(&["cni"], INPUTS).unwrap(), removal().unwrap());
    let (agents, removal) = (
        of_kind(&agents, "DaemonSet"),
        of_kind(&removal, "DaemonSet"),
    );
    assert_eq!(removal["metadata"]["name"], agents["metadata"]["name"]);
    assert_eq!(
        removal["metadata"]["namespace"],
        agents["metadata"]["namespace"]
    );
    assert_eq!(removal["spec"]["selector"], agents["spec"]["selector"]);
    let [agents, removal] = [agents, removal].map(|set| &set["spec"]["template"]["spec"]);
    for field in [
        "hostNetwork",
        "tolerations",
        "affinity",
        "priorityClassName",
    ] {
        assert_eq!(removal[field], agents[field], "{field}");
    }
    let paths = |pod: &Value| {
        let volumes = pod["volumes"].as_array().unwrap();
        let paths = volumes
            .iter()
            .filter_map(|volume| volume["hostPath"]["path"].as_str());
        paths.map(str::to_owned).collect::<Vec<_>>()
    };
    let reached = paths(removal);
    // What the agents only read.
    let read = ["/run/containerd", "/etc/health-agent/pods"];
    for path in paths(agents)
        .iter()
        .filter(|path| !read.contains(&path.as_str()))
    {
        assert!(reached.contains(path), "{path}: {reached:?}");
    }
}

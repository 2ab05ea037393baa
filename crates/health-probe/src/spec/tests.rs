//! Tests of the manifest reader.

use serde_json::{Value, json};

use super::*;

/// A pod with these containers and annotations.
fn manifest(containers: Value, annotations: Value) -> String {
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "web", "annotations": annotations},
        "spec": {"containers": containers},
    })
    .to_string()
}

fn probed(field: &str, probe: Value) -> String {
    let container = json!({
        "name": "app",
        "ports": [{"name": "http", "containerPort": 8080}],
        "env": [{"name": "A", "value": "script"}, {"name": "S", "valueFrom": {}}],
        (field): probe,
    });
    manifest(json!([container]), json!({}))
}

fn pod(text: &str) -> PodSpec {
    let Manifest {
        mut pods, errors, ..
    } = read(text);
    assert_eq!(errors, [], "{text}");
    assert_eq!(pods.len(), 1);
    pods.remove(0)
}

fn only_probe(text: &str) -> Probe {
    let pod = pod(text);
    let probes = ProbeType::ALL.map(|kind| pod.containers[0].probe(kind).cloned());
    let mut probes = probes.into_iter().flatten();
    let probe = probes.next().expect("a probe");
    assert_eq!(probes.next(), None);
    (*probe).clone()
}

/// All errors, without the names of pod and container.
fn errors(text: &str) -> Vec<String> {
    let mut errors = read(text).errors;
    for error in &mut errors {
        (error.pod, error.container) = (None, None);
    }
    errors.iter().map(ToString::to_string).collect()
}

/// The errors of a probe, without the path to the probe.
fn errors_of(field: &str, probe: Value) -> Vec<String> {
    let prefix = format!("spec.containers[0].{field}");
    let own = |error: String| {
        let rest = error.strip_prefix(&prefix);
        rest.map(str::to_owned).unwrap_or(error)
    };
    errors(&probed(field, probe)).into_iter().map(own).collect()
}

#[test]
fn defaults_are_those_of_kubernetes() {
    let probe = only_probe(&probed("livenessProbe", json!({"httpGet": {"port": 80}})));
    assert_eq!(
        probe,
        Probe {
            handler: Handler::Http(HttpGet {
                tls: None,
                host: None,
                port: Port::Number(80),
                path: "/".to_owned(),
                headers: Vec::new(),
            }),
            initial_delay_seconds: 0,
            period: Duration::from_secs(10),
            period_until_ready: None,
            timeout: Duration::from_secs(1),
            success_threshold: 1,
            failure_threshold: 3,
            termination_grace: None,
            origin: Origin::Node,
        }
    );
    let zeros = json!({
        "tcpSocket": {"port": 80, "host": ""},
        "periodSeconds": 0, "timeoutSeconds": 0, "successThreshold": 0, "failureThreshold": 0,
        "initialDelaySeconds": 0,
    });
    let tcp = Handler::Tcp {
        host: None,
        port: Port::Number(80),
    };
    let expected = Probe {
        handler: tcp,
        ..probe
    };
    assert_eq!(only_probe(&probed("livenessProbe", zeros)), expected);
}

#[test]
fn all_fields_of_a_pod_are_read() {
    let text = r#"
# The first document is empty.
---
apiVersion: v1
kind: Pod
metadata: {name: web, namespace: shop, uid: 1234}
spec:
  restartPolicy: OnFailure
  terminationGracePeriodSeconds: 7
  nodeName: ignored
  initContainers:
  - {name: setup, image: setup:1}
  - name: proxy
    restartPolicy: Always
    startupProbe: {grpc: {port: 9000, service: ready}, failureThreshold: 30, periodSeconds: 2}
  containers:
  - name: app
    image: app:1
    env:
    - {name: A, value: script}
    - {name: EMPTY}
    - {name: SECRET, valueFrom: {secretKeyRef: {name: s, key: k}}}
    ports: [{name: http, containerPort: 8080}, {containerPort: 9090, protocol: UDP}]
    readinessProbe:
      httpGet:
        path: /ready?full=1
        port: http
        host: example.org
        scheme: HTTPS
        httpHeaders: [{name: Host, value: shop}, {name: X-A, value: ""}, {name: X-A, value: b}]
      initialDelaySeconds: 5
      periodSeconds: 20
      timeoutSeconds: 30
      successThreshold: 2
      failureThreshold: 4
    livenessProbe:
      exec: {command: [some, $(A), $(B), "$(SECRET)", $$(A)]}
      terminationGracePeriodSeconds: 3
status:
  podIP: 10.0.0.7
  podIPs: [{ip: 10.0.0.7}, {ip: "fd00::7"}]
"#;
    let pod = pod(&text.replace("uid: 1234", "uid: \"1234\""));
    assert_eq!(
        (&*pod.uid, &*pod.namespace, &*pod.name),
        ("1234", "shop", "web")
    );
    assert_eq!(pod.restart_policy, RestartPolicy::OnFailure);
    assert_eq!(pod.termination_grace, Duration::from_secs(7));
    let ips: Vec<_> = pod.ips.iter().map(ToString::to_string).collect();
    assert_eq!(ips, ["10.0.0.7", "fd00::7"]);
    let roles: Vec<_> = pod
        .containers
        .iter()
        .map(|one| (&*one.name, one.role))
        .collect();
    assert_eq!(
        roles,
        [
            ("app", Role::Regular),
            ("setup", Role::Init),
            ("proxy", Role::Sidecar)
        ]
    );

    let app = pod.container("app").unwrap();
    assert_eq!(app.image, "app:1");
    let env: Vec<_> = app
        .env
        .iter()
        .map(|(name, value)| (&**name, &**value))
        .collect();
    assert_eq!(env, [("A", "script"), ("EMPTY", "")]);
    assert_eq!(app.ports.len(), 2);
    let readiness = app.probe(ProbeType::Readiness).unwrap();
    let Handler::Http(request) = &readiness.handler else {
        panic!("not HTTP");
    };
    assert_eq!(request.path, "/ready?full=1");
    assert_eq!(request.host.as_deref(), Some("example.org"));
    assert_eq!(request.tls, Some(Tls::default()));
    let headers = [("Host", "shop"), ("X-A", ""), ("X-A", "b")];
    let headers = headers.map(|(name, value)| (name.to_owned(), value.to_owned()));
    assert_eq!(request.headers, headers);
    assert_eq!(readiness.initial_delay_seconds, 5);
    assert_eq!(readiness.period, Duration::from_secs(20));
    assert_eq!(readiness.timeout, Duration::from_secs(30));
    assert_eq!(
        (readiness.success_threshold, readiness.failure_threshold),
        (2, 4)
    );
    assert_eq!(readiness.handler.name(), "https");

    let liveness = app.probe(ProbeType::Liveness).unwrap();
    assert_eq!(liveness.termination_grace, Some(Duration::from_secs(3)));
    assert_eq!(app.probe(ProbeType::Startup), None);
    let startup = pod.container("proxy").unwrap().startup.clone().unwrap();
    let grpc = Handler::Grpc {
        port: Port::Number(9000),
        service: "ready".to_owned(),
        tls: None,
    };
    assert_eq!(startup.handler, grpc);
}

#[test]
fn p2_a_target_is_the_pod_unless_a_host_is_given() {
    let ports = [("http", "http", 8080), ("76", "76", 76)];
    for (host, expected) in [(None, "fd00::7"), (Some("10.9.9.9"), "10.9.9.9")] {
        for (_, port, number) in ports {
            let port = port.parse::<u16>().map_or(json!(port), |port| json!(port));
            let text = probed(
                "readinessProbe",
                json!({"tcpSocket": {"port": port, "host": host}}),
            );
            let mut pod = pod(&text);
            pod.ips = vec!["fd00::7".parse().unwrap()];
            let app = &pod.containers[0];
            let target = app.readiness.as_ref().unwrap().target(&pod, app).unwrap();
            let host = expected.to_owned();
            assert_eq!(target.action, TargetAction::Tcp { host, port: number });
        }
    }
}

#[test]
fn p1_a_target_with_a_port_that_does_not_exist_is_an_error() {
    for handler in ["httpGet", "tcpSocket"] {
        let text = probed("readinessProbe", json!({(handler): {"port": "other"}}));
        let pod = PodSpec {
            ips: vec!["10.0.0.1".parse().unwrap()],
            ..pod(&text)
        };
        let app = &pod.containers[0];
        let error = app.readiness.as_ref().unwrap().target(&pod, app);
        let error = error.unwrap_err();
        assert_eq!(error.to_string(), "the container has no port \"other\"");
        let outcome = crate::Outcome::from(error);
        assert!(outcome.errored);
        assert_eq!(outcome.result, crate::RawResult::Unknown);
    }
}

#[test]
fn p6_commands_are_passed_on_with_literal_values_filled_in() {
    for (command, expected) in [
        (vec!["echo", "a b", "--c"], vec!["echo", "a b", "--c"]),
        (vec!["some $(A) $(B)"], vec!["some script $(B)"]),
        (vec!["$(S)", "$$(A)", "$A"], vec!["$(S)", "$(A)", "$A"]),
    ] {
        let text = probed("livenessProbe", json!({"exec": {"command": command}}));
        let pod = pod(&text);
        let app = &pod.containers[0];
        let probe = app.liveness.as_ref().unwrap();
        let target = probe.target(&pod, app).unwrap();
        let expected: Vec<_> = expected.into_iter().map(str::to_owned).collect();
        assert_eq!(target.action, TargetAction::Exec(&expected));
    }
}

#[test]
fn numbers_out_of_range_are_errors_with_the_words_of_kubernetes() {
    let probe = json!({
        "tcpSocket": {"port": 80},
        "initialDelaySeconds": -1, "periodSeconds": -2, "timeoutSeconds": -3,
        "successThreshold": -4, "failureThreshold": -5, "terminationGracePeriodSeconds": -6,
    });
    let negative = "must be greater than or equal to 0";
    assert_eq!(
        errors_of("readinessProbe", probe),
        [
            format!(".initialDelaySeconds: Invalid value: -1: {negative}"),
            format!(".periodSeconds: Invalid value: -2: {negative}"),
            format!(".timeoutSeconds: Invalid value: -3: {negative}"),
            format!(".successThreshold: Invalid value: -4: {negative}"),
            format!(".failureThreshold: Invalid value: -5: {negative}"),
            ".terminationGracePeriodSeconds: Invalid value: -6: must not be set for readinessProbes"
                .to_owned(),
        ]
    );
    for field in ["livenessProbe", "startupProbe"] {
        let probe = json!({
            "tcpSocket": {"port": 80}, "successThreshold": 2, "terminationGracePeriodSeconds": 0,
        });
        assert_eq!(
            errors_of(field, probe),
            [
                ".successThreshold: Invalid value: 2: must be 1",
                ".terminationGracePeriodSeconds: Invalid value: 0: must be greater than 0",
            ]
        );
    }
}

#[test]
fn a_probe_has_one_handler_that_can_be_used() {
    let range = "must be between 1 and 65535, inclusive";
    for (probe, expected) in [
        (
            json!({}),
            vec![": Required value: must specify a handler type".to_owned()],
        ),
        (
            json!({"exec": {"command": ["a"]}, "tcpSocket": {"port": 1}, "grpc": {"port": 2}}),
            vec![
                ".tcpSocket: Forbidden: may not specify more than 1 handler type".to_owned(),
                ".grpc: Forbidden: may not specify more than 1 handler type".to_owned(),
            ],
        ),
        (
            json!({"exec": {}}),
            vec![".exec.command: Required value".to_owned()],
        ),
        (
            json!({"exec": {"command": []}}),
            vec![".exec.command: Required value".to_owned()],
        ),
        (
            json!({"httpGet": {"scheme": "FTP", "httpHeaders": [{"name": "ok"}, {"name": "a b"}, {}]}}),
            vec![
                ".httpGet.scheme: Unsupported value: \"FTP\": supported values: \"HTTP\", \"HTTPS\""
                    .to_owned(),
                ".httpGet.httpHeaders[1].name: Invalid value: \"a b\": a header's name must \
                 consist of letters, digits and '-'"
                    .to_owned(),
                ".httpGet.httpHeaders[2].name: Invalid value: \"\": a header's name must \
                 consist of letters, digits and '-'"
                    .to_owned(),
                format!(".httpGet.port: Invalid value: 0: {range}"),
            ],
        ),
        (
            json!({"tcpSocket": {"port": 65536}}),
            vec![format!(".tcpSocket.port: Invalid value: 65536: {range}")],
        ),
        (
            json!({"tcpSocket": {"port": "80"}}),
            vec![
                ".tcpSocket.port: Invalid value: \"80\": must contain at least one letter (a-z)"
                    .to_owned(),
            ],
        ),
        (
            json!({"grpc": {"port": -1}}),
            vec![format!(".grpc.port: Invalid value: -1: {range}")],
        ),
    ] {
        assert_eq!(errors_of("livenessProbe", probe), expected);
    }
}

#[test]
fn fields_and_types_that_do_not_exist_are_errors_with_all_others() {
    let probe = json!({
        "httpGet": {"port": true, "pfad": "/", "path": 7},
        "tcpSocket": {"ports": 1, "port": 0},
        "grpc": {"port": 1, "mode": "TLS"},
        "periodSecond": 3, "timeoutSeconds": "1", "failureThreshold": 3000000000_u32,
    });
    let reported = errors_of("readinessProbe", probe);
    for expected in [
        ".periodSecond: unknown field",
        ".httpGet.pfad: unknown field",
        ".tcpSocket.ports: unknown field",
        ".grpc.mode: unknown field: set it with the annotation CONTAINER.TYPE.mode",
        ".httpGet.port: Invalid value: invalid type: boolean `true`, expected IntOrString",
        ".httpGet.path: Invalid value: invalid type: integer `7`, expected a string",
        ".timeoutSeconds: Invalid value: invalid type: string \"1\", expected i32",
        ".tcpSocket.port: Invalid value: 0: must be between 1 and 65535, inclusive",
        ".tcpSocket: Forbidden: may not specify more than 1 handler type",
    ] {
        assert!(
            reported.iter().any(|error| error == expected),
            "{expected}: {reported:#?}"
        );
    }
    let too_large = reported
        .iter()
        .find(|error| error.starts_with(".failureThreshold: Invalid value"));
    assert!(too_large.is_some(), "{reported:#?}");
    assert!(
        !reported
            .iter()
            .any(|error| error.contains(".httpGet.port: Invalid value: 0")),
        "no error follows from another: {reported:#?}"
    );
    let typo = manifest(json!([{"name": "app", "livenesProbe": {}}]), json!({}));
    assert_eq!(
        errors(&typo),
        ["spec.containers[0].livenesProbe: unknown field"]
    );
}

#[test]
fn errors_name_the_pod_the_container_and_the_field() {
    let text = r#"
apiVersion: v1
kind: List
items:
- apiVersion: v1
  kind: Pod
  metadata: {name: good}
  spec: {containers: [{name: app}]}
- apiVersion: v1
  kind: Pod
  metadata: {name: bad, namespace: shop}
  spec:
    restartPolicy: Sometimes
    containers:
    - name: app
      livenessProbe: {tcpSocket: {port: 0}, periodSeconds: soon}
    - {name: app}
    - {name: App}
    - {restartPolicy: Always, ports: [{containerPort: 0, name: UP}]}
    initContainers:
    - name: setup
      readinessProbe: {tcpSocket: {port: 80}}
    - {name: other, restartPolicy: Never}
- {apiVersion: apps/v1beta1, kind: Deployment}
- {kind: Pod}
- nothing
"#;
    let manifest = read(text);
    assert_eq!(manifest.pods.len(), 1);
    assert_eq!(&*manifest.pods[0].uid, "default/good");
    let reported: Vec<_> = manifest.errors.iter().map(ToString::to_string).collect();
    let name = "must be at most 63 lower-case letters, digits and '-', with no '-' at either end";
    let range = "must be between 1 and 65535, inclusive";
    let expected = [
        "pod shop/bad, container app: items[1].spec.containers[0].livenessProbe.periodSeconds: \
         Invalid value: invalid type: string \"soon\", expected i32"
            .to_owned(),
        format!(
            "pod shop/bad, container app: items[1].spec.containers[0].livenessProbe.tcpSocket.port: \
             Invalid value: 0: {range}"
        ),
        "pod shop/bad: items[1].spec.containers[1].name: Duplicate value: \"app\"".to_owned(),
        format!(
            "pod shop/bad, container App: items[1].spec.containers[2].name: Invalid value: \"App\": {name}"
        ),
        "pod shop/bad: items[1].spec.containers[3].name: Required value".to_owned(),
        "pod shop/bad: items[1].spec.containers[3].restartPolicy: Forbidden: may not be set for \
         non-init containers"
            .to_owned(),
        "pod shop/bad: items[1].spec.containers[3].ports[0].name: Invalid value: \"UP\": must \
         contain only lower-case letters, digits and hyphens (-)"
            .to_owned(),
        format!(
            "pod shop/bad: items[1].spec.containers[3].ports[0].containerPort: Invalid value: 0: {range}"
        ),
        "pod shop/bad, container setup: items[1].spec.initContainers[0].readinessProbe: \
         Forbidden: may not be set for init containers without restartPolicy=Always"
            .to_owned(),
        "pod shop/bad, container other: items[1].spec.initContainers[1].restartPolicy: \
         Unsupported value: \"Never\": supported values: \"Always\""
            .to_owned(),
        "pod shop/bad: items[1].spec.restartPolicy: Unsupported value: \"Sometimes\": supported \
         values: \"Always\", \"OnFailure\", \"Never\""
            .to_owned(),
        "items[2].apiVersion: Unsupported value: \"apps/v1beta1\": supported values: \"apps/v1\""
            .to_owned(),
        "items[3].apiVersion: Required value".to_owned(),
        "items[4]: Invalid value: must be an object".to_owned(),
    ];
    assert_eq!(reported, expected);
}

#[test]
fn texts_of_every_wrong_kind_are_refused() {
    let missing = |path: &str| format!("{path}: Required value");
    for (text, expected) in [
        ("", vec!["no pod found".to_owned()]),
        ("---\n", vec!["no pod found".to_owned()]),
        (
            "{\"kind\": \"List\", \"apiVersion\": \"v1\", \"items\": []}",
            vec!["no pod found".to_owned()],
        ),
        (
            "kind: List\nitems: 3",
            vec!["items: Invalid value: must be a list".to_owned()],
        ),
        ("- a", vec!["Invalid value: must be an object".to_owned()]),
        ("7", vec!["Invalid value: must be an object".to_owned()]),
        ("a: b", vec![missing("kind")]),
        ("kind: Pod", vec![missing("apiVersion")]),
        (
            "kind: Pod\napiVersion: v2",
            vec!["apiVersion: Unsupported value: \"v2\": supported values: \"v1\"".to_owned()],
        ),
        (
            "kind: Pod\napiVersion: v1",
            vec![missing("metadata.name"), missing("spec")],
        ),
        (
            "kind: Pod\napiVersion: v1\nmetadata: {name: A/b}\nspec: {}",
            vec![
                "metadata.name: Invalid value: \"A/b\": must be at most 253 lower-case \
                 letters, digits, '-' and '.'"
                    .to_owned(),
                missing("spec.containers"),
            ],
        ),
    ] {
        assert_eq!(errors(text), expected, "{text}");
    }
    for text in ["{", "a: [", "\u{0}"] {
        let manifest = read(text);
        assert!(manifest.pods.is_empty());
        assert!(
            matches!(manifest.errors[0].problem, Problem::Text(_)),
            "{text}"
        );
    }
    let other = "kind: Service\napiVersion: v1";
    let reported = "kind: Unsupported value: \"Service\": supported values: \"Pod\", \"Deployment\", \
                \"DaemonSet\", \"StatefulSet\", \"ReplicaSet\", \"ReplicationController\", \"Job\", \
                \"CronJob\", \"List\"";
    assert_eq!(errors(other), [reported]);
}

#[test]
fn templates_of_pods_are_pods_with_the_names_of_their_objects() {
    let template = json!({
        "metadata": {
            "name": "not-its-name", "labels": {"app": "web"},
            "annotations": {"probe.health-agent.io/app.liveness.period": "50ms"},
        },
        "spec": {"containers": [{"name": "app", "livenessProbe": {"tcpSocket": {"port": 80}}}]},
    });
    let object = |kind: &str, version: &str, spec: Value| {
        let metadata = json!({"name": kind.to_lowercase(), "namespace": "shop", "uid": "u-1"});
        json!({"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec})
    };
    let with_template = json!({"template": template});
    let objects = [
        object("Deployment", "apps/v1", with_template.clone()),
        object("DaemonSet", "apps/v1", with_template.clone()),
        object("StatefulSet", "apps/v1", with_template.clone()),
        object("ReplicaSet", "apps/v1", with_template.clone()),
        object("ReplicationController", "v1", with_template.clone()),
        object("Job", "batch/v1", with_template.clone()),
        object(
            "CronJob",
            "batch/v1",
            json!({"jobTemplate": {"spec": with_template}}),
        ),
    ];
    let list = json!({"apiVersion": "v1", "kind": "List", "items": objects});
    let documents = objects.iter().map(ToString::to_string);
    let documents = documents.collect::<Vec<_>>().join("\n---\n");
    for text in [list.to_string(), format!("---\n{documents}")] {
        let manifest = read(&text);
        assert_eq!(manifest.errors, []);
        assert_eq!(manifest.pods.len(), objects.len());
        for (pod, object) in manifest.pods.iter().zip(&objects) {
            let name = object["kind"].as_str().unwrap().to_lowercase();
            assert_eq!((&*pod.namespace, &pod.name), ("shop", &name));
            assert_eq!(*pod.uid, format!("shop/{name}"));
            let probe = pod.containers[0].liveness.as_ref().unwrap();
            assert_eq!(probe.period, Duration::from_millis(50));
        }
        assert!(manifest.statuses.is_empty());
    }
    // In a list of one kind, the API omits kind and version of the items.
    let mut bare = objects[0].clone();
    for field in ["kind", "apiVersion"] {
        bare.as_object_mut().unwrap().remove(field);
    }
    let list = json!({"apiVersion": "apps/v1", "kind": "DeploymentList", "items": [bare]});
    assert_eq!(read(&list.to_string()).pods.len(), 1);
}

#[test]
fn what_is_wrong_with_a_template_is_reported_with_its_place() {
    let deployment = |rest: &str| format!("kind: Deployment\napiVersion: apps/v1\n{rest}");
    for (text, expected) in [
        (deployment(""), "spec.template: Required value"),
        (deployment("spec: {template: 7}"), "spec.template: Required value"),
        (
            deployment("spec: {template: {spec: {containers: [{name: a}]}}}"),
            "metadata.name: Required value",
        ),
        (
            deployment("metadata: {name: a}\nspec: {template: {metadata: , spec: {}}}"),
            "spec.template.spec.containers: Required value",
        ),
        (
            "kind: CronJob\napiVersion: batch/v1\nmetadata: {name: a}\nspec: {jobTemplate: {spec: {template: \
             {spec: {containers: [{name: a, livenessProbe: {exec: {}}}]}}}}}"
                .to_owned(),
            "spec.jobTemplate.spec.template.spec.containers[0].livenessProbe.exec.command: Required value",
        ),
    ] {
        assert_eq!(errors(&text), [expected], "{text}");
    }
    let pod = "kind: Pod\napiVersion: v1\nmetadata: {name: a}\nspec: {containers: [{name: a}]}";
    let twice =
        deployment("metadata: {name: a}\nspec: {template: {spec: {containers: [{name: a}]}}}");
    let manifest = read(&format!("{pod}\n---\n{twice}"));
    let reported: Vec<_> = manifest.errors.iter().map(ToString::to_string).collect();
    assert_eq!(reported, ["metadata.name: Duplicate value: \"default/a\""]);
}

#[test]
fn objects_of_other_kinds_are_skipped_by_name_beside_pods() {
    let text = "\
kind: Service
apiVersion: v1
metadata: {name: web, namespace: shop}
---
kind: Pod
apiVersion: v1
metadata: {name: a}
spec: {containers: [{name: a}]}
---
kind: List
items: [{kind: Rollout, apiVersion: argoproj.io/v1, metadata: {name: web}}, {kind: ConfigMap}]
";
    let manifest = read(text);
    assert_eq!(manifest.errors, []);
    assert_eq!(manifest.pods.len(), 1);
    let skipped = [
        "Service shop/web",
        "Rollout web",
        "ConfigMap without a name",
    ];
    assert_eq!(manifest.skipped, skipped);
}

#[test]
fn lists_and_documents_hold_many_pods_of_different_names() {
    let pod =
        |name: &str| json!({"metadata": {"name": name}, "spec": {"containers": [{"name": "a"}]}});
    let list =
        json!({"kind": "PodList", "apiVersion": "v1", "items": [pod("a"), pod("b"), pod("a")]});
    let manifest = read(&list.to_string());
    let uids: Vec<_> = manifest.pods.iter().map(|pod| &*pod.uid).collect();
    assert_eq!(uids, ["default/a", "default/b"]);
    let reported: Vec<_> = manifest.errors.iter().map(ToString::to_string).collect();
    assert_eq!(
        reported,
        ["items[2].metadata.uid: Duplicate value: \"default/a\""]
    );

    let one = |name: &str| {
        format!(
            "kind: Pod\napiVersion: v1\nmetadata: {{name: {name}}}\nspec: {{containers: [{{name: a}}]}}\n"
        )
    };
    let text = format!("{}---\n{}---\nkind: Pod\n", one("a"), one("b"));
    let manifest = read(&text);
    assert_eq!(manifest.pods.len(), 2);
    assert_eq!(manifest.errors.len(), 1);
}

fn annotated(annotations: &[(&str, &str)]) -> String {
    let containers = json!([{
        "name": "web",
        "startupProbe": {"exec": {"command": ["true"]}},
        "readinessProbe": {"httpGet": {"port": 443, "scheme": "HTTPS"}},
        "livenessProbe": {"grpc": {"port": 9000}},
    }, {"name": "db", "readinessProbe": {"tcpSocket": {"port": 5432}}}]);
    let keys = annotations
        .iter()
        .map(|(key, value)| (format!("probe.health-agent.io/{key}"), json!(value)));
    let mut map: serde_json::Map<_, _> = keys.collect();
    map.insert("example.org/other".to_owned(), json!("not ours"));
    manifest(containers, Value::Object(map))
}

#[test]
fn annotations_set_what_kubernetes_has_no_fields_for() {
    let pod = pod(&annotated(&[
        ("web.readiness.period", "250ms"),
        ("web.readiness.timeout", "40ms"),
        ("web.readiness.period-until-ready", "50ms"),
        ("web.readiness.from", "pod"),
        ("web.readiness.ca", "web-ca.pem"),
        ("web.readiness.server-name", "web.shop"),
        ("web.readiness.client-cert", "agent.pem"),
        ("web.readiness.client-key", "agent.key"),
        ("web.startup.period", "1m30s"),
        ("web.startup.period-until-ready", "10ms"),
        ("web.liveness.mode", "TLS"),
        ("web.liveness.ca", "other.pem"),
        ("db.readiness.from", "node"),
    ]));
    let web = &pod.containers[0];
    let readiness = web.readiness.as_ref().unwrap();
    assert_eq!(readiness.period, Duration::from_millis(250));
    assert_eq!(readiness.timeout, Duration::from_millis(40));
    assert_eq!(
        readiness.period_until_ready,
        Some(Duration::from_millis(50))
    );
    assert_eq!(readiness.origin, Origin::Pod);
    let Handler::Http(request) = &readiness.handler else {
        panic!("not HTTP");
    };
    let tls = Tls {
        check: Some(ServerCheck {
            ca: "web-ca.pem".to_owned(),
            server_name: Some("web.shop".to_owned()),
        }),
        client: Some(ClientIdentity {
            certificate: "agent.pem".to_owned(),
            key: "agent.key".to_owned(),
        }),
    };
    assert_eq!(request.tls, Some(tls));
    let startup = web.startup.as_ref().unwrap();
    assert_eq!(startup.period, Duration::from_secs(90));
    let Handler::Grpc { tls: Some(tls), .. } = &web.liveness.as_ref().unwrap().handler else {
        panic!("no TLS");
    };
    assert_eq!(tls.check.as_ref().unwrap().server_name, None);
    assert_eq!(
        pod.containers[1].readiness.as_ref().unwrap().origin,
        Origin::Node
    );
}

#[test]
fn annotations_that_mean_nothing_are_errors_with_their_path() {
    for (annotation, problem) in [
        (
            ("web.readiness", "x"),
            "Invalid value: \"web.readiness\": must be CONTAINER.TYPE.SETTING after the prefix",
        ),
        (
            ("web.readiness.period.x", "1s"),
            "Invalid value: \"web.readiness.period.x\": must be CONTAINER.TYPE.SETTING after the prefix",
        ),
        (
            ("web.ready.period", "1s"),
            "Unsupported value: \"ready\": supported values: \"startup\", \"readiness\", \"liveness\"",
        ),
        (
            ("api.readiness.period", "1s"),
            "Invalid value: \"api\": must be the name of a container in the pod",
        ),
        (
            ("db.liveness.period", "1s"),
            "Forbidden: the container has no such probe",
        ),
        (
            ("web.readiness.period", "1"),
            "Invalid value: \"1\": not a duration; write it like 10s, 500ms or 1m30s",
        ),
        (
            ("web.readiness.period", "9ms"),
            "Invalid value: \"9ms\": must be whole milliseconds, 10ms at least",
        ),
        (
            ("web.readiness.period", "10.5ms"),
            "Invalid value: \"10.5ms\": must be whole milliseconds, 10ms at least",
        ),
        (
            ("web.readiness.timeout", "0s"),
            "Invalid value: \"0s\": must be whole milliseconds, 1ms at least",
        ),
        (
            ("web.readiness.period-until-ready", "11s"),
            "Invalid value: \"11s\": must not be longer than the period",
        ),
        (
            ("web.liveness.period-until-ready", "1s"),
            "Forbidden: may not be set for liveness probes",
        ),
        (
            ("web.startup.from", "pod"),
            "Forbidden: may not be set for commands, which run in the container",
        ),
        (
            ("web.readiness.from", "host"),
            "Unsupported value: \"host\": supported values: \"node\", \"pod\"",
        ),
        (
            ("web.readiness.mode", "TLS"),
            "Forbidden: may only be set for grpc",
        ),
        (
            ("web.liveness.mode", "tls"),
            "Unsupported value: \"tls\": supported values: \"Plaintext\", \"TLS\"",
        ),
        (
            ("web.liveness.ca", "ca.pem"),
            "Forbidden: may only be set with TLS: scheme HTTPS, or grpc in mode TLS",
        ),
        (
            ("db.readiness.client-key", "a.key"),
            "Forbidden: may only be set with TLS: scheme HTTPS, or grpc in mode TLS",
        ),
        (
            ("web.readiness.ca", "/etc/shadow"),
            "Invalid value: \"/etc/shadow\": must be the name of a file in the node's certificate folder",
        ),
        (
            ("web.readiness.ca", ".."),
            "Invalid value: \"..\": must be the name of a file in the node's certificate folder",
        ),
        (
            ("web.readiness.ca", ""),
            "Invalid value: \"\": must be the name of a file in the node's certificate folder",
        ),
        (
            ("web.readiness.server-name", "web"),
            "Forbidden: may only be set with ca",
        ),
        (
            ("web.readiness.client-key", "a.key"),
            "Forbidden: client-cert and client-key may only be set together",
        ),
        (
            ("web.readiness.client-cert", "a.pem"),
            "Forbidden: client-cert and client-key may only be set together",
        ),
    ] {
        let path = format!(
            "metadata.annotations[probe.health-agent.io/{}]",
            annotation.0
        );
        let reported = errors(&annotated(&[annotation]));
        assert_eq!(reported, [format!("{path}: {problem}")]);
    }
    let reported = errors(&annotated(&[
        ("web.readiness.peroid", "1s"),
        ("web.readiness.ca", "a/b"),
    ]));
    assert_eq!(reported.len(), 2);
    assert!(
        reported[0].contains("Unsupported value: \"peroid\""),
        "{reported:?}"
    );
}

#[test]
fn hostile_types_end() {
    let types = [
        json!(null),
        json!(true),
        json!(7),
        json!(-1.5),
        json!("x"),
        json!([]),
        json!([1]),
        json!({}),
        json!({"a": 1}),
    ];
    let places = [
        "/metadata",
        "/metadata/name",
        "/metadata/annotations",
        "/spec",
        "/spec/containers",
        "/spec/containers/0",
        "/spec/containers/0/name",
        "/spec/containers/0/ports",
        "/spec/containers/0/ports/0",
        "/spec/containers/0/env",
        "/spec/containers/0/env/0",
        "/spec/containers/0/readinessProbe",
        "/spec/containers/0/readinessProbe/tcpSocket",
        "/spec/containers/0/readinessProbe/tcpSocket/port",
        "/spec/containers/0/readinessProbe/periodSeconds",
    ];
    let good: Value = serde_json::from_str(&probed(
        "readinessProbe",
        json!({"tcpSocket": {"port": 1}, "periodSeconds": 1}),
    ))
    .unwrap();
    for place in places {
        for wrong in &types {
            let mut object = good.clone();
            *object.pointer_mut(place).unwrap() = wrong.clone();
            let manifest = read(&object.to_string());
            assert_eq!(
                manifest.pods.is_empty(),
                !manifest.errors.is_empty(),
                "{place} {wrong}"
            );
        }
    }
    // Of very many errors, only some are reported, but reading completes.
    let many: Vec<_> = (0..1000).map(|_| json!({"name": 1})).collect();
    let reported = errors(&manifest(json!(many), json!({})));
    assert!((32..100).contains(&reported.len()), "{}", reported.len());
}

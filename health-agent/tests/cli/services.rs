//! Commands that show services.

use health_model::api::ServiceEntry;
use serde_json::Value;

use super::common::Agent;
use super::{failure, printed, program_in, stderr, stdout};

/// An agent that serves services.
fn serving() -> Agent {
    Agent::start(|fixture| fixture.serves_services = true)
}

#[test]
fn services_are_listed_with_what_keeps_others_from_it() {
    let agent = serving();
    let output = program_in(agent.dir(), "service list").output().unwrap();
    assert_eq!(
        stdout(&output),
        "\
SERVICE    PORT          TYPE           FRONTENDS         BACKENDS   POLICY          AFFINITY   ALGORITHM   PROBLEM
shop/old   53/UDP        NodePort       10.96.0.2:53      0/0        Cluster         -          -           no backends: rejects
                                        node port 30053
shop/web   http 80/TCP   LoadBalancer   10.96.0.1:80      1/3        Cluster/Local   3h0m0s     maglev      -
                                        node port 30080
shop/web   dns 53/UDP    LoadBalancer   10.96.0.1:53      0/0        Cluster/Local   3h0m0s     maglev      no backends: rejects
                                                                                                            address conflict
test/web   80/TCP        ClusterIP      [fd00::1]:80      0/0        Cluster         -          -           no backends: rejects
"
    );
    let warnings: Vec<_> = stderr(&output).lines().collect();
    let [bad, unheard] = &warnings[..] else {
        panic!("{warnings:?}")
    };
    assert!(
        bad.contains("bad.yaml: service shop/bad: spec.ports[0].port: "),
        "{bad}"
    );
    assert!(
        unheard.ends_with("cannot listen on 0.0.0.0:31000: \\u{1b}[1m"),
        "{unheard}"
    );

    let wide = printed(&agent, "service list -o wide --namespace shop --no-headers");
    assert!(
        wide.contains("   31000   ") && wide.contains("/services/web.yaml   "),
        "{wide}"
    );
    assert!(
        wide.contains("belongs to shop/old/UDP, which comes first"),
        "{wide}"
    );
    assert!(!wide.contains("test/web"), "{wide}");
    let services: Vec<ServiceEntry> =
        serde_json::from_str(&printed(&agent, "service list -o json")).unwrap();
    assert_eq!(services.len(), 3);
    assert_eq!(printed(&agent, "service list -o jsonl").lines().count(), 3);

    let none = Agent::start(|_| {});
    let output = program_in(none.dir(), "service list").output().unwrap();
    assert_eq!(stdout(&output).lines().count(), 1, "{output:?}");
    assert_eq!(
        stderr(&output),
        "warning: this agent serves no services; give `health-agent run` a source, such as --service-manifests\n"
    );
}

#[test]
fn everything_about_a_service_is_in_one_place() {
    let agent = serving();
    let text = printed(&agent, "service get shop/web");
    for part in [
        "Service:   shop/web\nType:   LoadBalancer\n",
        "\n      NodePort    node port 30080   IPv4     cluster   local\n",
        "\n      10.244.1.7:8080   ready                  probe            cluster, local    1        hnode1   z1\n",
        "\n      10.244.1.8:8080   not ready              probe            none              1        hnode1   -\n",
        "\n      10.244.2.9:8080   terminating, serving   slice            none, lingering   1        hnode2   -\n",
        "\n    Conflict:   service shop/web: spec.ports.nodePort ",
        "\nProblems:\n  service shop/web: spec.healthCheckNodePort: ",
    ] {
        assert!(text.contains(part), "no {part:?} in:\n{text}");
    }
    assert!(!text.contains("shop/bad"), "{text}");
    let details: Value = serde_json::from_str(&printed(&agent, "service get old -o json")).unwrap();
    assert_eq!(details["service"]["name"], "old");
    assert_eq!(details["conflicts"].as_array().map(Vec::len), Some(0));
    for (command, named) in [
        (
            "service get db",
            "no service \"db\"; `health-agent service list`",
        ),
        (
            "service get web",
            "several services match \"web\": give one of shop/web, test/web",
        ),
    ] {
        let output = program_in(agent.dir(), command).output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        assert!(stderr(&output).contains(named), "{output:?}");
    }
    let none = Agent::start(|_| {});
    let line = failure(program_in(none.dir(), "service get web"));
    assert!(
        line.contains("no service \"web\": this agent serves no services"),
        "{line}"
    );
}

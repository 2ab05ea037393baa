//! Policies of a Kubernetes cluster: kept through restarts, refused whole, and waited for.

use health_policy::{Kind, Policy, read_policy};
use serde_json::json;

use super::*;
use crate::enforcement::CLUSTER_FILE;

/// A NetworkPolicy of this name, which lets endpoints reach one port of those with the label `app=a`.
fn object(name: &str, port: u16) -> Arc<Policy> {
    let object = json!({
        "apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy",
        "metadata": { "name": name, "namespace": "shop" },
        "spec": {
            "podSelector": { "matchLabels": { "app": "a" } },
            "ingress": [{ "ports": [{ "port": port }] }],
        },
    });
    Arc::new(read_policy(&object).unwrap())
}

fn complete(policies: impl IntoIterator<Item = Arc<Policy>>) -> ClusterPolicies {
    let policies = policies.into_iter();
    ClusterPolicies {
        objects: policies.map(|one| (one.name().clone(), Ok(one))).collect(),
        complete: Kind::ALL.into(),
        reason: None,
    }
}

fn names(enforcer: &Enforcer) -> Vec<String> {
    let repository = enforcer.repository();
    repository
        .of_cluster()
        .map(|held| held.name().to_string())
        .collect()
}

fn following() -> Site {
    Site {
        follows_cluster: true,
        ..Site::new()
    }
}

#[tokio::test(start_paused = true)]
async fn policies_of_the_cluster_are_kept_until_the_server_answers_and_forgotten_without_one() {
    let mut site = following();
    let enforcer = site.enforcer(&Session::new(&site.store));
    enforcer
        .set_cluster_policies(&complete([object("p", 80), object("q", 80)]))
        .unwrap();
    drop(enforcer);

    let enforcer = site.enforcer(&Session::new(&site.store));
    assert_eq!(
        names(&enforcer),
        ["NetworkPolicy shop/p", "NetworkPolicy shop/q"]
    );
    assert_eq!(enforcer.until_policies_known(Duration::ZERO).await, Ok(()));
    // The server has not listed this kind yet.
    let incomplete = ClusterPolicies {
        complete: [Kind::CiliumNetworkPolicy].into(),
        ..ClusterPolicies::default()
    };
    enforcer.set_cluster_policies(&incomplete).unwrap();
    assert_eq!(names(&enforcer).len(), 2);
    let before = enforcer.repository().revision();
    enforcer
        .set_cluster_policies(&complete([object("q", 80)]))
        .unwrap();
    assert_eq!(names(&enforcer), ["NetworkPolicy shop/q"]);
    assert_eq!(enforcer.repository().revision(), before + 1);
    drop(enforcer);

    site.follows_cluster = false;
    let enforcer = site.enforcer(&Session::new(&site.store));
    assert_eq!(names(&enforcer), [""; 0]);
    assert!(!site.dir.path().join(CLUSTER_FILE).exists());
}

#[tokio::test(start_paused = true)]
async fn a_refused_object_keeps_the_form_that_was_in_force() {
    let site = following();
    let enforcer = site.enforcer(&Session::new(&site.store));
    enforcer
        .set_cluster_policies(&complete([object("p", 80)]))
        .unwrap();
    let mut changed = complete([object("q", 80)]);
    let p = object("p", 80).name().clone();
    changed
        .objects
        .insert(p, Err("spec.x: unknown field".to_owned()));
    enforcer.set_cluster_policies(&changed).unwrap();
    assert_eq!(
        names(&enforcer),
        ["NetworkPolicy shop/p", "NetworkPolicy shop/q"]
    );
    let refused = enforcer.refused_policies();
    assert_eq!(refused.len(), 1);
    assert_eq!(
        (refused[0].name.as_str(), refused[0].reason.as_str()),
        ("NetworkPolicy shop/p", "spec.x: unknown field")
    );
    enforcer
        .set_cluster_policies(&complete([object("q", 80)]))
        .unwrap();
    assert_eq!(names(&enforcer), ["NetworkPolicy shop/q"]);
    assert!(enforcer.refused_policies().is_empty());
}

#[tokio::test(start_paused = true)]
async fn an_object_with_networks_that_do_not_fit_is_refused_and_the_others_stay() {
    let site = following();
    let enforcer = site.enforcer(&Session::new(&site.store));
    let many = |name: &str, first: u32| {
        let blocks = (0..10_000_u32).map(|n| {
            let network = std::net::Ipv4Addr::from((first + n) << 8);
            json!({ "ipBlock": { "cidr": format!("{network}/24") } })
        });
        let object = json!({
            "apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy",
            "metadata": { "name": name, "namespace": "shop" },
            "spec": { "podSelector": {}, "egress": [{ "to": blocks.collect::<Vec<_>>() }] },
        });
        Arc::new(read_policy(&object).unwrap())
    };
    let policies: Vec<_> = (0..26)
        .map(|n| many(&format!("p{n:02}"), n * 10_000))
        .collect();
    enforcer.set_cluster_policies(&complete(policies)).unwrap();
    assert_eq!(names(&enforcer).len(), 25);
    let refused = enforcer.refused_policies();
    assert_eq!(refused.len(), 1);
    assert_eq!(refused[0].name, "NetworkPolicy shop/p25");
    assert!(refused[0].reason.contains("260000 networks"), "{refused:?}");
}

#[tokio::test(start_paused = true)]
async fn an_agent_waits_for_policies_that_it_has_never_known() {
    let site = following();
    let enforcer = site.enforcer(&Session::new(&site.store));
    let unknown = |reason: &str| {
        let known = "the policies of the Kubernetes cluster are not known yet";
        Err(format!("{known}{reason}"))
    };
    assert_eq!(enforcer.until_policies_known(LONG).await, unknown(""));
    let mut given = complete([object("p", 80)]);
    given.complete = [Kind::NetworkPolicy].into();
    given.reason = Some("cannot list x".to_owned());
    enforcer.set_cluster_policies(&given).unwrap();
    assert_eq!(
        enforcer.until_policies_known(LONG).await,
        unknown(": cannot list x")
    );
    assert_eq!(names(&enforcer), ["NetworkPolicy shop/p"]);
    given.complete = Kind::ALL.into();
    enforcer.set_cluster_policies(&given).unwrap();
    assert_eq!(enforcer.until_policies_known(LONG).await, Ok(()));
}

#[tokio::test(start_paused = true)]
async fn policies_that_cannot_be_saved_are_in_force_and_saved_later() {
    let site = following();
    let enforcer = site.enforcer(&Session::new(&site.store));
    let file = site.dir.path().join(CLUSTER_FILE);
    // Nothing can replace a folder.
    std::fs::create_dir(&file).unwrap();
    let given = complete([object("p", 80)]);
    let error = enforcer
        .set_cluster_policies(&given)
        .unwrap_err()
        .to_string();
    assert!(error.contains(CLUSTER_FILE), "{error}");
    assert_eq!(names(&enforcer), ["NetworkPolicy shop/p"]);
    std::fs::remove_dir(&file).unwrap();
    enforcer.set_cluster_policies(&given).unwrap();
    assert!(file.is_file());
}

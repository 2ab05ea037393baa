//! The policy objects of an API server that lacks kinds, loses its store or has large objects, and the events about them.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Context as _;
use health_registry::kubernetes::{EventType, EventWriter, ObjectEvent, ObjectTable, PolicyWatch};
use serde_json::{Value, json};
use tests::apiserver::{ApiServer, Behaviour};
use tests::{PATIENCE, wait_for};
use tokio::sync::watch::Receiver;

type Table = ObjectTable<Value>;

/// A server with a namespace, and the watches of its policies.
struct Watched {
    server: ApiServer,
    network: Receiver<Arc<Table>>,
    cilium: Receiver<Arc<Table>>,
    folder: tempfile::TempDir,
    _watch: PolicyWatch<Value>,
}

impl Watched {
    /// Prepares the server before the watches start.
    fn start(prepare: impl FnOnce(&ApiServer)) -> anyhow::Result<Self> {
        let server = ApiServer::start()?;
        server.put(
            json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": "default" } }),
        );
        prepare(&server);
        let folder = tempfile::tempdir()?;
        server.write_kubeconfig(&kubeconfig(&folder))?;
        let name = |object: Value, _: Option<&Value>| object["metadata"]["name"].clone();
        let watch = PolicyWatch::open(Some(&kubeconfig(&folder)), [name; 3])?;
        let [network, cilium, _] = watch.tables();
        Ok(Self {
            server,
            network,
            cilium,
            folder,
            _watch: watch,
        })
    }

    /// Counts the requests so far that contain this text.
    fn requests(&self, text: &str) -> usize {
        let requests = self.server.requests();
        requests.iter().filter(|one| one.contains(text)).count()
    }
}

fn kubeconfig(folder: &tempfile::TempDir) -> PathBuf {
    folder.path().join("config")
}

async fn until(
    table: &mut Receiver<Arc<Table>>,
    what: &str,
    is_reached: impl Fn(&Table) -> bool,
) -> anyhow::Result<Arc<Table>> {
    let reached = table.wait_for(|table| is_reached(table));
    let reached = tokio::time::timeout(PATIENCE, reached).await;
    let table = reached.with_context(|| format!("no {what}"))??;
    Ok(table.clone())
}

fn reason(table: &Table) -> &str {
    table.stale.as_ref().map_or("", |stale| &stale.reason)
}

fn network_policy(name: &str, annotation: &str) -> Value {
    json!({
        "apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy",
        "metadata": { "namespace": "default", "name": name, "annotations": { "note": annotation } },
        "spec": { "podSelector": {} },
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn only_kinds_of_cilium_may_be_missing_and_only_after_several_answers() -> anyhow::Result<()>
{
    let mut watched = Watched::start(|server| server.behave(Behaviour::NotFound))?;
    until(&mut watched.cilium, "missing kind", |table| {
        table.has_all(|| false)
    })
    .await?;
    assert!(watched.requests("/ciliumnetworkpolicies?") >= 3);
    let network = until(&mut watched.network, "error", |table| {
        reason(table).contains("cannot list networkpolicies: the API server answers 404")
    })
    .await?;
    assert!(!network.has_all(|| false) && network.lacking.is_none());
    watched.server.behave(Behaviour::Serve);
    until(&mut watched.network, "listing", |table| table.is_complete).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_empty_list_of_policies_is_refused_while_the_server_has_no_namespaces()
-> anyhow::Result<()> {
    let mut watched = Watched::start(|server| server.put(network_policy("web", "")))?;
    until(&mut watched.network, "listing", |table| table.is_complete).await?;
    watched.server.stop();
    watched.server.put(network_policy("web", "changed"));
    watched.server.compact();
    watched.server.behave(Behaviour::LostStore);
    watched.server.resume()?;
    let lost =
        "the API server lists no networkpolicies and no namespaces; its store may have been lost";
    let table = until(&mut watched.network, "refusal", |table| {
        reason(table) == lost
    })
    .await?;
    assert_eq!(table.objects.len(), 1);
    watched.server.stop();
    watched
        .server
        .delete_of(tests::apiserver::Kind::NetworkPolicy, "default/web");
    watched.server.compact();
    watched.server.behave(Behaviour::Serve);
    watched.server.resume()?;
    // Now the server has namespaces, but no policy.
    until(&mut watched.network, "empty listing", |table| {
        table.objects.is_empty() && table.stale.is_none()
    })
    .await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn pages_shrink_until_large_objects_fit() -> anyhow::Result<()> {
    let note = "x".repeat(200_000);
    let mut watched = Watched::start(|server| {
        for n in 0..180 {
            server.put(network_policy(&format!("p{n}"), &note));
        }
    })?;
    let table = until(&mut watched.network, "listing", |table| table.is_complete).await?;
    assert_eq!(table.objects.len(), 180);
    assert!(watched.requests("/networkpolicies?&limit=100") >= 2);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn one_of_several_agents_writes_an_event_also_after_a_failure() -> anyhow::Result<()> {
    let watched = Watched::start(|server| server.behave(Behaviour::BadGateway))?;
    let open = |node: &str| EventWriter::open(Some(&kubeconfig(&watched.folder)), node);
    let writers = [open("n1")?, open("n2")?];
    let event = ObjectEvent {
        kind: "NetworkPolicy".to_owned(),
        api_version: "networking.k8s.io/v1".to_owned(),
        namespace: Some("default".to_owned()),
        name: "web".to_owned(),
        uid: "u-1".to_owned(),
        field_path: None,
        event_type: EventType::Warning,
        reason: "PolicyRefused",
        message: "spec.x: unknown field".to_owned(),
    };
    for writer in &writers {
        writer.keep(BTreeSet::from([event.clone()]), 2);
    }
    let posts = || watched.requests("POST /api/v1/namespaces/default/events");
    wait_for("failed attempts of both", PATIENCE, || {
        Ok((posts() >= 2).then_some(()))
    })?;
    let failed = posts();
    watched.server.behave(Behaviour::Serve);
    wait_for("further attempts of both", PATIENCE, || {
        Ok((posts() >= failed + 2 && watched.server.events().len() == 1).then_some(()))
    })?;
    Ok(())
}

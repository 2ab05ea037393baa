//! Keeps this node's health addresses in the annotations of its Node object.

use std::net::IpAddr;
use std::time::Duration;

use health_model::activity::{self, Activity, Reporter};
use kube::Client;
use kube::api::{Api, ApiResource, Patch, PatchParams};
use tokio::sync::watch;
use tokio::time::{Instant, sleep};

use super::object::{NodeObject, annotations};
use crate::backoff::Backoff;
use crate::kubernetes::access::{self, Access, AccessError};

/// The field manager, which the object records as the writer of the annotations.
const FIELD_MANAGER: &str = "health-agent";
/// Annotations that stay unchanged for this long are undisputed: the next change is then handled immediately.
const UNDISPUTED: Duration = Duration::from_secs(30);

/// Writes the annotations whenever they differ from the wanted ones.
pub(super) struct Publisher {
    access: Access,
    node_name: Option<String>,
    /// The addresses that the object should have; `None` until they are known.
    wanted: watch::Receiver<Option<Vec<IpAddr>>>,
    /// The annotations that the object has; `None` while there is no object.
    seen: watch::Receiver<Option<Vec<String>>>,
    client: Option<Client>,
    backoff: Backoff,
    /// The last failure that was logged.
    failure: Option<String>,
    reporter: Reporter,
}

/// Why the annotations could not be written.
#[derive(Debug, thiserror::Error)]
enum PatchError {
    #[error(transparent)]
    Access(#[from] AccessError),
    #[error("{}", access::reason(.0))]
    Api(#[from] kube::Error),
}

impl Publisher {
    /// Creates a publisher. Without a node name, it writes nothing.
    pub(super) fn new(
        access: Access,
        node_name: Option<String>,
        wanted: watch::Receiver<Option<Vec<IpAddr>>>,
        seen: watch::Receiver<Option<Vec<String>>>,
    ) -> Self {
        Self {
            access,
            node_name,
            wanted,
            seen,
            client: None,
            backoff: Backoff::default(),
            failure: None,
            reporter: activity::channel().0,
        }
    }

    /// What is known about the writing.
    pub(super) fn activity(&self) -> Activity {
        self.reporter.activity()
    }

    /// Runs until the registry is closed.
    pub(super) async fn run(mut self) {
        let Some(name) = self.node_name.take() else {
            return;
        };
        let mut last_patch: Option<Instant> = None;
        loop {
            if let Some(wanted) = self.due() {
                if last_patch.is_some_and(|last| last.elapsed() > UNDISPUTED) {
                    self.backoff.reset();
                }
                let outcome = self.patch(&name, &wanted).await;
                last_patch = Some(Instant::now());
                let is_done = outcome.is_ok();
                self.note(&name, &wanted, outcome);
                // Pause even after a success: two agents with the same name would keep overwriting each other.
                sleep(self.backoff.pause(rand::random())).await;
                if !is_done {
                    continue;
                }
            }
            let changed = tokio::select! {
                changed = self.wanted.changed() => changed,
                changed = self.seen.changed() => changed,
            };
            if changed.is_err() {
                return;
            }
        }
    }

    /// Returns the addresses that must be written, if any.
    fn due(&mut self) -> Option<Vec<IpAddr>> {
        let wanted = self.wanted.borrow_and_update().clone()?;
        let seen = self.seen.borrow_and_update().clone()?;
        let texts: Vec<_> = annotations(&wanted)
            .into_iter()
            .filter_map(|(_, value)| value)
            .collect();
        (texts != seen).then_some(wanted)
    }

    async fn patch(&mut self, name: &str, wanted: &[IpAddr]) -> Result<(), PatchError> {
        let client = match self.client.take() {
            Some(client) => client,
            None => self.access.client(watch::Sender::default()).await?,
        };
        let nodes: Api<NodeObject> = Api::all_with(
            client.clone(),
            &ApiResource::erase::<k8s_openapi::api::core::v1::Node>(&()),
        );
        let metadata: serde_json::Map<_, _> = annotations(wanted)
            .into_iter()
            .map(|(key, value)| (key.to_owned(), value.into()))
            .collect();
        // A merge patch, not an apply: an apply would create an object that does not exist.
        let patch = Patch::Merge(serde_json::json!({ "metadata": { "annotations": metadata } }));
        let params = PatchParams {
            field_manager: Some(FIELD_MANAGER.to_owned()),
            ..PatchParams::default()
        };
        nodes.patch_metadata(name, &params, &patch).await?;
        // Only reached after a success: after a failure, the credentials are read again.
        self.client = Some(client);
        Ok(())
    }

    fn note(&mut self, node: &str, wanted: &[IpAddr], outcome: Result<(), PatchError>) {
        match outcome {
            Ok(()) => {
                self.failure = None;
                self.reporter.succeeded();
                tracing::info!(node, addresses = ?wanted, "published the health addresses");
            }
            Err(error) => {
                let error = error.to_string();
                self.reporter.failed(&error);
                if self.failure.as_ref() != Some(&error) {
                    tracing::warn!(node, error, "cannot publish the health addresses");
                    self.failure = Some(error);
                }
            }
        }
    }
}

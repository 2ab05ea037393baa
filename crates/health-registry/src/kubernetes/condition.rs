//! Keeps a condition in the status of a Node object.

use std::path::Path;
use std::time::Duration;

use health_model::activity::{self, Activity, Controller, Reporter};
use health_model::task::AbortOnDrop;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Node;
use kube::Client;
use kube::api::{Api, ApiResource, DynamicObject, Patch, PatchParams};
use serde_json::json;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until};

use super::access::{self, Access, AccessError};
use crate::backoff::Backoff;

/// The field manager, which the object records as the writer of the condition.
const FIELD_MANAGER: &str = "health-agent";
/// How often an unchanged condition is written, so that its heartbeat shows that the agent is alive; same as the
/// kubelet.
const HEARTBEAT: Duration = Duration::from_secs(300);
/// Minimum time between two writes when the status changes. Each write of a Node goes to all that follow nodes.
const STATUS_GAP: Duration = Duration::from_secs(10);
/// Minimum time between two writes when only the reason or the message changes.
const MESSAGE_GAP: Duration = Duration::from_secs(60);

/// The state of a condition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConditionStatus {
    /// The condition holds.
    True,
    /// The condition does not hold.
    False,
    /// It is not known whether it holds.
    Unknown,
}

impl ConditionStatus {
    const fn text(self) -> &'static str {
        match self {
            Self::True => "True",
            Self::False => "False",
            Self::Unknown => "Unknown",
        }
    }
}

/// A condition of a node, without its type.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeCondition {
    /// Whether it holds.
    pub status: ConditionStatus,
    /// Why, in one word.
    pub reason: &'static str,
    /// Why, for people.
    pub message: String,
}

/// Writes a condition of a Node object until dropped.
#[derive(Debug)]
pub struct ConditionWriter {
    wanted: watch::Sender<Wanted>,
    activity: Activity,
    closed: watch::Receiver<bool>,
    _task: AbortOnDrop,
}

impl ConditionWriter {
    /// Writes the condition of this type of the Node `node`. Uses the kubeconfig at the given path, else the service
    /// account of this process's pod, else the environment's kubeconfig. Fails if there are no credentials. Must be
    /// called in a tokio runtime.
    pub fn open(kubeconfig: Option<&Path>, node: &str, kind: &str) -> Result<Self, AccessError> {
        let (wanted, receiver) = watch::channel(Wanted::default());
        let (reporter, activity) = activity::channel();
        let (ended, closed) = watch::channel(false);
        let writing = Writing {
            access: Access::find(kubeconfig)?,
            client: None,
            node: node.to_owned(),
            kind: kind.to_owned(),
            known: None,
            written: None,
            failure: None,
            reporter,
        };
        Ok(Self {
            wanted,
            activity,
            closed,
            _task: AbortOnDrop::spawn(writing.run(receiver, ended)),
        })
    }

    /// Whether the writes succeed.
    pub fn controller(&self) -> Controller {
        Controller::new("node-condition", self.activity.clone())
    }

    /// Sets the condition. It is written soon if it differs from the last one, and again every 5 minutes.
    pub fn set(&self, condition: NodeCondition) {
        self.wanted.send_if_modified(|wanted| {
            let is_news = !wanted.is_last && wanted.condition.as_ref() != Some(&condition);
            if is_news {
                wanted.condition = Some(condition);
            }
            is_news
        });
    }

    /// Tries once to write a last condition, and waits for the outcome. Returns whether it was written.
    pub async fn close(&self, last: NodeCondition) -> bool {
        self.wanted.send_replace(Wanted {
            condition: Some(last),
            is_last: true,
        });
        let mut closed = self.closed.clone();
        // The channel closes without this value if the attempt fails.
        closed.wait_for(|is_written| *is_written).await.is_ok()
    }
}

/// The condition that the object should have.
#[derive(Clone, Debug, Default)]
struct Wanted {
    /// `None` until it is known.
    condition: Option<NodeCondition>,
    /// Whether it is written at once, and no other one after it.
    is_last: bool,
}

/// The condition as last written.
struct Written {
    condition: NodeCondition,
    at: Instant,
}

/// Status and time of the last transition of the condition in the object.
struct Known {
    status: String,
    transition: String,
}

struct Writing {
    access: Access,
    /// The client that last worked.
    client: Option<Client>,
    node: String,
    kind: String,
    /// `None` before the object was read.
    known: Option<Known>,
    written: Option<Written>,
    /// The last failure that was logged.
    failure: Option<String>,
    reporter: Reporter,
}

impl Writing {
    async fn run(mut self, mut wanted: watch::Receiver<Wanted>, ended: watch::Sender<bool>) {
        let mut backoff = Backoff::default();
        loop {
            let Wanted { condition, is_last } = wanted.borrow_and_update().clone();
            let due = async {
                match &condition {
                    Some(_) if is_last => {}
                    Some(condition) => sleep_until(self.due(condition)).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                changed = wanted.changed() => match changed {
                    Ok(()) => continue,
                    Err(_) => return,
                },
                () = due => {}
            }
            let Some(condition) = condition else { continue };
            let is_written = self.write(condition).await;
            if is_last {
                ended.send_replace(is_written);
                return;
            }
            if is_written {
                backoff.reset();
                continue;
            }
            tokio::select! {
                () = sleep(backoff.pause(rand::random())) => {}
                Ok(_) = wanted.wait_for(|wanted| wanted.is_last) => {}
            }
        }
    }

    /// When this condition should be written.
    fn due(&self, wanted: &NodeCondition) -> Instant {
        let Some(Written { condition, at }) = &self.written else {
            return Instant::now();
        };
        let gap = match (condition.status == wanted.status, condition == wanted) {
            (false, _) => STATUS_GAP,
            (true, false) => MESSAGE_GAP,
            (true, true) => HEARTBEAT,
        };
        *at + gap
    }

    /// Writes the condition, and reports the outcome. Returns whether it was written.
    async fn write(&mut self, condition: NodeCondition) -> bool {
        let outcome = self.patch(&condition).await;
        match outcome {
            Ok(()) => {
                self.failure = None;
                let at = Instant::now();
                self.written = Some(Written { condition, at });
                self.reporter.end(None, Some(HEARTBEAT));
                true
            }
            Err(error) => {
                self.reporter.failed(&error);
                if self.failure.as_ref() != Some(&error) {
                    tracing::warn!(
                        node = self.node,
                        error,
                        "cannot write the condition of this node"
                    );
                    self.failure = Some(error);
                }
                false
            }
        }
    }

    async fn patch(&mut self, condition: &NodeCondition) -> Result<(), String> {
        let client = match self.client.take() {
            Some(client) => client,
            None => {
                let client = self.access.client(watch::Sender::default()).await;
                client.map_err(|error| error.to_string())?
            }
        };
        let nodes: Api<DynamicObject> =
            Api::all_with(client.clone(), &ApiResource::erase::<Node>(&()));
        let status = condition.status.text();
        let now = format!("{:.0}", Timestamp::now());
        let known = match self.known.take() {
            Some(known) => Some(known),
            None => self.read(&nodes).await?,
        };
        let transition = match known {
            Some(known) if known.status == status => known.transition,
            _ => now.clone(),
        };
        // Strategic: lists of conditions are merged by type. A merge patch would remove those of the kubelet.
        let patch = Patch::Strategic(json!({ "status": { "conditions": [{
            "type": self.kind,
            "status": status,
            "reason": condition.reason,
            "message": condition.message,
            "lastHeartbeatTime": now,
            "lastTransitionTime": transition,
        }] } }));
        let params = PatchParams {
            field_manager: Some(FIELD_MANAGER.to_owned()),
            ..PatchParams::default()
        };
        let patched = nodes.patch_status(&self.node, &params, &patch).await;
        patched.map_err(|error| {
            let hint = match &error {
                kube::Error::Api(status) if status.code == 403 => {
                    "; the agent's role must allow `patch` on `nodes/status`, as in deploy/kubernetes/condition"
                }
                _ => "",
            };
            format!("{}{hint}", access::reason(&error))
        })?;
        self.known = Some(Known {
            status: status.to_owned(),
            transition,
        });
        // Only reached after a success: after a failure, the credentials are read again.
        self.client = Some(client);
        Ok(())
    }

    /// Reads the condition that an earlier agent wrote.
    async fn read(&self, nodes: &Api<DynamicObject>) -> Result<Option<Known>, String> {
        let node = nodes.get(&self.node).await;
        let node = node.map_err(|error| access::reason(&error))?;
        let conditions = node.data["status"]["conditions"].as_array();
        let mut conditions = conditions.into_iter().flatten();
        let own = conditions.find(|condition| condition["type"] == *self.kind);
        Ok(own.and_then(|condition| {
            Some(Known {
                status: condition["status"].as_str()?.to_owned(),
                transition: condition["lastTransitionTime"].as_str()?.to_owned(),
            })
        }))
    }
}

//! The requests to the API server for identities and slices.

use std::time::Duration;

use health_model::identity::Identity;
use health_model::labels::LabelSet;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::api::{
    Api, ApiResource, DeleteParams, DynamicObject, ListParams, Patch, PatchParams, PostParams,
    Preconditions,
};
use kube::{Client, Error};
use serde_json::json;
use tokio::sync::watch;

use super::objects::{
    Entries, IdentityObject, ObjectVersion, SliceObject, identity_kind, mark_patch, new_identity,
    slice_key, slice_kind, slice_name, slice_spec,
};
use crate::kubernetes::access::{self, Access, AccessError};

/// The field manager, which the objects record as their writer.
const FIELD_MANAGER: &str = "health-agent";

/// Maximum number of objects in one answer of a list.
const PAGE: u32 = 500;

/// Why a request failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum RequestError {
    #[error(transparent)]
    Access(#[from] AccessError),
    #[error("cannot {attempt}: {}", access::reason(source))]
    Api {
        attempt: &'static str,
        source: Error,
    },
    #[error(
        "the API server drops fields of slices of endpoints; install the current deploy/kubernetes/crds.yaml"
    )]
    Pruned,
    #[error("the API server answers with an earlier state; its store may have been restored")]
    Outdated,
}

/// What a failure of a request says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Blame {
    /// The server wants fewer requests, after this pause if it names one.
    Overload(Option<Duration>),
    /// The server fails.
    Server,
    /// There is no connection, or the credentials are refused: read them again.
    Connection,
    /// Requests about other objects may succeed.
    Object,
}

impl RequestError {
    pub(super) fn blame(&self) -> Blame {
        let status = match self {
            Self::Api {
                source: Error::Api(status),
                ..
            } => status,
            Self::Api { .. } | Self::Access(_) => return Blame::Connection,
            Self::Pruned => return Blame::Server,
            Self::Outdated => return Blame::Object,
        };
        let wished = status.details.as_ref().map(|all| all.retry_after_seconds);
        let wished = wished.filter(|seconds| *seconds > 0);
        let wished = wished.map(|seconds| Duration::from_secs(seconds.into()));
        match status.code {
            401 => Blame::Connection,
            429 => Blame::Overload(wished),
            _ if wished.is_some() => Blame::Overload(wished),
            502..=504 => Blame::Server,
            // 500 is also what an admission webhook gives as its answer.
            _ => Blame::Object,
        }
    }
}

/// A connection to the API server.
#[derive(Clone)]
pub(super) struct Requests {
    identities: Api<DynamicObject>,
    slices: Api<DynamicObject>,
    nodes: Api<DynamicObject>,
}

impl Requests {
    /// Reads the credentials. Connects with the first request.
    pub(super) async fn open(access: &Access) -> Result<Self, AccessError> {
        let client = access.client(watch::Sender::default()).await?;
        let api = |client: Client, kind| Api::all_with(client, &kind);
        Ok(Self {
            identities: api(client.clone(), identity_kind()),
            slices: api(client.clone(), slice_kind()),
            nodes: api(client, ApiResource::erase::<Node>(&())),
        })
    }

    /// Gives a number to a label set. `None` if the number is taken.
    pub(super) async fn create_identity(
        &self,
        identity: Identity,
        labels: &LabelSet,
    ) -> Result<Option<IdentityObject>, RequestError> {
        let object = new_identity(identity, labels);
        match self.identities.create(&creation(), &object).await {
            Ok(created) => Ok(Some(created.into())),
            Err(Error::Api(status)) if status.is_already_exists() => Ok(None),
            Err(source) => Err(failed("allocate an identity", source)),
        }
    }

    /// Reads the object of a number. `None` if there is none.
    pub(super) async fn read_identity(
        &self,
        identity: Identity,
    ) -> Result<Option<IdentityObject>, RequestError> {
        let found = self.identities.get_opt(&identity.to_string()).await;
        let found = found.map_err(|source| failed("look up an identity", source))?;
        Ok(found.map(IdentityObject::from))
    }

    /// Marks an identity as unused, or removes the mark. `None` if the object has another version or is gone.
    pub(super) async fn mark(
        &self,
        identity: Identity,
        version: &ObjectVersion,
        unused_since: Option<Timestamp>,
    ) -> Result<Option<IdentityObject>, RequestError> {
        let patch = Patch::Merge(mark_patch(version, unused_since));
        let name = identity.to_string();
        match self.identities.patch(&name, &patching(), &patch).await {
            Ok(marked) => Ok(Some(marked.into())),
            Err(error) if is_other_version(&error) => Ok(None),
            Err(source) => Err(failed("mark an identity", source)),
        }
    }

    /// Deletes an identity. Returns whether it still had this version.
    pub(super) async fn delete_identity(
        &self,
        identity: Identity,
        version: &ObjectVersion,
    ) -> Result<bool, RequestError> {
        let params = DeleteParams::default().preconditions(Preconditions {
            uid: Some(version.uid.clone()),
            resource_version: Some(version.resource_version.clone()),
        });
        match self.identities.delete(&identity.to_string(), &params).await {
            Ok(_) => Ok(true),
            Err(error) if is_other_version(&error) => Ok(false),
            Err(source) => Err(failed("delete an identity", source)),
        }
    }

    /// Writes a slice of a node. `is_known` says whether the object is known to exist.
    pub(super) async fn write_slice(
        &self,
        node: &str,
        index: u32,
        entries: &Entries,
        is_known: bool,
    ) -> Result<SliceObject, RequestError> {
        const ATTEMPT: &str = "write a slice of endpoints";
        let name = slice_name(node, index);
        let spec = json!({ "spec": slice_spec(node, entries) });
        let patch = Patch::Merge(&spec);
        if is_known {
            match self.slices.patch(&name, &patching(), &patch).await {
                Ok(patched) => return Ok(patched.into()),
                // The server lost it, or somebody deleted it a moment ago.
                Err(Error::Api(status)) if status.is_not_found() => {}
                Err(source) => return Err(failed(ATTEMPT, source)),
            }
        }
        let mut object = DynamicObject::new(&name, &slice_kind()).data(spec.clone());
        object.metadata.owner_references = self.owner(node).await?;
        let written = match self.slices.create(&creation(), &object).await {
            Err(Error::Api(status)) if status.is_already_exists() => {
                self.slices.patch(&name, &patching(), &patch).await
            }
            created => created,
        };
        let written = written.map_err(|source| failed(ATTEMPT, source))?;
        Ok(written.into())
    }

    /// Returns a reference to the Node object, with which Kubernetes deletes the node's slices. `None` if there is no
    /// such object.
    async fn owner(&self, node: &str) -> Result<Option<Vec<OwnerReference>>, RequestError> {
        let found = self.nodes.get_metadata_opt(node).await;
        let found = found.map_err(|source| failed("look up this node", source))?;
        let uid = found.and_then(|node| node.metadata.uid);
        Ok(uid.map(|uid| {
            vec![OwnerReference {
                api_version: "v1".to_owned(),
                kind: "Node".to_owned(),
                name: node.to_owned(),
                uid,
                ..Default::default()
            }]
        }))
    }

    /// Sets the owner of slices that have none. Returns them, or nothing as long as there is no Node object.
    pub(super) async fn adopt_slices(
        &self,
        node: &str,
        indices: &[u32],
    ) -> Result<Vec<SliceObject>, RequestError> {
        let Some(owner) = self.owner(node).await? else {
            return Ok(Vec::new());
        };
        let patch = Patch::Merge(json!({ "metadata": { "ownerReferences": owner } }));
        let mut adopted = Vec::new();
        for index in indices {
            let name = slice_name(node, *index);
            match self.slices.patch(&name, &patching(), &patch).await {
                Ok(slice) => adopted.push(slice.into()),
                Err(Error::Api(status)) if status.is_not_found() => {}
                Err(source) => return Err(failed("set the owner of a slice of endpoints", source)),
            }
        }
        Ok(adopted)
    }

    /// Returns the indices of a node's slices.
    pub(super) async fn slices_of(&self, node: &str) -> Result<Vec<u32>, RequestError> {
        let mut params = ListParams::default().limit(PAGE);
        let mut indices = Vec::new();
        loop {
            let page = match self.slices.list_metadata(&params).await {
                Ok(page) => page,
                Err(Error::Api(status)) if status.is_not_found() => return Ok(indices),
                Err(source) => return Err(failed("list slices of endpoints", source)),
            };
            let names = page.items.iter();
            let names = names.filter_map(|slice| slice.metadata.name.as_deref());
            let keys = names.filter_map(slice_key);
            indices.extend(
                keys.filter(|(owner, _)| owner == node)
                    .map(|(_, index)| index),
            );
            match page.metadata.continue_.filter(|token| !token.is_empty()) {
                Some(token) => params = params.continue_token(&token),
                None => return Ok(indices),
            }
        }
    }

    /// Deletes a slice of a node, if it exists.
    pub(super) async fn delete_slice(&self, node: &str, index: u32) -> Result<(), RequestError> {
        let name = slice_name(node, index);
        match self.slices.delete(&name, &DeleteParams::default()).await {
            Ok(_) => Ok(()),
            Err(Error::Api(status)) if status.is_not_found() => Ok(()),
            Err(source) => Err(failed("delete a slice of endpoints", source)),
        }
    }
}

fn creation() -> PostParams {
    PostParams {
        field_manager: Some(FIELD_MANAGER.to_owned()),
        ..PostParams::default()
    }
}

fn patching() -> PatchParams {
    PatchParams {
        field_manager: Some(FIELD_MANAGER.to_owned()),
        ..PatchParams::default()
    }
}

fn failed(attempt: &'static str, source: Error) -> RequestError {
    RequestError::Api { attempt, source }
}

/// Whether a change was refused because the object has another version or is gone.
fn is_other_version(error: &Error) -> bool {
    matches!(error, Error::Api(status) if status.is_conflict() || status.is_not_found())
}

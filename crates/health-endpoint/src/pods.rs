//! The labels of this node's pods, as Kubernetes has them.

use std::collections::BTreeMap;
use std::sync::Arc;

use health_model::api::PodName;
use health_model::labels::pod::IdentityLabels;

/// The labels of the known pods. A pod that is not known may exist: its labels stay as they were.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PodLabels(BTreeMap<String, Arc<LabelledPod>>);

/// One pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LabelledPod {
    /// Its UIDs: that of its object, and for a pod from a kubelet's own folder also that of the kubelet.
    pub uids: Vec<String>,
    /// The labels of its identity.
    pub identity: IdentityLabels,
}

impl PodLabels {
    /// The labels of a pod, if it is known. A pod with another UID is another pod, even if it has the same name.
    pub fn of(&self, pod: &PodName) -> Option<&IdentityLabels> {
        let found = self.0.get(&pod.to_string())?;
        let is_same = pod.uid.as_ref().is_none_or(|uid| found.uids.contains(uid));
        is_same.then_some(&found.identity)
    }
}

impl FromIterator<(String, Arc<LabelledPod>)> for PodLabels {
    /// Collects pods by `NAMESPACE/NAME`.
    fn from_iter<T: IntoIterator<Item = (String, Arc<LabelledPod>)>>(pods: T) -> Self {
        Self(pods.into_iter().collect())
    }
}

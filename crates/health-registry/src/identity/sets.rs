//! Label sets as stores hold them, and the numbers that the cluster has for them.

use health_common::identity::{CLUSTER_FIRST, CLUSTER_LAST};
use health_model::labels::LabelSet;
use ring::digest::{Digest, SHA256, digest};

use super::allocator::not_for_endpoints;
#[cfg(feature = "kubernetes")]
use super::view::LabelsDigest;

/// The total number of identities.
pub(super) const NUMBERS: usize = (CLUSTER_LAST - CLUSTER_FIRST + 1) as usize;

/// Returns a label set as stored: a JSON array of strings, in order.
pub(super) fn labels_text(labels: &LabelSet) -> String {
    // Serializing strings to JSON cannot fail.
    serde_json::to_string(labels).unwrap_or_default()
}

/// Returns the SHA-256 of a label set's JSON form.
pub(super) fn digest_of(labels: &LabelSet) -> Digest {
    digest(&SHA256, labels_text(labels).as_bytes())
}

/// Returns the short digest of a label set.
#[cfg(feature = "kubernetes")]
pub(super) fn short_digest_of(labels: &LabelSet) -> LabelsDigest {
    let digest = digest_of(labels);
    let head = digest.as_ref().first_chunk().copied().unwrap_or_default();
    LabelsDigest(u64::from_be_bytes(head))
}

/// Checks that endpoints may have a label set. Returns the reason if not.
pub(super) fn checked(labels: LabelSet) -> Result<LabelSet, String> {
    if labels.is_empty() {
        return Err("the label set is empty".to_owned());
    }
    match not_for_endpoints(&labels) {
        Some(label) => Err(format!("label {label} is not allowed on endpoints")),
        None => Ok(labels),
    }
}

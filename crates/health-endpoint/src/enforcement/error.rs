//! Errors of changing policy or taking it over.

use std::io;
use std::path::PathBuf;

use health_datapath::{DatapathError, TrieError};
use health_policy::{PolicyError, PolicyName};

/// Why policy could not be changed or taken over.
#[derive(Debug, thiserror::Error)]
pub enum EnforceError {
    /// The document is not a policy.
    #[error(transparent)]
    Policy(#[from] PolicyError),
    /// No policy has this name.
    #[error("no policy {0}; `health-agent policy get` lists the existing ones")]
    NoPolicy(PolicyName),
    /// The policy is an object of the Kubernetes cluster.
    #[error("policy {0} comes from the Kubernetes cluster; delete it there")]
    OfCluster(PolicyName),
    /// All policies together would name more networks than fit beside the addresses of endpoints and nodes.
    #[error("all policies together would name {count} networks, but at most {max} are allowed")]
    TooManyNetworks {
        /// The number of networks that would be named.
        count: usize,
        /// The limit.
        max: usize,
    },
    /// All policies together would name more labels of nodes than a node may have.
    #[error(
        "all policies together would name {count} labels of nodes, but at most {max} are allowed"
    )]
    TooManyNodeLabels {
        /// The number of keys that would be named.
        count: usize,
        /// The limit.
        max: usize,
    },
    /// The saved policies cannot be read. Starting without them would let all traffic pass.
    #[error("cannot read the policies in {}: {source}; fix the file, or delete it to start without policy", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// The problem with the file.
        source: io::Error,
    },
    /// A change could not be saved, and so was not made.
    #[error("cannot save the policies in {}: {source}; nothing was changed", path.display())]
    Save {
        /// The file.
        path: PathBuf,
        /// The system error.
        source: io::Error,
    },
    /// The cluster's policies are in force, but could not be saved.
    #[error(
        "cannot save the policies of the Kubernetes cluster in {}: {source}; an agent that starts without an answer \
         from the API server would lack the latest", path.display()
    )]
    SaveCluster {
        /// The file.
        path: PathBuf,
        /// The system error.
        source: io::Error,
    },
    /// The saved policies of a cluster that is no longer followed cannot be removed.
    #[error("cannot remove {}: {source}", path.display())]
    Forget {
        /// The file.
        path: PathBuf,
        /// The system error.
        source: io::Error,
    },
    /// An error from a table of verdicts.
    #[error(transparent)]
    Table(#[from] health_datapath::policy::PolicyError),
    /// An error from the datapath's maps.
    #[error(transparent)]
    Datapath(#[from] DatapathError),
    /// An error from the map of identities by address (ipcache).
    #[error(transparent)]
    Ipcache(#[from] TrieError),
}

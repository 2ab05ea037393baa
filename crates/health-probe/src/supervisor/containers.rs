//! Where the processes of containers run, for the prober.

use std::collections::HashMap;
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use health_net::netns::NetNs;

use crate::prober::{Containers, Execution};
use crate::runtime::{Runtime, RuntimePod};
use crate::spec::PodSpec;

/// Where the containers of each pod run, by the pod's UID.
pub(super) struct KnownContainers {
    runtime: Option<Runtime>,
    pods: Mutex<HashMap<Arc<str>, Known>>,
}

/// Where a pod's containers run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Known {
    /// A process in the pod's namespaces.
    pub(super) pid: Option<u32>,
    /// Processes of the pod's containers, by container ID.
    pub(super) containers: HashMap<String, u32>,
    /// The network namespace of the pod's endpoint.
    pub(super) netns: Option<PathBuf>,
}

impl Known {
    /// Takes the processes from the runtime's report.
    pub(super) fn of(pod: &RuntimePod) -> Self {
        let pids = pod.containers.iter();
        Self {
            pid: pod.pid,
            containers: pids
                .filter_map(|one| Some((one.id.clone(), one.pid?)))
                .collect(),
            netns: None,
        }
    }
}

impl KnownContainers {
    pub(super) fn new(runtime: Option<Runtime>) -> Self {
        Self {
            runtime,
            pods: Mutex::default(),
        }
    }

    pub(super) fn set(&self, uid: &Arc<str>, known: Known) {
        self.pods().insert(uid.clone(), known);
    }

    pub(super) fn retain(&self, is_there: impl Fn(&str) -> bool) {
        self.pods().retain(|uid, _| is_there(uid));
    }

    fn pods(&self) -> MutexGuard<'_, HashMap<Arc<str>, Known>> {
        self.pods.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Containers for KnownContainers {
    fn netns(&self, pod: &PodSpec) -> Option<Arc<NetNs>> {
        let known = self.pods().get(&pod.uid)?.clone();
        let path = match (known.pid, known.netns) {
            (Some(pid), _) => PathBuf::from(format!("/proc/{pid}/ns/net")),
            (None, Some(path)) => path,
            (None, None) => return None,
        };
        NetNs::at(&path).ok().map(Arc::new)
    }

    fn execution(&self, pod: &PodSpec, container_id: &str) -> Option<Execution> {
        let known = self.pods().get(&pod.uid)?.clone();
        match &self.runtime {
            Some(runtime) => Some(Execution::Runtime {
                runtime: runtime.clone(),
                container_id: container_id.to_owned(),
                pid: known.containers.get(container_id).copied(),
            }),
            None => Some(Execution::Direct {
                pid: first_process_in(known.netns.as_deref()?)?,
                started: None,
            }),
        }
    }
}

/// Returns the lowest PID in a network namespace, preferring processes outside of this agent's mount namespace: a
/// program that an administrator runs in a container's network namespace is not part of the container.
fn first_process_in(netns: &Path) -> Option<u32> {
    let identity = |path: &Path| {
        let metadata = fs::metadata(path).ok()?;
        Some((metadata.dev(), metadata.ino()))
    };
    let wanted = identity(netns)?;
    let entries = fs::read_dir("/proc").ok()?;
    let pids = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<u32>().ok());
    let of = |pid: &u32, kind: &str| identity(Path::new(&format!("/proc/{pid}/ns/{kind}")));
    let own = identity(Path::new("/proc/self/ns/mnt"));
    pids.filter(|pid| of(pid, "net") == Some(wanted))
        .min_by_key(|pid| (of(pid, "mnt") == own, *pid))
}

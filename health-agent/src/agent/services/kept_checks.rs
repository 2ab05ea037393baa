//! Saves the last health-check answers for the next agent. Until that agent has read its sources, the kernel keeps
//! serving the state that the last agent wrote, so the health-check node ports should keep giving load balancers the
//! same answers.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use health_model::durable;
use health_model::task::AbortOnDrop;
use health_net::clock;
use health_server::services::listeners::HealthChecks;
use health_service::spec::ServiceName;
use health_service::state::HealthCheck;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use tracing::warn;

/// Name of the file in the state folder.
pub(in crate::agent) const FILE: &str = "service-health-checks.json";

const VERSION: u32 = 1;

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct File {
    version: u32,
    /// The kernel's service state does not survive a reboot.
    boot_id: String,
    /// One list per family, as in [`HealthChecks`].
    checks: [Vec<Check>; 2],
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Check {
    namespace: String,
    service: String,
    port: u16,
    local_endpoints: usize,
}

/// Reads the answers that an earlier agent saved since this boot; empty if none exist. Logs an unusable file and treats
/// it as empty.
pub(super) fn read(state_dir: &Path) -> HealthChecks {
    let path = state_dir.join(FILE);
    read_file(&path).unwrap_or_else(|error| {
        warn!(file = %path.display(), %error, "cannot read the saved health-check answers; load balancers get none until services have been read");
        HealthChecks::default()
    })
}

fn read_file(path: &Path) -> io::Result<HealthChecks> {
    let text = match fs::read(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Ok(HealthChecks::default());
        }
        text => text?,
    };
    let file: File = serde_json::from_slice(&text)?;
    if file.version != VERSION || file.boot_id != clock::boot_id()? {
        return Ok(HealthChecks::default());
    }
    Ok(file.checks.map(|checks| {
        let checks = checks.into_iter().map(|check| {
            let name = ServiceName::new(&check.namespace, &check.service);
            let check = HealthCheck {
                port: check.port,
                local_endpoints: check.local_endpoints,
            };
            (name, check)
        });
        checks.collect()
    }))
}

fn write(path: &Path, checks: &HealthChecks) -> io::Result<()> {
    let file = File {
        version: VERSION,
        boot_id: clock::boot_id()?,
        checks: checks.each_ref().map(|checks| {
            let checks = checks.iter().map(|(name, check)| Check {
                namespace: name.namespace.to_string(),
                service: name.name.to_string(),
                port: check.port,
                local_endpoints: check.local_endpoints,
            });
            checks.collect()
        }),
    };
    durable::replace(path, &file)
}

/// Removes the file, because nothing is served any more. Returns whether it existed.
pub(in crate::agent) fn remove(state_dir: &Path) -> io::Result<bool> {
    durable::remove(&state_dir.join(FILE))
}

/// Saves the answers to load balancers until dropped.
#[derive(Debug)]
pub(super) struct KeptChecks {
    _task: AbortOnDrop,
}

impl KeptChecks {
    /// Starts saving. The file must already contain the current answers. Must be called in a tokio runtime.
    pub(super) fn follow(state_dir: &Path, mut checks: watch::Receiver<Arc<HealthChecks>>) -> Self {
        let kept = checks.borrow_and_update().clone();
        Self {
            _task: AbortOnDrop::spawn(keep(state_dir.join(FILE), kept, checks)),
        }
    }
}

async fn keep(
    path: PathBuf,
    mut written: Arc<HealthChecks>,
    mut checks: watch::Receiver<Arc<HealthChecks>>,
) {
    // Logged once for each cause.
    let mut failure = None;
    while checks.changed().await.is_ok() {
        let now = checks.borrow_and_update().clone();
        if failure.is_none() && now == written {
            continue;
        }
        let (path, of) = (path.clone(), now.clone());
        let result = tokio::task::spawn_blocking(move || {
            write(&path, &of).map_err(|error| (path, error.to_string()))
        });
        failure = match result.await {
            Ok(Err((path, error))) => {
                if failure.as_ref() != Some(&error) {
                    warn!(file = %path.display(), error, "cannot save the health-check answers; after a restart, load balancers get none until services have been read");
                }
                Some(error)
            }
            _ => None,
        };
        written = now;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checks() -> HealthChecks {
        let check = |port, local_endpoints| HealthCheck {
            port,
            local_endpoints,
        };
        let [mut v4, mut v6] = HealthChecks::default();
        v4.insert(ServiceName::new("shop", "web"), check(30_100, 2));
        v4.insert(ServiceName::new("shop", "none"), check(30_101, 0));
        v6.insert(ServiceName::new("shop", "web"), check(30_100, 1));
        [v4, v6]
    }

    #[tokio::test]
    async fn what_was_reported_is_there_for_the_next_agent_of_the_boot() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(read(folder.path()), HealthChecks::default());
        let (sender, receiver) = watch::channel(Arc::default());
        let _kept = KeptChecks::follow(folder.path(), receiver);
        sender.send_replace(Arc::new(checks()));
        while read(folder.path()) != checks() {
            tokio::task::yield_now().await;
        }

        let path = folder.path().join(FILE);
        let text = fs::read_to_string(&path).unwrap();
        let boot_id = clock::boot_id().unwrap();
        fs::write(&path, text.replace(&boot_id, "another")).unwrap();
        assert_eq!(read(folder.path()), HealthChecks::default());
        fs::write(&path, "{ half").unwrap();
        assert!(read_file(&path).is_err());
        assert_eq!(read(folder.path()), HealthChecks::default());
    }
}

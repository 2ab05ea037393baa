//! A node whose agent restarts while the identity store is unavailable: the restored endpoints wait for the store, but
//! new ones can still be added.

use std::fs::File;
use std::path::Path;

use anyhow::{Context as _, ensure};
use health_registry::identity::LOCK_SUFFIX;
use nix::sys::signal::Signal;
use serde_json::Value;

use super::stand::{Namespaces, Stand, Times, ptp};
use crate::bench::{Figure, Target};
use crate::plugin::Plugin;
use crate::{PATIENCE, wait_for};

const ENDPOINTS: usize = 200;
/// Number of endpoints with the same labels. The agent queries the store once per label set.
const OF_A_KIND: usize = 10;
const SAMPLES: usize = 100;
/// Limit relative to `ptp`, which has nothing to restore.
const ADD_LIMIT: Target = Target::RatioAtMost(2.0);
const PREFIX: &str = "bench-new";

/// Measures `ADD` for containers in this state, including the plugin's process.
pub(super) fn figures() -> anyhow::Result<Vec<Figure>> {
    let folder = tempfile::tempdir()?;
    let store = folder.path().join("identities.json");
    let stand = Stand::with_args(&format!("--identity-store file:{}", store.display()))?;
    let node = stand.node();
    let many = Namespaces::new("bench-restored", 1)?;
    let many = many.paths().next().context("no namespace")?;
    for n in 0..ENDPOINTS {
        let labels = [format!("kind=k{}", n / OF_A_KIND)];
        stand.create(many, &format!("r{n}"), &labels)?;
    }
    let ours = Plugin::of(node, folder.path())?;
    let theirs = ptp(folder.path());
    let both = [(PREFIX, &ours), ("bench-beside", &theirs)];
    let containers = both.map(|(prefix, _)| Namespaces::new(prefix, SAMPLES));
    let [of_ours, of_theirs] = containers;
    let containers = [of_ours?, of_theirs?];
    node.kill_agent(Signal::SIGKILL)?;
    // The lock keeps the agent from reading the store.
    let lock = File::create(folder.path().join(format!("identities.json{LOCK_SUFFIX}")))?;
    lock.lock()?;
    node.take_over(None)?;
    let mut times = [(); 2].map(|()| Times::default());
    let mut deleted = Vec::new();
    for n in 0..SAMPLES {
        for (((prefix, plugin), namespaces), times) in both.iter().zip(&containers).zip(&mut times)
        {
            let path = namespaces.paths().nth(n).map(Path::display);
            let path = path.context("too few namespaces")?.to_string();
            let container = format!("{prefix}{n}");
            let call = |command: &str| {
                let answer = node.run_in(|| plugin.call(command, &container, &path))??;
                ensure!(
                    answer.is_success,
                    "{command} for {container}: {}",
                    answer.json
                );
                Ok(())
            };
            times.take_after_a_pause(|| call("ADD"))?;
            deleted.push((container, path));
        }
    }
    let waiting = count(&stand, |state| state != "ready")?;
    ensure!(
        waiting >= ENDPOINTS,
        "{waiting} of {ENDPOINTS} endpoints wait for the store"
    );
    drop(lock);
    wait_for("the restored endpoints to be ready", PATIENCE, || {
        Ok((count(&stand, |state| state != "ready")? == 0).then_some(()))
    })?;
    for (container, path) in &deleted {
        let plugin = match container.starts_with(PREFIX) {
            true => &ours,
            false => &theirs,
        };
        let answer = node.run_in(|| plugin.call("DEL", container, path))??;
        ensure!(answer.is_success, "DEL for {container}: {}", answer.json);
    }
    let [ours, theirs] = times;
    let name =
        format!("ADD by CNI, {ENDPOINTS} restored endpoints, store unavailable (other: ptp)");
    Ok(ours.figures(&name, Some(&theirs), Some(ADD_LIMIT))?.into())
}

/// Number of endpoints whose state satisfies `is_counted`.
fn count(stand: &Stand, is_counted: impl Fn(&Value) -> bool) -> anyhow::Result<usize> {
    let listed = stand.send("GET", "/v1/endpoints", &Value::Null)?;
    let all = listed.as_array().context("the list is not an array")?;
    Ok(all.iter().filter(|one| is_counted(&one["state"])).count())
}

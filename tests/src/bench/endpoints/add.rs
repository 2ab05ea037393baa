//! Containers added and deleted through the CNI plugin, compared with Debian's plugin.

use std::path::{Path, PathBuf};

use anyhow::ensure;

use super::stand::{Namespaces, Stand, Times, ptp};
use crate::bench::{Figure, Target};
use crate::plugin::Plugin;

const CONTAINERS: usize = 100;
/// Limit relative to `ptp`.
const ADD_LIMIT: Target = Target::RatioAtMost(1.0);

/// Time of `ADD` and `DEL` for a container, including the plugin's process. Debian's plugin is used with IPv4 only:
/// with IPv6, it waits several seconds for duplicate address detection.
pub(super) fn figures() -> anyhow::Result<Vec<Figure>> {
    let folder = tempfile::tempdir()?;
    let stand = Stand::new()?;
    let ours = Plugin::of(stand.node(), folder.path())?;
    let theirs = ptp(folder.path());
    let both = [("bench-ours", ours), ("bench-theirs", theirs)];
    let [mut added, mut deleted, mut at_once] =
        [(); 3].map(|()| [(); 2].map(|()| Times::default()));
    for is_at_once in [false, true] {
        let containers = both.each_ref().map(|(prefix, _)| {
            let namespaces = Namespaces::new(prefix, CONTAINERS)?;
            let paths: Vec<PathBuf> = namespaces.paths().map(Path::to_owned).collect();
            anyhow::Ok((namespaces, paths))
        });
        let [ours, theirs] = containers;
        let containers = [ours?, theirs?];
        let call = |whose: usize, command: &str, n: usize| {
            let path = containers[whose].1[n].display().to_string();
            let container = format!("{}{n}", both[whose].0);
            // A plugin creates the host's end of the veth pair in the namespace in which it runs.
            let call = || both[whose].1.call(command, &container, &path);
            let answer = stand.node().run_in(call)??;
            ensure!(
                answer.is_success,
                "{command} for {container}: {}",
                answer.json
            );
            Ok(())
        };
        if is_at_once {
            for (whose, times) in at_once.iter_mut().enumerate() {
                for n in 0..CONTAINERS {
                    times.take(|| call(whose, "ADD", n))?;
                }
            }
        } else {
            for n in 0..CONTAINERS {
                for (whose, times) in added.iter_mut().enumerate() {
                    times.take_after_a_pause(|| call(whose, "ADD", n))?;
                }
            }
        }
        for n in 0..CONTAINERS {
            for (whose, times) in deleted.iter_mut().enumerate() {
                match is_at_once {
                    true => call(whose, "DEL", n)?,
                    false => times.take_after_a_pause(|| call(whose, "DEL", n))?,
                }
            }
        }
    }
    let mut figures = Vec::new();
    for (name, [ours, theirs], limit) in [
        ("ADD by CNI (other: ptp)", added, Some(ADD_LIMIT)),
        ("DEL by CNI (other: ptp)", deleted, None),
        (
            "ADD by CNI, one right after the other (other: ptp)",
            at_once,
            None,
        ),
    ] {
        figures.extend(ours.figures(name, Some(&theirs), limit)?);
    }
    Ok(figures)
}

//! The programs of Kubernetes, which `tests/kubernetes/build.sh` builds.

use std::env;
use std::path::PathBuf;

use anyhow::{Context as _, ensure};

/// Environment variable: the folder of the programs, if they are not in `target/kubernetes`.
const PROGRAMS: &str = "HEALTH_KUBERNETES";

/// Returns the path of a program, such as `kubelet`.
pub(super) fn program(name: &str) -> anyhow::Result<PathBuf> {
    let folder = match env::var_os(PROGRAMS) {
        Some(folder) => PathBuf::from(folder),
        None => {
            let own = env::current_exe().context("cannot find this program's own file")?;
            let target = own.ancestors().find(|path| path.ends_with("debug"));
            let target = target.and_then(|debug| debug.parent());
            target
                .with_context(|| format!("{} is not in a target folder", own.display()))?
                .join("kubernetes/bin")
        }
    };
    let path = folder.join(name);
    ensure!(
        path.is_file(),
        "{} is missing; run: tests/kubernetes/build.sh target/kubernetes",
        path.display()
    );
    Ok(path)
}

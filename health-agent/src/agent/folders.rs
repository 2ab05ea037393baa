//! The agent's folders, made as needed and given back when the start fails.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context as _;

/// The folders that were not there before, outermost first.
#[derive(Debug, Default)]
pub(super) struct NewFolders(Vec<PathBuf>);

impl NewFolders {
    /// Makes a folder and those that it is in.
    pub(super) fn make(&mut self, folder: &Path) -> anyhow::Result<()> {
        let mut missing: Vec<_> = folder
            .ancestors()
            .take_while(|path| !path.exists())
            .collect();
        missing.reverse();
        for path in missing {
            match fs::create_dir(path) {
                Ok(()) => self.0.push(path.to_owned()),
                // An agent of another instance, which starts at the same time, was faster.
                Err(_) if path.is_dir() => {}
                Err(error) => {
                    return Err(error)
                        .with_context(|| format!("cannot create folder {}", path.display()));
                }
            }
        }
        Ok(())
    }

    /// Removes those that are empty.
    pub(super) fn remove(self) {
        for folder in self.0.iter().rev() {
            // One that others use by now stays.
            let _ = fs::remove_dir(folder);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::thread;

    use super::*;

    #[test]
    fn agents_that_start_together_make_their_common_folder_together() {
        const AGENTS: usize = 8;
        for _ in 0..20 {
            let root = tempfile::tempdir().unwrap();
            let together = Barrier::new(AGENTS);
            let make = &|agent: usize| {
                let own = root.path().join("common/parents").join(agent.to_string());
                together.wait();
                let mut new = NewFolders::default();
                ["run", "state"]
                    .iter()
                    .try_for_each(|name| new.make(&own.join(name)))
            };
            thread::scope(|scope| {
                let agents: Vec<_> = (0..AGENTS)
                    .map(|agent| scope.spawn(move || make(agent)))
                    .collect();
                for agent in agents {
                    agent.join().unwrap().unwrap();
                }
            });
        }
    }
}

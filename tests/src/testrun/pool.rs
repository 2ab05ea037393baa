//! Loaded programs that the tests of a process share one after another, so that the kernel verifies them once rather
//! than for each test.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

use anyhow::ensure;
use aya::programs::ProgramInfo;
use health_datapath::dump::OpenMap;

use super::Loaded;
use super::contents::{Content, Maps};

/// The pool for all tests of this process.
pub(super) static SHARED: LazyLock<Arc<Pool>> = LazyLock::new(Arc::default);

/// Loaded programs that no test is using.
#[derive(Default)]
pub struct Pool(Mutex<Vec<Set>>);

impl Pool {
    /// Number of idle program sets.
    pub fn idle(&self) -> usize {
        self.sets().len()
    }

    pub(super) fn take(&self) -> Option<Set> {
        self.sets().pop()
    }

    /// Restores a set and takes it back.
    pub(super) fn give_back(&self, set: Set) -> anyhow::Result<()> {
        set.restore()?;
        self.sets().push(set);
        Ok(())
    }

    fn sets(&self) -> MutexGuard<'_, Vec<Set>> {
        // A panic cannot leave an inconsistent pool: sets are pushed and popped as a whole.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Loaded programs and their state right after loading.
pub(super) struct Set {
    pub(super) loaded: Loaded,
    pins: BTreeMap<PathBuf, Pin>,
    contents: BTreeMap<String, Content>,
}

impl Set {
    pub(super) fn new(loaded: Loaded) -> anyhow::Result<Self> {
        let pins = pins(&loaded.location.bpf_root)?;
        let contents = Maps::of(&loaded.location.pins())?.contents()?;
        Ok(Self {
            loaded,
            pins,
            contents,
        })
    }

    /// Restores the contents of the maps. Fails if anything else has changed.
    fn restore(&self) -> anyhow::Result<()> {
        ensure!(
            self.loaded.datapath.is_as_loaded(),
            "programs were or will be attached"
        );
        let pins = pins(&self.loaded.location.bpf_root)?;
        for (path, pin) in &self.pins {
            let now = pins.get(path);
            ensure!(now.is_some(), "the pin {} is gone", path.display());
            ensure!(now == Some(pin), "the pin {} was replaced", path.display());
        }
        let added = pins.keys().find(|path| !self.pins.contains_key(*path));
        ensure!(added.is_none(), "there is a new pin {added:?}");
        Maps::of(&self.loaded.location.pins())?.restore(&self.contents)
    }
}

/// The kind of object at a path in a bpffs.
#[derive(Debug, PartialEq, Eq)]
enum Pin {
    Folder,
    Map(u32),
    Program(u32),
    /// A link, or a file that the kernel creates itself.
    Other,
}

/// Lists everything below a folder in a bpffs.
fn pins(dir: &Path) -> anyhow::Result<BTreeMap<PathBuf, Pin>> {
    let mut all = BTreeMap::new();
    for entry in dir.read_dir()? {
        let path = entry?.path();
        let pin = if path.is_dir() {
            all.append(&mut pins(&path)?);
            Pin::Folder
        } else {
            let map = OpenMap::open(&path).map(|map| Pin::Map(map.id()));
            let program = || ProgramInfo::from_pin(&path).map(|program| Pin::Program(program.id()));
            // If an object could be opened at first but not later, the pins compare as different.
            map.ok().or_else(|| program().ok()).unwrap_or(Pin::Other)
        };
        all.insert(path, pin);
    }
    Ok(all)
}

//! The agent's folders: created as needed, removed again when the start fails, and closed to other users.

use std::fs::{self, DirBuilder, Metadata};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, PermissionsExt as _, chown};
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use health_model::private::{self, FOLDER_MODE};
use health_model::settings::Location;
use nix::unistd::Gid;
use tracing::{info, warn};

/// Mode of the runtime folder if a group may reach the socket in it.
const GROUP_FOLDER_MODE: u32 = 0o750;
/// Mode of parent folders created along with the runtime folder: others may traverse them.
const PASSABLE_MODE: u32 = 0o711;
/// Bits that let group and others traverse a folder.
const PASS: u32 = 0o011;
/// All bits of group and others.
const OTHERS: u32 = 0o077;
/// Bits that let users other than owner and group list or change a folder.
const OTHERS_USE: u32 = 0o006;
/// Lets others write; the sticky bit decides whether they may also remove other users' files (inode(7)).
const OTHERS_WRITE: u32 = 0o002;
const STICKY: u32 = 0o1000;

/// The groups whose members may reach a socket.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct SocketGroups {
    /// The group of the socket for everything.
    pub(super) full: Option<Gid>,
    /// The group of the socket for reading.
    pub(super) readers: Option<Gid>,
}

impl SocketGroups {
    /// Whether any group is set.
    pub(super) fn is_any(self) -> bool {
        self.of_folder().is_some()
    }

    /// The group that owns the folder of the sockets.
    fn of_folder(self) -> Option<Gid> {
        self.full.or(self.readers)
    }

    /// Whether a second group uses the folder. It can do that only if all users can traverse the folder.
    fn is_another(self) -> bool {
        matches!(self, Self { full: Some(full), readers: Some(readers) } if full != readers)
    }
}

/// The folders that this agent created, outermost first.
#[derive(Debug, Default)]
pub(super) struct NewFolders(Vec<PathBuf>);

impl NewFolders {
    /// Creates a folder and its missing parents, accessible only to their owner.
    pub(super) fn make(&mut self, folder: &Path) -> anyhow::Result<()> {
        self.make_below(folder, FOLDER_MODE)
    }

    /// Like [`make`](Self::make), but others may traverse the new parents, so that a group can reach the folder.
    pub(super) fn make_reachable(&mut self, folder: &Path) -> anyhow::Result<()> {
        self.make_below(folder, PASSABLE_MODE)
    }

    /// `above` is the mode of newly created parents.
    fn make_below(&mut self, folder: &Path, above: u32) -> anyhow::Result<()> {
        let mut missing: Vec<_> = folder
            .ancestors()
            .take_while(|path| !path.exists())
            .collect();
        missing.reverse();
        for path in missing {
            let mode = if path == folder { FOLDER_MODE } else { above };
            match DirBuilder::new().mode(mode).create(path) {
                Ok(()) => self.0.push(path.to_owned()),
                // Another instance's agent, starting at the same time, created the folder first.
                Err(_) if path.is_dir() => {}
                Err(error) => {
                    return Err(error)
                        .with_context(|| format!("cannot create folder {}", path.display()));
                }
            }
        }
        Ok(())
    }

    /// Removes the folders that are still empty.
    pub(super) fn remove(self) {
        for folder in self.0.iter().rev() {
            // A folder that others have started to use stays.
            let _ = fs::remove_dir(folder);
        }
    }

    /// Closes the runtime folder, the state folder and everything in them to other users, except that members of
    /// `groups` may use the runtime folder. Earlier versions left them open. A folder that contains other programs'
    /// files stays unchanged. If one instance's runtime folder is inside another's, others may traverse the outer one
    /// while a group has access to the inner one.
    pub(super) fn close(&self, location: &Location, groups: SocketGroups) -> anyhow::Result<()> {
        let (runtime_dir, state_dir) = (&location.runtime_dir, &location.state_dir);
        if self.is_own(runtime_dir, |path| is_of_runtime(path, location))? {
            let is_passed = groups.is_another() || leads_to_a_group(location)?;
            admit(runtime_dir, groups.of_folder(), is_passed)
                .with_context(|| format!("cannot set the mode of {}", runtime_dir.display()))?;
        }
        let mut folders = vec![state_dir.join("endpoints"), location.deletions()];
        // In a shared folder, other users' files may have the same names.
        if self.is_own(state_dir, is_of_state)? {
            folders.push(state_dir.clone());
        }
        for folder in folders {
            tighten(&folder)?;
            for path in entries(&folder)?.iter().filter(|path| is_of_state(path)) {
                tighten(path)?;
            }
        }
        for folder in [runtime_dir, state_dir] {
            require_unwritable(folder)?;
        }
        if groups.is_any() {
            open_outer(location).context("cannot let the group reach the socket")?;
        }
        for (flag, group) in [
            ("--socket-group", groups.full),
            ("--read-only-socket-group", groups.readers),
        ] {
            if let Some(group) = group {
                warn_if_unreachable(runtime_dir, flag, group);
            }
        }
        Ok(())
    }

    /// Whether a folder contains nothing that belongs to others.
    fn is_own(&self, folder: &Path, is_ours: impl Fn(&Path) -> bool) -> anyhow::Result<bool> {
        let is_new = self.0.iter().any(|made| made == folder);
        Ok(is_new || entries(folder)?.iter().all(|path| is_ours(path)))
    }
}

/// The contents of a folder; empty if it does not exist.
fn entries(folder: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let listed = match fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        listed => listed.and_then(|entries| {
            entries
                .map(|entry| entry.map(|entry| entry.path()))
                .collect::<io::Result<Vec<_>>>()
        }),
    };
    listed.with_context(|| format!("cannot list {}", folder.display()))
}

/// Whether this is an agent's file in the runtime folder, or another instance's runtime folder below it.
fn is_of_runtime(path: &Path, location: &Location) -> bool {
    *path == location.pid_file()
        || *path == location.socket()
        || *path == location.read_only_socket()
        || *path == location.deletions()
        || location.state_dir.starts_with(path)
        || is_runtime_folder(path, location)
}

/// Whether this is the runtime folder of any instance's agent: all instances use the same file names.
fn is_runtime_folder(path: &Path, location: &Location) -> bool {
    let is_in_it = |file: PathBuf| {
        file.file_name()
            .is_some_and(|name| path.join(name).exists())
    };
    is_in_it(location.pid_file()) || is_in_it(location.socket())
}

/// Whether an agent of another instance gives a group access to its runtime folder inside this one.
fn leads_to_a_group(location: &Location) -> anyhow::Result<bool> {
    let is_open_to_group = |path: &Path| {
        let mode = fs::symlink_metadata(path).map_or(0, |metadata| metadata.mode());
        mode & PASS != 0 && mode & OTHERS_USE == 0
    };
    let inside = entries(&location.runtime_dir)?;
    Ok(inside
        .iter()
        .any(|path| is_runtime_folder(path, location) && is_open_to_group(path)))
}

/// Lets others traverse the parent folder if it is another instance's runtime folder.
fn open_outer(location: &Location) -> io::Result<()> {
    let Some(outer) = location.runtime_dir.parent() else {
        return Ok(());
    };
    let mode = fs::symlink_metadata(outer)?.mode() & 0o7777;
    if !is_runtime_folder(outer, location) || mode & PASS == PASS {
        return Ok(());
    }
    fs::set_permissions(outer, fs::Permissions::from_mode(mode | PASS))
}

/// Whether this is an agent's file in the state folder, judged by its name.
fn is_of_state(path: &Path) -> bool {
    let extension = path.extension().and_then(|extension| extension.to_str());
    let is_kept = matches!(extension, Some("json" | "lock" | "damaged" | "new"));
    is_kept || path.file_name().is_some_and(|name| name == "endpoints")
}

fn tighten(path: &Path) -> anyhow::Result<()> {
    let tightened = private::tighten(path)
        .with_context(|| format!("cannot remove other users' access to {}", path.display()))?;
    if tightened {
        info!(path = %path.display(), "removed other users' access");
    }
    Ok(())
}

/// Restricts access to a folder to its owner and the group's members; others may traverse it if `is_passed`.
fn admit(folder: &Path, group: Option<Gid>, is_passed: bool) -> io::Result<()> {
    let of_group = group.map_or(FOLDER_MODE, |_| GROUP_FOLDER_MODE);
    let wanted = of_group | if is_passed { PASS } else { 0 };
    // Do not interrupt access that stays allowed.
    if fs::symlink_metadata(folder)?.mode() & OTHERS & !wanted != 0 {
        private::tighten(folder)?;
    }
    if let Some(group) = group {
        chown(folder, None, Some(group.as_raw()))?;
    }
    if wanted != FOLDER_MODE {
        fs::set_permissions(folder, fs::Permissions::from_mode(wanted))?;
    }
    Ok(())
}

/// Fails if others could replace the agent's files.
fn require_unwritable(folder: &Path) -> anyhow::Result<()> {
    let metadata = fs::metadata(folder);
    let mode = metadata.map_or(FOLDER_MODE, |metadata| metadata.mode());
    anyhow::ensure!(
        mode & OTHERS_WRITE == 0 || mode & STICKY != 0,
        "any user can replace files in {} (mode {:o}); run `chmod o-w` on it or use another folder",
        folder.display(),
        mode & 0o7777
    );
    Ok(())
}

/// Logs which folder keeps the group's members from reaching the socket.
fn warn_if_unreachable(runtime_dir: &Path, flag: &str, group: Gid) {
    let is_passable = |metadata: &Metadata| {
        let mode = metadata.mode();
        mode & 0o001 != 0 || metadata.gid() == group.as_raw() && mode & 0o010 != 0
    };
    let closed = runtime_dir
        .ancestors()
        .find(|path| fs::metadata(path).is_ok_and(|metadata| !is_passable(&metadata)));
    if let Some(closed) = closed {
        warn!(
            folder = %closed.display(),
            group = group.as_raw(),
            "members of {flag} cannot reach the socket: this folder denies them access"
        );
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::thread;

    use super::*;

    /// A group for the socket, and none for the one for reading.
    fn groups(full: Option<Gid>) -> SocketGroups {
        SocketGroups {
            full,
            readers: None,
        }
    }

    fn location(root: &Path) -> Location {
        Location {
            instance: "default".to_owned(),
            runtime_dir: root.join("run"),
            state_dir: root.join("state"),
            bpf_root: root.join("bpf"),
        }
    }

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().mode() & 0o7777
    }

    #[test]
    fn what_an_earlier_version_left_open_is_closed_but_not_what_is_shared_with_others() {
        let root = tempfile::tempdir().unwrap();
        let place = location(root.path());
        let kept = [
            place.pid_file(),
            place.state_dir.join("identities.json"),
            place.state_dir.join("identities.json.lock"),
            place.state_dir.join("endpoints/9.json"),
        ];
        let folders = [&place.runtime_dir, &place.state_dir];
        let open = |path: &Path, mode| {
            fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
        };
        for path in &kept {
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "").unwrap();
            open(path, 0o644);
        }
        for folder in folders {
            fs::write(folder.join("notes.txt"), "somebody else's").unwrap();
            open(folder, 0o755);
        }
        let close = || NewFolders::default().close(&place, SocketGroups::default());
        close().unwrap();
        assert_eq!(folders.map(|folder| mode(folder)), [0o755; 2]);
        assert_eq!(mode(&place.state_dir.join("endpoints")), 0o700);
        assert_eq!(mode(&kept[3]), 0o600);
        for folder in folders {
            fs::remove_file(folder.join("notes.txt")).unwrap();
        }
        close().unwrap();
        assert_eq!(folders.map(|folder| mode(folder)), [0o700; 2]);
        assert_eq!(kept[1..].iter().map(|path| mode(path)).max(), Some(0o600));

        open(&place.state_dir, 0o777);
        fs::write(place.state_dir.join("notes.txt"), "somebody else's").unwrap();
        let error = close().unwrap_err().to_string();
        let words = format!(
            "any user can replace files in {}",
            place.state_dir.display()
        );
        assert!(error.contains(&words), "{error}");
    }

    #[test]
    fn an_instance_whose_runtime_folder_is_inside_another_stays_reachable_for_its_group() {
        let root = tempfile::tempdir().unwrap();
        let outer = location(root.path());
        let inner = Location {
            instance: "blue".to_owned(),
            runtime_dir: outer.runtime_dir.join("blue"),
            state_dir: root.path().join("blue-state"),
            ..outer.clone()
        };
        let start = |place: &Location, group: Option<Gid>| {
            let mut new = NewFolders::default();
            new.make(&place.runtime_dir).unwrap();
            new.make(&place.state_dir).unwrap();
            fs::write(place.pid_file(), "").unwrap();
            new.close(place, groups(group)).unwrap();
            [&outer, &inner].map(|place| match place.runtime_dir.exists() {
                true => mode(&place.runtime_dir),
                false => 0,
            })
        };
        let group = Some(nix::unistd::getgid());
        assert_eq!(start(&outer, None), [0o700, 0]);
        assert_eq!(start(&inner, group), [0o711, 0o750]);
        // It does not matter which agent restarts.
        assert_eq!(start(&outer, None), [0o711, 0o750]);
        assert_eq!(start(&outer, group), [0o751, 0o750]);
        assert_eq!(start(&inner, group), [0o751, 0o750]);
        // Others no longer need to traverse the outer folder.
        assert_eq!(start(&inner, None), [0o751, 0o700]);
        assert_eq!(start(&outer, None), [0o700, 0o700]);
    }

    #[test]
    fn both_groups_reach_the_sockets() {
        let root = tempfile::tempdir().unwrap();
        let place = location(root.path());
        let own = nix::unistd::getgid();
        let other = Gid::from_raw(own.as_raw() + 1);
        for (full, readers, expected) in [
            (None, Some(own), 0o750),
            (Some(own), Some(own), 0o750),
            (Some(own), Some(other), 0o751),
            (Some(own), None, 0o750),
        ] {
            let mut new = NewFolders::default();
            new.make(&place.runtime_dir).unwrap();
            new.make(&place.state_dir).unwrap();
            fs::write(place.read_only_socket(), "").unwrap();
            new.close(&place, SocketGroups { full, readers }).unwrap();
            let metadata = fs::metadata(&place.runtime_dir).unwrap();
            assert_eq!(metadata.mode() & 0o7777, expected, "{full:?}, {readers:?}");
            assert_eq!(metadata.gid(), own.as_raw());
        }
    }

    #[test]
    fn folders_above_one_that_a_group_reaches_can_be_passed() {
        let root = tempfile::tempdir().unwrap();
        let mut new = NewFolders::default();
        let reachable = root.path().join("a/b/run");
        new.make_reachable(&reachable).unwrap();
        let above = reachable.parent().unwrap();
        assert_eq!([mode(&reachable), mode(above)], [0o700, 0o711]);
        let closed = root.path().join("c/d");
        new.make(&closed).unwrap();
        assert_eq!([mode(&closed), mode(closed.parent().unwrap())], [0o700; 2]);
    }

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

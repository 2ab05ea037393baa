//! Installs the plugin for the container runtimes of a host, and removes it.
//!
//! Runtimes take the first network configuration of their folder by name. A host's pods therefore never change to this
//! plugin while another one's configuration is there, unless the caller says so.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use health_model::durable;
use serde_json::{Value, json};
use thiserror::Error;

use super::{LINK_NAME, MAX_CONFIG};

/// The configuration that [`Installation::install`] writes.
const CONFIG_NAME: &str = "10-health-agent.conflist";
/// The same beside configurations of other plugins: it comes before theirs.
const FIRST_CONFIG_NAME: &str = "00-health-agent.conflist";
/// What libcni reads as configurations (containernetworking/cni, libcni/conf.go, `ConfFiles`).
const CONFIG_EXTENSIONS: [&str; 3] = ["conf", "conflist", "json"];
/// Mode of the program: runtimes run it as root, and others may look.
const PROGRAM_MODE: u32 = 0o755;
/// Mode of the configuration.
const CONFIG_MODE: u32 = 0o644;

/// Why the plugin was not installed or not removed.
#[derive(Debug, Error)]
pub enum InstallError {
    /// A file or folder cannot be used.
    #[error("cannot {attempt} {path}: {source}", path = path.display())]
    Io {
        /// The attempted operation.
        attempt: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    /// Another plugin connects this host's containers.
    #[error("{} configures another CNI plugin; remove it, or install with --before-others", .0.display())]
    OtherPlugin(PathBuf),
    /// The program's file belongs to something else.
    #[error("{} is a folder", .0.display())]
    NotAFile(PathBuf),
}

/// The folders of a host's container runtimes.
#[derive(Clone, Debug)]
pub struct Installation {
    /// Folder of the plugins.
    pub bin_dir: PathBuf,
    /// Folder of the network configurations.
    pub config_dir: PathBuf,
}

impl Installation {
    /// Copies `program` to the plugins as [`LINK_NAME`] and writes the network configuration, in this order: a runtime
    /// that finds the configuration also finds the plugin. Replaces earlier ones atomically. Returns the files.
    ///
    /// Fails without any change if the configuration of another plugin is there, unless `before_others`: then this
    /// plugin's configuration comes first, and others remain for the time after [`uninstall`](Self::uninstall).
    pub fn install(
        &self,
        program: &Path,
        before_others: bool,
    ) -> Result<Vec<PathBuf>, InstallError> {
        let own = self.own_configs()?;
        let other = self.other_config(&own)?;
        let name = match other {
            Some(other) if !before_others => return Err(InstallError::OtherPlugin(other)),
            Some(_) => FIRST_CONFIG_NAME,
            None => CONFIG_NAME,
        };
        for folder in [&self.bin_dir, &self.config_dir] {
            make_folder(folder)?;
        }
        let plugin = self.bin_dir.join(LINK_NAME);
        if plugin.is_dir() {
            return Err(InstallError::NotAFile(plugin));
        }
        replace(&plugin, PROGRAM_MODE, |file| {
            let mut source = File::open(program)?;
            io::copy(&mut source, file).map(drop)
        })?;
        let config = self.config_dir.join(name);
        replace(&config, CONFIG_MODE, |file| {
            serde_json::to_writer_pretty(file, &network()).map_err(io::Error::from)
        })?;
        // Two configurations of this plugin would be two networks.
        for stale in own.iter().filter(|path| **path != config) {
            remove(stale)?;
        }
        Ok(vec![plugin, config])
    }

    /// Removes the network configuration, then the plugin: no runtime finds a configuration without its plugin. Returns
    /// the files that were there. Configurations that name further plugins stay, with the plugin.
    pub fn uninstall(&self) -> Result<Vec<PathBuf>, InstallError> {
        let mut removed = Vec::new();
        for path in self.own_configs()? {
            removed.extend(remove(&path)?.then_some(path));
        }
        if !self.is_named()? {
            let plugin = self.bin_dir.join(LINK_NAME);
            removed.extend(remove(&plugin)?.then_some(plugin));
        }
        Ok(removed)
    }

    /// The configurations that an installation wrote.
    fn own_configs(&self) -> Result<Vec<PathBuf>, InstallError> {
        let names = [CONFIG_NAME, FIRST_CONFIG_NAME];
        let paths = names.map(|name| self.config_dir.join(name));
        let mut own = Vec::new();
        for path in paths {
            let plugins = plugins_of(&path)?;
            own.extend((plugins == [LINK_NAME]).then_some(path));
        }
        Ok(own)
    }

    /// The first configuration that is not in `own`.
    fn other_config(&self, own: &[PathBuf]) -> Result<Option<PathBuf>, InstallError> {
        let configs = self.configs()?;
        Ok(configs.into_iter().find(|path| !own.contains(path)))
    }

    /// Whether a configuration names this plugin.
    fn is_named(&self) -> Result<bool, InstallError> {
        for path in self.configs()? {
            if plugins_of(&path)?.iter().any(|name| name == LINK_NAME) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// The configurations that runtimes read, by name.
    fn configs(&self) -> Result<Vec<PathBuf>, InstallError> {
        let unreadable = error("list", &self.config_dir);
        let entries = match fs::read_dir(&self.config_dir) {
            Ok(entries) => entries,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(unreadable(error)),
        };
        let mut paths = Vec::new();
        for entry in entries {
            let path = entry.map_err(&unreadable)?.path();
            let extension = path.extension().and_then(|extension| extension.to_str());
            let is_config = extension.is_some_and(|it| CONFIG_EXTENSIONS.contains(&it));
            paths.extend(is_config.then_some(path));
        }
        paths.sort_unstable();
        Ok(paths)
    }
}

/// The network configuration. Runtimes with the specification 1.1.0 choose that version, and ask for STATUS; earlier ones
/// ignore `cniVersions`.
fn network() -> Value {
    json!({
        "cniVersion": "1.0.0",
        "cniVersions": ["1.0.0", "1.1.0"],
        "name": "health",
        "plugins": [{ "type": LINK_NAME }],
    })
}

/// The plugins that a configuration names; none if it is missing or malformed.
fn plugins_of(path: &Path) -> Result<Vec<String>, InstallError> {
    let length = match fs::metadata(path) {
        Ok(metadata) => metadata.len(),
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        Err(source) => return Err(error("inspect", path)(source)),
    };
    if length > MAX_CONFIG {
        return Ok(Vec::new());
    }
    let bytes = fs::read(path).map_err(error("read", path))?;
    let config: Value = serde_json::from_slice(&bytes).unwrap_or_default();
    let plugins = config["plugins"].as_array().map_or(&[][..], Vec::as_slice);
    let plugins = plugins.iter().chain([&config]);
    let types = plugins.filter_map(|plugin| plugin["type"].as_str());
    Ok(types.map(str::to_owned).collect())
}

/// Replaces a file atomically and durably with what `write` writes.
fn replace(
    path: &Path,
    mode: u32,
    write: impl FnOnce(&mut File) -> io::Result<()>,
) -> Result<(), InstallError> {
    // Runtimes ignore a name without one of the extensions.
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".new");
    let temporary = path.with_file_name(name);
    let written = (|| {
        durable::remove(&temporary)?;
        let mut options = OpenOptions::new();
        let mut file = options
            .write(true)
            .create_new(true)
            .mode(mode)
            .open(&temporary)?;
        write(&mut file)?;
        file.sync_all()?;
        fs::rename(&temporary, path)?;
        sync_names(path)
    })();
    written.map_err(|source| {
        // The first error counts; the next attempt removes the file.
        let _ = durable::remove(&temporary);
        error("write", path)(source)
    })
}

/// Removes a file durably. Returns whether it existed.
fn remove(path: &Path) -> Result<bool, InstallError> {
    let removed = durable::remove(path).and_then(|was_there| {
        if was_there {
            sync_names(path)?;
        }
        Ok(was_there)
    });
    removed.map_err(error("remove", path))
}

/// Creates a folder and those above it durably, as far as they are missing.
fn make_folder(path: &Path) -> Result<(), InstallError> {
    let missing = path.ancestors().take_while(|folder| !folder.exists());
    let missing: Vec<_> = missing.collect();
    fs::create_dir_all(path).map_err(error("create", path))?;
    for folder in missing.into_iter().rev() {
        sync_names(folder).map_err(error("create", folder))?;
    }
    Ok(())
}

/// Waits until the disk has the names in the folder that `path` is in: a rename or removal may be lost otherwise, even if
/// the file itself is on the disk.
fn sync_names(path: &Path) -> io::Result<()> {
    let folder = path.parent().filter(|it| !it.as_os_str().is_empty());
    File::open(folder.unwrap_or(Path::new(".")))?.sync_all()
}

fn error(attempt: &'static str, path: &Path) -> impl Fn(io::Error) -> InstallError {
    let path = path.to_owned();
    move |source| InstallError::Io {
        attempt,
        path: path.clone(),
        source,
    }
}

#[cfg(test)]
mod tests;

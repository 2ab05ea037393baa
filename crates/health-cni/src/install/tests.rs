//! The plugin's files on a host.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use tempfile::TempDir;

use super::{InstallError, Installation};

const FLANNEL: &str = r#"{"name": "cbr0", "plugins": [{"type": "flannel"}, {"type": "portmap"}]}"#;

struct Host {
    folder: TempDir,
    installation: Installation,
}

impl Host {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let installation = Installation {
            bin_dir: folder.path().join("opt/cni/bin"),
            config_dir: folder.path().join("etc/cni/net.d"),
        };
        fs::write(folder.path().join("health-agent"), "version 1").unwrap();
        Self {
            folder,
            installation,
        }
    }

    fn install(&self, before_others: bool) -> Result<Vec<PathBuf>, InstallError> {
        let program = self.folder.path().join("health-agent");
        self.installation.install(&program, before_others)
    }

    fn plugin(&self) -> PathBuf {
        self.installation.bin_dir.join("health-agent-cni")
    }

    fn config(&self, name: &str) -> PathBuf {
        self.installation.config_dir.join(name)
    }

    fn add_config(&self, name: &str, content: &str) {
        fs::create_dir_all(&self.installation.config_dir).unwrap();
        fs::write(self.config(name), content).unwrap();
    }
}

/// The names in a folder, sorted.
fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<_> = names.collect();
    names.sort_unstable();
    names
}

#[test]
fn the_plugin_and_its_network_are_installed_and_removed() {
    let host = Host::new();
    let config = host.config("10-health-agent.conflist");
    assert_eq!(
        host.install(false).unwrap(),
        [host.plugin(), config.clone()]
    );
    assert_eq!(fs::read_to_string(host.plugin()).unwrap(), "version 1");
    let mode = fs::metadata(host.plugin()).unwrap().permissions().mode();
    assert_eq!(mode & 0o111, 0o111, "{mode:o}");
    let network: Value = serde_json::from_slice(&fs::read(&config).unwrap()).unwrap();
    assert_eq!(network["plugins"], json!([{ "type": "health-agent-cni" }]));

    let removed = host.installation.uninstall().unwrap();
    assert_eq!(removed, [config, host.plugin()]);
    assert_eq!(host.installation.uninstall().unwrap(), [] as [PathBuf; 0]);
}

#[test]
fn an_upgrade_replaces_the_plugin_and_leaves_no_other_file() {
    let host = Host::new();
    host.install(false).unwrap();
    // What an installation that was killed left.
    fs::write(host.plugin().with_extension("new"), "half").unwrap();
    fs::write(host.folder.path().join("health-agent"), "version 2").unwrap();
    host.install(false).unwrap();
    assert_eq!(fs::read_to_string(host.plugin()).unwrap(), "version 2");
    assert_eq!(names(&host.installation.bin_dir), ["health-agent-cni"]);
    let configs = names(&host.installation.config_dir);
    assert_eq!(configs, ["10-health-agent.conflist"]);
}

#[test]
fn another_plugin_keeps_its_containers_unless_the_caller_says_otherwise() {
    let host = Host::new();
    host.add_config("10-flannel.conflist", FLANNEL);
    let error = host.install(false).unwrap_err().to_string();
    assert!(
        error.contains("10-flannel.conflist configures another CNI plugin"),
        "{error}"
    );
    assert!(!host.plugin().exists(), "nothing is installed");
    assert_eq!(
        names(&host.installation.config_dir),
        ["10-flannel.conflist"]
    );

    host.install(true).unwrap();
    let configs = ["00-health-agent.conflist", "10-flannel.conflist"];
    assert_eq!(names(&host.installation.config_dir), configs);
    host.install(true).unwrap();
    host.installation.uninstall().unwrap();
    assert_eq!(
        names(&host.installation.config_dir),
        ["10-flannel.conflist"]
    );
    let kept = fs::read_to_string(host.config("10-flannel.conflist")).unwrap();
    assert_eq!(kept, FLANNEL);
}

#[test]
fn files_that_runtimes_do_not_read_are_no_other_plugin() {
    let host = Host::new();
    host.add_config("10-flannel.conflist.bak", FLANNEL);
    host.add_config("README", "");
    host.install(false).unwrap();
}

#[test]
fn a_configuration_that_somebody_extended_keeps_its_plugin() {
    let host = Host::new();
    let chained =
        r#"{"name": "health", "plugins": [{"type": "health-agent-cni"}, {"type": "tuning"}]}"#;
    host.install(false).unwrap();
    host.add_config("10-health-agent.conflist", chained);
    assert_eq!(host.installation.uninstall().unwrap(), [] as [PathBuf; 0]);
    assert!(host.plugin().exists());
    assert!(host.install(false).is_err(), "it would replace the chain");
}

#[test]
fn a_folder_in_the_plugins_place_is_named() {
    let host = Host::new();
    fs::create_dir_all(host.plugin()).unwrap();
    let error = host.install(false).unwrap_err().to_string();
    assert!(error.ends_with("health-agent-cni is a folder"), "{error}");
    assert!(!host.config("10-health-agent.conflist").exists());
}

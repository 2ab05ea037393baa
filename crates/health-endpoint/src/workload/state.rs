//! The state of each endpoint that is kept across restarts: one file per endpoint, written before its devices are
//! created and again once they exist. Devices do not survive a reboot, which makes these files useless too, so writes
//! are not synced to disk.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::{Path, PathBuf};
use std::time::Duration;
use std::{fs, io};

use health_model::api::{EndpointSettings, PodName};
use health_model::durable;
use health_model::identity::Identity;
use health_model::labels::LabelSet;
use health_net::clock;
use health_net::mac::MacAddr;
use health_net::netns::NetNsId;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::WorkloadError;
use crate::health::ENDPOINT_IDS;

/// Name of the folder inside the state folder.
const FOLDER: &str = "endpoints";
const EXTENSION: &str = "json";

/// The saved state of an endpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct SavedEndpoint {
    /// Endpoint id.
    pub id: u16,
    /// The endpoint's name.
    pub name: Option<String>,
    /// The endpoint's container.
    pub container_id: Option<String>,
    /// The endpoint's pod.
    #[serde(default)]
    pub pod: Option<PodName>,
    /// The container runtime's network for which the endpoint was created.
    #[serde(default)]
    pub network: Option<String>,
    /// The endpoint's labels. Empty: not known.
    pub labels: LabelSet,
    /// The labels given to the endpoint at its creation, while those of its pod are not known; `labels` is empty until
    /// then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub given_labels: Option<LabelSet>,
    /// The labels of `identity`, while the identity of `labels` is awaited; `None` if `identity` belongs to `labels`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub former_labels: Option<LabelSet>,
    /// The identity in use.
    pub identity: Identity,
    /// IPv4 address.
    pub ipv4: Option<Ipv4Addr>,
    /// IPv6 address.
    pub ipv6: Option<Ipv6Addr>,
    /// The endpoint's own hardware address.
    pub mac: MacAddr,
    /// The host side's hardware address.
    pub host_mac: MacAddr,
    /// MTU of both ends in bytes.
    pub mtu: u32,
    /// File of the endpoint's network namespace.
    pub netns: PathBuf,
    /// Identifies the namespace itself.
    pub netns_id: NetNsId,
    /// Name of the device in the namespace.
    pub ifname: String,
    /// Name of the host's end of the pair.
    pub device: String,
    /// Ifindex of the host's end; `None` until the device is complete.
    pub ifindex: Option<u32>,
    /// When the endpoint was created.
    pub created: Timestamp,
    /// The boot in which the endpoint was created; `None` if an earlier version wrote the file. No device survives a
    /// reboot.
    #[serde(default)]
    pub boot_id: Option<String>,
    /// Whether the namespace's default routes lead to the endpoint.
    #[serde(default = "yes")]
    pub has_default_route: bool,
    /// The settings that may change while the endpoint runs.
    #[serde(default)]
    pub settings: EndpointSettings,
    /// Whether the deletion of the endpoint has started.
    #[serde(default)]
    pub is_deleting: bool,
}

/// The value for files of earlier versions, in which all endpoints had default routes.
const fn yes() -> bool {
    true
}

impl SavedEndpoint {
    /// Returns the endpoint's addresses, IPv4 first.
    pub fn addresses(&self) -> impl Iterator<Item = IpAddr> + use<> {
        let v4 = self.ipv4.map(IpAddr::from);
        v4.into_iter().chain(self.ipv6.map(IpAddr::from))
    }

    /// Returns the labels of the identity in use.
    pub(crate) fn labels_in_use(&self) -> &LabelSet {
        self.former_labels.as_ref().unwrap_or(&self.labels)
    }

    /// Whether the endpoint's labels are known but have no identity.
    pub(crate) fn lacks_identity(&self) -> bool {
        self.identity == Identity::INIT && !self.labels.is_empty()
    }

    /// Returns the labels to which those of the endpoint's pod are added.
    pub(crate) fn given(&self) -> &LabelSet {
        self.given_labels.as_ref().unwrap_or(&self.labels)
    }

    /// Returns what the endpoint's labels wait for, if they are not known.
    pub(crate) fn awaited_labels(&self) -> Option<String> {
        let pod = self.pod.as_ref().filter(|_| self.given_labels.is_some())?;
        Some(format!("the labels of pod {pod} are not known yet"))
    }

    /// Whether the endpoint belongs to this device of this container.
    pub fn is_of(&self, container_id: &str, ifname: &str) -> bool {
        self.container_id.as_deref() == Some(container_id) && self.ifname == ifname
    }

    /// Whether the machine has been rebooted since the endpoint was created. If an earlier version did not record the
    /// boot, the creation time decides, which goes wrong if the clock has been set since.
    pub(crate) fn is_of_former_boot(&self) -> bool {
        let now = clock::boot_id().ok();
        match (&self.boot_id, &now) {
            (Some(boot_id), Some(now)) => boot_id != now,
            (Some(_), None) => false,
            (None, _) => clock::boot_time().is_ok_and(|booted| {
                let created = self.created.as_duration();
                Duration::try_from(created).unwrap_or_default() < booted
            }),
        }
    }

    /// Changes the labels, and keeps those of the identity in use.
    pub fn relabel(&mut self, labels: LabelSet) {
        let in_use = self.labels_in_use().clone();
        self.former_labels = (in_use != labels).then_some(in_use);
        self.labels = labels;
        self.given_labels = None;
    }
}

/// A state file that could not be read and was renamed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DamagedFile {
    /// The new path.
    pub path: PathBuf,
    /// The problem with the file.
    pub problem: String,
}

/// The folder of the state files.
#[derive(Clone, Debug)]
pub struct StateDir(PathBuf);

impl StateDir {
    /// Returns the folder inside an agent's `state_dir`.
    pub fn of(state_dir: &Path) -> Self {
        Self(state_dir.join(FOLDER))
    }

    /// Returns the path of the folder.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Writes an endpoint's file atomically: if the agent is killed at any moment, either the old or the new file
    /// exists.
    pub fn save(&self, saved: &SavedEndpoint) -> Result<(), WorkloadError> {
        let path = self.file(saved.id);
        durable::replace(&path, saved).map_err(|source| error("write", path, source))
    }

    /// Removes an endpoint's file. Returns whether it existed.
    pub fn remove(&self, id: u16) -> Result<bool, WorkloadError> {
        let path = self.file(id);
        durable::remove(&path).map_err(|source| error("remove", path, source))
    }

    /// Reads all files. Renames unreadable files, so that their ids become free.
    pub fn load(&self) -> Result<(Vec<SavedEndpoint>, Vec<DamagedFile>), WorkloadError> {
        let entries = match fs::read_dir(&self.0) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Ok((Vec::new(), Vec::new()));
            }
            entries => entries.map_err(|source| error("list", self.0.clone(), source))?,
        };
        let (mut endpoints, mut damaged) = (Vec::new(), Vec::new());
        for entry in entries {
            let path = entry
                .map_err(|source| error("list", self.0.clone(), source))?
                .path();
            // The agent was killed while writing this file.
            if path
                .extension()
                .is_some_and(|found| found == durable::UNFINISHED)
            {
                durable::remove(&path).map_err(|source| error("remove", path.clone(), source))?;
            }
            if path.extension().is_none_or(|found| found != EXTENSION) {
                continue;
            }
            match read(&path) {
                Ok(saved) => endpoints.push(saved),
                Err(problem) => damaged.push(rename_damaged(path, &problem)?),
            }
        }
        endpoints.sort_unstable_by_key(|saved: &SavedEndpoint| saved.id);
        Ok((endpoints, damaged))
    }

    fn file(&self, id: u16) -> PathBuf {
        self.0.join(format!("{id}.{EXTENSION}"))
    }
}

fn read(path: &Path) -> io::Result<SavedEndpoint> {
    let saved: SavedEndpoint = serde_json::from_slice(&fs::read(path)?)?;
    let is_its_own = path
        .file_stem()
        .and_then(|stem| stem.to_str()?.parse().ok())
        == Some(saved.id);
    if is_its_own && ENDPOINT_IDS.contains(&saved.id) {
        Ok(saved)
    } else {
        let problem = format!("endpoint id {} does not match the file name", saved.id);
        Err(io::Error::new(io::ErrorKind::InvalidData, problem))
    }
}

fn rename_damaged(path: PathBuf, problem: &io::Error) -> Result<DamagedFile, WorkloadError> {
    let aside = path.with_extension("damaged");
    fs::rename(&path, &aside).map_err(|source| error("rename", path, source))?;
    Ok(DamagedFile {
        path: aside,
        problem: problem.to_string(),
    })
}

fn error(attempt: &'static str, path: PathBuf, source: io::Error) -> WorkloadError {
    WorkloadError::State {
        attempt,
        path,
        source,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn saved(id: u16) -> SavedEndpoint {
        SavedEndpoint {
            id,
            name: Some("web-1".to_owned()),
            container_id: None,
            pod: None,
            network: None,
            labels: LabelSet::new(["app=web".parse().unwrap()]).unwrap(),
            given_labels: None,
            former_labels: None,
            identity: Identity::INIT,
            ipv4: Some(Ipv4Addr::new(10, 244, 1, 9)),
            ipv6: None,
            mac: MacAddr([2, 0, 0, 0, 0, 1]),
            host_mac: MacAddr([2, 0, 0, 0, 0, 2]),
            mtu: 1500,
            netns: "/run/netns/a".into(),
            netns_id: NetNsId { dev: 4, ino: 77 },
            ifname: "eth0".to_owned(),
            device: "lxc9".to_owned(),
            ifindex: Some(12),
            created: Timestamp::UNIX_EPOCH,
            boot_id: None,
            has_default_route: true,
            settings: EndpointSettings::default(),
            is_deleting: false,
        }
    }

    #[test]
    fn what_is_saved_is_loaded_in_order_until_it_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let states = StateDir::of(dir.path());
        assert_eq!(states.load().unwrap().0, []);
        states.save(&saved(900)).unwrap();
        states.save(&saved(9)).unwrap();
        assert_eq!(states.load().unwrap(), (vec![saved(9), saved(900)], vec![]));
        assert!(states.remove(9).unwrap() && !states.remove(9).unwrap());
        assert_eq!(states.load().unwrap().0, [saved(900)]);
    }

    #[test]
    fn the_boot_of_an_endpoint_is_known_also_where_its_file_does_not_name_it() {
        let boot = |id: Option<String>, created: Timestamp| {
            let saved = SavedEndpoint {
                boot_id: id,
                created,
                ..saved(9)
            };
            saved.is_of_former_boot()
        };
        let (then, now) = (Timestamp::UNIX_EPOCH, Timestamp::now());
        let this = clock::boot_id().unwrap();
        // The boot id decides, whatever the clock says.
        assert!(!boot(Some(this.clone()), then) && !boot(Some(this), now));
        assert!(boot(Some("another".to_owned()), now));
        assert!(boot(None, then) && !boot(None, now));
    }

    #[test]
    fn damaged_files_are_set_aside_and_the_rest_loaded() {
        let dir = tempfile::tempdir().unwrap();
        let states = StateDir::of(dir.path());
        states.save(&saved(9)).unwrap();
        let good = fs::read_to_string(states.file(9)).unwrap();
        fs::write(states.file(10), &good).unwrap();
        fs::write(states.file(11), &good[..good.len() / 2]).unwrap();
        let (endpoints, mut damaged) = states.load().unwrap();
        damaged.sort_by(|a, b| a.path.cmp(&b.path));
        assert_eq!(endpoints, [saved(9)]);
        let names: Vec<_> = damaged
            .iter()
            .map(|one| one.path.file_name().unwrap())
            .collect();
        assert_eq!(names, ["10.damaged", "11.damaged"]);
        assert_eq!(states.load().unwrap(), (vec![saved(9)], vec![]));
    }

    #[test]
    fn fields_of_later_versions_are_passed_over() {
        let dir = tempfile::tempdir().unwrap();
        let states = StateDir::of(dir.path());
        states.save(&saved(9)).unwrap();
        let good = fs::read_to_string(states.file(9)).unwrap();
        let later = good.replacen('{', "{ \"later\": 1,", 1);
        fs::write(states.file(9), later).unwrap();
        assert_eq!(states.load().unwrap().0, [saved(9)]);
    }
}

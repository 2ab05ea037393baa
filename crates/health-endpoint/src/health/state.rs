//! The state of the health endpoint that survives restarts and reboots.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::{fs, io};

use health_model::durable;
use health_model::ipam::Family;
use health_net::mac::MacAddr;
use health_net::sysctl::Originals;
use serde::{Deserialize, Serialize};
use tracing::warn;

use super::HealthError;

/// Valid endpoint ids.
pub const ENDPOINT_IDS: RangeInclusive<u16> = 1..=4095;

const FILE_NAME: &str = "health-endpoint.json";

/// The saved state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct State {
    /// Endpoint id.
    pub id: u16,
    /// IPv4 address.
    pub ipv4: Option<Ipv4Addr>,
    /// IPv6 address.
    pub ipv6: Option<Ipv6Addr>,
    /// The endpoint's own hardware address.
    pub mac: MacAddr,
    /// The host side's hardware address.
    pub host_mac: MacAddr,
    /// File of its network namespace.
    pub netns: PathBuf,
    /// The host's settings before the agent changed them.
    pub sysctls: Originals,
}

impl State {
    /// Returns the endpoint's addresses, IPv4 first.
    pub fn addresses(&self) -> impl Iterator<Item = IpAddr> + use<> {
        let v4 = self.ipv4.map(IpAddr::from);
        v4.into_iter().chain(self.ipv6.map(IpAddr::from))
    }

    /// Returns the endpoint's address of one family.
    pub fn address(&self, family: Family) -> Option<IpAddr> {
        self.addresses().find(|ip| Family::of(*ip) == family)
    }
}

/// The file that holds the [`State`].
#[derive(Clone, Debug)]
pub(super) struct StateFile {
    dir: PathBuf,
}

impl StateFile {
    pub(super) fn in_dir(dir: &Path) -> Self {
        Self {
            dir: dir.to_owned(),
        }
    }

    pub(super) fn path(&self) -> PathBuf {
        self.dir.join(FILE_NAME)
    }

    /// Reads the state. An unreadable file is logged and counts as absent.
    pub(super) fn load(&self) -> Option<State> {
        let path = self.path();
        let state = match fs::read(&path) {
            Ok(bytes) => serde_json::from_slice(&bytes)
                .map_err(io::Error::from)
                .and_then(validate),
            Err(e) if e.kind() == io::ErrorKind::NotFound => return None,
            Err(e) => Err(e),
        };
        state
            .inspect_err(|error| {
                warn!(file = %path.display(), %error, "ignoring unreadable endpoint state");
            })
            .ok()
    }

    /// Writes the state atomically: a crash at any moment leaves either the old or the new state.
    pub(super) fn save(&self, state: &State) -> Result<(), HealthError> {
        durable::write(&self.path(), state).map_err(|source| self.error("write", source))
    }

    /// Removes the file. Returns whether it existed.
    pub(super) fn remove(&self) -> Result<bool, HealthError> {
        durable::remove(&self.path()).map_err(|source| self.error("remove", source))
    }

    fn error(&self, attempt: &'static str, source: io::Error) -> HealthError {
        HealthError::State {
            attempt,
            path: self.path(),
            source,
        }
    }
}

fn validate(state: State) -> io::Result<State> {
    if ENDPOINT_IDS.contains(&state.id) {
        Ok(state)
    } else {
        let problem = format!("endpoint id {} is out of range", state.id);
        Err(io::Error::new(io::ErrorKind::InvalidData, problem))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state() -> State {
        State {
            id: 4095,
            ipv4: Some(Ipv4Addr::new(10, 244, 1, 7)),
            ipv6: None,
            mac: MacAddr([2, 0, 0, 0, 0, 1]),
            host_mac: MacAddr([2, 0, 0, 0, 0, 2]),
            netns: "/run/netns/health-a".into(),
            sysctls: Originals::default(),
        }
    }

    #[test]
    fn state_survives_the_round_trip_and_leaves_one_file() {
        let dir = tempfile::tempdir().unwrap();
        let file = StateFile::in_dir(&dir.path().join("made/on/demand"));
        assert_eq!(file.load(), None);
        file.save(&state()).unwrap();
        assert_eq!(file.load(), Some(state()));
        assert_eq!(fs::read_dir(&file.dir).unwrap().count(), 1);
        assert!(file.remove().unwrap());
        assert!(!file.remove().unwrap());
        assert_eq!(file.load(), None);
    }

    #[test]
    fn damaged_state_is_ignored() {
        let dir = tempfile::tempdir().unwrap();
        let file = StateFile::in_dir(dir.path());
        file.save(&state()).unwrap();
        let good = fs::read_to_string(file.path()).unwrap();
        for bad in [
            String::new(),
            good[..good.len() / 2].to_owned(),
            good.replace("4095", "4096"),
            good.replace("4095", "0"),
            good.replace("02:00", "zz:00"),
        ] {
            fs::write(file.path(), &bad).unwrap();
            assert_eq!(file.load(), None, "{bad}");
        }
    }
}

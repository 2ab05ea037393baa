//! The settings of `health-agent run`. Each setting is a field of its group's struct, which defines its name, type,
//! default, range and help. The flag, the environment variable, the key in settings files, `health-agent config`, the
//! JSON Schema, the example file and the reference in `docs/settings.md` are derived from the field.
//!
//! The command line takes precedence over the environment, the environment over files, and files over defaults.

#![forbid(unsafe_code)]

mod api;
mod check;
mod conntrack;
mod containers;
mod definition;
mod documents;
mod endpoints;
mod external_ips;
mod file;
mod form;
mod invalid;
mod layers;
mod listen;
mod log;
mod masquerade;
mod mesh;
mod node;
mod policy;
mod probing;
mod range;
mod registry;
mod seconds;
mod service_maps;
mod service_proxy;
mod service_sources;
mod services;
mod value;

use std::sync::Arc;

use clap::{Args, Command, FromArgMatches};
use health_common::ct::DEFAULT_ENTRIES;
use health_model::settings::Location;

pub use self::api::ApiSettings;
pub use self::conntrack::{ConntrackSettings, ConntrackTimeouts, GcInterval, GcIntervalError};
pub use self::containers::{ApiAccess, ApiAccessError, ContainerSettings};
pub use self::definition::{Definition, Group, groups};
pub use self::documents::{INTRODUCTION, example, reference, schema};
pub use self::endpoints::EndpointSettings;
pub use self::external_ips::{ExternalIpSetting, ExternalIpSettingError};
pub use self::file::{DEFAULT_FILE, FileError, SettingsFiles};
pub use self::form::{is_live, with_one_form, with_ranges_in_help};
pub use self::invalid::{InvalidValue, invalid_flag};
pub use self::layers::{Layers, OverriddenValue, SettingsError};
pub use self::listen::{ListenAddress, ListenAddressError};
pub use self::log::{LogFormat, LogLevel, LogSettings};
pub use self::masquerade::{
    MasqueradeError, MasqueradePorts, MasqueradePortsError, MasqueradeSettings,
};
pub use self::mesh::MeshSettings;
pub use self::node::{NodeSettings, absolute_path};
pub use self::policy::PolicySettings;
pub use self::probing::{Interval, IntervalError, ProbeChoice, ProbeChoiceError, ProbeIntervals};
pub use self::range::{Amount, Range};
pub use self::registry::{RegistrySpec, RegistrySpecError, RemoteCluster, RemoteClusterError};
pub use self::seconds::{Seconds, SecondsError};
pub use self::service_maps::ServiceMapSettings;
pub use self::service_proxy::{IpvsSettings, ServiceProxyMode};
pub use self::service_sources::{EtcdAccess, EtcdAccessError, ServiceSources};
pub use self::services::{FORWARDING_NEEDS_KEY, ServiceSettings};
pub use self::value::{Origin, SettingList, SettingValue};

/// All settings of an agent, by group.
#[derive(Args, Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Where the agent keeps its files; all commands have these flags.
    #[arg(skip = Location::default())]
    pub location: Location,
    /// This node and its sources.
    #[command(flatten)]
    pub node: NodeSettings,
    /// Probes of the mesh.
    #[command(flatten)]
    pub mesh: MeshSettings,
    /// Endpoints.
    #[command(flatten)]
    pub endpoints: EndpointSettings,
    /// Policy.
    #[command(flatten)]
    pub policy: PolicySettings,
    /// Connection tracking.
    #[command(flatten)]
    pub conntrack: ConntrackSettings,
    /// Masquerading.
    #[command(flatten)]
    pub masquerade: MasqueradeSettings,
    /// Container probes.
    #[command(flatten)]
    pub containers: ContainerSettings,
    /// Services.
    #[command(flatten)]
    pub services: ServiceSettings,
    /// The API and the monitoring pages.
    #[command(flatten)]
    pub api: ApiSettings,
    /// The log.
    #[command(flatten)]
    pub log: LogSettings,
    /// The files from which the settings were read.
    #[arg(skip)]
    pub files: SettingsFiles,
    /// The values in these files that flags and variables override.
    #[arg(skip)]
    pub overridden: Arc<[OverriddenValue]>,
    /// Each setting's value in force and its origin.
    #[arg(skip)]
    pub values: Arc<[SettingValue]>,
}

impl Default for Settings {
    fn default() -> Self {
        defaults()
    }
}

impl Settings {
    /// Where the identities of this cluster are stored.
    pub fn identity_store(&self) -> RegistrySpec {
        match (&self.node.identity_store, &self.node.registry) {
            (Some(store), _) => store.clone(),
            (None, RegistrySpec::File(_)) => {
                RegistrySpec::File(self.location.state_dir.join(IDENTITIES_FILE))
            }
            (None, registry) => registry.clone(),
        }
    }

    /// Maximum number of TCP conntrack entries per IP version. With services, the default is the size of the service
    /// flow maps, because a flow through a service has entries in both.
    pub fn conntrack_max_entries(&self) -> u32 {
        let default = match self.services.has_services() {
            true => self.services.maps.service_flow_max_entries,
            false => DEFAULT_ENTRIES,
        };
        self.conntrack.conntrack_max_entries.unwrap_or(default)
    }

    /// Checks the form of each setting, and all settings together. Ranges are checked when values are read, and
    /// conditions that depend on the machine (does this interface exist?) when the agent starts.
    pub fn validated(self) -> Result<Self, InvalidValue> {
        match check::check(&self) {
            Ok(()) => Ok(self),
            Err(invalid) => Err(InvalidValue::among(invalid, &self.values)),
        }
    }
}

/// Name of the identities file in the agent's state folder.
pub const IDENTITIES_FILE: &str = "identities.json";

/// Creates a group of settings with its defaults.
fn defaults<T: Args + FromArgMatches>() -> T {
    let command = T::augment_args(Command::new("defaults").no_binary_name(true));
    let parsed = command.try_get_matches_from([""; 0]);
    parsed
        .and_then(|matches| T::from_arg_matches(&matches))
        .expect("each setting has a default")
}

#[cfg(test)]
mod tests;

//! Validation of the settings.

use std::time::Duration;

use health_model::duration::duration_text;
use health_model::settings::InvalidSetting;
use ipnet::IpNet;

use super::{
    ConntrackSettings, EndpointSettings, GcInterval, ListenAddress, MeshSettings, NodeSettings,
    RegistrySpec, RemoteCluster, Settings,
};

/// Longest name of a node or cluster in bytes: the limit of a DNS name (RFC 1035 section 2.3.4).
const MAX_NAME_LEN: usize = 253;
/// Longest interface name in bytes (`IFNAMSIZ` less the final zero).
const MAX_INTERFACE_LEN: usize = 15;

const MIN_PROBE_INTERVAL: Duration = Duration::from_millis(100);
const MAX_PROBE_INTERVAL: Duration = Duration::from_secs(3600);
const MIN_PATH_MTU_INTERVAL: Duration = Duration::from_secs(1);
const MAX_PATH_MTU_INTERVAL: Duration = Duration::from_secs(24 * 3600);
const MIN_GC_INTERVAL: Duration = Duration::from_secs(1);
const MIN_GC_MAX_INTERVAL: Duration = Duration::from_secs(10);
pub(super) const MAX_GC_INTERVAL: Duration = Duration::from_secs(12 * 3600);
/// The same bounds as Cilium's.
const MIN_FLOWS: u32 = 1 << 10;
const MAX_FLOWS: u32 = 1 << 24;
const MIN_PROBE_TIMEOUT: Duration = Duration::from_millis(1);
/// The remaining probes still distinguish an outage from loss within minutes.
const MAX_PASSIVE_RELIEF: u8 = 5;
const MAX_COOLING_TIME: Duration = Duration::from_secs(24 * 3600);
const MAX_PROBE_RATE: u32 = 1_000_000;
/// Well below the time that a client waits for the answer to `PUT /v1beta/status/probe`.
const MAX_PROBE_TIMEOUT: Duration = Duration::from_secs(20);

/// Checks each setting by itself, and all of them together.
pub(super) fn check(settings: &Settings) -> Result<(), InvalidSetting> {
    settings.location.clone().validated()?;
    settings.node.check(settings)?;
    settings.endpoints.check()?;
    settings.mesh.check()?;
    settings.containers.check()?;
    settings.services.check(settings)?;
    settings.conntrack.check(settings)?;
    settings.masquerade.validate()?;
    check_monitoring(settings)
}

impl NodeSettings {
    /// Checks the node, its cluster and the remote clusters, and the sources of these.
    fn check(&self, settings: &Settings) -> Result<(), InvalidSetting> {
        name("--node-name", &self.node_name)?;
        name("--cluster-name", &self.cluster_name)?;
        for (i, remote) in self.remote_clusters.iter().enumerate() {
            name("--remote-cluster", &remote.name)?;
            let known = |other: &RemoteCluster| other.name == remote.name;
            if remote.name == self.cluster_name || self.remote_clusters[..i].iter().any(known) {
                return Err(InvalidSetting::new(
                    "--remote-cluster",
                    remote,
                    "each cluster needs a unique name that differs from --cluster-name",
                ));
            }
        }
        if matches!(settings.identity_store(), RegistrySpec::Kubernetes(_)) {
            return Err(InvalidSetting::new(
                "--identity-store",
                settings.identity_store(),
                "cannot store identities; write it like file:/var/lib/identities.json or \
                 etcd:http://192.0.2.1:2379",
            ));
        }
        for address in &self.node_addresses {
            if address.is_unspecified() || address.is_multicast() || address.is_loopback() {
                return Err(InvalidSetting::new(
                    "--node-address",
                    address,
                    "is not an address at which other nodes can reach this one",
                ));
            }
        }
        for (i, device) in self.devices.iter().enumerate() {
            interface(device)?;
            if self.devices[..i].contains(device) {
                return Err(InvalidSetting::new(
                    "--device",
                    device,
                    "is given twice; name each interface once",
                ));
            }
        }
        Ok(())
    }
}

impl EndpointSettings {
    /// Checks the addresses of endpoints.
    fn check(&self) -> Result<(), InvalidSetting> {
        for cidr in &self.pod_cidrs {
            network("--pod-cidr", cidr)?;
        }
        within(
            "--ipam-cooling-time",
            self.ipam_cooling_time,
            Duration::ZERO,
            MAX_COOLING_TIME,
        )?;
        Ok(())
    }
}

impl MeshSettings {
    /// Checks when and how targets are probed, and how results are rated.
    fn check(&self) -> Result<(), InvalidSetting> {
        if self.health_port == 0 {
            return Err(InvalidSetting::new(
                "--health-port",
                self.health_port,
                "must be 1 to 65535: peers have to know it",
            ));
        }
        within(
            "--probe-interval",
            self.probe_interval,
            MIN_PROBE_INTERVAL,
            MAX_PROBE_INTERVAL,
        )?;
        self.check_choices()?;
        if !(1..=MAX_PROBE_RATE).contains(&self.probe_rate) {
            return Err(InvalidSetting::new(
                "--probe-rate",
                self.probe_rate,
                format!("must be 1 to {MAX_PROBE_RATE} probes a second"),
            ));
        }
        if !(1..=MAX_PASSIVE_RELIEF).contains(&self.passive_relief) {
            return Err(InvalidSetting::new(
                "--passive-relief",
                self.passive_relief,
                format!("must be 1 to {MAX_PASSIVE_RELIEF}"),
            ));
        }
        if self.passive_relief > 1 && !self.passive_rtt {
            return Err(InvalidSetting::new(
                "--passive-relief",
                self.passive_relief,
                "needs --passive-rtt on, which detects traffic",
            ));
        }
        self.check_timeout()?;
        if let Some(interval) = self.path_mtu_interval.0 {
            within(
                "--path-mtu-interval",
                interval,
                MIN_PATH_MTU_INTERVAL,
                MAX_PATH_MTU_INTERVAL,
            )?;
        }
        if !(1..=100).contains(&self.loss_threshold) {
            return Err(InvalidSetting::new(
                "--loss-threshold",
                self.loss_threshold,
                "must be 1 to 100 percent",
            ));
        }
        Ok(())
    }

    fn check_choices(&self) -> Result<(), InvalidSetting> {
        for choice in &self.probes {
            let usable = choice.interval.is_none_or(|interval| {
                (MIN_PROBE_INTERVAL..=MAX_PROBE_INTERVAL).contains(&interval)
            });
            if !usable {
                return Err(InvalidSetting::new(
                    "--probe",
                    choice,
                    format!(
                        "must be off or {} to {}",
                        duration_text(MIN_PROBE_INTERVAL),
                        duration_text(MAX_PROBE_INTERVAL)
                    ),
                ));
            }
        }
        Ok(())
    }

    fn check_timeout(&self) -> Result<(), InvalidSetting> {
        within(
            "--probe-timeout",
            self.probe_timeout,
            MIN_PROBE_TIMEOUT,
            MAX_PROBE_TIMEOUT,
        )?;
        let shortest = self.probe_intervals().iter().min();
        if let Some(shortest) = shortest.filter(|&shortest| self.probe_timeout > shortest) {
            return Err(InvalidSetting::new(
                "--probe-timeout",
                duration_text(self.probe_timeout),
                format!(
                    "must not exceed the shortest interval of --probe-interval and --probe, which is {}",
                    duration_text(shortest)
                ),
            ));
        }
        Ok(())
    }
}

impl ConntrackSettings {
    fn check(&self, settings: &Settings) -> Result<(), InvalidSetting> {
        if let GcInterval::Fixed(interval) = self.conntrack_gc_interval {
            within(
                "--conntrack-gc-interval",
                interval,
                MIN_GC_INTERVAL,
                MAX_GC_INTERVAL,
            )?;
        }
        within(
            "--conntrack-gc-max-interval",
            self.conntrack_gc_max_interval,
            MIN_GC_MAX_INTERVAL,
            MAX_GC_INTERVAL,
        )?;
        for (flag, entries) in [
            ("--conntrack-max-entries", settings.conntrack_max_entries()),
            (
                "--conntrack-any-max-entries",
                self.conntrack_any_max_entries,
            ),
            ("--nat-max-entries", self.nat_max_entries),
            ("--nat-any-max-entries", self.nat_any_max_entries),
        ] {
            if !(MIN_FLOWS..=MAX_FLOWS).contains(&entries) {
                return Err(InvalidSetting::new(
                    flag,
                    entries,
                    format!("must be {MIN_FLOWS} to {MAX_FLOWS}"),
                ));
            }
        }
        Ok(())
    }
}

/// Checks where the monitoring pages are served.
fn check_monitoring(settings: &Settings) -> Result<(), InvalidSetting> {
    let mut listens = vec![
        ("--metrics-address", settings.api.metrics_address),
        ("--healthz-address", settings.api.healthz_address),
    ];
    listens.extend(settings.services.listens());
    for (i, (flag, address)) in listens.iter().enumerate() {
        if address.port() == Some(0) {
            return Err(InvalidSetting::new(
                flag,
                address,
                "must have a port from 1 to 65535: monitoring has to know it",
            ));
        }
        let is_same = |(_, other): &&(_, ListenAddress)| other == address;
        if *address != ListenAddress::Off
            && let Some((other, _)) = listens[..i].iter().find(is_same)
        {
            return Err(InvalidSetting::new(
                flag,
                address,
                format!("must not be the same as {other}"),
            ));
        }
    }
    Ok(())
}

/// Checks a name. Names appear in `cluster/node` and in one-line reports.
fn name(flag: &'static str, value: &str) -> Result<(), InvalidSetting> {
    let printable = |c: char| c != '/' && !c.is_whitespace() && !c.is_control();
    if (1..=MAX_NAME_LEN).contains(&value.len()) && value.chars().all(printable) {
        Ok(())
    } else {
        Err(InvalidSetting::new(
            flag,
            value.escape_default(),
            format!("must be 1 to {MAX_NAME_LEN} bytes without slashes or spaces"),
        ))
    }
}

/// Checks that the kernel accepts the text as an interface name (`dev_valid_name`).
fn interface(value: &str) -> Result<(), InvalidSetting> {
    let valid = (1..=MAX_INTERFACE_LEN).contains(&value.len())
        && !matches!(value, "." | "..")
        && !value
            .bytes()
            .any(|b| matches!(b, b'/' | b':') || b.is_ascii_whitespace());
    if valid {
        Ok(())
    } else {
        Err(InvalidSetting::new(
            "--device",
            value.escape_default(),
            "is not a valid interface name; `ip link` lists the existing ones",
        ))
    }
}

pub(super) fn network(flag: &'static str, value: &IpNet) -> Result<(), InvalidSetting> {
    if value.trunc() == *value {
        return Ok(());
    }
    let why = format!("has host bits set; write {}", value.trunc());
    Err(InvalidSetting::new(flag, value, why))
}

pub(super) fn within(
    flag: &'static str,
    value: Duration,
    min: Duration,
    max: Duration,
) -> Result<(), InvalidSetting> {
    if (min..=max).contains(&value) {
        Ok(())
    } else {
        Err(InvalidSetting::new(
            flag,
            duration_text(value),
            format!("must be {} to {}", duration_text(min), duration_text(max)),
        ))
    }
}

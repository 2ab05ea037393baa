//! Settings for which Kubernetes has no fields: annotations of a pod, `probe.health-agent.io/CONTAINER.TYPE.SETTING`.
//!
//! `TYPE` is `startup`, `readiness` or `liveness`. The settings are:
//!
//! - `period`, such as `50ms`: the time from one probe to the next, instead of `periodSeconds`; at least 10 ms.
//! - `timeout`, such as `200ms`: instead of `timeoutSeconds`; at least 1 ms.
//! - `period-until-ready`, such as `50ms`: the period of a readiness probe while its result is not a success, or of a
//!   startup probe until it succeeds; at most the period.
//! - `from`, `node` or `pod`: the network namespace to probe from; defaults to `node`. Not for commands.
//! - `mode`, `Plaintext` or `TLS`: whether a gRPC target speaks TLS; defaults to `Plaintext`.
//! - `ca`, a file name: the certificates of the accepted signers of the server's certificate, which is then checked.
//!   For HTTPS and gRPC with TLS, like the next three settings.
//! - `server-name`, a name: the name for which the server's certificate must be valid, also sent as SNI. Needs `ca`.
//! - `client-cert` and `client-key`, file names: presented to a server that asks for a certificate. Both or none.
//!
//! Durations are whole milliseconds. Files are names in the node's folder of certificates, not paths.

use std::collections::BTreeMap;
use std::time::Duration;

use health_model::duration::parse_duration;

use super::error::{Errors, Problem};
use super::{ClientIdentity, Handler, HttpGet, Origin, Probe, ProbeType, ServerCheck, Tls};

/// The prefix of our annotation keys.
pub const PREFIX: &str = "probe.health-agent.io/";

/// Shortest period.
const PERIOD_MIN: Duration = Duration::from_millis(10);
/// Shortest timeout.
const TIMEOUT_MIN: Duration = Duration::from_millis(1);
/// Longest period and timeout; same as in Kubernetes.
const LONGEST: Duration = Duration::from_secs(i32::MAX as u64);

/// The names of the settings.
const SETTINGS: [&str; 9] = [
    "period",
    "timeout",
    "period-until-ready",
    "from",
    "mode",
    "ca",
    "server-name",
    "client-cert",
    "client-key",
];

/// A pod's annotations that have not been assigned to a probe yet: by container and type, then by setting, with the
/// whole key and the value.
#[derive(Debug, Default)]
pub(super) struct Annotations<'a> {
    containers: BTreeMap<&'a str, BTreeMap<ProbeType, Settings<'a>>>,
}

/// The annotations of one probe.
pub(super) type Settings<'a> = BTreeMap<&'a str, (&'a str, &'a str)>;

/// The path of an annotation.
pub(super) fn path(key: &str) -> String {
    format!("metadata.annotations[{key}]")
}

impl<'a> Annotations<'a> {
    /// Reads our annotations. Malformed keys are errors.
    pub(super) fn read(all: Option<&'a BTreeMap<String, String>>, errors: &mut Errors) -> Self {
        let mut annotations = Self::default();
        for (key, value) in all.into_iter().flatten() {
            let Some(name) = key.strip_prefix(PREFIX) else {
                continue;
            };
            let mut parts = name.split('.');
            let (container, kind, setting) = (parts.next(), parts.next(), parts.next());
            let (Some(container), Some(kind), Some(setting), None) =
                (container, kind, setting, parts.next())
            else {
                let detail = "must be CONTAINER.TYPE.SETTING after the prefix";
                errors.add(path(key), Problem::invalid(name, detail));
                continue;
            };
            let Ok(kind) = kind.parse() else {
                let supported = &["startup", "readiness", "liveness"];
                errors.add(path(key), Problem::not_supported(kind, supported));
                continue;
            };
            if !SETTINGS.contains(&setting) {
                errors.add(path(key), Problem::not_supported(setting, &SETTINGS));
                continue;
            }
            let probes = annotations.containers.entry(container).or_default();
            let settings = probes.entry(kind).or_default();
            settings.insert(setting, (key, value));
        }
        annotations
    }

    /// Removes and returns the annotations of one probe.
    pub(super) fn take(&mut self, container: &str, kind: ProbeType) -> Settings<'a> {
        let probes = self.containers.get_mut(container);
        let settings = probes.and_then(|probes| probes.remove(&kind));
        settings.unwrap_or_default()
    }

    /// Reports the remaining annotations as errors: they belong to no probe.
    pub(super) fn refuse_rest(self, is_container: impl Fn(&str) -> bool, errors: &mut Errors) {
        for (container, probes) in self.containers {
            let problem = if is_container(container) {
                Problem::Forbidden("the container has no such probe")
            } else {
                Problem::invalid(container, "must be the name of a container in the pod")
            };
            for (key, _) in probes.into_values().flat_map(Settings::into_values) {
                errors.add(path(key), problem.clone());
            }
        }
    }
}

/// Applies annotations to a probe.
pub(super) fn apply(
    mut settings: Settings<'_>,
    kind: ProbeType,
    probe: &mut Probe,
    errors: &mut Errors,
) {
    if let Some(period) = duration(settings.remove("period"), PERIOD_MIN, errors) {
        probe.period = period;
    }
    if let Some(timeout) = duration(settings.remove("timeout"), TIMEOUT_MIN, errors) {
        probe.timeout = timeout;
    }
    if let Some((key, value)) = settings.remove("period-until-ready") {
        match duration(Some((key, value)), PERIOD_MIN, errors) {
            _ if kind == ProbeType::Liveness => {
                let detail = "may not be set for liveness probes";
                errors.add(path(key), Problem::Forbidden(detail));
            }
            Some(period) if period > probe.period => {
                let detail = "must not be longer than the period";
                errors.add(path(key), Problem::invalid(value, detail));
            }
            period => probe.period_until_ready = period,
        }
    }
    if let Some((key, value)) = settings.remove("from") {
        match value {
            _ if matches!(probe.handler, Handler::Exec { .. }) => {
                let detail = "may not be set for commands, which run in the container";
                errors.add(path(key), Problem::Forbidden(detail));
            }
            "node" => probe.origin = Origin::Node,
            "pod" => probe.origin = Origin::Pod,
            _ => errors.add(path(key), Problem::not_supported(value, &["node", "pod"])),
        }
    }
    if let Some((key, value)) = settings.remove("mode") {
        match (value, &mut probe.handler) {
            ("Plaintext", Handler::Grpc { tls, .. }) => *tls = None,
            ("TLS", Handler::Grpc { tls, .. }) => *tls = Some(Tls::default()),
            (_, Handler::Grpc { .. }) => {
                let supported = &["Plaintext", "TLS"];
                errors.add(path(key), Problem::not_supported(value, supported));
            }
            _ => errors.add(path(key), Problem::Forbidden("may only be set for grpc")),
        }
    }
    apply_tls(settings, probe, errors);
}

fn apply_tls(settings: Settings<'_>, probe: &mut Probe, errors: &mut Errors) {
    let tls = match &mut probe.handler {
        Handler::Http(HttpGet { tls: Some(tls), .. }) | Handler::Grpc { tls: Some(tls), .. } => tls,
        _ => {
            let detail = "may only be set with TLS: scheme HTTPS, or grpc in mode TLS";
            for (key, _) in settings.into_values() {
                errors.add(path(key), Problem::Forbidden(detail));
            }
            return;
        }
    };
    let file = |setting: &str, errors: &mut Errors| {
        let (key, value) = settings.get(setting).copied()?;
        if value.is_empty() || value.starts_with('.') || value.contains(['/', '\0']) {
            let detail = "must be the name of a file in the node's certificate folder";
            errors.add(path(key), Problem::invalid(value, detail));
        }
        Some((key, value.to_owned()))
    };
    let ca = file("ca", errors);
    let server_name = settings.get("server-name").copied();
    if let Some((key, "")) = server_name {
        errors.add(path(key), Problem::invalid("", "must be a name"));
    }
    match (ca, server_name) {
        (None, Some((key, _))) => {
            let detail = "may only be set with ca";
            errors.add(path(key), Problem::Forbidden(detail));
        }
        (ca, server_name) => {
            tls.check = ca.map(|(_, ca)| ServerCheck {
                ca,
                server_name: server_name.map(|(_, name)| name.to_owned()),
            });
        }
    }
    match (file("client-cert", errors), file("client-key", errors)) {
        (Some((_, certificate)), Some((_, key))) => {
            tls.client = Some(ClientIdentity { certificate, key });
        }
        (None, None) => {}
        (Some((key, _)), None) | (None, Some((key, _))) => {
            let detail = "client-cert and client-key may only be set together";
            errors.add(path(key), Problem::Forbidden(detail));
        }
    }
}

fn duration(setting: Option<(&str, &str)>, min: Duration, errors: &mut Errors) -> Option<Duration> {
    let (key, value) = setting?;
    let is_whole = |duration: &Duration| duration.subsec_nanos().is_multiple_of(1_000_000);
    match parse_duration(value) {
        Ok(duration) if (min..=LONGEST).contains(&duration) && is_whole(&duration) => {
            Some(duration)
        }
        Ok(_) => {
            let min = min.as_millis();
            let detail = format!("must be whole milliseconds, {min}ms at least");
            errors.add(path(key), Problem::invalid(value, detail));
            None
        }
        Err(error) => {
            errors.add(path(key), Problem::invalid(value, error.to_string()));
            None
        }
    }
}

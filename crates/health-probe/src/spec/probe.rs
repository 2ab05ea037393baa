//! One probe of a manifest.

use std::collections::BTreeMap;
use std::time::Duration;

use health_model::manifest::{PORT_OUT_OF_RANGE, check_port_name};
use k8s_openapi::api::core::v1 as k8s;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

use super::error::{Errors, Problem};
use super::{Handler, HttpGet, Origin, Port, Probe, ProbeType, Tls, expand};

const PERIOD_SECONDS: i32 = 10;
const TIMEOUT_SECONDS: i32 = 1;
const SUCCESS_THRESHOLD: i32 = 1;
const FAILURE_THRESHOLD: i32 = 3;

const NEGATIVE: &str = "must be greater than or equal to 0";

/// Reads a probe; `None` if it has no usable handler.
pub(super) fn read(
    probe: &k8s::Probe,
    kind: ProbeType,
    path: &str,
    env: &BTreeMap<String, String>,
    errors: &mut Errors,
) -> Option<Probe> {
    // Zero means unset.
    let mut number = |name: &str, value: Option<i32>, default: i32| match value {
        Some(value) if value < 0 => {
            let problem = Problem::invalid_number(value.into(), NEGATIVE);
            errors.add(format!("{path}.{name}"), problem);
            default
        }
        None | Some(0) => default,
        Some(value) => value,
    };
    let initial_delay_seconds = number("initialDelaySeconds", probe.initial_delay_seconds, 0);
    let period = number("periodSeconds", probe.period_seconds, PERIOD_SECONDS);
    let timeout = number("timeoutSeconds", probe.timeout_seconds, TIMEOUT_SECONDS);
    let successes = number(
        "successThreshold",
        probe.success_threshold,
        SUCCESS_THRESHOLD,
    );
    let failures = number(
        "failureThreshold",
        probe.failure_threshold,
        FAILURE_THRESHOLD,
    );
    if kind != ProbeType::Readiness && successes != 1 {
        let problem = Problem::invalid_number(successes.into(), "must be 1");
        errors.add(format!("{path}.successThreshold"), problem);
    }
    let termination_grace = termination_grace(probe, kind, path, errors);
    Some(Probe {
        handler: handler(probe, path, env, errors)?,
        initial_delay_seconds,
        period: seconds(period),
        period_until_ready: None,
        timeout: seconds(timeout),
        success_threshold: successes.unsigned_abs(),
        failure_threshold: failures.unsigned_abs(),
        termination_grace,
        origin: Origin::Node,
    })
}

fn seconds(seconds: i32) -> Duration {
    Duration::from_secs(u64::from(seconds.unsigned_abs()))
}

fn termination_grace(
    probe: &k8s::Probe,
    kind: ProbeType,
    path: &str,
    errors: &mut Errors,
) -> Option<Duration> {
    let value = probe.termination_grace_period_seconds?;
    let path = format!("{path}.terminationGracePeriodSeconds");
    match u64::try_from(value) {
        _ if kind == ProbeType::Readiness => {
            let detail = "must not be set for readinessProbes";
            errors.add(path, Problem::invalid_number(value, detail));
            None
        }
        Ok(seconds) if seconds > 0 => Some(Duration::from_secs(seconds)),
        _ => {
            let problem = Problem::invalid_number(value, "must be greater than 0");
            errors.add(path, problem);
            None
        }
    }
}

/// Returns the probe's handler. The first handler counts, and each further one is an error.
fn handler(
    probe: &k8s::Probe,
    path: &str,
    env: &BTreeMap<String, String>,
    errors: &mut Errors,
) -> Option<Handler> {
    let mut handlers = Vec::new();
    if let Some(action) = &probe.exec {
        handlers.push(("exec", exec(action, &format!("{path}.exec"), env, errors)));
    }
    if let Some(action) = &probe.http_get {
        let path = format!("{path}.httpGet");
        handlers.push(("httpGet", Handler::Http(http_get(action, &path, errors))));
    }
    if let Some(action) = &probe.tcp_socket {
        let port = port(&action.port, &format!("{path}.tcpSocket.port"), errors);
        let host = action.host.clone().filter(|host| !host.is_empty());
        handlers.push(("tcpSocket", Handler::Tcp { host, port }));
    }
    if let Some(action) = &probe.grpc {
        let port = IntOrString::Int(action.port);
        let handler = Handler::Grpc {
            port: self::port(&port, &format!("{path}.grpc.port"), errors),
            service: action.service.clone().unwrap_or_default(),
            tls: None,
        };
        handlers.push(("grpc", handler));
    }
    if handlers.is_empty() {
        errors.add(path, Problem::Required("must specify a handler type"));
    }
    for (name, _) in handlers.iter().skip(1) {
        let detail = "may not specify more than 1 handler type";
        errors.add(format!("{path}.{name}"), Problem::Forbidden(detail));
    }
    handlers.into_iter().next().map(|(_, handler)| handler)
}

fn exec(
    action: &k8s::ExecAction,
    path: &str,
    env: &BTreeMap<String, String>,
    errors: &mut Errors,
) -> Handler {
    let command = action.command.as_deref().unwrap_or_default();
    if command.is_empty() {
        errors.add(format!("{path}.command"), Problem::Required(""));
    }
    Handler::Exec {
        command: command.iter().map(|part| expand(part, env)).collect(),
    }
}

fn http_get(action: &k8s::HTTPGetAction, path: &str, errors: &mut Errors) -> HttpGet {
    let tls = match action.scheme.as_deref().unwrap_or_default() {
        "" | "HTTP" => None,
        "HTTPS" => Some(Tls::default()),
        other => {
            let problem = Problem::not_supported(other, &["HTTP", "HTTPS"]);
            errors.add(format!("{path}.scheme"), problem);
            None
        }
    };
    let mut headers = Vec::new();
    for (i, header) in action.http_headers.iter().flatten().enumerate() {
        let fits = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
        if header.name.is_empty() || !header.name.bytes().all(fits) {
            let detail = "a header's name must consist of letters, digits and '-'";
            errors.add(
                format!("{path}.httpHeaders[{i}].name"),
                Problem::invalid(&header.name, detail),
            );
        }
        headers.push((header.name.clone(), header.value.clone()));
    }
    let target = action.path.clone().filter(|path| !path.is_empty());
    HttpGet {
        tls,
        host: action.host.clone().filter(|host| !host.is_empty()),
        port: port(&action.port, &format!("{path}.port"), errors),
        path: target.unwrap_or_else(|| "/".to_owned()),
        headers,
    }
}

fn port(port: &IntOrString, path: &str, errors: &mut Errors) -> Port {
    match port {
        IntOrString::Int(number) => {
            if !(1..=65_535).contains(number) {
                let problem = Problem::invalid_number((*number).into(), PORT_OUT_OF_RANGE);
                errors.add(path, problem);
            }
            Port::Number(*number)
        }
        IntOrString::String(name) => {
            if let Some(detail) = check_port_name(name) {
                errors.add(path, Problem::invalid(name, detail));
            }
            Port::Name(name.clone())
        }
    }
}

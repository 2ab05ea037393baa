//! One container of a manifest.

use std::collections::BTreeMap;
use std::sync::Arc;

use health_model::manifest::{PORT_OUT_OF_RANGE, check_port_name};
use k8s_openapi::api::core::v1 as k8s;

use super::annotation::{self, Annotations};
use super::error::{Errors, Problem};
use super::port::NamedPort;
use super::{ContainerSpec, ProbeType, Role, probe};

/// Why an ordinary init container has no probes.
const INIT: &str = "may not be set for init containers without restartPolicy=Always";

/// Reads the container at this path.
pub(super) fn read(
    container: &k8s::Container,
    is_init: bool,
    path: &str,
    annotations: &mut Annotations<'_>,
    errors: &mut Errors,
) -> ContainerSpec {
    errors.container = Some(container.name.clone()).filter(|name| !name.is_empty());
    check_container_name(&container.name, &format!("{path}.name"), errors);
    let role = role(container.restart_policy.as_deref(), is_init, path, errors);
    let env = literal_env(container);
    let mut spec = ContainerSpec {
        name: Arc::from(container.name.as_str()),
        role,
        image: container.image.clone().unwrap_or_default(),
        ports: ports(container, path, errors),
        env,
        startup: None,
        readiness: None,
        liveness: None,
    };
    let probes = [
        (ProbeType::Startup, &container.startup_probe),
        (ProbeType::Readiness, &container.readiness_probe),
        (ProbeType::Liveness, &container.liveness_probe),
    ];
    for (kind, probe) in probes {
        let Some(probe) = probe else { continue };
        let path = format!("{path}.{}", kind.field());
        let settings = annotations.take(&container.name, kind);
        if role == Role::Init {
            errors.add(path, Problem::Forbidden(INIT));
            continue;
        }
        let Some(mut probe) = probe::read(probe, kind, &path, &spec.env, errors) else {
            continue;
        };
        annotation::apply(settings, kind, &mut probe, errors);
        let probe = Some(Arc::new(probe));
        match kind {
            ProbeType::Startup => spec.startup = probe,
            ProbeType::Readiness => spec.readiness = probe,
            ProbeType::Liveness => spec.liveness = probe,
        }
    }
    errors.container = None;
    spec
}

fn role(policy: Option<&str>, is_init: bool, path: &str, errors: &mut Errors) -> Role {
    let path = format!("{path}.restartPolicy");
    match (policy, is_init) {
        (None, true) => Role::Init,
        (None, false) => Role::Regular,
        (Some("Always"), true) => Role::Sidecar,
        (Some(other), true) => {
            errors.add(path, Problem::not_supported(other, &["Always"]));
            // The container is invalid in any case; do not report errors about its probes for the wrong reason.
            Role::Sidecar
        }
        (Some(_), false) => {
            let detail = "may not be set for non-init containers";
            errors.add(path, Problem::Forbidden(detail));
            Role::Regular
        }
    }
}

/// The variables whose values are in the manifest itself.
fn literal_env(container: &k8s::Container) -> BTreeMap<String, String> {
    let literal = container
        .env
        .iter()
        .flatten()
        .filter(|var| var.value_from.is_none());
    literal
        .map(|var| (var.name.clone(), var.value.clone().unwrap_or_default()))
        .collect()
}

fn ports(container: &k8s::Container, path: &str, errors: &mut Errors) -> Vec<NamedPort> {
    let mut ports: Vec<NamedPort> = Vec::new();
    for (i, port) in container.ports.iter().flatten().enumerate() {
        let name = port.name.clone().unwrap_or_default();
        let name_path = || format!("{path}.ports[{i}].name");
        if let (false, Some(detail)) = (name.is_empty(), check_port_name(&name)) {
            errors.add(name_path(), Problem::invalid(&name, detail));
        } else if !name.is_empty() && ports.iter().any(|known| known.name == name) {
            errors.add(name_path(), Problem::Duplicate(name.clone()));
        }
        match u16::try_from(port.container_port) {
            Ok(number) if number > 0 => ports.push(NamedPort { name, port: number }),
            _ => errors.add(
                format!("{path}.ports[{i}].containerPort"),
                Problem::invalid_number(port.container_port.into(), PORT_OUT_OF_RANGE),
            ),
        }
    }
    ports
}

/// Checks that a name is a DNS label (RFC 1123). Labels contain no dot, so annotation keys show where the name ends.
fn check_container_name(name: &str, path: &str, errors: &mut Errors) {
    const LENGTH_MAX: usize = 63;
    let fits = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    if name.is_empty() {
        errors.add(path, Problem::Required(""));
    } else if name.len() > LENGTH_MAX
        || !name.bytes().all(fits)
        || name.starts_with('-')
        || name.ends_with('-')
    {
        let detail =
            "must be at most 63 lower-case letters, digits and '-', with no '-' at either end";
        errors.add(path, Problem::invalid(name, detail));
    }
}

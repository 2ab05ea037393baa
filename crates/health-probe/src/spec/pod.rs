//! One pod of a manifest, or of the Kubernetes API.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use health_model::address::parse_ip;
use health_model::manifest::{NAMESPACE, check_name};
use k8s_openapi::api::core::v1 as k8s;

use super::annotation::Annotations;
use super::error::{Errors, Problem, SpecError};
use super::{ContainerSpec, PodSpec, RestartPolicy, container};

const TERMINATION_GRACE: i64 = 30;

impl PodSpec {
    /// Converts a pod to its probe settings, or returns all problems with it.
    pub(crate) fn from_pod(pod: &k8s::Pod) -> Result<Self, Vec<SpecError>> {
        let mut errors = Errors::default();
        let spec = read(pod, &mut errors);
        if errors.list.is_empty() {
            Ok(spec)
        } else {
            Err(errors.list)
        }
    }
}

/// Converts a pod, as far as possible.
fn read(pod: &k8s::Pod, errors: &mut Errors) -> PodSpec {
    let metadata = &pod.metadata;
    let name = metadata.name.clone().unwrap_or_default();
    let namespace = metadata.namespace.clone().filter(|name| !name.is_empty());
    let namespace = namespace.unwrap_or_else(|| NAMESPACE.to_owned());
    let full_name = format!("{namespace}/{name}");
    if name.is_empty() {
        errors.add("metadata.name", Problem::Required(""));
    } else {
        errors.pod = Some(full_name.clone());
        if let Err(problem) = check_name(&name) {
            errors.add("metadata.name", problem);
        }
    }
    if let Err(problem) = check_name(&namespace) {
        errors.add("metadata.namespace", problem);
    }
    let uid = metadata.uid.clone().filter(|uid| !uid.is_empty());

    let none = k8s::PodSpec::default();
    if pod.spec.is_none() {
        errors.add("spec", Problem::Required(""));
    }
    let spec = pod.spec.as_ref().unwrap_or(&none);
    let mut annotations = Annotations::read(metadata.annotations.as_ref(), errors);
    let containers = if pod.spec.is_some() {
        containers(spec, &mut annotations, errors)
    } else {
        Vec::new()
    };
    let is_container = |name: &str| containers.iter().any(|known| &*known.name == name);
    annotations.refuse_rest(is_container, errors);
    PodSpec {
        uid: Arc::from(uid.unwrap_or(full_name)),
        mirrored_uid: None,
        ips: addresses(pod, errors),
        restart_policy: restart_policy(spec, errors),
        termination_grace: termination_grace(spec, errors),
        namespace,
        name,
        containers,
    }
}

/// Returns regular containers, then init containers. All names differ.
fn containers(
    spec: &k8s::PodSpec,
    annotations: &mut Annotations<'_>,
    errors: &mut Errors,
) -> Vec<ContainerSpec> {
    if spec.containers.is_empty() {
        errors.add("spec.containers", Problem::Required(""));
    }
    let regular = spec.containers.iter().enumerate();
    let regular = regular.map(|(i, item)| (item, false, format!("spec.containers[{i}]")));
    let init = spec.init_containers.iter().flatten().enumerate();
    let init = init.map(|(i, item)| (item, true, format!("spec.initContainers[{i}]")));
    let mut names = BTreeSet::new();
    let mut containers = Vec::new();
    for (item, is_init, path) in regular.chain(init) {
        containers.push(container::read(item, is_init, &path, annotations, errors));
        if !item.name.is_empty() && !names.insert(&item.name) {
            let problem = Problem::Duplicate(item.name.clone());
            errors.add(format!("{path}.name"), problem);
        }
    }
    containers
}

fn restart_policy(spec: &k8s::PodSpec, errors: &mut Errors) -> RestartPolicy {
    match spec.restart_policy.as_deref().unwrap_or_default() {
        "" | "Always" => RestartPolicy::Always,
        "OnFailure" => RestartPolicy::OnFailure,
        "Never" => RestartPolicy::Never,
        other => {
            let problem = Problem::not_supported(other, &["Always", "OnFailure", "Never"]);
            errors.add("spec.restartPolicy", problem);
            RestartPolicy::default()
        }
    }
}

fn termination_grace(spec: &k8s::PodSpec, errors: &mut Errors) -> Duration {
    let seconds = spec
        .termination_grace_period_seconds
        .unwrap_or(TERMINATION_GRACE);
    let seconds = u64::try_from(seconds).unwrap_or_else(|_| {
        let problem = Problem::invalid_number(seconds, "must be greater than or equal to 0");
        errors.add("spec.terminationGracePeriodSeconds", problem);
        0
    });
    Duration::from_secs(seconds)
}

/// Returns the pod's addresses, without duplicates.
fn addresses(pod: &k8s::Pod, errors: &mut Errors) -> Vec<IpAddr> {
    let status = pod.status.as_ref();
    let primary = status.and_then(|status| status.pod_ip.as_deref());
    let primary = primary.map(|ip| (ip, "status.podIP".to_owned()));
    let all = status
        .iter()
        .flat_map(|status| status.pod_ips.iter().flatten())
        .enumerate();
    let all = all.map(|(i, address)| (address.ip.as_str(), format!("status.podIPs[{i}].ip")));
    let mut addresses = Vec::new();
    for (text, path) in primary.into_iter().chain(all) {
        match parse_ip(text) {
            _ if text.is_empty() => {}
            Ok(address) if addresses.contains(&address) => {}
            Ok(address) => addresses.push(address),
            Err(_) => errors.add(path, Problem::invalid(text, "must be an IP address")),
        }
    }
    addresses
}

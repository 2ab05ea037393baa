//! `health-agent service`: the services of this node.

mod list;
mod show;
mod trace;

use std::process::ExitCode;

use anyhow::bail;
use clap::Subcommand;
use health_api::client::Client;
use health_model::api::{
    ServiceConflict, ServiceEntry, ServiceFrontend, ServicePortEntry, ServiceSummary,
};
use health_model::ipam::Family;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};

use super::output::printable;

const EXAMPLES: &str = "\
Services:
  A SERVICE is NAMESPACE/NAME, or a NAME that only one service has. To choose a port, use
  NAMESPACE/NAME:PORT with the port's number or name

Examples:
  health-agent service list
  health-agent service list --namespace shop -o wide
  health-agent service get shop/web
  health-agent service trace 10.244.1.7 shop/web:http";

/// Commands of `service`.
#[derive(Debug, Subcommand)]
#[command(after_help = EXAMPLES)]
pub enum ServiceCommand {
    /// List the services of this node, one line per port
    List(list::ListArgs),
    /// Show everything about one service
    Get(show::GetArgs),
    /// Explain which backend a flow gets, whether policy lets it pass, and why
    Trace(trace::TraceArgs),
}

impl ServiceCommand {
    pub(super) async fn execute(self, client: &Client) -> anyhow::Result<ExitCode> {
        match self {
            Self::List(args) => args.execute(client).await?,
            Self::Get(args) => args.execute(client).await?,
            Self::Trace(args) => return args.execute(client).await,
        }
        Ok(ExitCode::SUCCESS)
    }
}

/// The service named NAMESPACE/NAME, or NAME if only one service has it.
pub(super) async fn find(client: &Client, wanted: &str) -> anyhow::Result<ServiceEntry> {
    let services = client.get(&path(Some(wanted), None)).await?;
    the_one(wanted, services)
}

/// The one service that matches `wanted`. Fails if none or several do.
fn the_one(wanted: &str, mut services: Vec<ServiceEntry>) -> anyhow::Result<ServiceEntry> {
    match (services.pop(), &services[..]) {
        (None, _) => {
            bail!("no service {wanted:?}; `health-agent service list` lists the existing ones")
        }
        (Some(service), []) => Ok(service),
        (Some(last), others) => {
            let names = others.iter().chain([&last]).map(ServiceEntry::full_name);
            let names: Vec<_> = names.collect();
            bail!(
                "several services match {wanted:?}: give one of {}",
                names.join(", ")
            )
        }
    }
}

/// The API path that lists the services with this name and namespace.
fn path(service: Option<&str>, namespace: Option<&str>) -> String {
    let parameters = [("service", service), ("namespace", namespace)];
    query("/v1/services", &parameters)
}

/// Appends the parameters that have a value to a path.
fn query(path: &str, parameters: &[(&str, Option<&str>)]) -> String {
    let parameters = parameters.iter().filter_map(|(key, value)| {
        let encoded = utf8_percent_encode((*value)?, NON_ALPHANUMERIC);
        Some(format!("{key}={encoded}"))
    });
    let parameters: Vec<_> = parameters.collect();
    match &parameters[..] {
        [] => path.to_owned(),
        some => format!("{path}?{}", some.join("&")),
    }
}

/// Prints to stderr why a listing of services is incomplete.
fn warn(summary: &ServiceSummary) {
    if !summary.enabled {
        eprintln!(
            "warning: this agent serves no services; give `health-agent run` a source, such as --service-manifests"
        );
        return;
    }
    if !summary.synced {
        eprintln!("warning: the services have not been read yet");
    }
    if let Some(error) = &summary.error {
        let text = format!("services are not in force as shown: {error}");
        eprintln!("warning: {}", printable(&text));
    }
    for problem in &summary.problems {
        let text = format!("{}: {}", problem.subject, problem.problem);
        eprintln!("warning: {}", printable(&text));
    }
}

/// Formats the traffic policies: the internal one, and the external one if it differs.
fn policy(service: &ServiceEntry) -> String {
    let (internal, external) = (&service.internal_policy, &service.external_policy);
    match internal == external {
        true => internal.clone(),
        false => format!("{internal}/{external}"),
    }
}

/// Why new flows to a port get no backend, and what happens to them; `None` if they get one. Names the IP version if
/// the port has frontends or backends of the other version.
fn refusal(port: &ServicePortEntry) -> Option<String> {
    let kept = [("reject", "no", "rejects"), ("drop", "no local", "drops")];
    kept.into_iter().find_map(|(target, none, what)| {
        let is_target = |one: &&ServiceFrontend| one.inside == target || one.outside == target;
        let mut refusing = port.frontends.iter().filter(is_target);
        let first = &refusing.next()?.family;
        let is_other = |family: &str| family != first;
        let backends = port.backends.iter();
        let mut backends = backends.map(|backend| Family::of(backend.address.ip()).name());
        let mut frontends = port.frontends.iter().map(|frontend| &*frontend.family);
        let refuses_both = refusing.any(|one| is_other(&one.family));
        let has_other = frontends.any(is_other) || backends.any(is_other);
        Some(match has_other && !refuses_both {
            true => format!("{none} {first} backends: {what}"),
            false => format!("{none} backends: {what}"),
        })
    })
}

/// Why SCTP packets are dropped if their backends have another port; `None` for other protocols. A changed port needs a
/// checksum over the whole packet (RFC 9260), which IPVS computes and eBPF programs do not.
fn port_change(port: &ServicePortEntry, mode: &str) -> Option<String> {
    if mode != "ebpf" || port.protocol != "SCTP" {
        return None;
    }
    let is_served = |frontend: &&ServiceFrontend| {
        let number = frontend.listen.rsplit([':', ' ']).next();
        let number: Option<u16> = number.and_then(|number| number.parse().ok());
        let mut backends = port.backends.iter();
        backends.all(|backend| Some(backend.address.port()) == number)
    };
    let frontends = port.frontends.iter();
    let dropping: Vec<_> = frontends
        .filter(|frontend| !is_served(frontend))
        .map(|frontend| &*frontend.listen)
        .collect();
    (!dropping.is_empty()).then(|| {
        let places = dropping.join(", ");
        format!("SCTP to another port: drops at {places}")
    })
}

/// The conflicts of a port.
fn conflicts_of<'a>(
    service: &ServiceEntry,
    port: &'a ServicePortEntry,
    conflicts: &'a [ServiceConflict],
) -> impl Iterator<Item = &'a ServiceConflict> {
    let full_name = service.full_name();
    conflicts.iter().filter(move |conflict| {
        conflict.service == full_name
            && (&conflict.port, &conflict.protocol) == (&port.name, &port.protocol)
    })
}

#[cfg(test)]
pub(super) mod fixture {
    use health_model::api::{
        ServiceBackend, ServiceConflict, ServiceEntry, ServiceFrontend, ServicePortEntry,
    };

    /// A service with one port that has backends in every state, and one port without a frontend.
    pub(crate) fn web() -> ServiceEntry {
        let frontend = |kind: &str, listen: &str, outside: &str| ServiceFrontend {
            kind: kind.into(),
            listen: listen.into(),
            family: "IPv4".into(),
            inside: "cluster".into(),
            outside: outside.into(),
        };
        let well = backend("10.244.1.7:8080");
        let backends = vec![
            ServiceBackend {
                local: true,
                probed: Some(true),
                in_local_list: true,
                ..well.clone()
            },
            ServiceBackend {
                address: "10.244.1.8:8080".parse().unwrap(),
                local: true,
                ready: false,
                serving: false,
                probed: Some(false),
                in_cluster_list: false,
                ..well.clone()
            },
            ServiceBackend {
                address: "10.244.2.9:8080".parse().unwrap(),
                ready: false,
                terminating: true,
                lingering: true,
                in_cluster_list: false,
                node: Some("hnode2".into()),
                weight: 20,
                ..well
            },
        ];
        ServiceEntry {
            namespace: "shop".into(),
            name: "web".into(),
            kind: "LoadBalancer".into(),
            source: "services/web.yaml".into(),
            internal_policy: "Cluster".into(),
            external_policy: "Local".into(),
            affinity_ns: Some(10_800_000_000_000),
            algorithm: Some("maglev".into()),
            forwarding: "hybrid".into(),
            forwarding_problem: None,
            health_check_node_port: Some(31_000),
            ports: vec![
                ServicePortEntry {
                    name: "http".into(),
                    protocol: "TCP".into(),
                    port: 80,
                    node_port: Some(30_080),
                    frontends: vec![
                        frontend("ClusterIP", "10.96.0.1:80", "cluster"),
                        frontend("NodePort", "node port 30080", "drop"),
                    ],
                    backends,
                    topology: Vec::new(),
                    failures: Vec::new(),
                },
                ServicePortEntry {
                    name: "dns".into(),
                    protocol: "UDP".into(),
                    port: 53,
                    node_port: None,
                    frontends: Vec::new(),
                    backends: Vec::new(),
                    topology: Vec::new(),
                    failures: vec!["IPv4: HEALTH_BACKENDS has no room".into()],
                },
            ],
        }
    }

    pub(super) fn backend(address: &str) -> ServiceBackend {
        ServiceBackend {
            address: address.parse().unwrap(),
            ready: true,
            serving: true,
            terminating: false,
            local: false,
            probed: None,
            in_cluster_list: true,
            in_local_list: false,
            lingering: false,
            weight: 1,
            node: Some("hnode1".into()),
            zone: None,
        }
    }

    /// Another service owns the address of the port `dns`.
    pub(super) fn conflict() -> ServiceConflict {
        ServiceConflict {
            service: "shop/web".into(),
            port: "dns".into(),
            protocol: "UDP".into(),
            problem: "service shop/web: spec.clusterIPs of shop/web:dns/UDP IPv4 belongs to shop/old:dns/UDP, which \
                      comes first: it is not served at 10.96.0.1:53/UDP"
                .into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::fixture::{backend, web};
    use super::*;

    #[test]
    fn a_path_holds_what_is_meant() {
        assert_eq!(path(None, None), "/v1/services");
        assert_eq!(
            path(Some("shop/web"), Some("a&b")),
            "/v1/services?service=shop%2Fweb&namespace=a%26b"
        );
    }

    #[test]
    fn a_port_without_backends_says_of_which_ip_version_if_the_other_is_there() {
        let v4 = ServiceFrontend {
            outside: "cluster".to_owned(),
            ..web().ports[0].frontends[0].clone()
        };
        let v6 = ServiceFrontend {
            listen: "[fd00::1]:80".to_owned(),
            family: "IPv6".to_owned(),
            ..v4.clone()
        };
        let to = |frontend: &ServiceFrontend, target: &str| ServiceFrontend {
            inside: target.to_owned(),
            outside: target.to_owned(),
            ..frontend.clone()
        };
        let one = vec![backend("10.244.1.7:8080")];
        for (frontends, backends, reported) in [
            (vec![v4.clone(), v6.clone()], one.clone(), None),
            // Its only address is IPv6, and its only backend is not.
            (
                vec![to(&v6, "reject")],
                one.clone(),
                Some("no IPv6 backends: rejects"),
            ),
            (
                vec![v4.clone(), to(&v6, "reject")],
                one.clone(),
                Some("no IPv6 backends: rejects"),
            ),
            (
                vec![to(&v4, "drop"), v6.clone()],
                one.clone(),
                Some("no local IPv4 backends: drops"),
            ),
            (vec![to(&v4, "reject")], one, Some("no backends: rejects")),
            (
                vec![to(&v6, "reject")],
                vec![],
                Some("no backends: rejects"),
            ),
            (
                vec![to(&v4, "reject"), to(&v6, "reject")],
                vec![],
                Some("no backends: rejects"),
            ),
        ] {
            let port = ServicePortEntry {
                frontends,
                backends,
                ..web().ports[0].clone()
            };
            assert_eq!(refusal(&port).as_deref(), reported, "{port:?}");
        }
    }
}

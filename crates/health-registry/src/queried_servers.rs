//! The servers that the agent queries over the network: API servers and etcd members.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use health_model::address::parse_ip;

use health_settings::{RegistrySpec, Settings};

/// A server that the agent queries according to its settings.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct QueriedServer {
    /// Description, such as `the API server https://192.0.2.1:6443`.
    pub what: String,
    /// Host name or address.
    pub host: String,
    /// TCP port.
    pub port: u16,
}

/// Default TCP ports of URLs (RFC 9110, 4.2).
#[cfg(any(feature = "etcd", feature = "kubernetes"))]
const HTTP_PORT: u16 = 80;
#[cfg(any(feature = "etcd", feature = "kubernetes"))]
const HTTPS_PORT: u16 = 443;

/// Returns all servers that an agent with these settings queries. Skips sources that cannot be read: the code that
/// opens such a source reports why.
pub async fn of_settings(config: &Settings) -> Vec<QueriedServer> {
    let services = &config.services.sources;
    let mut specs: Vec<RegistrySpec> = vec![
        config.node.registry.clone(),
        config.identity_store().clone(),
    ];
    specs.extend(
        config
            .node
            .remote_clusters
            .iter()
            .map(|one| one.registry.clone()),
    );
    let etcd = services.services_from_etcd.as_ref();
    specs.extend(
        etcd.and_then(|access| access.cluster(&config.node.registry))
            .cloned(),
    );
    let apis = [
        services.services_from_kubernetes.as_ref(),
        config.containers.pods_from_kubernetes.as_ref(),
        config.policy.policies_from_kubernetes.as_ref(),
    ];
    for access in apis.into_iter().flatten() {
        let kubeconfig = access.kubeconfig(&config.node.registry);
        specs.push(RegistrySpec::Kubernetes(kubeconfig.map(Into::into)));
    }
    let mut all = Vec::new();
    for spec in specs {
        all.extend(of_spec(&spec).await);
    }
    all.sort();
    all.dedup();
    all
}

async fn of_spec(spec: &RegistrySpec) -> Vec<QueriedServer> {
    match spec {
        RegistrySpec::File(_) => Vec::new(),
        #[cfg(feature = "etcd")]
        RegistrySpec::Etcd(_) | RegistrySpec::EtcdConfig(_) => {
            let access = crate::etcd::Source::of(spec).and_then(|source| source.access().ok());
            let urls = access.map(|access| access.endpoints).unwrap_or_default();
            let members = urls.iter();
            members.filter_map(|url| of_url("etcd", url)).collect()
        }
        #[cfg(feature = "kubernetes")]
        RegistrySpec::Kubernetes(kubeconfig) => {
            let url = crate::kubernetes::server(kubeconfig.as_deref()).await;
            url.and_then(|url| of_url("the API server", &url))
                .into_iter()
                .collect()
        }
        #[cfg(not(all(feature = "etcd", feature = "kubernetes")))]
        _ => Vec::new(),
    }
}

/// Returns the host and port of a URL such as `https://[2001:db8::1]:6443/path`.
#[cfg(any(feature = "etcd", feature = "kubernetes"))]
fn of_url(kind: &str, url: &str) -> Option<QueriedServer> {
    let (scheme, rest) = url.split_once("://")?;
    let authority = rest.split(['/', '?', '#']).next()?;
    let place = authority.rsplit('@').next()?;
    let (host, port) = match place.strip_prefix('[') {
        Some(rest) => rest.split_once(']')?,
        None => place.split_at(place.find(':').unwrap_or(place.len())),
    };
    let port = match port.strip_prefix(':') {
        Some(port) => port.parse().ok()?,
        None if scheme == "http" => HTTP_PORT,
        None => HTTPS_PORT,
    };
    (!host.is_empty()).then(|| QueriedServer {
        what: format!("{kind} {}", url.trim_end_matches('/')),
        host: host.to_owned(),
        port,
    })
}

/// Returns the socket addresses of the servers, with their descriptions. Resolves names at the time of the call, and
/// skips those that cannot be resolved.
pub async fn addresses(servers: &[QueriedServer]) -> BTreeMap<SocketAddr, String> {
    let mut found = BTreeMap::new();
    for one in servers {
        if let Ok(ip) = parse_ip(&one.host) {
            found.insert(SocketAddr::new(ip, one.port), one.what.clone());
            continue;
        }
        let Ok(resolved) = tokio::net::lookup_host((one.host.as_str(), 0)).await else {
            continue;
        };
        let ips = resolved.map(|address| address.ip().to_canonical());
        found.extend(ips.map(|ip| (SocketAddr::new(ip, one.port), one.what.clone())));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_host_of_a_url_is_found_in_all_its_forms() {
        for (url, host, port) in [
            ("http://192.0.2.1:2379", "192.0.2.1", 2379),
            ("https://[2001:db8::1]:6443/", "2001:db8::1", 6443),
            (
                "https://user:word@api.example.com:6443/a?b",
                "api.example.com",
                6443,
            ),
            ("https://api.example.com", "api.example.com", 443),
            ("http://[2001:db8::1]", "2001:db8::1", 80),
        ] {
            let found = of_url("etcd", url).map(|server| (server.host, server.port));
            assert_eq!(found, Some((host.to_owned(), port)), "{url}");
        }
        for bad in ["192.0.2.1:2379", "https://", "https://:6443", "http://a:b"] {
            assert_eq!(of_url("etcd", bad), None, "{bad}");
        }
    }

    #[tokio::test]
    async fn addresses_are_those_of_literals_and_names() {
        let servers = [
            "http://[::ffff:192.0.2.1]:2379",
            "http://localhost:2379",
            "http://no.such.invalid",
        ];
        let servers: Vec<_> = servers
            .iter()
            .filter_map(|url| of_url("etcd", url))
            .collect();
        let found = addresses(&servers).await;
        assert!(
            found.contains_key(&([192, 0, 2, 1], 2379).into()),
            "{found:?}"
        );
        assert!(
            found.keys().any(|address| address.ip().is_loopback()),
            "{found:?}"
        );
    }
}

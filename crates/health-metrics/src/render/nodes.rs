//! Metrics of nodes and their probed addresses.

use std::fmt;

use health_model::api::Reachability;
use prometheus_client::encoding::DescriptorEncoder;
use prometheus_client::metrics::MetricType;

use super::rows::histogram;
use super::{Label, Snapshot, counter, family, gauge};
use crate::summary::{Address, Peer, Target};

impl Snapshot {
    pub(super) fn encode_nodes(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let (hosts, endpoints) = (&self.summary.hosts, &self.summary.endpoints);
        let mut statuses = family(
            encoder,
            "node_health_connectivity_status",
            "Probed addresses by state",
            MetricType::Gauge,
        )?;
        for (path, summary) in [("node", hosts), ("endpoint", endpoints)] {
            for (status, count) in summary.addresses.iter() {
                let [cluster, name] = self.source();
                let labels = [cluster, name, ("type", path), ("status", status)];
                statuses.encode_family(&labels)?.encode_gauge(&count)?;
            }
        }
        for (name, help, count) in [
            (
                "unreachable_nodes",
                "Nodes with a host address that does not answer",
                hosts.unreachable,
            ),
            (
                "unreachable_health_endpoints",
                "Health endpoints with an address that does not answer",
                endpoints.unreachable,
            ),
            (
                "degraded_nodes",
                "Nodes whose host addresses all answer, but at least one with losses or late",
                hosts.degraded,
            ),
            (
                "degraded_health_endpoints",
                "Health endpoints whose addresses all answer, but at least one with losses or late",
                endpoints.degraded,
            ),
        ] {
            gauge(encoder, name, help, &count)?;
        }
        Ok(())
    }

    pub(super) fn encode_diagnoses(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let help = "Nodes by diagnosis";
        let mut diagnoses = family(encoder, "node_diagnosis", help, MetricType::Gauge)?;
        for (cause, count) in &self.summary.causes {
            diagnoses
                .encode_family(&[("cause", cause.as_str())])?
                .encode_gauge(count)?;
        }
        let help = "Diagnosis of a node";
        let mut diagnoses = family(encoder, "target_diagnosis", help, MetricType::Info)?;
        for peer in &self.summary.peers {
            if let Some(cause) = &peer.cause {
                let [cluster, name, _] = peer.target();
                diagnoses.encode_info(&[cluster, name, ("cause", cause)])?;
            }
        }
        let help = "Diagnosis of this node if most others fail at once";
        let mut diagnosis = family(encoder, "local_diagnosis", help, MetricType::Info)?;
        match &self.summary.cause {
            Some(cause) => diagnosis.encode_info(&[("cause", cause.as_str())]),
            None => Ok(()),
        }
    }

    pub(super) fn encode_failing(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        for (name, help, shown) in [
            (
                "node_health_failing",
                "1 for each address and protocol whose last probe failed",
                Reachability::Unreachable,
            ),
            (
                "node_health_degraded",
                "1 for each address and protocol that answers with losses or late",
                Reachability::Degraded,
            ),
        ] {
            let mut failing = family(encoder, name, help, MetricType::Gauge)?;
            for (peer, address, target) in self.targets() {
                if target.reachability == Some(shown) {
                    let [cluster, name, _] = peer.target();
                    let labels = [
                        cluster,
                        name,
                        ("type", address.path),
                        ("protocol", target.protocol),
                        ("address", &address.ip.to_string()),
                    ];
                    failing.encode_family(&labels)?.encode_gauge(&1_u64)?;
                }
            }
        }
        Ok(())
    }

    pub(super) fn encode_peers(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let mut statuses = family(
            encoder,
            "node_connectivity_status",
            "1 if all of a node's addresses answer, 0 if one does not",
            MetricType::Gauge,
        )?;
        for peer in &self.summary.peers {
            for (path, reachability) in &peer.groups {
                let answers = match reachability {
                    Reachability::Reachable | Reachability::Degraded => 1_u64,
                    Reachability::Unreachable => 0,
                    Reachability::Unknown => continue,
                };
                let [source_cluster, source_name] = self.source();
                let [cluster, name, kind] = peer.target();
                let path = ("type", *path);
                let labels = [source_cluster, source_name, cluster, name, kind, path];
                statuses.encode_family(&labels)?.encode_gauge(&answers)?;
            }
        }
        let mut latencies = family(
            encoder,
            "node_connectivity_latency_seconds",
            "Round trip of the last probe, if it was answered",
            MetricType::Gauge,
        )?;
        for (peer, address, target) in self.targets() {
            if let Some(latency_ns) = target.latency_ns {
                let labels = self.target_labels(peer, address, target);
                let labels = labels
                    .each_ref()
                    .map(|(name, value)| (*name, value.as_str()));
                latencies
                    .encode_family(&labels)?
                    .encode_gauge(&(latency_ns as f64 / 1e9))?;
            }
        }
        self.encode_path_mtus(encoder)?;
        let mut probes = family(
            encoder,
            "node_connectivity_probes",
            "Completed probes of a target by result",
            MetricType::Counter,
        )?;
        for (peer, address, target) in self.targets() {
            let Some((answered, lost)) = target.counts else {
                continue;
            };
            let labels = self.target_labels(peer, address, target);
            for (result, count) in [("answered", answered), ("lost", lost)] {
                let mut labels: Vec<Label<'_>> = labels
                    .iter()
                    .map(|(name, value)| (*name, value.as_str()))
                    .collect();
                labels.push(("result", result));
                counter(&mut probes, &labels, count)?;
            }
        }
        Ok(())
    }

    pub(super) fn encode_path_mtus(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        for (index, name, help) in [
            (
                0,
                "node_path_mtu_bytes",
                "Largest packet that reaches an address, if this host sends larger ones",
            ),
            (
                1,
                "node_local_mtu_bytes",
                "Largest packet that this host sends to such an address",
            ),
        ] {
            let mut mtus = family(encoder, name, help, MetricType::Gauge)?;
            for peer in &self.summary.peers {
                for address in &peer.addresses {
                    let Some(mtu) = address.path_mtu.map(|mtus| mtus[index]) else {
                        continue;
                    };
                    let [cluster, name, _] = peer.target();
                    let labels = [cluster, name, ("address", &address.ip.to_string())];
                    mtus.encode_family(&labels)?.encode_gauge(&u64::from(mtu))?;
                }
            }
        }
        Ok(())
    }

    pub(super) fn target_labels(
        &self,
        peer: &Peer,
        address: &Address,
        target: &Target,
    ) -> [(&'static str, String); 9] {
        let [source_cluster, source_name] = self.source();
        let [cluster, name, kind] = peer.target();
        let ip = address.ip.to_string();
        [
            source_cluster,
            source_name,
            cluster,
            name,
            kind,
            ("target_node_ip", &ip),
            ("type", address.path),
            ("protocol", target.protocol),
            ("address_type", address.address_type),
        ]
        .map(|(name, value)| (name, value.to_owned()))
    }

    pub(super) fn encode_latency(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        for (name, help, is_probed) in [
            (
                "node_health_connectivity_latency_seconds",
                "Round trips of answered probes",
                true,
            ),
            (
                "node_tcp_latency_seconds",
                "Round trips of existing TCP connections",
                false,
            ),
        ] {
            let mut latency = family(encoder, name, help, MetricType::Histogram)?;
            let probes = self.probes.iter();
            for (class, probes) in probes.filter(|(class, _)| class.is_probed() == is_probed) {
                let labels = [
                    ("source_cluster", self.summary.cluster.as_str()),
                    ("source_node_name", self.summary.name.as_str()),
                    ("type", class.path),
                    ("protocol", class.protocol),
                    ("address_type", class.address_type),
                ];
                histogram(&mut latency, &labels, probes)?;
            }
        }
        Ok(())
    }
}

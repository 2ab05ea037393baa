//! Policy with IPVS: egress rules see the service address, and ingress rules see the client.

use anyhow::ensure;
use tests::served::{curl, curl_soon};

use crate::services::policy::{Guarded, NAMES, is_kept_out};
use crate::services::{Mode, targets, wait_answered_by, wait_datagrams_answered_by};

/// Backends admit friends and caged clients. Rules let a caged client reach backends, hosts and the cluster, but no
/// service addresses.
const RULES: &str = r#"[
{"labels": ["name=web"], "endpointSelector": {"matchLabels": {"app": "web"}},
 "ingress": [{"fromEndpoints": [{"matchLabels": {"role": "friend"}}, {"matchLabels": {"role": "caged"}}],
              "toPorts": [{"ports": [{"port": "8080", "protocol": "ANY"}]}]}]},
{"labels": ["name=caged"], "endpointSelector": {"matchLabels": {"role": "caged"}},
 "egress": [{"toEndpoints": [{"matchLabels": {"app": "web"}}]}, {"toEntities": ["host", "remote-node", "cluster"]}]},
{"labels": ["name=friend"], "endpointSelector": {"matchLabels": {"role": "friend"}},
 "egress": [{"toCIDR": ["10.96.0.0/16", "fd00:10:96::/48"], "toPorts": [{"ports": [{"port": "80", "protocol": "ANY"}]}]}]}
]"#;

#[test]
#[ignore = "needs root"]
fn by_ipvs_egress_rules_see_services_and_ingress_rules_see_clients() -> anyhow::Result<()> {
    let Guarded {
        stand,
        service,
        own,
        foe,
        caged,
        ..
    } = &Guarded::start(Mode::Ipvs, RULES, "")?;
    let (here, there) = (stand.bed.node(1), stand.bed.node(2));
    for client in &stand.clients {
        for (target, address) in targets(service).into_iter().zip(client.addresses()) {
            let answers = curl(&client.name, target, 30)?;
            ensure!(answers.all_from().is_some(), "{}: {answers}", client.name);
            ensure!(
                answers.clients.iter().eq([&address]),
                "{:?}",
                answers.clients
            );
            wait_datagrams_answered_by(&client.name, target, &NAMES)?;
        }
        // The client may reach the backends only through the service.
        let direct = stand.backends[0].addresses()[0];
        let answers = curl_soon(&client.name, direct, 1)?;
        ensure!(answers.backends.is_empty(), "{}: {answers}", client.name);
    }
    for backend in &stand.backends {
        for address in backend.addresses() {
            wait_answered_by(&caged.name, address, &[&backend.name])?;
        }
    }
    // The backend's node drops the foe's packets, and the caged client's own node drops those of the caged client.
    is_kept_out(foe, own, here)?;
    is_kept_out(caged, own, there)?;
    Ok(())
}

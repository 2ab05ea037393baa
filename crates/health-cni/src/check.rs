//! CHECK: verifies that a container's interface is still as ADD left it.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::path::Path;

use health_endpoint::lifecycle::State;
use health_model::api::Endpoint;
use health_net::netns::{self, NetNs};
use health_net::{link, route};

use super::environment::Attachment;
use super::error::{CniError, Code};
use super::result::{self, PreviousResult};

/// Compares the runtime's previous result, the agent's state and the namespace's contents.
pub(super) async fn check(
    attachment: &Attachment,
    netns: &str,
    previous: &PreviousResult,
    endpoint: Option<&Endpoint>,
) -> Result<(), CniError> {
    let Attachment {
        container_id,
        ifname,
    } = attachment;
    let endpoint = endpoint.ok_or_else(|| {
        differs(format!(
            "the agent has no endpoint for interface {ifname} of container {container_id}"
        ))
    })?;
    if State::of(endpoint) != Some(State::Ready) {
        return Err(differs(format!(
            "endpoint {} is {}, not ready",
            endpoint.id, endpoint.state
        ))
        .with_code(Code::TryAgainLater));
    }
    let reported = previous
        .interfaces
        .iter()
        .find(|interface| interface.name == *ifname && !interface.sandbox.is_empty())
        .ok_or_else(|| {
            CniError::new(
                Code::InvalidConfig,
                format!("prevResult has no interface {ifname} in a sandbox"),
            )
        })?;
    if reported.mac != endpoint.mac {
        return Err(differs(format!(
            "{ifname} had address {}, but endpoint {} has {}",
            reported.mac, endpoint.id, endpoint.mac
        )));
    }
    let addresses: BTreeSet<IpAddr> = [endpoint.ipv4, endpoint.ipv6]
        .into_iter()
        .flatten()
        .collect();
    // Later plugins of a chain may have added addresses, devices and routes, and check those themselves.
    let reported: BTreeSet<IpAddr> = previous.ips.iter().map(|ip| ip.address.addr()).collect();
    if let Some(address) = addresses.difference(&reported).next() {
        return Err(differs(format!(
            "prevResult has addresses {reported:?}, but not {address} of endpoint {}",
            endpoint.id
        )));
    }
    let gateways = [endpoint.gateway4, endpoint.gateway6];
    let is_ours = |route: &&result::Route| {
        route.dst.prefix_len() == 0 && route.gw.is_some() && gateways.contains(&route.gw)
    };
    let wanted = WantedInterface {
        mac: &endpoint.mac,
        addresses: &addresses,
        routes: previous.routes.iter().filter(is_ours).collect(),
    };
    look_inside(ifname, Path::new(netns), &wanted).await
}

/// The required state of an interface.
struct WantedInterface<'a> {
    mac: &'a str,
    addresses: &'a BTreeSet<IpAddr>,
    routes: Vec<&'a result::Route>,
}

async fn look_inside(
    ifname: &str,
    netns: &Path,
    wanted: &WantedInterface<'_>,
) -> Result<(), CniError> {
    let failed = |error: &dyn std::error::Error| {
        let problem = format!("cannot inspect {}: {error}", netns.display());
        CniError::new(Code::Io, problem)
    };
    let inside = NetNs::at(netns)
        .and_then(|netns| netns::netlink_in(&netns))
        .map_err(|error| failed(&error))?;
    let device = link::by_name(&inside, ifname)
        .await
        .map_err(|error| failed(&error))?
        .ok_or_else(|| differs(format!("{ifname} is not in {}", netns.display())))?;
    if !device.running {
        return Err(differs(format!("{ifname} in {} is down", netns.display())));
    }
    let mac = device.mac.map(|mac| mac.to_string()).unwrap_or_default();
    if mac != wanted.mac {
        return Err(differs(format!(
            "{ifname} in {} has address {mac} instead of {}",
            netns.display(),
            wanted.mac
        )));
    }
    let there: BTreeSet<IpAddr> = link::addresses(&inside)
        .await
        .map_err(|error| failed(&error))?
        .into_iter()
        .filter(|address| address.index == device.index)
        .map(|address| address.address)
        .collect();
    if let Some(address) = wanted.addresses.difference(&there).next() {
        return Err(differs(format!(
            "{ifname} in {} has lost address {address}",
            netns.display()
        )));
    }
    let routes = route::list_all(&inside)
        .await
        .map_err(|error| failed(&error))?;
    let is_lost = |wanted: &&&result::Route| {
        !routes.iter().any(|route| {
            (route.destination, route.gateway, route.device)
                == (wanted.dst.trunc(), wanted.gw, Some(device.index))
        })
    };
    match wanted.routes.iter().find(is_lost) {
        Some(result::Route { dst, .. }) => Err(differs(format!(
            "{ifname} in {} has lost the route to {dst}",
            netns.display()
        ))),
        None => Ok(()),
    }
}

fn differs(problem: String) -> CniError {
    CniError::new(Code::Differs, problem)
}

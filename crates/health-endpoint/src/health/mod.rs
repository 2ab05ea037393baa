//! The node's health endpoint: a network namespace behind a veth pair, whose host side is `lxc_health`.
//! [`HealthEndpoint::ensure`] creates, adopts or repairs the endpoint, [`HealthEndpoint::check`] reports whether that
//! is necessary, and [`cleanup()`] removes the endpoint.
//!
//! The endpoint's gateway is not on any device: the programs on `lxc_health` answer for it.

mod cleanup;
mod error;
mod fault;
pub mod forwarding;
mod inspect;
mod pair;
mod plan;
mod state;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};

use health_common::endpoint::{ENDPOINT_HEALTH, EndpointInfo};
use health_common::identity;
use health_model::ipam::{AddressRange, Family};
use health_net::link;
use health_net::mac::MacAddr;
use health_net::netlink::{self, Handle};
use health_net::netns::{self, NetNs};
use ipnet::IpNet;
use socket2::{Domain, Protocol, Socket, Type};
use tracing::{info, warn};

pub use self::cleanup::{Cleanup, RemovedResource, cleanup};
pub use self::error::HealthError;
pub use self::fault::{End, Fault, Repair};
pub(crate) use self::pair::ALIAS_PREFIX;
pub use self::state::{ENDPOINT_IDS, State};

use self::pair::{Blueprint, Pair, PairState};
use self::plan::{Plan, PreviousEndpoint};
use self::state::StateFile;

/// Name of the host's end of the veth pair.
pub const DEVICE: &str = "lxc_health";
/// Name of the endpoint's end of the veth pair.
pub const INNER_DEVICE: &str = "health0";

/// Default MTU in bytes, if no device determines it.
pub const ETHERNET_MTU: u32 = 1500;

/// Maximum number of connections that wait to be accepted.
const LISTEN_BACKLOG: i32 = 1024;

/// The settings of a health endpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HealthEndpointSpec {
    /// The agent's instance.
    pub instance: String,
    /// The node's own addresses.
    pub node_addresses: Vec<IpAddr>,
    /// Node addresses that are currently on no device, so that nothing can be sent from them. All other node addresses
    /// must belong to this host.
    pub unusable_addresses: Vec<IpAddr>,
    /// Prefixes for endpoint addresses. The health endpoint gets one address of each family that occurs here.
    pub pod_cidrs: Vec<IpNet>,
    /// Addresses that the endpoint must have, at most one per family. For a family without one, an address is
    /// allocated.
    pub fixed_addresses: Vec<IpAddr>,
    /// Addresses that the endpoint must not have.
    pub excluded: Vec<AddressRange>,
    /// Ids of other endpoints.
    pub taken_ids: BTreeSet<u16>,
    /// The device that determines the endpoint's MTU. `None`: the smallest MTU of all devices that are up, except the
    /// loopback.
    pub mtu_device: Option<String>,
    /// Devices that lead to other nodes; the host forwards between these devices and the endpoint. Empty: the devices
    /// that carry the node's addresses.
    pub uplinks: Vec<String>,
    /// Directory for state that must survive a reboot.
    pub state_dir: PathBuf,
}

/// Description of a health endpoint, for reports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HealthDescription {
    /// Endpoint id.
    pub id: u16,
    /// IPv4 address.
    pub ipv4: Option<Ipv4Addr>,
    /// IPv6 address.
    pub ipv6: Option<Ipv6Addr>,
    /// Ifindex of the host's end of the veth pair.
    pub ifindex: u32,
    /// The endpoint's own hardware address.
    pub mac: MacAddr,
    /// The host side's hardware address.
    pub host_mac: MacAddr,
    /// File of the endpoint's network namespace.
    pub netns: PathBuf,
    /// Whether a policy applies to the endpoint.
    pub has_policy: bool,
}

impl HealthDescription {
    /// Returns the endpoint's addresses, IPv4 first.
    pub fn addresses(&self) -> impl Iterator<Item = IpAddr> + use<> {
        let v4 = self.ipv4.map(IpAddr::from);
        v4.into_iter().chain(self.ipv6.map(IpAddr::from))
    }

    /// Whether this endpoint has the same id and addresses as `other`.
    pub(crate) fn has_same_addresses(&self, other: &Self) -> bool {
        (self.id, self.ipv4, self.ipv6) == (other.id, other.ipv4, other.ipv6)
    }
}

/// A health endpoint as established by [`HealthEndpoint::ensure`].
#[derive(Debug)]
pub struct HealthEndpoint {
    instance: String,
    host: Handle,
    pair: Pair,
    plan: Plan,
    state: State,
    mtu_device: Option<String>,
}

impl HealthEndpoint {
    /// Ensures that the endpoint exists and is in order. Returns the repairs, of which there are none when the endpoint
    /// is created. An endpoint in order is not touched. A failure leaves nothing behind that did not exist before.
    pub async fn ensure(spec: &HealthEndpointSpec) -> Result<(Self, Vec<Repair>), HealthError> {
        let host = netlink::open()?;
        let file = StateFile::in_dir(&spec.state_dir);
        let saved = file.load();
        let Survey {
            living,
            past,
            mut faults,
        } = survey(&host, &spec.instance, saved.as_ref()).await?;
        let plan = Plan::make(&host, spec, &past).await?;
        let living = living.filter(|_| {
            let outdated = outdated(&past, &plan);
            faults.extend_from_slice(&outdated);
            outdated.is_empty()
        });

        // Save before the first change, so that everything can be undone whatever happens.
        let state = state(&plan, spec, saved.as_ref())?;
        if saved.as_ref() != Some(&state) {
            file.save(&state)?;
        }
        let adopted = living.is_some();
        match Self::establish(host.clone(), spec, plan, &state, living).await {
            Ok((endpoint, repaired)) => {
                // A new pair lacks everything at first; this is not a fault.
                faults.extend(repaired.into_iter().filter(|_| adopted));
                endpoint.log(adopted);
                Ok((endpoint, faults.into_iter().map(Repair).collect()))
            }
            Err(error) => {
                if !adopted {
                    undo(&host, &spec.instance, &file, saved.as_ref(), &state).await;
                }
                Err(error)
            }
        }
    }

    async fn establish(
        host: Handle,
        spec: &HealthEndpointSpec,
        plan: Plan,
        state: &State,
        living: Option<Pair>,
    ) -> Result<(Self, Vec<Fault>), HealthError> {
        let instance = &spec.instance;
        let pair = match living {
            Some(pair) => pair,
            None => {
                pair::remove(&host, instance).await?;
                let blueprint = Blueprint {
                    mac: plan.mac,
                    host_mac: plan.host_mac,
                    mtu: plan.mtu,
                    ipv6: plan.stack(Family::V6).is_some(),
                };
                pair::create(&host, instance, &blueprint).await?
            }
        };
        let endpoint = Self {
            instance: instance.clone(),
            host,
            pair,
            plan,
            state: state.clone(),
            mtu_device: spec.mtu_device.clone(),
        };
        let repaired = endpoint.put_in_order().await?;
        Ok((endpoint, repaired))
    }

    /// Opens a non-blocking listener on each of the endpoint's addresses, inside its namespace.
    pub fn listen(&self, port: u16) -> Result<Vec<TcpListener>, HealthError> {
        self.pair.netns.run_in(|| {
            self.plan
                .addresses()
                .map(|address| {
                    let address = SocketAddr::new(address, port);
                    listener(address).map_err(|source| HealthError::Listen { address, source })
                })
                .collect()
        })?
    }

    /// Returns the endpoint id, one of [`ENDPOINT_IDS`].
    pub fn id(&self) -> u16 {
        self.state.id
    }

    /// Returns the IPv4 address.
    pub fn ipv4(&self) -> Option<Ipv4Addr> {
        self.state.ipv4
    }

    /// Returns the IPv6 address.
    pub fn ipv6(&self) -> Option<Ipv6Addr> {
        self.state.ipv6
    }

    /// Returns the gateways, IPv4 first. They are not on any device.
    pub fn gateways(&self) -> impl Iterator<Item = IpAddr> {
        self.plan.stacks.iter().map(|stack| stack.gateway)
    }

    /// Returns the endpoint's own hardware address.
    pub fn mac(&self) -> MacAddr {
        self.state.mac
    }

    /// Returns the endpoint in the form that the programs take.
    pub fn info(&self) -> EndpointInfo {
        EndpointInfo {
            ifindex: self.ifindex(),
            identity: identity::HEALTH,
            flags: ENDPOINT_HEALTH,
            policy: 0,
            id: self.id(),
            mac: self.mac().0,
            host_mac: self.host_mac().0,
            pad: 0,
        }
    }

    /// Returns the endpoint's description for reports.
    pub fn description(&self) -> HealthDescription {
        HealthDescription {
            id: self.id(),
            ipv4: self.ipv4(),
            ipv6: self.ipv6(),
            ifindex: self.ifindex(),
            mac: self.mac(),
            host_mac: self.host_mac(),
            netns: self.netns().path().to_owned(),
            has_policy: self.info().policy != 0,
        }
    }

    /// Returns the hardware address of the host's end, which is also the gateway's.
    pub fn host_mac(&self) -> MacAddr {
        self.state.host_mac
    }

    /// Returns the ifindex of the host's end of the veth pair. It changes when the pair is recreated.
    pub fn ifindex(&self) -> u32 {
        self.pair.outer.index
    }

    /// Returns the name of the host's end of the veth pair.
    pub fn ifname(&self) -> &'static str {
        DEVICE
    }

    /// Returns the endpoint's network namespace. It changes when the namespace is recreated.
    pub fn netns(&self) -> &NetNs {
        &self.pair.netns
    }

    /// Returns the size in bytes of the largest packet that the endpoint sends.
    pub fn mtu(&self) -> u32 {
        self.plan.mtu
    }

    /// Returns the state that is kept across restarts.
    pub fn state(&self) -> &State {
        &self.state
    }

    fn log(&self, adopted: bool) {
        info!(
            id = self.id(),
            ipv4 = self.ipv4().map(tracing::field::display),
            ipv6 = self.ipv6().map(tracing::field::display),
            ifindex = self.ifindex(),
            netns = %self.netns().path().display(),
            "health endpoint {}",
            if adopted { "adopted" } else { "created" },
        );
    }
}

/// The state found before any change.
struct Survey {
    living: Option<Pair>,
    past: PreviousEndpoint,
    /// Faults of an endpoint that is not alive.
    faults: Vec<Fault>,
}

async fn survey(
    host: &Handle,
    instance: &str,
    saved: Option<&State>,
) -> Result<Survey, HealthError> {
    let mut past = saved.map(PreviousEndpoint::of_state).unwrap_or_default();
    let (living, fault) = match pair::find(host, instance, saved).await? {
        PairState::Living(pair) => {
            past.device_stands = true;
            (Some(pair), None)
        }
        PairState::Remains {
            fault,
            device_stands,
        } => {
            past.device_stands = device_stands;
            (None, Some(fault))
        }
        PairState::Nothing => (None, saved.map(|_| Fault::VethGone)),
    };
    if let (None, Some(pair)) = (saved, &living) {
        past.macs = pair.inner.mac.zip(pair.outer.mac);
        past.addresses = link::addresses(&pair.inside)
            .await?
            .into_iter()
            .filter(|address| address.index == pair.inner.index)
            .map(|address| address.address)
            .collect();
    }
    Ok(Survey {
        living,
        past,
        faults: fault.into_iter().collect(),
    })
}

/// Returns a fault for each address that a live endpoint must not keep or does not have yet. If there are any, the
/// endpoint needs a new pair.
fn outdated(past: &PreviousEndpoint, plan: &Plan) -> Vec<Fault> {
    let old: BTreeSet<_> = past.addresses.iter().copied().collect();
    let new: BTreeSet<_> = plan.addresses().collect();
    let gone = old.difference(&new).copied().map(Fault::AddressOutdated);
    let added = new.difference(&old).copied().map(Fault::AddressMissing);
    gone.chain(added).collect()
}

fn state(
    plan: &Plan,
    spec: &HealthEndpointSpec,
    saved: Option<&State>,
) -> Result<State, HealthError> {
    let mut sysctls = saved.map(|state| state.sysctls.clone()).unwrap_or_default();
    for setting in plan.host_settings()? {
        sysctls.remember(&setting)?;
    }
    let (mut ipv4, mut ipv6) = (None, None);
    for address in plan.addresses() {
        match address {
            IpAddr::V4(address) => ipv4 = Some(address),
            IpAddr::V6(address) => ipv6 = Some(address),
        }
    }
    Ok(State {
        id: plan.id,
        ipv4,
        ipv6,
        mac: plan.mac,
        host_mac: plan.host_mac,
        netns: netns::path_of(&pair::netns_name(&spec.instance))?,
        sysctls,
    })
}

/// Returns the endpoint's state saved in `state_dir`, if any.
pub fn saved_state(state_dir: &Path) -> Option<State> {
    StateFile::in_dir(state_dir).load()
}

/// Removes an endpoint that [`HealthEndpoint::ensure`] newly created, after a later step of the agent's start has
/// failed. Restores the state that was `saved` before.
pub async fn take_back(spec: &HealthEndpointSpec, saved: Option<&State>) {
    let file = StateFile::in_dir(&spec.state_dir);
    match (netlink::open(), file.load()) {
        (Ok(host), Some(made)) => undo(&host, &spec.instance, &file, saved, &made).await,
        (Err(error), _) => warn!(%error, "cannot undo the creation of the health endpoint"),
        (Ok(_), None) => {}
    }
}

/// Undoes the steps of a failed attempt to create an endpoint.
async fn undo(
    host: &Handle,
    instance: &str,
    file: &StateFile,
    saved: Option<&State>,
    attempted: &State,
) {
    if let Err(error) = pair::remove(host, instance).await {
        warn!(%error, "cannot undo the creation of the health endpoint");
    }
    let before = saved.map(|state| state.sysctls.clone()).unwrap_or_default();
    let (_, failed) = attempted.sysctls.since(&before).restore();
    for error in &failed {
        warn!(%error, "cannot restore a kernel setting");
    }
    if !failed.is_empty() {
        // `cleanup()` restores the settings from the file, and finds devices by their alias.
        return;
    }
    let restored = match saved {
        Some(state) => file.save(state),
        None => file.remove().map(drop),
    };
    if let Err(error) = restored {
        warn!(%error, "cannot restore the state file");
    }
}

fn listener(address: SocketAddr) -> std::io::Result<TcpListener> {
    let socket = Socket::new(
        Domain::for_address(address),
        Type::STREAM,
        Some(Protocol::TCP),
    )?;
    socket.set_reuse_address(true)?;
    if address.is_ipv6() {
        socket.set_only_v6(true)?;
    }
    socket.bind(&address.into())?;
    socket.listen(LISTEN_BACKLOG)?;
    socket.set_nonblocking(true)?;
    Ok(socket.into())
}

//! Compares the health endpoint with its intended state, and repairs differences.

use std::time::Duration;

use health_net::link::{self, Link};
use health_net::netlink::Handle;
use health_net::{neighbour, route, sysctl};
use tokio::time::{self, Instant};

use super::fault::{End, Fault};
use super::{DEVICE, HealthEndpoint, HealthError, INNER_DEVICE, pair};

const LOOPBACK: &str = "lo";

/// How many times to look for faults and repair them before blaming something else. One repair may uncover another
/// fault, for example when a device is brought up.
const ROUNDS: usize = 3;

/// How long the kernel may take to notice that both ends are up; it checks once a second.
const CARRIER_PATIENCE: Duration = Duration::from_secs(3);
const CARRIER_POLL: Duration = Duration::from_millis(2);

impl HealthEndpoint {
    /// Finds all differences from the state that [`HealthEndpoint::ensure`] established. Takes about a dozen system
    /// calls, and changes nothing.
    pub async fn check(&self) -> Result<Vec<Fault>, HealthError> {
        let Some(outer) = link::by_name(&self.host, DEVICE).await? else {
            return Ok(vec![Fault::VethGone]);
        };
        let mark = pair::alias(&self.instance);
        if outer.index != self.pair.outer.index || outer.alias.as_ref() != Some(&mark) {
            return Ok(vec![Fault::VethReplaced]);
        }
        if !self.pair.netns.is_named() {
            let path = self.pair.netns.path().to_owned();
            return Ok(vec![Fault::NetnsGone(path)]);
        }
        let links = link::list(&self.pair.inside).await?;
        let is_inner =
            |link: &&Link| link.index == self.pair.inner.index && link.name == INNER_DEVICE;
        let Some(inner) = links.iter().find(is_inner) else {
            return Ok(vec![Fault::PeerGone]);
        };
        // Checked in the order in which faults can be repaired: only a device that is up can get addresses, and routes
        // need addresses.
        let mut faults = self.changed_settings()?;
        let mtu = self.wanted_mtu().await?;
        faults.extend(self.device_faults(End::Outer, &outer, mtu));
        faults.extend(self.device_faults(End::Inner, inner, mtu));
        if links.iter().any(|link| link.loopback && !link.up) {
            faults.push(Fault::LoopbackDown);
        }
        faults.extend(self.missing_addresses().await?);
        faults.extend(self.missing_neighbours().await?);
        faults.extend(self.lost_routes().await?);
        Ok(faults)
    }

    /// Repairs until no fault is left and packets pass. Returns the faults that it found.
    pub(super) async fn put_in_order(&self) -> Result<Vec<Fault>, HealthError> {
        let mut repaired = Vec::new();
        for _ in 0..ROUNDS {
            let faults = self.check().await?;
            if faults.is_empty() {
                self.wait_until_running().await?;
                return Ok(repaired);
            }
            for fault in faults {
                self.repair(&fault).await?;
                if !repaired.contains(&fault) {
                    repaired.push(fault);
                }
            }
        }
        match self.check().await?.into_iter().next() {
            None => self.wait_until_running().await.map(|()| repaired),
            Some(fault) => Err(HealthError::Unrepaired(fault)),
        }
    }

    async fn wait_until_running(&self) -> Result<(), HealthError> {
        let deadline = Instant::now() + CARRIER_PATIENCE;
        let mut poll = time::interval(CARRIER_POLL);
        for end in [End::Outer, End::Inner] {
            let (handle, link) = self.side(end);
            loop {
                poll.tick().await;
                let link = link::by_index(handle, link.index).await?;
                if link.is_some_and(|link| link.running) {
                    break;
                }
                if Instant::now() >= deadline {
                    return Err(HealthError::Unrepaired(Fault::Down(end)));
                }
            }
        }
        Ok(())
    }

    async fn repair(&self, fault: &Fault) -> Result<(), HealthError> {
        match fault {
            Fault::Down(end) => {
                let (handle, link) = self.side(*end);
                link::set_up(handle, link).await?;
            }
            Fault::LoopbackDown => {
                let inside = &self.pair.inside;
                if let Some(loopback) = link::by_name(inside, LOOPBACK).await? {
                    link::set_up(inside, &loopback).await?;
                }
            }
            Fault::MacChanged { end, wanted } => {
                let (handle, link) = self.side(*end);
                link::set_mac(handle, link, *wanted).await?;
            }
            Fault::MtuChanged { end, wanted } => {
                let (handle, link) = self.side(*end);
                link::set_mtu(handle, link, *wanted).await?;
            }
            Fault::AddressMissing(address) => {
                link::add_address(&self.pair.inside, &self.pair.inner, *address).await?;
            }
            Fault::NeighbourMissing(address) => {
                let (handle, link) = self.side(End::Outer);
                neighbour::set_permanent(handle, link, *address, self.plan.mac).await?;
            }
            Fault::RouteLost { end, wanted } => {
                route::replace(self.side(*end).0, wanted).await?;
            }
            Fault::SettingChanged { wanted, .. } => wanted.apply()?,
            // These faults require a new pair, which is not created here.
            Fault::VethGone
            | Fault::VethReplaced
            | Fault::NetnsGone(_)
            | Fault::PeerGone
            | Fault::AddressOutdated(_) => return Err(HealthError::Unrepaired(fault.clone())),
        }
        Ok(())
    }

    fn side(&self, end: End) -> (&Handle, &Link) {
        match end {
            End::Outer => (&self.host, &self.pair.outer),
            End::Inner => (&self.pair.inside, &self.pair.inner),
        }
    }

    fn changed_settings(&self) -> Result<Vec<Fault>, HealthError> {
        let mut faults = Vec::new();
        for wanted in self
            .plan
            .device_settings()
            .into_iter()
            .chain(self.plan.host_settings()?)
        {
            // There is nothing to set if the device is gone or the kernel has no IPv6.
            let Some(value) = sysctl::read(&wanted.key)? else {
                continue;
            };
            if value != wanted.value {
                faults.push(Fault::SettingChanged { value, wanted });
            }
        }
        Ok(faults)
    }

    /// Returns the current MTU of the device that determines the endpoint's MTU, or the last known MTU if that device
    /// is gone.
    async fn wanted_mtu(&self) -> Result<u32, HealthError> {
        let device = match &self.mtu_device {
            Some(name) => link::by_name(&self.host, name).await?,
            None => None,
        };
        Ok(device.map_or(self.plan.mtu, |device| device.mtu))
    }

    fn device_faults(
        &self,
        end: End,
        link: &Link,
        mtu: u32,
    ) -> impl Iterator<Item = Fault> + use<> {
        let mac = match end {
            End::Outer => self.plan.host_mac,
            End::Inner => self.plan.mac,
        };
        let mac_changed = (link.mac != Some(mac)).then_some(Fault::MacChanged { end, wanted: mac });
        let mtu_changed = (link.mtu != mtu).then_some(Fault::MtuChanged { end, wanted: mtu });
        let down = (!link.up).then_some(Fault::Down(end));
        [mac_changed, mtu_changed, down].into_iter().flatten()
    }

    async fn missing_addresses(&self) -> Result<Vec<Fault>, HealthError> {
        let there = link::addresses(&self.pair.inside).await?;
        let is_there = |wanted| {
            there.iter().any(|address| {
                address.index == self.pair.inner.index
                    && address.address == wanted
                    && !address.tentative
            })
        };
        let missing = self.plan.addresses().filter(|wanted| !is_there(*wanted));
        Ok(missing.map(Fault::AddressMissing).collect())
    }

    async fn missing_neighbours(&self) -> Result<Vec<Fault>, HealthError> {
        let mut missing = Vec::new();
        for address in self.plan.addresses() {
            let known = neighbour::permanent(&self.host, &self.pair.outer, address).await?;
            if known != Some(self.plan.mac) {
                missing.push(Fault::NeighbourMissing(address));
            }
        }
        Ok(missing)
    }

    async fn lost_routes(&self) -> Result<Vec<Fault>, HealthError> {
        let mut lost = Vec::new();
        // The host may have very many routes, so look each of these up instead of dumping all.
        for wanted in self.plan.host_routes(self.pair.outer.index) {
            let found = route::matching(&self.host, wanted.destination.addr()).await?;
            if found.as_ref() != Some(&wanted) {
                let end = End::Outer;
                lost.push(Fault::RouteLost { end, wanted });
            }
        }
        let inside = route::list_ours(&self.pair.inside).await?;
        for wanted in self.plan.inner_routes(self.pair.inner.index) {
            if !inside.contains(&wanted) {
                let end = End::Inner;
                lost.push(Fault::RouteLost { end, wanted });
            }
        }
        Ok(lost)
    }
}

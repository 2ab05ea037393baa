//! Creates an endpoint step by step; a failure undoes the steps before it.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Instant;

use health_model::api::{Endpoint, EndpointSettings};
use health_model::identity::Identity;
use health_model::ipam::{Family, IpamError, Owner, Search};
use health_net::clock;
use health_net::mac::MacAddr;
use health_net::netns::NetNsId;
use jiff::Timestamp;
use tracing::{info, warn};

use super::labels::FirstLabels;
use super::restore::fate;
use super::table::Entry;
use super::{Manager, NewEndpoint, interrupted};
use crate::error::EndpointError;
use crate::lifecycle::{Lifecycle, Side, State};
use crate::log::Status;
use crate::regenerate::RegenerationError;
use crate::workload::{Blueprint, DEFAULT_IFNAME, SavedEndpoint, Stack, device_name};

impl Manager {
    pub(super) async fn make(&self, new: NewEndpoint) -> Result<Arc<Endpoint>, EndpointError> {
        let netns_id = self.0.devices.look_at(&new.netns)?;
        let asked = [new.ipv4.map(IpAddr::from), new.ipv6.map(IpAddr::from)];
        let id = self.reserve_or_succeed(&new, netns_id).await?;
        self.note_change();
        match self.make_reserved(id, asked).await {
            Ok(endpoint) => Ok(endpoint),
            Err(error) => {
                warn!(id, %error, "cannot create an endpoint");
                self.clear_away(id, &error).await;
                Err(error)
            }
        }
    }

    /// Reserves an id. If an endpoint in the way has ended unnoticed with its namespace, deletes it first.
    async fn reserve_or_succeed(
        &self,
        new: &NewEndpoint,
        netns_id: NetNsId,
    ) -> Result<u16, EndpointError> {
        loop {
            // The namespace of an endpoint that has ended may have had the same id; it has no route in this namespace.
            let sibling = self.table().default_route_in(netns_id);
            if let Some((id, _)) = sibling
                && let Some(why) = self.end_of(id).await?
            {
                warn!(id, why, "replacing an endpoint with a new one");
                self.unmake(id).await?;
                continue;
            }
            let refused = match self.reserve(new, netns_id) {
                Ok(id) => return Ok(id),
                Err(refused) => refused,
            };
            let (EndpointError::ContainerTaken { id, .. } | EndpointError::DeviceTaken { id, .. }) =
                refused
            else {
                return Err(refused);
            };
            let Some(why) = self.end_of(id).await? else {
                return Err(refused);
            };
            warn!(id, why, "replacing an endpoint with a new one");
            self.unmake(id).await?;
        }
    }

    /// Returns why an endpoint is no longer alive, or soon will not be; `None` if it is alive.
    async fn end_of(&self, id: u16) -> Result<Option<&'static str>, EndpointError> {
        let saved = match self.table().entries.get(&id) {
            None => return Ok(Some("it is gone")),
            Some(entry) if entry.state().is_ending() => return Ok(Some("it is being deleted")),
            Some(entry) if entry.is_lost => return Ok(Some("its device is gone")),
            Some(entry) if !entry.is_complete => return Ok(None),
            Some(entry) => entry.saved.clone(),
        };
        let found = match saved.ifindex {
            Some(ifindex) => self.0.devices.find(ifindex).await?,
            None => None,
        };
        let own = found.filter(|found| found.endpoint == id);
        Ok(fate(&saved, own.as_ref()))
    }

    /// Reserves an id, so that no other call can create the same endpoint.
    fn reserve(&self, new: &NewEndpoint, netns_id: NetNsId) -> Result<u16, EndpointError> {
        let mut rng = rand::rng();
        let now = self.now();
        let mut table = self.table();
        let ifname = new.ifname.as_deref().unwrap_or(DEFAULT_IFNAME);
        for Entry { saved, .. } in table.entries.values() {
            if let Some(container_id) = &new.container_id
                && saved.container_id.as_ref() == Some(container_id)
                && (saved.ifname == ifname || saved.netns_id != netns_id)
            {
                return Err(EndpointError::ContainerTaken {
                    container_id: container_id.clone(),
                    ifname: saved.ifname.clone(),
                    id: saved.id,
                });
            }
            if saved.netns_id == netns_id && saved.ifname == ifname {
                return Err(EndpointError::DeviceTaken {
                    netns: new.netns.clone(),
                    ifname: ifname.to_owned(),
                    id: saved.id,
                });
            }
        }
        let has_default_route = match (new.default_route, table.default_route_in(netns_id)) {
            (Some(true), Some((id, ifname))) => {
                return Err(EndpointError::DefaultRouteTaken {
                    netns: new.netns.clone(),
                    ifname,
                    id,
                });
            }
            (Some(is_asked_for), _) => is_asked_for,
            (None, taken) => taken.is_none(),
        };
        let id = table.free_id(&mut rng)?;
        let FirstLabels { labels, given } = self.first_labels(new);
        let saved = SavedEndpoint {
            id,
            name: new.name.clone(),
            container_id: new.container_id.clone(),
            pod: new.pod.clone(),
            network: new.network.clone(),
            labels,
            given_labels: given,
            former_labels: None,
            identity: Identity::INIT,
            ipv4: None,
            ipv6: None,
            mac: MacAddr::random(&mut rng),
            host_mac: MacAddr::random(&mut rng),
            mtu: *self.0.mtu.borrow(),
            netns: new.netns.clone(),
            netns_id,
            ifname: ifname.to_owned(),
            device: device_name(id),
            ifindex: None,
            created: now,
            boot_id: clock::boot_id().ok(),
            has_default_route,
            settings: EndpointSettings::default(),
            is_deleting: false,
        };
        let lifecycle = Lifecycle::created(now, "created");
        let entry = Entry::new(saved, lifecycle, &table.ipam);
        table.entries.insert(id, entry);
        Ok(id)
    }

    async fn make_reserved(
        &self,
        id: u16,
        asked: [Option<IpAddr>; 2],
    ) -> Result<Arc<Endpoint>, EndpointError> {
        self.take_addresses(id, asked).await?;
        // Save the intent, so that the next agent can also undo what follows.
        self.save(id).await?;
        self.first_identity(id).await?;
        let blueprint = self.blueprint(id)?;
        let ifindex = self.0.devices.create(&blueprint).await?;
        self.with(id, |entry, now| {
            entry.saved.ifindex = Some(ifindex);
            const REASON: &str = "devices created";
            if entry.saved.lacks_identity() {
                entry.note(now, Status::Ok, REASON);
                return Ok(());
            }
            entry.set(Side::Manager, State::WaitingToRegenerate, now, REASON)
        })?
        .map_err(|refused| EndpointError::Refused { id, refused })?;
        self.0.regenerator.until_informed().await;
        self.table().push(id, "created");
        self.0.work.notify_one();
        self.wait_built(id).await?;
        self.0.devices.activate(&blueprint, ifindex).await?;
        let shown = self.with(id, |entry, _| {
            entry.is_complete = true;
            entry.touch();
            entry.shown()
        })?;
        self.save(id).await?;
        self.resolve_if_needed(id);
        self.note_change();
        info!(
            id,
            name = shown.name,
            ipv4 = shown.ipv4.map(tracing::field::display),
            ipv6 = shown.ipv6.map(tracing::field::display),
            netns = shown.netns,
            "endpoint created"
        );
        Ok(shown)
    }

    async fn take_addresses(
        &self,
        id: u16,
        asked: [Option<IpAddr>; 2],
    ) -> Result<(), EndpointError> {
        let families: Vec<Family> = self.table().ipam.families().collect();
        if families.is_empty() {
            return Err(EndpointError::NoPodCidr);
        }
        for (family, asked) in Family::ALL.into_iter().zip(asked) {
            let address = match asked {
                Some(address) => self.claim(id, address).await?,
                None if families.contains(&family) => self.allocate(id, family).await?,
                None => continue,
            };
            self.with(id, |entry, _| match address {
                IpAddr::V4(address) => entry.saved.ipv4 = Some(address),
                IpAddr::V6(address) => entry.saved.ipv6 = Some(address),
            })?;
        }
        Ok(())
    }

    async fn claim(&self, id: u16, address: IpAddr) -> Result<IpAddr, EndpointError> {
        let owner = self.owner(id)?;
        self.table().ipam.claim(address, owner)?;
        if self.0.devices.is_in_use(address).await? {
            return Err(IpamError::Taken(address).into());
        }
        Ok(address)
    }

    async fn allocate(&self, id: u16, family: Family) -> Result<IpAddr, EndpointError> {
        let mut search = Search::new(family, self.owner(id)?);
        loop {
            let address = {
                let mut table = self.table();
                // Any deletion waits for this step.
                table.living(id)?;
                let now = Instant::now();
                table.ipam.allocate(&search, now, &mut rand::rng())?
            };
            if !self.0.devices.is_in_use(address).await? {
                return Ok(address);
            }
            warn!(%address, "another program is using an address from the pod CIDR");
            let now = Instant::now();
            self.table().ipam.refuse(&mut search, address, now);
        }
    }

    fn owner(&self, id: u16) -> Result<Owner, EndpointError> {
        self.with(id, |entry, _| Owner {
            endpoint: id,
            name: entry.saved.name.clone().unwrap_or_default(),
        })
    }

    /// Returns the intended devices of an endpoint.
    pub(super) fn blueprint(&self, id: u16) -> Result<Blueprint, EndpointError> {
        let mut table = self.table();
        let saved = table.living(id)?.saved.clone();
        let stacks = saved.addresses().filter_map(|address| {
            let of_family = |node: &&IpAddr| Family::of(**node) == Family::of(address);
            Some(Stack {
                address,
                gateway: table.ipam.gateway(Family::of(address))?,
                node: self.0.node_addresses.iter().find(of_family).copied(),
            })
        });
        let stacks = stacks.collect();
        Ok(Blueprint {
            id,
            device: saved.device,
            ifname: saved.ifname,
            netns: saved.netns,
            mac: saved.mac,
            host_mac: saved.host_mac,
            mtu: saved.mtu,
            stacks,
            has_default_route: saved.has_default_route,
        })
    }

    /// Waits for the first build.
    async fn wait_built(&self, id: u16) -> Result<(), EndpointError> {
        self.wait_until(|table| match table.living(id) {
            Err(error) => Some(Err(error)),
            Ok(entry) if entry.realized.is_some() => Some(Ok(())),
            Ok(entry) => {
                let problem = entry.problem.clone()?;
                let source = RegenerationError(problem);
                Some(Err(EndpointError::Regenerate { id, source }))
            }
        })
        .await
    }

    /// Runs `work` on a live endpoint.
    pub(super) fn with<T>(
        &self,
        id: u16,
        work: impl FnOnce(&mut Entry, Timestamp) -> T,
    ) -> Result<T, EndpointError> {
        let now = self.now();
        let mut table = self.table();
        table.living(id).map(|entry| work(entry, now))
    }

    /// Saves the state that an endpoint has when the write starts. Saves nothing if the endpoint has been deleted by
    /// then.
    pub(super) async fn save(&self, id: u16) -> Result<(), EndpointError> {
        self.at_files(move |manager| {
            let saved = manager.with(id, |entry, _| SavedEndpoint {
                // Until the endpoint is complete, save only the intent.
                ifindex: entry.saved.ifindex.filter(|_| entry.is_complete),
                ..entry.saved.clone()
            })?;
            Ok(manager.0.states.save(&saved)?)
        })
        .await
    }

    /// Runs `work` with exclusive access to the endpoints' files.
    pub(super) async fn at_files<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Self) -> Result<T, EndpointError> + Send + 'static,
    ) -> Result<T, EndpointError> {
        let manager = self.clone();
        let done = tokio::task::spawn_blocking(move || {
            let _files = manager.0.files.lock();
            work(&manager)
        });
        done.await.unwrap_or_else(|error| Err(interrupted(&error)))
    }
}

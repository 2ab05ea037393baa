//! Builds single endpoints, and makes space for their tables.

use std::collections::BTreeSet;
use std::future::Future;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::PoisonError;
use std::time::Duration;

use health_common::endpoint::{
    ENDPOINT_DEBUG, ENDPOINT_DHCPV6, ENDPOINT_ENFORCE_EGRESS, ENDPOINT_ENFORCE_INGRESS,
    ENDPOINT_UNTRACKED, EndpointInfo,
};
use health_common::ipcache::IpcacheEntry;
use health_datapath::policy::PolicyError;
use health_datapath::{TrieError, Workload};
use health_model::identity::Identity;
use health_model::labels::LabelSet;
use ipnet::IpNet;
use tokio::sync::watch;

use super::subjects::{BuildFailure, Generation, Subject};
use super::{EnforceError, Enforcer, lock};
use crate::regenerate::{RealizedPolicy, Regeneration, RegenerationError, Regenerator};

/// How long a new endpoint waits for the cluster's identities, provided that the store can be used, and an endpoint with
/// a new identity for the policies of others.
const PATIENCE: Duration = Duration::from_secs(5);

/// The endpoints to rebuild after space was freed.
pub(super) enum Room {
    /// Unused tables were removed; some of these endpoints may fit now.
    Swept(BTreeSet<u16>),
    /// These endpoints were closed: all their traffic is dropped until they are rebuilt.
    Closed(BTreeSet<u16>),
}

impl Enforcer {
    /// Builds an endpoint. May block.
    pub(super) fn build(
        &self,
        endpoint: &Regeneration,
    ) -> Result<RealizedPolicy, RegenerationError> {
        let generation = self.generation();
        let built = self.build_by(endpoint, &generation);
        if let Err(error) = &built {
            let failure = BuildFailure {
                generation: generation.number,
                lacks_room: matches!(error, EnforceError::Table(PolicyError::Full { .. })),
                reason: error.to_string(),
            };
            self.subjects().fail(endpoint.id, failure);
        }
        self.0.built.notify_one();
        built.map_err(|error| RegenerationError(error.to_string()))
    }

    fn build_by(
        &self,
        endpoint: &Regeneration,
        generation: &Generation,
    ) -> Result<RealizedPolicy, EnforceError> {
        let changing = self.0.changing.read();
        let _changing = changing.unwrap_or_else(PoisonError::into_inner);
        let labels = subject_labels(endpoint.identity, &endpoint.labels);
        let realized =
            self.subjects()
                .plan(endpoint.id, endpoint.subject(), &labels, generation)?;
        self.0.programs.set(self.workload(endpoint, realized))?;
        let former = self.subjects().settle(endpoint.id, &endpoint.addresses);
        // The endpoint may send packets at once, and policy judges them by its identity.
        self.update_ipcache(endpoint)?;
        self.withdraw(former.iter().filter(|ip| !endpoint.addresses.contains(ip)));
        self.announce(endpoint);
        Ok(realized)
    }

    /// Removes unused tables. If every table is in use, blocks all traffic of the endpoints of one identity that is not
    /// yet in `closed`; their tables then make space for the new ones. Returns the endpoints that may have enough space
    /// now.
    pub(super) fn free_tables(&self, closed: &mut BTreeSet<Subject>) -> Result<Room, EnforceError> {
        let changing = self.0.changing.write();
        let _changing = changing.unwrap_or_else(PoisonError::into_inner);
        let cramped = self.subjects().cramped();
        if cramped.is_empty() || self.subjects().sweep()? {
            return Ok(Room::Swept(cramped));
        }
        let subject = self.subjects().to_close();
        let Some(subject) = subject.filter(|subject| closed.insert(*subject)) else {
            return Ok(Room::Swept(BTreeSet::new()));
        };
        let (table, ids) = self.subjects().close(subject)?;
        for id in &ids {
            self.0.programs.set_policy(*id, table)?;
            self.subjects().moved(*id, table);
        }
        self.subjects().sweep()?;
        Ok(Room::Closed(ids))
    }

    /// Switches an endpoint to a table that drops everything in both directions.
    fn name_empty_table(&self, id: u16) -> Result<Option<RealizedPolicy>, EnforceError> {
        let changing = self.0.changing.read();
        let _changing = changing.unwrap_or_else(PoisonError::into_inner);
        // Hold the lock until the endpoint uses the table, so that the table is not swept.
        let mut subjects = self.subjects();
        let Some(table) = subjects.empty_table(id)? else {
            return Ok(None);
        };
        self.0.programs.shut_off(id, table)?;
        subjects.moved(id, table);
        Ok(Some(RealizedPolicy {
            policy: table,
            enforces_ingress: true,
            enforces_egress: true,
        }))
    }

    /// Converts an endpoint to the form that the programs take.
    fn workload(&self, endpoint: &Regeneration, realized: RealizedPolicy) -> Workload {
        let flag = |is_set, flag| if is_set { flag } else { 0 };
        Workload {
            device: endpoint.device.clone(),
            addresses: endpoint.addresses.clone(),
            info: EndpointInfo {
                ifindex: endpoint.ifindex,
                identity: endpoint.identity.0,
                flags: flag(realized.enforces_ingress, ENDPOINT_ENFORCE_INGRESS)
                    | flag(realized.enforces_egress, ENDPOINT_ENFORCE_EGRESS)
                    | flag(self.0.allow_dhcpv6, ENDPOINT_DHCPV6)
                    | flag(!endpoint.settings.conntrack, ENDPOINT_UNTRACKED)
                    | flag(endpoint.settings.debug, ENDPOINT_DEBUG),
                policy: realized.policy,
                id: endpoint.id,
                mac: endpoint.mac.0,
                host_mac: endpoint.host_mac.0,
                pad: 0,
            },
        }
    }

    fn update_ipcache(&self, endpoint: &Regeneration) -> Result<(), TrieError> {
        let entry = IpcacheEntry {
            identity: endpoint.identity.0,
            ..IpcacheEntry::default()
        };
        let mut ipcache = lock(&self.0.ipcache);
        let mut addresses = endpoint.addresses.iter();
        addresses.try_for_each(|address| ipcache.set(IpNet::from(*address), entry))
    }

    pub(super) fn take_away(&self, id: u16) -> Result<(), RegenerationError> {
        let removed = self.0.programs.remove(id);
        removed.map_err(|error| RegenerationError(error.to_string()))?;
        let addresses = self.subjects().forget(id);
        self.withdraw(addresses.iter());
        self.0.built.notify_one();
        Ok(())
    }

    /// Announces the identity of an endpoint's addresses to the other nodes.
    fn announce(&self, endpoint: &Regeneration) {
        let nodes = &self.0.node_addresses;
        let with_node = |ip: &IpAddr| {
            let of_family = |node: &&IpAddr| node.is_ipv4() == ip.is_ipv4();
            let node = nodes.iter().find(of_family).or(nodes.first())?;
            Some((*ip, *node))
        };
        let addresses: Vec<_> = endpoint.addresses.iter().filter_map(with_node).collect();
        let cluster = &self.0.cluster;
        cluster.announce(endpoint.id, endpoint.identity, &addresses);
    }

    fn withdraw<'a>(&self, addresses: impl Iterator<Item = &'a IpAddr>) {
        for ip in addresses {
            self.0.cluster.withdraw(*ip);
        }
    }
}

impl Regenerator for Enforcer {
    fn held_back(&self) -> watch::Receiver<Option<RegenerationError>> {
        self.0.held_back.subscribe()
    }

    fn until_informed(&self) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
        Box::pin(async {
            let mut held_back = self.0.held_back.subscribe();
            let mut identities = self.0.identities.clone();
            // Identities still missing by then arrive with the next change.
            tokio::select! {
                _ = held_back.wait_for(Option::is_none) => {}
                _ = identities.wait_for(|known| known.stale.is_some()) => {}
                () = tokio::time::sleep(PATIENCE) => {}
            }
        })
    }

    fn until_covered(&self, identity: Identity) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
        let mut covered = self.0.covered.subscribe();
        Box::pin(async move {
            let is_known = covered.wait_for(|covered| covered.contains_key(&identity));
            // Endpoints that lag behind for longer hold up no other.
            let _ = tokio::time::timeout(PATIENCE, is_known).await;
        })
    }

    fn regenerate<'a>(
        &'a self,
        endpoint: &'a Regeneration,
    ) -> Pin<Box<dyn Future<Output = Result<RealizedPolicy, RegenerationError>> + Send + 'a>> {
        let endpoint = endpoint.clone();
        Box::pin(self.blocking(move |enforcer| enforcer.build(&endpoint)))
    }

    fn shut_off(
        &self,
        id: u16,
    ) -> Pin<Box<dyn Future<Output = Result<Option<RealizedPolicy>, RegenerationError>> + Send + '_>>
    {
        Box::pin(self.blocking(move |enforcer| {
            let named = enforcer.name_empty_table(id);
            // The failed deletion must be reported.
            enforcer.0.built.notify_one();
            named.map_err(|error| RegenerationError(error.to_string()))
        }))
    }

    fn remove(
        &self,
        id: u16,
    ) -> Pin<Box<dyn Future<Output = Result<(), RegenerationError>> + Send + '_>> {
        Box::pin(self.blocking(move |enforcer| enforcer.take_away(id)))
    }
}

impl Regeneration {
    fn subject(&self) -> Subject {
        Subject {
            identity: self.identity,
            fails_closed: self.fails_closed,
            enforcement: self.settings.enforcement,
        }
    }
}

/// Returns the labels by which policies select an endpoint. Until the endpoint has an identity of its own, this is only
/// the label of the reserved identity, whatever labels the endpoint has.
pub(super) fn subject_labels(identity: Identity, labels: &LabelSet) -> LabelSet {
    identity.reserved_labels().unwrap_or_else(|| labels.clone())
}

//! Recently deleted endpoints. They remain visible for a while, so that users can see what happened to them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use health_model::api::Endpoint;
use tokio::time::{Instant, sleep};

use super::Manager;
use super::table::Entry;

/// How long deleted endpoints are shown.
const SHOWN: Duration = Duration::from_secs(60);

/// The recently deleted endpoints. All their resources are free, except that their ids are reused only when no others
/// are available.
#[derive(Debug, Default)]
pub(super) struct DepartedEndpoints(BTreeMap<u16, DepartedEndpoint>);

#[derive(Debug)]
struct DepartedEndpoint {
    entry: Entry,
    since: Instant,
}

impl DepartedEndpoints {
    /// Starts showing a deleted endpoint.
    pub(super) fn show(&mut self, entry: Entry, now: Instant) {
        let departed = DepartedEndpoint { entry, since: now };
        self.0.insert(departed.entry.saved.id, departed);
    }

    /// Forgets endpoints that have been shown long enough. Returns whether there were any.
    fn forget(&mut self, now: Instant) -> bool {
        let before = self.0.len();
        self.0
            .retain(|_, departed| now.duration_since(departed.since) < SHOWN);
        self.0.len() < before
    }

    /// Forgets the endpoint that was deleted first, and returns its id.
    pub(super) fn forget_first(&mut self) -> Option<u16> {
        let first = self.0.iter().min_by_key(|(_, departed)| departed.since);
        let id = first.map(|(id, _)| *id)?;
        self.0.remove(&id);
        Some(id)
    }

    pub(super) fn get(&self, id: u16) -> Option<&Entry> {
        self.0.get(&id).map(|departed| &departed.entry)
    }

    pub(super) fn shown(&self) -> impl Iterator<Item = Arc<Endpoint>> {
        self.0.values().map(|departed| departed.entry.shown())
    }
}

impl Manager {
    /// Forgets the endpoints deleted so far, once they have been shown long enough.
    pub(super) async fn forget_later(self) {
        sleep(SHOWN).await;
        let is_less = self.table().departed.forget(Instant::now());
        if is_less {
            self.note_change();
        }
    }
}

#[cfg(test)]
mod tests {
    use health_model::api::EndpointSettings;
    use health_model::identity::Identity;
    use health_model::ipam::NodeIpam;
    use health_model::labels::LabelSet;
    use health_net::mac::MacAddr;
    use health_net::netns::NetNsId;
    use jiff::Timestamp;

    use super::*;
    use crate::health::ENDPOINT_IDS;
    use crate::lifecycle::Lifecycle;
    use crate::manager::table::Table;
    use crate::workload::SavedEndpoint;

    fn entry(id: u16, ipam: &NodeIpam) -> Entry {
        let saved = SavedEndpoint {
            id,
            name: None,
            container_id: None,
            pod: None,
            network: None,
            labels: LabelSet::default(),
            given_labels: None,
            former_labels: None,
            identity: Identity::INIT,
            ipv4: None,
            ipv6: None,
            mac: MacAddr([2, 0, 0, 0, 0, 1]),
            host_mac: MacAddr([2, 0, 0, 0, 0, 2]),
            mtu: 1500,
            netns: "/n".into(),
            netns_id: NetNsId { dev: 4, ino: 1 },
            ifname: "eth0".to_owned(),
            device: format!("lxc{id}"),
            ifindex: None,
            created: Timestamp::UNIX_EPOCH,
            boot_id: None,
            has_default_route: true,
            settings: EndpointSettings::default(),
            is_deleting: false,
        };
        let lifecycle = Lifecycle::created(Timestamp::UNIX_EPOCH, "created");
        Entry::new(saved, lifecycle, ipam)
    }

    #[tokio::test(start_paused = true)]
    async fn the_id_of_an_endpoint_that_is_shown_goes_to_another_only_where_none_else_is_free() {
        let ipam = NodeIpam::new(&[], &[], &[], Duration::ZERO).unwrap();
        let departed: Vec<Entry> = ENDPOINT_IDS
            .filter(|id| ![8, 9].contains(id))
            .map(|id| entry(id, &ipam))
            .collect();
        let living = entry(8, &ipam);
        let mut table = Table::new(ipam, 1);
        let begun = Instant::now();
        for one in departed {
            let since = begun + Duration::from_millis(one.saved.id.abs_diff(1000).into());
            table.departed.show(one, since);
        }
        table.entries.insert(8, living);
        let mut rng = rand::rng();
        assert_eq!(table.free_id(&mut rng).unwrap(), 9);
        let other = entry(9, &table.ipam);
        table.entries.insert(9, other);
        assert_eq!(table.free_id(&mut rng).unwrap(), 1000);
        assert!(table.departed.get(1000).is_none());
        assert!(table.departed.get(1001).is_some());
    }
}

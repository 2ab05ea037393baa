//! Workload endpoints in the datapath: each is added and removed individually, while the node's own hooks and entries
//! stay.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::net::IpAddr;
use std::path::Path;

use health_common::addr::Addr;
use health_common::endpoint::{ENDPOINT_ENFORCE_EGRESS, ENDPOINT_ENFORCE_INGRESS, EndpointInfo};
use nix::net::if_::if_nametoindex;
use tracing::{debug, warn};

use crate::attach::{Attacher, Hook, Hooks};
use crate::error::DatapathError;
use crate::maps::{EndpointMaps, has_other_endpoints, remove_former_layout, with_link_local};
use crate::pin_folder::former_layout_pins;

/// A workload's endpoint as the programs know it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Workload {
    /// The host's end of its veth pair.
    pub device: String,
    /// Its addresses.
    pub addresses: Vec<IpAddr>,
    /// The map entry for each of its addresses.
    pub info: EndpointInfo,
}

impl Workload {
    fn entries(&self) -> impl Iterator<Item = (Addr, EndpointInfo)> {
        let addresses = self.addresses.iter();
        addresses.flat_map(|address| with_link_local(Addr::from(*address), self.info))
    }

    fn hooks(&self) -> [Hook; 2] {
        Hook::endpoint(&self.device, self.info.ifindex)
    }

    fn has_device(&self) -> bool {
        if_nametoindex(self.device.as_str()) == Ok(self.info.ifindex)
    }
}

/// The known endpoints by id, and the next one to check.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Workloads {
    known: BTreeMap<u16, Workload>,
    next: u16,
    /// Endpoints that programs of another map layout serve until they are set. This agent's maps do not describe these
    /// endpoints.
    held_back: BTreeSet<u16>,
}

impl Workloads {
    pub(crate) fn entries(&self) -> impl Iterator<Item = (Addr, EndpointInfo)> {
        self.known.values().flat_map(Workload::entries)
    }

    /// Returns the endpoints' ifindexes and ids.
    pub(crate) fn devices(&self) -> impl Iterator<Item = (u32, u16)> {
        let known = self.known.values();
        known.map(|workload| (workload.info.ifindex, workload.info.id))
    }

    pub(crate) fn hooks(&self) -> impl Iterator<Item = Hook> {
        self.known.values().flat_map(Workload::hooks)
    }

    /// Returns the hooks where programs of another map layout are attached.
    pub(crate) fn hooks_held_back(&self) -> Vec<Hook> {
        let held_back = self.held_back.iter().filter_map(|id| self.known.get(id));
        held_back.flat_map(Workload::hooks).collect()
    }

    /// Whether programs of another map layout serve any endpoint.
    pub(crate) fn are_held_back(&self) -> bool {
        !self.held_back.is_empty()
    }

    /// Returns up to `count` endpoints that this agent's programs must serve, round-robin.
    fn turn(&mut self, count: usize) -> Vec<Workload> {
        let after = self.known.range(self.next..);
        let before = self.known.range(..self.next);
        let turn: Vec<_> = after
            .chain(before)
            .filter(|(id, _)| !self.held_back.contains(id))
            .take(count)
            .map(|(id, workload)| (*id, workload.clone()))
            .collect();
        self.next = turn.last().map_or(0, |(id, _)| id.wrapping_add(1));
        turn.into_iter().map(|(_, workload)| workload).collect()
    }

    /// Takes over a former agent's endpoints. Must be called before anything is attached.
    pub(crate) fn adopt(
        &mut self,
        workloads: impl IntoIterator<Item = Workload>,
        endpoints: &EndpointMaps,
        hooks: &Hooks,
        pins: &Path,
    ) {
        let has_other_endpoints = has_other_endpoints(pins);
        for mut workload in workloads {
            let known = workload
                .addresses
                .iter()
                .find_map(|address| endpoints.get(Addr::from(*address)));
            let of_same = |known: &EndpointInfo| {
                (known.id, known.ifindex) == (workload.info.id, workload.info.ifindex)
            };
            if let Some(known) = known.filter(of_same) {
                workload.info = known;
            }
            if has_other_endpoints && is_served_aside(&workload, hooks, pins) {
                self.held_back.insert(workload.info.id);
            }
            self.known.insert(workload.info.id, workload);
        }
    }

    /// Adds an endpoint, or changes its entry. Writes the entries before attaching the programs, so that each packet
    /// meets the old or the new state. On failure, nothing changes.
    pub(crate) fn set(
        &mut self,
        workload: Workload,
        attacher: &mut Attacher<'_>,
    ) -> Result<(), DatapathError> {
        let id = workload.info.id;
        let hooks = workload.hooks();
        attacher.folder.make_folders()?;
        let former = self.known.get(&id).cloned();
        let is_held_back = self.held_back.contains(&id);
        let mut done = write_entries(&workload, attacher);
        let fresh: Vec<_> = hooks
            .iter()
            .filter(|hook| !attacher.hooks.is_attached(hook))
            .collect();
        for hook in fresh {
            done = done.and_then(|()| attacher.attach_to_own(hook));
        }
        if let Err(error) = done {
            match &former {
                // One of the programs may be attached already, and only these entries say what it must enforce.
                Some(_) if is_held_back => {
                    self.known.insert(id, workload);
                }
                Some(former) => write_entries(former, attacher)?,
                None => forget(&workload, attacher)?,
            }
            return Err(error);
        }
        if let Some(former) = former {
            let endpoints = &mut attacher.maps.endpoints;
            let kept: HashSet<Addr> = workload.entries().map(|(address, _)| address).collect();
            for (address, _) in former
                .entries()
                .filter(|(address, _)| !kept.contains(address))
            {
                endpoints.remove(address)?;
            }
            if former.info.ifindex != workload.info.ifindex {
                endpoints.remove_device(former.info.ifindex)?;
            }
        }
        self.known.insert(id, workload);
        self.no_longer_held_back(id, attacher.folder.path());
        Ok(())
    }

    /// Switches an endpoint that these programs serve to another policy table, and changes nothing else.
    pub(crate) fn set_policy(
        &mut self,
        id: u16,
        table: u32,
        attacher: &mut Attacher<'_>,
    ) -> Result<(), DatapathError> {
        self.change(id, attacher, |info| info.policy = table)
    }

    /// Drops all traffic of an endpoint by pointing it at `table`, provided that this table has no entries.
    pub(crate) fn shut_off(
        &mut self,
        id: u16,
        table: u32,
        attacher: &mut Attacher<'_>,
    ) -> Result<(), DatapathError> {
        let shut_off = |info: &mut EndpointInfo| {
            info.policy = table;
            info.flags |= ENDPOINT_ENFORCE_INGRESS | ENDPOINT_ENFORCE_EGRESS;
        };
        match self.known.get(&id).cloned() {
            // Programs of another map layout serve this endpoint, and read other maps.
            Some(mut workload) if self.held_back.contains(&id) => {
                shut_off(&mut workload.info);
                self.set(workload, attacher)
            }
            _ => self.change(id, attacher, shut_off),
        }
    }

    fn change(
        &mut self,
        id: u16,
        attacher: &mut Attacher<'_>,
        change: impl FnOnce(&mut EndpointInfo),
    ) -> Result<(), DatapathError> {
        let Some(former) = self.known.get(&id).cloned() else {
            return Ok(());
        };
        let mut workload = former.clone();
        change(&mut workload.info);
        if let Err(error) = write_entries(&workload, attacher) {
            write_entries(&former, attacher)?;
            return Err(error);
        }
        self.known.insert(id, workload);
        Ok(())
    }

    /// The endpoints that are served.
    pub(crate) fn all(&self) -> impl Iterator<Item = &Workload> {
        self.known.values()
    }

    /// Returns the endpoints that this agent's programs must serve, by id.
    fn served(&self) -> impl Iterator<Item = (u16, &Workload)> {
        let known = self.known.iter().map(|(id, workload)| (*id, workload));
        known.filter(|(id, _)| !self.held_back.contains(id))
    }

    /// The endpoints that lack an attached program although their device exists.
    pub(crate) fn without_programs(&self, hooks: &Hooks) -> BTreeSet<u16> {
        self.served()
            .filter(|(_, workload)| {
                let mut own = workload.hooks().into_iter();
                own.any(|hook| !hooks.is_attached(&hook))
            })
            .filter(|(_, workload)| workload.has_device())
            .map(|(id, _)| id)
            .collect()
    }

    /// Removes an endpoint. Returns whether it existed.
    pub(crate) fn remove(
        &mut self,
        id: u16,
        attacher: &mut Attacher<'_>,
    ) -> Result<bool, DatapathError> {
        let Some(workload) = self.known.get(&id).cloned() else {
            return Ok(false);
        };
        forget(&workload, attacher)?;
        self.known.remove(&id);
        self.no_longer_held_back(id, attacher.folder.path());
        Ok(true)
    }

    /// Removes the former programs' pins once the last endpoint has moved.
    fn no_longer_held_back(&mut self, id: u16, pins: &Path) {
        if self.held_back.remove(&id)
            && let Err(error) = self.remove_former_layout(pins)
        {
            warn!(%error, "cannot remove the maps of the previous layout before the next start");
        }
    }

    /// Removes the pins of an agent with another map layout, if its programs serve no endpoint any more.
    pub(crate) fn remove_former_layout(&self, pins: &Path) -> Result<(), DatapathError> {
        match self.are_held_back() {
            true => Ok(()),
            false => remove_former_layout(pins),
        }
    }

    /// Returns the hooks of up to `count` endpoints, a different set at each call. An endpoint whose device is gone has
    /// no hooks.
    pub(crate) fn hooks_in_turn(&mut self, count: usize) -> impl Iterator<Item = Hook> {
        let turn = self.turn(count).into_iter();
        let there = turn.filter(Workload::has_device);
        there.flat_map(|workload| workload.hooks())
    }

    /// Attaches the missing programs of adopted endpoints. Failures are retried when the endpoint is set.
    pub(crate) fn attach_adopted(&self, attacher: &mut Attacher<'_>) {
        let hooks = self.served().flat_map(|(_, workload)| workload.hooks());
        let missing: Vec<Hook> = hooks
            .filter(|hook| !attacher.hooks.is_attached(hook))
            .collect();
        for hook in missing {
            if let Err(error) = attacher.attach_to_own(&hook) {
                debug!(%hook, %error, "not attached yet");
            }
        }
    }
}

/// Whether programs of another layout are on the endpoint's device: a link is pinned only in the folder set aside; or a
/// filter exists, with any program, and that layout's maps still exist.
fn is_served_aside(workload: &Workload, hooks: &Hooks, pins: &Path) -> bool {
    let aside = former_layout_pins(pins);
    workload.hooks().iter().any(|hook| {
        let is_linked = !hook.link_pin(pins).exists() && hook.link_pin(&aside).exists();
        is_linked || hooks.has_filter(hook)
    })
}

fn write_entries(workload: &Workload, attacher: &mut Attacher<'_>) -> Result<(), DatapathError> {
    let endpoints = &mut attacher.maps.endpoints;
    let mut entries = workload.entries();
    entries.try_for_each(|(address, info)| endpoints.write(address, &info))?;
    endpoints.write_device(workload.info.ifindex, workload.info.id)
}

fn forget(workload: &Workload, attacher: &mut Attacher<'_>) -> Result<(), DatapathError> {
    let endpoints = &mut attacher.maps.endpoints;
    for (address, _) in workload.entries() {
        endpoints.remove(address)?;
    }
    endpoints.remove_device(workload.info.ifindex)?;
    let mut hooks = workload.hooks().into_iter();
    hooks.try_for_each(|hook| attacher.detach(&hook))
}

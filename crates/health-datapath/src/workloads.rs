//! Workload endpoints in the datapath: each is added and removed on its own, while the node's own hooks and entries stay.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::iter;
use std::net::IpAddr;

use health_common::addr::Addr;
use health_common::endpoint::{ENDPOINT_ENFORCE_EGRESS, ENDPOINT_ENFORCE_INGRESS, EndpointInfo};
use nix::net::if_::if_nametoindex;
use tracing::{debug, warn};

use super::layout::LINK_PINS;
use super::layout_change::{has_other_endpoints, set_aside};
use super::{Datapath, DatapathError, Hook, HookFault};

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
}

/// An entry; for an IPv6 address, also the entry of the endpoint's link-local address.
pub(super) fn with_link_local(
    address: Addr,
    info: EndpointInfo,
) -> impl Iterator<Item = (Addr, EndpointInfo)> {
    let link_local = (!address.is_v4()).then(|| Addr::link_local(info.mac));
    iter::once(address)
        .chain(link_local)
        .map(move |address| (address, info))
}

/// The known endpoints by id, and which one to check next.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Workloads {
    known: BTreeMap<u16, Workload>,
    next: u16,
    /// Endpoints that programs of another map layout serve until they are set; this agent's maps do not describe them.
    held_back: BTreeSet<u16>,
}

impl Workloads {
    pub(super) fn entries(&self) -> impl Iterator<Item = (Addr, EndpointInfo)> {
        self.known.values().flat_map(Workload::entries)
    }

    /// Their device numbers and ids.
    pub(super) fn devices(&self) -> impl Iterator<Item = (u32, u16)> {
        let known = self.known.values();
        known.map(|workload| (workload.info.ifindex, workload.info.id))
    }

    pub(super) fn hooks(&self) -> impl Iterator<Item = Hook> {
        self.known.values().flat_map(Workload::hooks)
    }

    /// The hooks where programs of another map layout are attached.
    pub(super) fn hooks_held_back(&self) -> Vec<Hook> {
        let held_back = self.held_back.iter().filter_map(|id| self.known.get(id));
        held_back.flat_map(Workload::hooks).collect()
    }

    /// Whether programs of another map layout serve any endpoint.
    pub(super) fn are_held_back(&self) -> bool {
        !self.held_back.is_empty()
    }

    /// The next `count` endpoints, at most, that this agent's programs must serve, round-robin.
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
}

impl Datapath {
    /// Takes over a former agent's endpoints. Must be called before anything is attached; their map entries stay until they
    /// are [set](Self::set_workload). If that agent's endpoint maps had another layout, its programs and maps serve the
    /// endpoints until then.
    pub fn adopt_workloads(&mut self, workloads: impl IntoIterator<Item = Workload>) {
        let has_other_endpoints = has_other_endpoints(&self.pins);
        for mut workload in workloads {
            let known = workload
                .addresses
                .iter()
                .find_map(|address| self.endpoints.get(&Addr::from(*address), 0).ok());
            let of_same = |known: &EndpointInfo| {
                (known.id, known.ifindex) == (workload.info.id, workload.info.ifindex)
            };
            if let Some(known) = known.filter(of_same) {
                workload.info = known;
            }
            if has_other_endpoints && self.is_served_aside(&workload) {
                self.workloads.held_back.insert(workload.info.id);
            }
            self.workloads.known.insert(workload.info.id, workload);
        }
    }

    /// Whether programs of another layout are on the endpoint's device: a link is pinned only in the folder set aside; or a
    /// filter exists, whichever program it has by now, and that layout's maps still exist.
    fn is_served_aside(&self, workload: &Workload) -> bool {
        let aside = set_aside(&self.pins).join(LINK_PINS);
        workload.hooks().iter().any(|hook| {
            let pin = self.link_pin(hook);
            let former = pin.file_name().map(|name| aside.join(name));
            let is_linked = !pin.exists() && former.is_some_and(|former| former.exists());
            is_linked || matches!(self.clsact.filter(hook), Ok(Some(_)))
        })
    }

    /// Adds an endpoint, or changes its entry. Writes the entries before attaching its programs, so that each packet meets
    /// the old or the new state. After a failure everything is as before.
    pub fn set_workload(&mut self, workload: Workload) -> Result<(), DatapathError> {
        let id = workload.info.id;
        let hooks = workload.hooks();
        self.make_folders()?;
        let former = self.workloads.known.get(&id).cloned();
        let is_held_back = self.workloads.held_back.contains(&id);
        let mut done = self.write_entries(&workload);
        let fresh: Vec<_> = hooks
            .iter()
            .filter(|hook| !self.is_attached(hook))
            .collect();
        for hook in fresh {
            done = done.and_then(|()| self.attach_to_own(hook));
        }
        if let Err(error) = done {
            match &former {
                // One of its programs may be attached, and only these entries say what it must enforce.
                Some(_) if is_held_back => {
                    self.workloads.known.insert(id, workload);
                }
                Some(former) => self.write_entries(former)?,
                None => self.forget(&workload)?,
            }
            return Err(error);
        }
        if let Some(former) = former {
            let kept: HashSet<Addr> = workload.entries().map(|(address, _)| address).collect();
            for (address, _) in former
                .entries()
                .filter(|(address, _)| !kept.contains(address))
            {
                self.remove_endpoint(address)?;
            }
            if former.info.ifindex != workload.info.ifindex {
                self.remove_device(former.info.ifindex)?;
            }
        }
        self.workloads.known.insert(id, workload);
        self.no_longer_held_back(id);
        Ok(())
    }

    /// Points an endpoint that these programs serve at another policy table, and changes nothing else: needs neither its
    /// device nor its programs. An unknown endpoint is not an error. After a failure everything is as before.
    pub fn set_workload_policy(&mut self, id: u16, table: u32) -> Result<(), DatapathError> {
        self.change_workload(id, |info| info.policy = table)
    }

    /// Drops all traffic of an endpoint, provided that no entries were written to this table. An unknown endpoint is not an
    /// error. After a failure everything is as before.
    pub fn shut_off_workload(&mut self, id: u16, table: u32) -> Result<(), DatapathError> {
        let shut_off = |info: &mut EndpointInfo| {
            info.policy = table;
            info.flags |= ENDPOINT_ENFORCE_INGRESS | ENDPOINT_ENFORCE_EGRESS;
        };
        match self.workloads.known.get(&id).cloned() {
            // The programs of another map layout that serve it read other maps.
            Some(mut workload) if self.workloads.held_back.contains(&id) => {
                shut_off(&mut workload.info);
                self.set_workload(workload)
            }
            _ => self.change_workload(id, shut_off),
        }
    }

    fn change_workload(
        &mut self,
        id: u16,
        change: impl FnOnce(&mut EndpointInfo),
    ) -> Result<(), DatapathError> {
        let Some(former) = self.workloads.known.get(&id).cloned() else {
            return Ok(());
        };
        let mut workload = former.clone();
        change(&mut workload.info);
        if let Err(error) = self.write_entries(&workload) {
            self.write_entries(&former)?;
            return Err(error);
        }
        self.workloads.known.insert(id, workload);
        Ok(())
    }

    /// Whether programs of another map layout serve some endpoints.
    pub fn is_changing_layout(&self) -> bool {
        self.workloads.are_held_back()
    }

    /// The endpoints that are served.
    pub fn workloads(&self) -> impl Iterator<Item = &Workload> {
        self.workloads.known.values()
    }

    /// The endpoints that lack an attached program although their device exists.
    pub fn workloads_without_programs(&self) -> BTreeSet<u16> {
        let Workloads {
            known, held_back, ..
        } = &self.workloads;
        known
            .iter()
            .filter(|(id, _)| !held_back.contains(id))
            .filter(|(_, workload)| workload.hooks().iter().any(|hook| !self.is_attached(hook)))
            .filter(|(_, workload)| {
                if_nametoindex(workload.device.as_str()) == Ok(workload.info.ifindex)
            })
            .map(|(id, _)| *id)
            .collect()
    }

    /// Removes an endpoint. Returns whether it existed.
    pub fn remove_workload(&mut self, id: u16) -> Result<bool, DatapathError> {
        let Some(workload) = self.workloads.known.get(&id).cloned() else {
            return Ok(false);
        };
        self.forget(&workload)?;
        self.workloads.known.remove(&id);
        self.no_longer_held_back(id);
        Ok(true)
    }

    /// Once the last endpoint has moved, removes what the former programs needed.
    fn no_longer_held_back(&mut self, id: u16) {
        if self.workloads.held_back.remove(&id)
            && let Err(error) = self.remove_set_aside()
        {
            warn!(%error, "cannot remove the maps of the former layout before the next start");
        }
    }

    /// Faults at the hooks of up to `count` endpoints, different ones at each call. An endpoint whose device is gone has no
    /// hooks.
    pub fn workload_faults(&mut self, count: usize) -> Vec<HookFault> {
        let turn = self.workloads.turn(count);
        let there = turn.iter().filter(|workload| {
            if_nametoindex(workload.device.as_str()) == Ok(workload.info.ifindex)
        });
        there
            .flat_map(Workload::hooks)
            .filter_map(|hook| self.hook_fault(&hook))
            .collect()
    }

    /// Attaches the missing programs of adopted endpoints. Failures are retried when the endpoint is set.
    pub(super) fn attach_adopted(&mut self) {
        let Workloads {
            known, held_back, ..
        } = &self.workloads;
        let served = known.iter().filter(|(id, _)| !held_back.contains(id));
        let hooks = served.flat_map(|(_, workload)| workload.hooks());
        let missing: Vec<Hook> = hooks.filter(|hook| !self.is_attached(hook)).collect();
        for hook in missing {
            if let Err(error) = self.attach_to_own(&hook) {
                debug!(%hook, %error, "not attached yet");
            }
        }
    }

    fn write_entries(&mut self, workload: &Workload) -> Result<(), DatapathError> {
        let mut entries = workload.entries();
        entries.try_for_each(|(address, info)| self.write_endpoint(address, &info))?;
        self.write_device(workload.info.ifindex, workload.info.id)
    }

    fn is_attached(&self, hook: &Hook) -> bool {
        self.attached.contains_key(hook)
    }

    fn forget(&mut self, workload: &Workload) -> Result<(), DatapathError> {
        for (address, _) in workload.entries() {
            self.remove_endpoint(address)?;
        }
        self.remove_device(workload.info.ifindex)?;
        let mut hooks = workload.hooks().into_iter();
        hooks.try_for_each(|hook| self.detach(&hook))
    }
}

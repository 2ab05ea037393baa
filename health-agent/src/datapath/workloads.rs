//! Endpoints of workloads among the programs: each comes and goes by itself, while the node's own hooks and
//! entries stay.

use std::collections::{BTreeMap, HashSet};
use std::fs;
use std::io;
use std::net::IpAddr;

use health_common::addr::Addr;
use health_common::endpoint::EndpointInfo;
use nix::net::if_::if_nametoindex;
use tracing::debug;

use super::loader::file_error;
use super::{Datapath, DatapathError, Hook, HookFault};

/// A workload's endpoint as programs know it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Workload {
    /// The host's end of its veth pair.
    pub device: String,
    /// Its addresses.
    pub addresses: Vec<IpAddr>,
    /// What holds for each of them.
    pub info: EndpointInfo,
}

impl Workload {
    fn entries(&self) -> impl Iterator<Item = (Addr, EndpointInfo)> {
        let addresses = self.addresses.iter();
        addresses.map(|address| (Addr::from(*address), self.info))
    }

    fn hooks(&self) -> [Hook; 2] {
        Hook::endpoint(&self.device)
    }
}

/// Those there are, by id, and who is looked at next.
#[derive(Debug, Default)]
pub(super) struct Workloads {
    known: BTreeMap<u16, Workload>,
    /// Devices that have the programs ahead of their endpoints, by the ids that those will have.
    prepared: BTreeMap<u16, String>,
    next: u16,
}

impl Workloads {
    pub(super) fn entries(&self) -> impl Iterator<Item = (Addr, EndpointInfo)> {
        self.known.values().flat_map(Workload::entries)
    }

    pub(super) fn hooks(&self) -> impl Iterator<Item = Hook> {
        let known = self.known.values().map(|workload| &workload.device);
        known
            .chain(self.prepared.values())
            .flat_map(|device| Hook::endpoint(device))
    }

    /// Up to `count` of them, going round.
    fn turn(&mut self, count: usize) -> Vec<Workload> {
        let after = self.known.range(self.next..);
        let before = self.known.range(..self.next);
        let turn: Vec<_> = after
            .chain(before)
            .take(count)
            .map(|(id, workload)| (*id, workload.clone()))
            .collect();
        self.next = turn.last().map_or(0, |(id, _)| id.wrapping_add(1));
        turn.into_iter().map(|(_, workload)| workload).collect()
    }
}

impl Datapath {
    /// Takes over endpoints of a former agent. To be called before anything is attached; what holds for
    /// them in the maps stays until they are [set](Self::set_workload).
    pub fn adopt_workloads(&mut self, workloads: impl IntoIterator<Item = Workload>) {
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
            self.workloads.known.insert(workload.info.id, workload);
        }
    }

    /// Makes an endpoint one that programs serve, or changes what holds for it: its programs are on its
    /// device before its addresses are known, and each packet meets the old or the new. After a failure
    /// all is as before.
    pub fn set_workload(&mut self, workload: Workload) -> Result<(), DatapathError> {
        let id = workload.info.id;
        let hooks = workload.hooks();
        let is_known = self.workloads.known.contains_key(&id);
        self.make_folders()?;
        let mut done = Ok(());
        for hook in &hooks {
            done = done.and_then(|()| match self.is_attached(hook) {
                false => self.attach_to_own(hook),
                true if is_known => Ok(()),
                // Nobody has looked after it since it was prepared.
                true => self.look_after(hook),
            });
        }
        let former = self.workloads.known.get(&id).cloned();
        let written = done.and_then(|()| {
            let mut entries = workload.entries();
            entries.try_for_each(|(address, info)| self.write_endpoint(address, &info))
        });
        if let Err(error) = written {
            for (address, info) in former.iter().flat_map(Workload::entries) {
                self.write_endpoint(address, &info)?;
            }
            if former.is_none() {
                self.forget(&workload)?;
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
        }
        self.workloads.prepared.remove(&id);
        self.workloads.known.insert(id, workload);
        Ok(())
    }

    /// Puts the programs on the device of an endpoint to come, which then is [set](Self::set_workload) without
    /// waiting for the kernel to attach them, or [removed](Self::remove_workload). They know no address of it yet.
    pub fn prepare_workload(&mut self, id: u16, device: &str) -> Result<(), DatapathError> {
        self.make_folders()?;
        self.workloads.prepared.insert(id, device.to_owned());
        let mut hooks = Hook::endpoint(device).into_iter();
        let attached = hooks.try_for_each(|hook| self.attach_to_own(&hook));
        if attached.is_err() {
            self.workloads.prepared.remove(&id);
            self.detach(device)?;
        }
        attached
    }

    /// The policy table that each endpoint names.
    pub fn policies_named(&self) -> Vec<(u16, u32)> {
        let known = self.workloads.known.iter();
        known
            .map(|(id, workload)| (*id, workload.info.policy))
            .collect()
    }

    /// Takes an endpoint away, or what was prepared for one. Returns whether it was there.
    pub fn remove_workload(&mut self, id: u16) -> Result<bool, DatapathError> {
        if let Some(device) = self.workloads.prepared.remove(&id) {
            self.detach(&device)?;
        }
        let Some(workload) = self.workloads.known.get(&id).cloned() else {
            return Ok(false);
        };
        self.forget(&workload)?;
        self.workloads.known.remove(&id);
        Ok(true)
    }

    /// What is wrong with the hooks of up to `count` endpoints, others at each call. One whose device is
    /// gone has no hooks.
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

    /// Attaches what is missing of the endpoints that were taken over. Each is tried again when it is set.
    pub(super) fn attach_adopted(&mut self) {
        let hooks = self.workloads.hooks();
        let missing: Vec<Hook> = hooks.filter(|hook| !self.is_attached(hook)).collect();
        for hook in missing {
            if let Err(error) = self.attach_to_own(&hook) {
                debug!(%hook, %error, "not attached yet");
            }
        }
    }

    fn look_after(&mut self, hook: &Hook) -> Result<(), DatapathError> {
        match self.hook_fault(hook) {
            None => Ok(()),
            Some(HookFault::Detached(_)) => self.attach_to_own(hook),
            Some(fault) => self.repair_hook(&fault),
        }
    }

    fn is_attached(&self, hook: &Hook) -> bool {
        self.links.contains_key(hook)
    }

    fn forget(&mut self, workload: &Workload) -> Result<(), DatapathError> {
        for (address, _) in workload.entries() {
            self.remove_endpoint(address)?;
        }
        self.detach(&workload.device)
    }

    fn detach(&mut self, device: &str) -> Result<(), DatapathError> {
        for hook in Hook::endpoint(device) {
            self.links.remove(&hook);
            let pin = self.link_pin(&hook);
            match fs::remove_file(&pin) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    return Err(file_error("remove", &pin)(error));
                }
                _ => {}
            }
        }
        Ok(())
    }
}

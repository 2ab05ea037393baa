//! Monitors endpoints' devices: reports and repairs changes made by other programs.

use std::time::Instant;

use tracing::warn;

use super::Manager;
use crate::log::Status;
use crate::workload::{DeviceFault, FoundDevice, WorkloadError};

/// How many times one pass looks for faults and repairs them. One repair may uncover another fault.
const ROUNDS: usize = 2;

impl Manager {
    /// Drops endpoints whose device is gone, for example with its namespace, and addresses without an owner. Repairs
    /// the faults of all other endpoints on the host.
    pub(super) async fn look(&self) {
        let known = self.known_devices();
        if known.is_empty() {
            return;
        }
        let found = match self.0.devices.list().await {
            Ok(found) => found,
            Err(error) => {
                warn!(%error, "cannot check the devices of endpoints");
                return;
            }
        };
        for (id, ifindex) in known {
            let is_its = |found: &&FoundDevice| (found.endpoint, found.ifindex) == (id, ifindex);
            if let Some(there) = found.iter().find(is_its) {
                self.look_at(id, there).await;
                continue;
            }
            // An endpoint is never dropped only because the dump lacks its device.
            match self.0.devices.find(ifindex).await {
                Ok(Some(there)) if is_its(&&there) => {
                    self.look_at(id, &there).await;
                    continue;
                }
                Ok(_) => {}
                Err(error) => {
                    warn!(id, %error, "cannot check the device of an endpoint");
                    continue;
                }
            }
            warn!(
                id,
                "endpoint device and its namespace are gone; dropping the endpoint"
            );
            if let Err(error) = self.unmake(id).await {
                warn!(id, %error, "cannot drop an endpoint");
            }
        }
    }

    /// Checks an endpoint whose device exists. A device that is down is not checked further.
    async fn look_at(&self, id: u16, found: &FoundDevice) {
        self.note_link(id, found);
        if found.is_up
            && let Err(error) = self.put_in_order(id, found.ifindex).await
        {
            warn!(id, %error, "cannot inspect the devices of an endpoint");
        }
    }

    /// Repairs until nothing repairable is left, and reports the faults and what remains of them.
    async fn put_in_order(&self, id: u16, ifindex: u32) -> Result<(), WorkloadError> {
        let devices = &self.0.devices;
        // An endpoint that is being deleted needs no repair.
        let Ok(blueprint) = self.blueprint(id) else {
            return Ok(());
        };
        let mut left = String::new();
        for _ in 0..ROUNDS {
            let faults = devices.inspect(&blueprint, ifindex).await?;
            if faults.is_empty() {
                self.note_devices(id, None);
                return Ok(());
            }
            let texts: Vec<String> = faults.iter().map(ToString::to_string).collect();
            left = texts.join("; ");
            if !self.has_device_problem(id) {
                self.note_devices(id, Some(left.clone()));
            }
            let mut failures = Vec::new();
            for fault in &faults {
                match devices.repair(&blueprint, ifindex, fault).await {
                    Ok(()) => self.note_repair(id, fault),
                    Err(error) => failures.push(error.to_string()),
                }
            }
            if !failures.is_empty() {
                let why = failures.join("; ");
                self.note_devices(id, Some(format!("{left}; not repaired: {why}")));
                return Ok(());
            }
        }
        if !devices.inspect(&blueprint, ifindex).await?.is_empty() {
            let problem = format!("{left}; repaired, but broken again immediately");
            self.note_devices(id, Some(problem));
        } else {
            self.note_devices(id, None);
        }
        Ok(())
    }

    fn has_device_problem(&self, id: u16) -> bool {
        let found = self.with(id, |entry, _| entry.device_problem.is_some());
        found.unwrap_or(false)
    }

    /// Records the faults of an endpoint's devices if they have changed.
    fn note_devices(&self, id: u16, problem: Option<String>) {
        let noted = self.with(id, |entry, now| {
            if entry.device_problem == problem {
                return false;
            }
            match &problem {
                Some(problem) => {
                    warn!(id, problem, "faults found on the devices of an endpoint");
                    entry.note(now, Status::Failure, problem.clone());
                }
                None => entry.note(now, Status::Ok, "its devices are in order again"),
            }
            entry.device_problem = problem;
            true
        });
        if noted.unwrap_or(false) {
            self.note_change();
        }
    }

    fn note_repair(&self, id: u16, fault: &DeviceFault) {
        let cause = fault.cause();
        warn!(id, cause, "repaired: {fault}");
        let mut table = self.table();
        *table.repairs.entry(cause.to_owned()).or_default() += 1;
        if let Ok(entry) = table.living(id) {
            *entry.repairs.entry(cause.to_owned()).or_default() += 1;
            entry.touch();
        }
    }

    /// Records whether an endpoint's device is up; an endpoint whose device is down is cut off.
    fn note_link(&self, id: u16, found: &FoundDevice) {
        let noted = self.with(id, |entry, now| {
            let was_up = std::mem::replace(&mut entry.is_up, found.is_up);
            let (status, what) = match found.is_up {
                true => (Status::Ok, "up again"),
                false => (Status::Failure, "down"),
            };
            if was_up != found.is_up {
                entry.note(
                    now,
                    status,
                    format!("its device {} is {what}", found.device),
                );
            }
            was_up != found.is_up
        });
        // An endpoint that is being deleted needs no record.
        if noted.unwrap_or(false) {
            self.note_change();
        }
    }

    /// Returns the endpoints with devices and the devices' ifindexes. Also reclaims leaked addresses.
    fn known_devices(&self) -> Vec<(u16, u32)> {
        let mut table = self.table();
        for (address, owner) in table.take_back_leaks(Instant::now()) {
            warn!(%address, %owner, "reclaiming an address whose owner is gone");
        }
        let complete = table
            .entries
            .values()
            .filter(|entry| entry.is_complete && !entry.is_lost && !entry.is_being_removed);
        complete
            .filter_map(|entry| Some((entry.saved.id, entry.saved.ifindex?)))
            .collect()
    }
}

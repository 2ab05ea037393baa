//! Counts the flows of backends anew. The programs count a flow that is opened, and one that conntrack forgets, but not one
//! that a full map evicts.

use std::collections::HashMap;

use health_common::ct::TUPLE_IN;
use health_common::service::{ALGORITHM_LEAST_CONNECTION, Backend};

use super::lookup::reading;
use super::{ServiceMaps, ServiceTables, ServicesError};
use crate::layout;

/// How many flows a backend has, by its index and the number of its port.
type Counts = HashMap<(u32, u32), u32>;

impl ServiceTables {
    /// Sets the counts of flows right if a frontend goes by them. Returns how many were wrong: some are while flows come and
    /// go, by as many as these.
    pub fn recount(&self) -> Result<usize, ServicesError> {
        let mut frontends = self.frontends.values();
        if !frontends.any(|frontend| frontend.algorithm == ALGORITHM_LEAST_CONNECTION) {
            return Ok(0);
        }
        let maps = &self.maps;
        let before = maps.backends()?;
        let counts = maps.flow_counts()?;
        let mut right = Vec::new();
        for (index, before) in before {
            let count = counts.get(&(index, before.service));
            let count = count.copied().unwrap_or_default();
            if count == before.flows {
                continue;
            }
            let now = reading(layout::BACKENDS.name, maps.backends.get(&index))?;
            if let Some(now) = now.filter(|now| now.service == before.service) {
                // What was counted in the meantime counts.
                let flows = now.flows.saturating_add(count);
                let flows = flows.saturating_sub(before.flows);
                right.push((index, Backend { flows, ..now }));
            }
        }
        let written = maps.backends.write(&right);
        written.map_err(|(_, source)| {
            ServicesError::kernel("write to", layout::BACKENDS.name, source)
        })?;
        Ok(right.len())
    }
}

impl ServiceMaps {
    /// The flows that are known by what their backends answer, and the host's connected sockets.
    fn flow_counts(&self) -> Result<Counts, ServicesError> {
        let mut counts = Counts::new();
        let mut count = |backend: u32, service: u32| {
            *counts.entry((backend, service)).or_default() += 1;
        };
        self.for_each_flow(|flow| {
            if flow.direction == TUPLE_IN {
                count(flow.backend, flow.service);
            }
        })?;
        let sockets = self.sockets.for_each(|socket, flow| {
            if socket.is_connected() {
                count(flow.backend, flow.service);
            }
        });
        reading(layout::SOCKETS.name, sockets)?;
        Ok(counts)
    }
}

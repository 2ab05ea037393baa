//! Recounts the flows of backends. The programs count flows when they open and when conntrack forgets them, but not
//! when a full map evicts them.

use std::collections::HashMap;

use health_common::ct::TUPLE_IN;
use health_common::service::{ALGORITHM_LEAST_CONNECTION, Backend};

use super::lookup::reading;
use super::{ServiceMaps, ServiceTables, ServicesError};
use crate::layout;

/// Number of flows per backend, by its index and its port's number.
type Counts = HashMap<(u32, u32), u32>;

impl ServiceTables {
    /// Corrects flow counts if any frontend uses them. Returns the number of wrong counts. While flows come and go,
    /// some counts are off by the flows in transit.
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
                // Keeps flows that were counted in the meantime.
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
    /// Counts flows by their reply entries, and the host's connected sockets.
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

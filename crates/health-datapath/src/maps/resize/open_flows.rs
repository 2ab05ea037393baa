//! Flows that take precedence if a smaller TCP table cannot hold all flows: connections in which both sides have sent,
//! before connections that were never answered.

use std::collections::HashSet;
use std::io;
use std::os::fd::OwnedFd;

use aya::Pod;
use health_common::ct::{CtEntry, TUPLE_IN, Tuple4, Tuple6};
use health_common::tuple::Tuple;
use health_net::clock;

use super::copy::for_each;
use crate::layout::{CT4, CT6, MapLayout, NAT4, NAT6, REVNAT4, REVNAT6};
use crate::sys;

/// The keys of open connections in a conntrack table.
#[derive(Default)]
pub(super) struct OpenFlows(HashSet<Box<[u8]>>);

impl OpenFlows {
    /// Returns the conntrack table that knows which of a table's flows are open; `None` for other maps.
    pub(super) fn known_by(map: &MapLayout) -> Option<MapLayout> {
        match *map {
            CT4 | NAT4 | REVNAT4 => Some(CT4),
            CT6 | NAT6 | REVNAT6 => Some(CT6),
            _ => None,
        }
    }

    /// Adds the open connections from a map of this conntrack table.
    pub(super) fn read(&mut self, conntrack: &MapLayout, map: &OwnedFd) -> io::Result<()> {
        let now = clock::coarse_now_secs();
        for_each(conntrack, map, |key, value| {
            if sys::read::<CtEntry>(value).is_some_and(|entry| entry.is_open(now)) {
                self.0.insert(key.into());
            }
            Ok(())
        })
    }

    /// Whether a table's entry belongs to one of these open connections.
    pub(super) fn has(&self, map: &MapLayout, key: &[u8], value: &[u8]) -> bool {
        let is_open = match *map {
            CT4 | CT6 => Some(self.0.contains(key)),
            NAT4 => self.has_translation::<Tuple4>(key, value),
            NAT6 => self.has_translation::<Tuple6>(key, value),
            REVNAT4 => self.has_service_flow::<Tuple4>(key, value),
            REVNAT6 => self.has_service_flow::<Tuple6>(key, value),
            _ => None,
        };
        is_open.unwrap_or(false)
    }

    fn has_translation<T>(&self, key: &[u8], value: &[u8]) -> Option<bool>
    where
        T: Tuple + Pod,
        T::Translation: Pod,
    {
        let (key, entry) = (sys::read::<T>(key)?, sys::read(value)?);
        Some(self.has_flow(key.flow(&entry)))
    }

    fn has_service_flow<T>(&self, key: &[u8], value: &[u8]) -> Option<bool>
    where
        T: Tuple + Pod,
        T::ServiceFlow: Pod,
    {
        let (key, entry) = (sys::read::<T>(key)?, sys::read(value)?);
        let sent = key.sent(&entry);
        // If the backend sees the client itself, a flow from outside has direction in.
        let from_outside = sent.with_direction(TUPLE_IN);
        Some(self.has_flow(sent) || self.has_flow(from_outside))
    }

    /// Whether the flow is open in either direction: conntrack may have seen either side's packet first.
    fn has_flow<T: Tuple + Pod>(&self, flow: T) -> bool {
        let ways = [flow, flow.reply()];
        ways.iter().any(|way| self.0.contains(sys::bytes_of(way)))
    }
}

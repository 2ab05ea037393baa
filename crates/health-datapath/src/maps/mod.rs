//! The pinned maps: opening them, writing those of endpoints and settings, and changing their layout and sizes.

mod endpoints;
mod layout_change;
mod open;
mod resize;
mod rings;
mod service_sizes;
mod settings;

use std::collections::HashMap;
use std::path::Path;
use std::time::Duration;

use aya::maps::Map;

use crate::error::DatapathError;
use crate::layout::{IP_CALLS, MAPS, MapLayout};
use crate::optional_parts::OptionalParts;

pub(crate) use endpoints::{EndpointMaps, with_link_local};
pub(crate) use layout_change::{
    has_other_endpoints, move_other_layout_aside, remove_former_layout,
};
pub(crate) use open::{formers, map_data, typed};
pub use resize::MapSizes;
pub(crate) use resize::PendingResize;
pub(crate) use rings::Ring;
pub use service_sizes::ServiceMapSizes;
pub(crate) use settings::{SettingMaps, xdp_times};

use rings::{publish_first_slot_counts, publish_slot_counts};

/// The longest hold on new flows after each step of replacing maps. If the agent is killed meanwhile, flows resume by
/// themselves.
const LONGEST_HOLD: Duration = Duration::from_secs(10);

/// The maps of a loaded datapath.
pub(crate) struct Maps {
    /// By name, as opened by the loader.
    opened: HashMap<String, Map>,
    pub(crate) endpoints: EndpointMaps,
    pub(crate) settings: SettingMaps,
    /// Set until the programs are attached at all their hooks.
    resizing: Option<PendingResize>,
}

impl Maps {
    /// Opens the maps that the loader has pinned.
    pub(crate) fn open(
        pins: &Path,
        parts: OptionalParts,
        resizing: PendingResize,
    ) -> Result<Self, DatapathError> {
        let maps = Self {
            opened: HashMap::new(),
            endpoints: EndpointMaps::open(pins)?,
            settings: SettingMaps::open(pins, parts)?,
            resizing: resizing.is_needed().then_some(resizing),
        };
        publish_first_slot_counts(pins)?;
        Ok(maps)
    }

    /// Keeps maps as the loader opened them, by name.
    pub(crate) fn keep(&mut self, opened: HashMap<String, Map>) {
        self.opened.extend(opened);
    }

    /// One of the kept maps.
    pub(crate) fn opened_mut(&mut self, layout: &MapLayout) -> Result<&mut Map, DatapathError> {
        let opened = self.opened.get_mut(layout.name);
        opened.ok_or_else(|| DatapathError::Missing(layout.name.to_owned()))
    }

    /// Whether the map for uplinks whose packets begin with the IP header is in use.
    pub(crate) fn have_ip_calls(&self) -> bool {
        self.opened.contains_key(IP_CALLS.name)
    }

    /// Whether only the maps' contents have changed since they were opened.
    pub(crate) fn are_as_loaded(&self) -> bool {
        // Names all fields, so that a new field must be considered here. Maps are handles.
        let Self {
            opened: _,
            endpoints: _,
            settings: _,
            resizing,
        } = self;
        resizing.is_none()
    }

    /// Restores missing pins. Returns the names of the restored maps.
    pub(crate) fn repair_pins(&self, pins: &Path) -> Result<Vec<String>, DatapathError> {
        let mut lost = Vec::new();
        for map in self.pinned() {
            let path = pins.join(map.name);
            if path.exists() {
                continue;
            }
            let opened = self
                .opened
                .get(map.name)
                .ok_or_else(|| DatapathError::Missing(map.name.into()))?;
            opened
                .pin(&path)
                .map_err(|source| DatapathError::Pin { path, source })?;
            lost.push(map.name.to_owned());
        }
        Ok(lost)
    }

    /// Whether all maps have their pins.
    pub(crate) fn are_pinned(&self, pins: &Path) -> bool {
        self.pinned().all(|map| pins.join(map.name).exists())
    }

    /// Returns the maps that have pins.
    fn pinned(&self) -> impl Iterator<Item = MapLayout> {
        let of_ip = self.have_ip_calls().then_some(IP_CALLS);
        MAPS.into_iter().chain(of_ip)
    }

    /// Whether some maps are changing size and the programs are not yet attached at all their hooks.
    pub(crate) fn are_resizing(&self) -> bool {
        self.resizing.is_some()
    }

    /// Whether flows that start now could be lost: former programs know only the former maps, new programs only the new
    /// ones.
    pub(crate) fn would_lose_flows(&self) -> bool {
        self.resizing.as_ref().is_some_and(PendingResize::has_flows)
    }

    /// Holds new flows, or extends the hold, if they could be lost.
    pub(crate) fn hold_flows(&mut self) -> Result<(), DatapathError> {
        match self.would_lose_flows() {
            true => self.settings.hold_flows(LONGEST_HOLD),
            false => Ok(()),
        }
    }

    /// Ends the hold on new flows.
    pub(crate) fn release_flows(&mut self) -> Result<(), DatapathError> {
        self.settings.hold_flows(Duration::ZERO)
    }

    /// Copies entries of the former maps to the new ones.
    pub(crate) fn carry_over(&self) -> Result<(), DatapathError> {
        match &self.resizing {
            Some(resizing) => resizing.carry_over(),
            None => Ok(()),
        }
    }

    /// Copies entries that programs have written since then. Must be called right before the programs are replaced.
    pub(crate) fn catch_up(&mut self) -> Result<(), DatapathError> {
        match &mut self.resizing {
            Some(resizing) => resizing.catch_up(),
            None => Ok(()),
        }
    }

    /// Copies entries that programs have written so far, and removes the former maps. Must be called when no program
    /// uses the former maps any more.
    pub(crate) fn remove_formers(&mut self) -> Result<(), DatapathError> {
        match &mut self.resizing {
            Some(resizing) => resizing.finish(),
            None => Ok(()),
        }
    }

    /// Ends all size changes.
    pub(crate) fn end_resizing(&mut self, pins: &Path) -> Result<(), DatapathError> {
        self.resizing = None;
        publish_slot_counts(pins)
    }
}

//! The maps of settings that the programs read.

use std::collections::HashMap as StdHashMap;
use std::path::Path;
use std::time::Duration;

use aya::maps::{Array, HashMap, MapData};
use health_common::config::{DatapathConfig, SERVICES};
use health_common::masquerade::MasqueradeConfig;
use health_common::service::direct::DirectConfig;
use health_common::service::xdp::{XDP_WAY_NS, XdpDevice, XdpTimes};
use health_net::clock;

use super::open::typed;
use crate::error::{DatapathError, map_error};
use crate::layout;
use crate::optional_parts::OptionalParts;
use crate::program::DatapathProgram;

/// `HEALTH_CONFIG`, `HEALTH_XDP_TIMES`, `HEALTH_MASQUERADE` and `HEALTH_DIRECT`.
pub(crate) struct SettingMaps {
    /// The parts whose programs are loaded.
    parts: OptionalParts,
    config: Array<MapData, DatapathConfig>,
    xdp_times: Array<MapData, XdpTimes>,
    masquerade: Array<MapData, MasqueradeConfig>,
    direct: Array<MapData, DirectConfig>,
}

impl SettingMaps {
    pub(super) fn open(pins: &Path, parts: OptionalParts) -> Result<Self, DatapathError> {
        Ok(Self {
            parts,
            config: typed(pins, &layout::CONFIG, Array::try_from)?,
            xdp_times: typed(pins, &layout::XDP_TIMES, Array::try_from)?,
            masquerade: typed(pins, &layout::MASQUERADE, Array::try_from)?,
            direct: typed(pins, &layout::DIRECT, Array::try_from)?,
        })
    }

    /// Sets the configuration that the programs read. Fails if it needs programs that were not loaded.
    pub(crate) fn configure(&mut self, config: DatapathConfig) -> Result<(), DatapathError> {
        if config.flags & SERVICES != 0 && !self.parts.services {
            return Err(DatapathError::NotLoaded(DatapathProgram::ToService));
        }
        self.config
            .set(0, config, 0)
            .map_err(map_error("write", layout::CONFIG.name))?;
        self.note_change()
    }

    /// Prevents new service and masquerade flows for this long; zero allows new flows again.
    pub(super) fn hold_flows(&mut self, time: Duration) -> Result<(), DatapathError> {
        let name = layout::CONFIG.name;
        let config = self.config.get(&0, 0).map_err(map_error("read", name))?;
        let flows_held_until_ns = match time.as_nanos() as u64 {
            0 => 0,
            time_ns => clock::now_ns() + time_ns,
        };
        self.configure(DatapathConfig {
            flows_held_until_ns,
            ..config
        })
    }

    /// Sets the keys for the tags on packets that nodes forward to each other's backends.
    pub(crate) fn set_direct(&mut self, direct: DirectConfig) -> Result<(), DatapathError> {
        self.direct
            .set(0, direct, 0)
            .map_err(map_error("write", layout::DIRECT.name))
    }

    /// Sets whose packets are masqueraded. Fails if it needs programs that were not loaded.
    pub(crate) fn set_masquerade(
        &mut self,
        masquerade: MasqueradeConfig,
    ) -> Result<(), DatapathError> {
        if masquerade.is_on() && !self.parts.masquerade {
            return Err(DatapathError::NotLoaded(DatapathProgram::Masquerade));
        }
        self.masquerade
            .set(0, masquerade, 0)
            .map_err(map_error("write", layout::MASQUERADE.name))?;
        self.note_change()
    }

    /// Replaces the devices on which XDP forwards service packets; `wanted` is by ifindex.
    pub(crate) fn set_xdp_devices(
        &mut self,
        pins: &Path,
        wanted: StdHashMap<u32, XdpDevice>,
    ) -> Result<(), DatapathError> {
        let failed = || map_error("write", layout::XDP_DEVICES.name);
        let mut devices: HashMap<_, u32, XdpDevice> =
            typed(pins, &layout::XDP_DEVICES, HashMap::try_from)?;
        let known: StdHashMap<u32, XdpDevice> = devices.iter().filter_map(Result::ok).collect();
        if wanted == known {
            return Ok(());
        }
        for number in known.keys().filter(|number| !wanted.contains_key(number)) {
            devices.remove(number).map_err(failed())?;
        }
        for (number, device) in wanted {
            if known.get(&number) != Some(&device) {
                devices.insert(number, device, 0).map_err(failed())?;
            }
        }
        self.note_change()
    }

    /// Makes XDP forget its forwarding entries after a change that affects them.
    fn note_change(&mut self) -> Result<(), DatapathError> {
        self.xdp_times
            .set(0, xdp_times(), 0)
            .map_err(map_error("write", layout::XDP_TIMES.name))
    }
}

/// Returns the entry that notifies the XDP program of a change right now.
pub(crate) fn xdp_times() -> XdpTimes {
    XdpTimes {
        changed_ns: clock::now_ns(),
        way_ticks: XDP_WAY_NS / clock::tick_ns().max(1),
    }
}

//! The maps of local endpoints: by address, and by device.

use std::collections::HashMap as StdHashMap;
use std::iter;
use std::net::IpAddr;
use std::path::Path;

use aya::maps::{HashMap, MapData};
use health_common::addr::Addr;
use health_common::endpoint::EndpointInfo;

use super::open::typed;
use crate::aya_io::gone;
use crate::error::{DatapathError, map_error};
use crate::layout;

/// `HEALTH_ENDPOINTS` and `HEALTH_DEVICES`.
pub(crate) struct EndpointMaps {
    endpoints: HashMap<MapData, Addr, EndpointInfo>,
    devices: HashMap<MapData, u32, u32>,
}

/// Returns an entry; for an IPv6 address, also the entry of the endpoint's link-local address.
pub(crate) fn with_link_local(
    address: Addr,
    info: EndpointInfo,
) -> impl Iterator<Item = (Addr, EndpointInfo)> {
    let link_local = (!address.is_v4()).then(|| Addr::link_local(info.mac));
    iter::once(address)
        .chain(link_local)
        .map(move |address| (address, info))
}

impl EndpointMaps {
    pub(super) fn open(pins: &Path) -> Result<Self, DatapathError> {
        Ok(Self {
            endpoints: typed(pins, &layout::ENDPOINTS, HashMap::try_from)?,
            devices: typed(pins, &layout::DEVICES, HashMap::try_from)?,
        })
    }

    /// Replaces the local endpoints by these addresses plus those of workloads, and the workloads' devices by
    /// `devices`. Entries that stay are never missing in between.
    pub(crate) fn set_all(
        &mut self,
        wanted: &[(IpAddr, EndpointInfo)],
        of_workloads: impl Iterator<Item = (Addr, EndpointInfo)>,
        devices: impl Iterator<Item = (u32, u16)>,
    ) -> Result<(), DatapathError> {
        let own = wanted
            .iter()
            .flat_map(|(addr, info)| with_link_local(Addr::from(*addr), *info));
        let wanted: StdHashMap<Addr, EndpointInfo> = own.chain(of_workloads).collect();
        for (addr, endpoint) in &wanted {
            self.write(*addr, endpoint)?;
        }
        let known: Vec<Addr> = self.endpoints.keys().filter_map(Result::ok).collect();
        for addr in known.into_iter().filter(|addr| !wanted.contains_key(addr)) {
            self.remove(addr)?;
        }
        let wanted: StdHashMap<u32, u16> = devices.collect();
        for (ifindex, id) in &wanted {
            self.write_device(*ifindex, *id)?;
        }
        let known: Vec<u32> = self.devices.keys().filter_map(Result::ok).collect();
        for ifindex in known
            .into_iter()
            .filter(|known| !wanted.contains_key(known))
        {
            self.remove_device(ifindex)?;
        }
        Ok(())
    }

    /// The entry of an address.
    pub(crate) fn get(&self, addr: Addr) -> Option<EndpointInfo> {
        self.endpoints.get(&addr, 0).ok()
    }

    pub(crate) fn write(
        &mut self,
        addr: Addr,
        endpoint: &EndpointInfo,
    ) -> Result<(), DatapathError> {
        self.endpoints
            .insert(addr, endpoint, 0)
            .map_err(map_error("write", layout::ENDPOINTS.name))
    }

    pub(crate) fn remove(&mut self, addr: Addr) -> Result<(), DatapathError> {
        gone(self.endpoints.remove(&addr)).map_err(map_error("write", layout::ENDPOINTS.name))
    }

    /// Assigns a device to its endpoint.
    pub(crate) fn write_device(&mut self, ifindex: u32, id: u16) -> Result<(), DatapathError> {
        self.devices
            .insert(ifindex, u32::from(id), 0)
            .map_err(map_error("write", layout::DEVICES.name))
    }

    pub(crate) fn remove_device(&mut self, ifindex: u32) -> Result<(), DatapathError> {
        gone(self.devices.remove(&ifindex)).map_err(map_error("write", layout::DEVICES.name))
    }
}

//! Reads the echo probes of other agents from `HEALTH_ARRIVALS`, where the uplinks' programs count them.

use std::io;
use std::path::Path;

use aya::maps::{HashMap, MapData, MapError};
use health_common::arrivals::{Arrivals, Prober};

use crate::error::DatapathError;
use crate::layout;
use crate::maps::typed;

/// The probe arrivals that this agent reports back to the probing agents.
pub trait ArrivalStore: Send + Sync + 'static {
    /// Returns the arrivals of an agent's probes; `None` if none arrived.
    fn arrivals(&self, prober: Prober) -> io::Result<Option<Arrivals>>;
}

/// `HEALTH_ARRIVALS`, for reading.
pub struct KernelArrivals(HashMap<MapData, Prober, Arrivals>);

impl KernelArrivals {
    /// Opens the map pinned in an instance's folder.
    pub(crate) fn from_pins(pins: &Path) -> Result<Self, DatapathError> {
        typed(pins, &layout::ARRIVALS, HashMap::try_from).map(Self)
    }
}

impl ArrivalStore for KernelArrivals {
    fn arrivals(&self, prober: Prober) -> io::Result<Option<Arrivals>> {
        match self.0.get(&prober, 0) {
            Ok(arrivals) => Ok(Some(arrivals)),
            Err(MapError::KeyNotFound) => Ok(None),
            Err(MapError::SyscallError(error)) => Err(error.io_error),
            Err(other) => Err(io::Error::other(other)),
        }
    }
}

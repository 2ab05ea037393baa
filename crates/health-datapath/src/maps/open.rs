//! Opens pinned maps.

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use aya::maps::{Map, MapData, MapError};

use crate::error::{DatapathError, file_error, map_error};
use crate::layout::MapLayout;
use crate::sys;

/// Opens a map and converts it with `convert`.
pub(crate) fn typed<T>(
    pins: &Path,
    layout: &MapLayout,
    convert: impl FnOnce(Map) -> Result<T, MapError>,
) -> Result<T, DatapathError> {
    MapData::from_pin(pins.join(layout.name))
        .and_then(Map::from_map_data)
        .and_then(convert)
        .map_err(map_error("open", layout.name))
}

/// Opens a map without key and value types.
pub(crate) fn map_data(pins: &Path, layout: &MapLayout) -> Result<MapData, DatapathError> {
    MapData::from_pin(pins.join(layout.name)).map_err(map_error("open", layout.name))
}

/// Opens a pinned map; `None` if nothing is pinned there.
pub(super) fn open(pin: &Path) -> Result<Option<(OwnedFd, sys::MapInfo)>, DatapathError> {
    match sys::open_map(pin) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        result => result.map_err(file_error("open", pin)),
    }
}

/// Returns the pins of a map's former maps, oldest first.
pub(crate) fn formers(pins: &Path, map: &MapLayout) -> Vec<PathBuf> {
    let pins = (0..).map(|number| former(pins, map, number));
    pins.take_while(|pin| pin.exists()).collect()
}

/// Returns the pin of the former map with index `number`. Each interrupted size change leaves another former map, which
/// programs may still use.
pub(super) fn former(pins: &Path, map: &MapLayout, number: usize) -> PathBuf {
    match number {
        0 => pins.join(format!("{}_former", map.name)),
        more => pins.join(format!("{}_former{}", map.name, more + 1)),
    }
}

//! Maps of services that are nearly full get more room with the next start.

use std::path::Path;

use health_common::service::NUMBER_MASK;
use tracing::info;

use super::copy::{for_each, is_set};
use super::open;
use crate::DatapathError;
use crate::layout::{BACKENDS, MapLayout, SOURCE_RANGES, SVC4, SVC6};
use crate::loader::file_error;
use crate::services::ServiceMapSizes;

/// How many times the room that was asked for a map may get.
const MOST: u32 = 8;

/// Sizes by which the entries that are pinned use at most three quarters of each map, as far as the maps may grow.
pub(super) fn with_room(
    pins: &Path,
    sizes: ServiceMapSizes,
) -> Result<ServiceMapSizes, DatapathError> {
    let grown = |map, size| grown(pins, map, size);
    let frontends = grown(SVC4, sizes.frontends)?.max(grown(SVC6, sizes.frontends)?);
    // Entries of flows name no backend beyond.
    let backends = grown(BACKENDS, sizes.backends)?.min(NUMBER_MASK);
    Ok(ServiceMapSizes {
        frontends,
        backends,
        // Places of former pools are not cleared: how many are used shows by the backends.
        slots: sizes
            .slots
            .saturating_mul(backends.div_ceil(sizes.backends.max(1))),
        source_ranges: grown(SOURCE_RANGES, sizes.source_ranges)?,
        ..sizes
    })
}

fn grown(pins: &Path, map: MapLayout, size: u32) -> Result<u32, DatapathError> {
    let pin = pins.join(map.name);
    let Some((fd, _)) = open(&pin)? else {
        return Ok(size);
    };
    let mut used = 0;
    let counted = for_each(&map, &fd, |_, value| {
        used += u32::from(is_set(value));
        Ok(())
    });
    counted.map_err(file_error("read", &pin))?;
    let grown = with_room_for(used, size);
    if grown > size {
        info!(
            map = map.name,
            used,
            wanted = size,
            to = grown,
            "the map has more room than was asked for: it is nearly full"
        );
    }
    Ok(grown)
}

/// The size, doubled until so many entries use at most three quarters of it.
fn with_room_for(used: u32, size: u32) -> u32 {
    let mut grown = size;
    while used > grown / 4 * 3 && grown < size.saturating_mul(MOST) {
        grown = grown.saturating_mul(2);
    }
    grown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_double_until_a_quarter_is_free_and_at_most_three_times() {
        for (used, grown) in [
            (0, 1_024),
            (768, 1_024),
            (769, 2_048),
            (1_536, 2_048),
            (1_537, 4_096),
            (8_192, 8_192),
            (u32::MAX, 8_192),
        ] {
            assert_eq!(with_room_for(used, 1_024), grown, "{used}");
        }
    }
}

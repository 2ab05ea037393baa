//! Enlarges nearly full service maps at the next start.

use std::path::Path;

use health_common::service::NUMBER_MASK;
use tracing::info;

use super::copy::{for_each, is_set};
use crate::error::{DatapathError, file_error};
use crate::layout::{BACKENDS, MapLayout, SOURCE_RANGES, SVC4, SVC6};
use crate::maps::ServiceMapSizes;
use crate::maps::open::open;

/// Maximum size of a map, as a multiple of its configured size.
const MOST: u32 = 8;

/// Returns sizes at which the pinned entries fill at most three quarters of each map, within the limits of growth.
pub(super) fn with_room(
    pins: &Path,
    sizes: ServiceMapSizes,
) -> Result<ServiceMapSizes, DatapathError> {
    let grown = |map, size| grown(pins, map, size);
    let frontends = grown(SVC4, sizes.frontends)?.max(grown(SVC6, sizes.frontends)?);
    // Flow entries cannot refer to backends beyond this limit.
    let backends = grown(BACKENDS, sizes.backends)?.min(NUMBER_MASK);
    Ok(ServiceMapSizes {
        frontends,
        backends,
        // Slots of former pools are not cleared, so the number of used slots is estimated from the backends.
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
            "the map is larger than requested because it is nearly full"
        );
    }
    Ok(grown)
}

/// Doubles the size until `used` entries take at most three quarters of it.
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

//! The rings of the keys of tables of TCP: see [`health_common::ring`].

use std::path::Path;

use aya::maps::Array;
use health_common::ring::Hand;

use super::DatapathError;
use super::layout::{HANDS, RINGED};
use super::loader::{map_error, typed};
use super::resize::open;

/// Tells programs how many places each ring has.
pub(super) fn set_hands(pins: &Path) -> Result<(), DatapathError> {
    let mut hands: Array<_, Hand> = typed(pins, &HANDS, Array::try_from)?;
    for (index, (_, ring)) in (0..).zip(RINGED) {
        let Some((_, info)) = open(&pins.join(ring.name))? else {
            return Err(DatapathError::Missing(ring.name.to_owned()));
        };
        let hand = hands
            .get(&index, 0)
            .map_err(map_error("read", HANDS.name))?;
        if hand.places == info.max_entries {
            continue;
        }
        let hand = Hand {
            places: info.max_entries,
            patience: info.max_entries,
            ..hand
        };
        hands
            .set(index, hand, 0)
            .map_err(map_error("write", HANDS.name))?;
    }
    Ok(())
}

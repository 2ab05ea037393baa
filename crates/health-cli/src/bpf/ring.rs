//! Human-readable slots and hands of the rings of table keys.

use std::fmt;

use health_common::ring::{Hand, VACATED};
use health_datapath::dump::Flow;
use serde::Serialize;

use super::entry::Entry;
use super::flow::FlowKey;

/// Converts a slot of a ring for display; `None` if it has not been written yet.
pub(super) fn slot((slot, flow): (u32, Flow)) -> Option<Entry<u32, FlowKey>> {
    (flow.protocol != 0).then(|| Entry {
        key: slot,
        value: FlowKey::from(&flow),
    })
}

/// Converts an entry of `HEALTH_HANDS` for display.
pub(super) fn hand((key, hand): (u32, Hand)) -> Entry<u32, Passed> {
    Entry {
        key,
        value: Passed {
            next: hand.next,
            places: hand.slots,
            full_at_s: hand.full_at,
            spare_until_s: hand.spare_until,
            vacated: hand.vacated,
        },
    }
}

/// A ring's hand: the position to write next.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct Passed {
    next: u32,
    places: u32,
    full_at_s: u32,
    spare_until_s: u32,
    vacated: [u32; VACATED],
}

impl fmt::Display for Passed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            next,
            places,
            full_at_s,
            spare_until_s,
            vacated,
        } = self;
        let vacated = vacated.iter().filter(|&&slot| slot != 0).count();
        write!(
            f,
            "next={next} places={places} full-at={full_at_s}s spare-until={spare_until_s}s vacated={vacated}"
        )
    }
}

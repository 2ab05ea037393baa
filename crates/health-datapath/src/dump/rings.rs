//! The rings of table keys, in readable form.

use health_common::ct::{Tuple4, Tuple6};
use health_common::ring::Hand;

use super::flow::Version;
use super::map::decode;
use super::{DumpError, Flow, Pinned, Rows};
use crate::layout::{self, CT4_RING, CT6_RING, NAT4_RING, NAT6_RING, REVNAT4_RING, REVNAT6_RING};

impl Pinned {
    /// The slots of a ring with their keys; the protocol is 0 if a slot was never written. `None` if no ring has this
    /// name.
    pub fn ring_rows(&self, name: &str) -> Result<Option<Rows<(u32, Flow)>>, DumpError> {
        let fours = [CT4_RING, NAT4_RING, REVNAT4_RING];
        let sixes = [CT6_RING, NAT6_RING, REVNAT6_RING];
        if let Some(ring) = fours.iter().find(|ring| ring.name == name) {
            return self.rows(ring, noted::<Tuple4>).map(Some);
        }
        let Some(ring) = sixes.iter().find(|ring| ring.name == name) else {
            return Ok(None);
        };
        self.rows(ring, noted::<Tuple6>).map(Some)
    }

    /// The next write position of each ring, indexed by the ring numbers of [`health_common::ring`].
    pub fn hand_rows(&self) -> Result<Rows<(u32, Hand)>, DumpError> {
        self.rows(&layout::HANDS, decode)
    }
}

fn noted<T: Version>(key: &[u8], value: &[u8]) -> Option<(u32, Flow)> {
    let (slot, tuple) = decode::<u32, T>(key, value)?;
    Some((slot, Flow::of(&tuple)))
}

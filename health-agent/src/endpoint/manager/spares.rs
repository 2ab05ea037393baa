//! Veth pairs made ahead of the endpoints that will have them, programs and all: for each program that the
//! kernel attaches it waits until no CPU can still run what was there before (RCU's grace period), and no new
//! endpoint shall wait for that.

use std::collections::VecDeque;
use std::time::Duration;

use tokio::time::sleep;
use tracing::{debug, warn};

use super::Manager;
use super::table::Table;
use crate::endpoint::error::EndpointError;
use crate::endpoint::workload::Pair;
use crate::ipam::Family;

/// Time from a failure to the next attempt.
const PAUSE: Duration = Duration::from_secs(10);

/// A pair that waits for its endpoint.
#[derive(Debug)]
pub(super) struct Spare {
    pub(super) pair: Pair,
    /// Number of the host's end.
    pub(super) ifindex: u32,
}

/// The pairs that wait.
#[derive(Debug)]
pub(super) struct Spares {
    /// How many there shall be.
    wanted: usize,
    ready: VecDeque<Spare>,
    /// Id of the one that is being made.
    making: Option<u16>,
}

impl Spares {
    pub(super) fn new(wanted: usize) -> Self {
        Self {
            wanted,
            ready: VecDeque::new(),
            making: None,
        }
    }

    /// Whether one of this id waits or is being made.
    pub(super) fn has(&self, id: u16) -> bool {
        self.making == Some(id) || self.ready.iter().any(|spare| spare.pair.id == id)
    }

    /// Whether as many wait as shall.
    pub(super) fn is_full(&self) -> bool {
        self.ready.len() >= self.wanted
    }

    /// The one that has waited longest of those with this MTU.
    pub(super) fn take(&mut self, mtu: u32) -> Option<Spare> {
        let place = self.ready.iter().position(|spare| spare.pair.mtu == mtu)?;
        self.ready.remove(place)
    }

    /// One that has another MTU.
    fn take_unfit(&mut self, mtu: u32) -> Option<Spare> {
        let place = self.ready.iter().position(|spare| spare.pair.mtu != mtu)?;
        self.ready.remove(place)
    }
}

impl Manager {
    /// Makes pairs while nobody waits for an endpoint.
    pub(super) async fn prepare_forever(self) {
        loop {
            let begun = self.wait_until(|table| self.begin_spare(table)).await;
            let made = match begun {
                Ok(pair) => self.make_spare(pair).await,
                Err(error) => Err(error),
            };
            if let Err(error) = made {
                warn!(%error, "no pair can be made ahead of its endpoint; endpoints are made all the same");
                sleep(PAUSE).await;
            }
        }
    }

    /// The next pair to make, once it is to be made.
    fn begin_spare(&self, table: &mut Table) -> Option<Result<Pair, EndpointError>> {
        if table.spares.is_full() || !table.is_idle() {
            return None;
        }
        let pair = self.new_pair(table, &mut rand::rng());
        table.spares.making = pair.as_ref().ok().map(|pair| pair.id);
        Some(pair)
    }

    async fn make_spare(&self, pair: Pair) -> Result<(), EndpointError> {
        let id = pair.id;
        let made = self.prepare(&pair).await;
        let mut table = self.table();
        table.spares.making = None;
        let ifindex = made?;
        table.spares.ready.push_back(Spare { pair, ifindex });
        debug!(id, "a pair was made ahead of its endpoint");
        Ok(())
    }

    /// Takes away what was made with another MTU, bytes, than new endpoints are to have. Returns whether none is
    /// left.
    pub(super) async fn discard_unfit(&self, mtu: u32) -> bool {
        loop {
            let unfit = self.table().spares.take_unfit(mtu);
            let Some(Spare { pair, .. }) = unfit else {
                return self.table().spares.making.is_none();
            };
            if let Err(error) = self.discard(&pair).await {
                warn!(id = pair.id, %error, "a spare pair cannot be removed; the next start does");
            }
        }
    }

    async fn discard(&self, pair: &Pair) -> Result<(), EndpointError> {
        let id = pair.id;
        self.0.devices.remove(&pair.device).await?;
        let removed = self.0.regenerator.remove(id).await;
        removed.map_err(|source| EndpointError::Regenerate { id, source })?;
        self.0.states.forget_spare(id)?;
        Ok(())
    }

    /// Makes a pair. What a killed agent leaves of it, the next one finds by the note. Returns the number of the
    /// host's end.
    async fn prepare(&self, pair: &Pair) -> Result<u32, EndpointError> {
        let states = self.0.states.clone();
        let id = pair.id;
        let noted = tokio::task::spawn_blocking(move || states.note_spare(id)).await;
        noted.map_err(|error| EndpointError::BrokenOff(error.to_string()))??;
        let made = self.make_devices(pair).await;
        if made.is_err() {
            self.0.states.forget_spare(id)?;
        }
        made
    }

    async fn make_devices(&self, pair: &Pair) -> Result<u32, EndpointError> {
        let families: Vec<Family> = self.table().ipam.families().collect();
        let ifindex = self.0.devices.prepare(pair, &families).await?;
        if let Err(source) = self.0.regenerator.prepare(pair.id, &pair.device).await {
            self.0.devices.remove(&pair.device).await?;
            let id = pair.id;
            return Err(EndpointError::Regenerate { id, source });
        }
        Ok(ifindex)
    }
}

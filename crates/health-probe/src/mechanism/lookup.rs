//! Slots for name lookups, shared among askers.

use std::collections::HashMap;
use std::pin::pin;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

/// Maximum number of concurrent lookups. A lookup holds a thread until the system's resolver gives up, long after the
/// probe has.
const MOST: usize = 16;

/// The lookups of this process.
pub(super) static LOOKUPS: LazyLock<Lookups> = LazyLock::new(Lookups::default);

/// The slots that each asker holds. An asker only gets another slot while it holds fewer slots than are free, so an
/// asker whose names do not resolve leaves half of the slots to others.
#[derive(Debug, Default)]
pub(super) struct Lookups {
    held: Mutex<HashMap<Arc<str>, usize>>,
    ended: Notify,
}

/// A slot. Dropping it frees the slot.
#[derive(Debug)]
pub(super) struct Slot {
    lookups: &'static Lookups,
    asker: Arc<str>,
}

impl Lookups {
    /// Waits for a slot.
    pub(super) async fn slot(&'static self, asker: &Arc<str>) -> Slot {
        loop {
            let mut ended = pin!(self.ended.notified());
            // From here on, no release is missed.
            ended.as_mut().enable();
            if let Some(slot) = self.try_slot(asker) {
                return slot;
            }
            ended.await;
        }
    }

    fn try_slot(&'static self, asker: &Arc<str>) -> Option<Slot> {
        let mut held = self.held();
        let own = held.get(asker).copied().unwrap_or_default();
        let free = MOST.saturating_sub(held.values().sum());
        if own >= free {
            return None;
        }
        held.insert(asker.clone(), own + 1);
        Some(Slot {
            lookups: self,
            asker: asker.clone(),
        })
    }

    fn held(&self) -> MutexGuard<'_, HashMap<Arc<str>, usize>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        {
            let mut held = self.lookups.held();
            match held.get_mut(&self.asker) {
                Some(own) if *own > 1 => *own -= 1,
                _ => {
                    held.remove(&self.asker);
                }
            }
        }
        self.lookups.ended.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::timeout;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn an_asker_leaves_places_to_others_and_waits_for_its_own() {
        let lookups: &'static Lookups = Box::leak(Box::default());
        let (slow, other) = (Arc::from("slow"), Arc::from("other"));
        let slots = || std::iter::from_fn(|| lookups.try_slot(&slow));
        let mut held: Vec<_> = slots().collect();
        assert_eq!(held.len(), MOST / 2);
        let others: Vec<_> = std::iter::from_fn(|| lookups.try_slot(&other)).collect();
        assert_eq!(others.len(), MOST / 4);
        let minute = Duration::from_secs(60);
        assert!(timeout(minute, lookups.slot(&slow)).await.is_err());
        let waiting = tokio::spawn({
            let slow = slow.clone();
            async move { lookups.slot(&slow).await }
        });
        tokio::task::yield_now().await;
        drop(others);
        held.clear();
        drop(timeout(minute, waiting).await.unwrap().unwrap());
        assert!(lookups.held().is_empty());
    }
}

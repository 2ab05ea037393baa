//! How many new label sets this node adds to the store: each is an object that all agents keep for more than an hour.
//! Callers pass the time in.

use std::collections::BTreeMap;
use std::time::Duration;

use health_model::pace::Budget;
use tokio::time::Instant;

/// The rate of the whole node: enough for all its pods at once, and afterwards far less than the collectors remove.
const OF_NODE: Rate = Rate {
    burst: 1024,
    period: Duration::from_millis(200),
};
/// The rate of one namespace on this node.
const OF_NAMESPACE: Rate = Rate {
    burst: 100,
    period: Duration::from_secs(5),
};

/// A burst, and the time after which one more is allowed.
#[derive(Clone, Copy, Debug)]
struct Rate {
    burst: u32,
    period: Duration,
}

impl Rate {
    fn budget(self) -> Budget {
        Budget::with_burst(self.period, self.burst)
    }
}

/// The recent new label sets.
#[derive(Debug)]
pub(super) struct Quota {
    began: Instant,
    node: Budget,
    /// A namespace that is not in it has a full budget.
    namespaces: BTreeMap<String, Budget>,
}

impl Quota {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            began: now,
            node: OF_NODE.budget(),
            namespaces: BTreeMap::new(),
        }
    }

    /// Counts a new label set of a namespace, if it has one. Fails with the reason if there were too many recently.
    pub(super) fn take(&mut self, namespace: Option<&str>, now: Instant) -> Result<(), String> {
        let now = now.saturating_duration_since(self.began);
        self.namespaces.retain(|_, budget| !budget.is_full(now));
        if !self.node.allows(now) {
            return Err(refusal("this node", OF_NODE));
        }
        if let Some(namespace) = namespace {
            let budget = self.namespaces.entry(namespace.to_owned());
            let budget = budget.or_insert_with(|| OF_NAMESPACE.budget());
            if !budget.allows(now) {
                let whose = format!("namespace {namespace} on this node");
                return Err(refusal(&whose, OF_NAMESPACE));
            }
            budget.take(now);
        }
        self.node.take(now);
        Ok(())
    }
}

fn refusal(whose: &str, rate: Rate) -> String {
    let Rate { burst, period } = rate;
    format!("{whose} had {burst} new label sets recently; one more is allowed every {period:?}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_namespace_that_makes_label_sets_all_the_time_slows_only_itself() {
        let begun = Instant::now();
        let mut quota = Quota::new(begun);
        let mut taken = 0;
        for tick in 0..6000_u32 {
            let now = begun + Duration::from_millis(100) * tick;
            taken += u32::from(quota.take(Some("shop"), now).is_ok());
            // One that does so seldom is never refused.
            if tick.is_multiple_of(60) {
                quota.take(Some("bank"), now).unwrap();
                quota.take(None, now).unwrap();
            }
        }
        let allowed = OF_NAMESPACE.burst + 600 / 5;
        assert!((allowed - 1..=allowed + 1).contains(&taken), "{taken}");
        let reason = quota.take(Some("shop"), begun + Duration::from_millis(599_950));
        assert!(reason.unwrap_err().contains("namespace shop"));
        let later = begun + Duration::from_secs(6000);
        quota.take(Some("shop"), later).unwrap();
        assert_eq!(quota.namespaces.len(), 1, "the idle ones are forgotten");
    }

    #[test]
    fn a_node_has_its_own_bound() {
        let now = Instant::now();
        let mut quota = Quota::new(now);
        let taken = (0..5000).filter(|i| quota.take(Some(&i.to_string()), now).is_ok());
        assert_eq!(taken.count(), 1024);
    }
}

//! Decides which regular probes to skip because traffic shows that their target answers. Pure.

use slotmap::SecondaryMap;

use super::target::TargetId;

/// The skipped probes.
#[derive(Debug)]
pub(super) struct Relief {
    /// One probe in this many is sent.
    factor: u8,
    /// Probes skipped since the last one sent.
    left_out: SecondaryMap<TargetId, u8>,
}

impl Relief {
    /// Sends at least one probe in `factor`; all with 1.
    pub(super) fn new(factor: u8) -> Self {
        Self {
            factor,
            left_out: SecondaryMap::new(),
        }
    }

    /// Whether to skip the target's probe that is due now. Calls `answers` only if necessary, to learn whether other
    /// traffic shows that the target answers.
    pub(super) fn leave_out(&mut self, id: TargetId, answers: impl FnOnce() -> bool) -> bool {
        let before = self.left_out.get(id).copied().unwrap_or(0);
        if before + 1 >= self.factor || !answers() {
            return false;
        }
        self.left_out.insert(id, before + 1);
        true
    }

    /// Resets a target's count: a probe is sent, or the target is gone.
    pub(super) fn forget(&mut self, id: TargetId) {
        self.left_out.remove(id);
    }
}

#[cfg(test)]
mod tests {
    use slotmap::KeyData;

    use super::*;

    fn target() -> TargetId {
        KeyData::from_ffi((1 << 32) | 1).into()
    }

    #[test]
    fn one_probe_in_so_many_is_sent_while_there_is_traffic() {
        for factor in 1..=5 {
            let mut relief = Relief::new(factor);
            for _ in 0..3 {
                for _ in 1..factor {
                    assert!(relief.leave_out(target(), || true));
                }
                assert!(!relief.leave_out(target(), || true));
                relief.forget(target());
            }
        }
    }

    #[test]
    fn the_first_probe_after_the_traffic_is_sent() {
        let mut relief = Relief::new(5);
        assert!(relief.leave_out(target(), || true));
        assert!(!relief.leave_out(target(), || false));
    }
}

//! Simplifies the packet of a finding.

use super::{Case, Loaded, verdicts};

/// The kernel rejects test runs of shorter frames.
const SHORTEST: usize = 14;

/// Truncates the packet and zeroes its bytes as long as it still breaks a rule, not necessarily the same one. May not
/// get far, since the contents of the maps change with each attempt.
pub(super) fn shrink(datapath: &Loaded, case: &Case) -> Case {
    let mut best = case.clone();
    let keep_if_broken = |best: &mut Case, frame: Vec<u8>| {
        let tried = Case {
            frame,
            ..best.clone()
        };
        let is_broken = datapath
            .run(&tried)
            .is_some_and(|outcome| verdicts::check(&tried, &outcome).is_err());
        if is_broken {
            *best = tried;
        }
    };
    for step in [256, 64, 16, 4, 1] {
        while best.frame.len() >= SHORTEST + step {
            let len = best.frame.len();
            let shorter = best.frame[..len - step].to_vec();
            keep_if_broken(&mut best, shorter);
            if best.frame.len() == len {
                break;
            }
        }
    }
    for step in [32, 4, 1] {
        for at in (0..best.frame.len()).step_by(step) {
            let mut zeroed = best.frame.clone();
            let end = zeroed.len().min(at + step);
            zeroed[at..end].fill(0);
            if zeroed != best.frame {
                keep_if_broken(&mut best, zeroed);
            }
        }
    }
    best
}

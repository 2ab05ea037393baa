//! Whether all is well with an agent and the nodes that it probes.

use std::fmt;

use crate::api::{AgentReport, AgentState, Reachability, RegistryState};

/// Whether all is well.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// All is well.
    Well,
    /// Something is known to be wrong.
    Wrong,
    /// Nothing is known to be wrong, but not everything is known yet.
    Unknown,
}

/// What an agent says about itself.
#[derive(Clone, Copy, Debug)]
pub struct OwnReport<'a> {
    /// The state of its checks.
    pub state: &'a AgentState,
    /// What the start waits for.
    pub starting: Option<&'a str>,
    /// Its node registries.
    pub registries: &'a [RegistryState],
}

impl<'a> From<&'a AgentReport> for OwnReport<'a> {
    fn from(report: &'a AgentReport) -> Self {
        Self {
            state: &report.state,
            starting: report.starting.as_deref(),
            registries: &report.registries,
        }
    }
}

/// Judges an agent, and those of `all` nodes that are `shown`. Returns the verdict and the reason.
pub fn judge(agent: OwnReport<'_>, shown: Tally, all: Tally) -> (Verdict, String) {
    if let Some(starting) = agent.starting {
        return (Verdict::Unknown, starting.to_owned());
    }
    let headline = shown.headline();
    let is_well = agent.state.state == "Ok";
    if !is_well {
        return (Verdict::Wrong, format!("{headline}; {}", agent.state.msg));
    }
    if shown.unreachable() > 0 {
        return (Verdict::Wrong, headline);
    }
    match lacking(agent, all) {
        Some(lacking) => (Verdict::Unknown, lacking),
        None => (Verdict::Well, headline),
    }
}

/// What the agent does not know yet: registries that it never read, nodes that it has not probed. A mesh that is known
/// to be empty lacks nothing.
pub fn lacking(agent: OwnReport<'_>, all: Tally) -> Option<String> {
    let stale = agent.registries.iter().find_map(|registry| {
        let reason = registry.stale.as_ref()?;
        Some(format!("{}: {reason}", registry.registry))
    });
    if all.total == 0 && (stale.is_some() || agent.registries.is_empty()) {
        return Some(stale.unwrap_or_else(|| "no registry was read yet".to_owned()));
    }
    match all.unknown {
        0 => None,
        count => Some(format!("{count} of {} nodes not probed yet", all.total)),
    }
}

/// Numbers of nodes or addresses by state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    reachable: usize,
    degraded: usize,
    unknown: usize,
    total: usize,
}

impl Tally {
    /// Counts one more node or address.
    pub const fn add(&mut self, one: Reachability) {
        self.total += 1;
        match one {
            Reachability::Reachable => self.reachable += 1,
            Reachability::Degraded => {
                self.reachable += 1;
                self.degraded += 1;
            }
            Reachability::Unknown => self.unknown += 1,
            Reachability::Unreachable => {}
        }
    }

    /// The number of unreachable nodes or addresses.
    pub const fn unreachable(self) -> usize {
        self.total - self.reachable - self.unknown
    }

    /// `2/3 reachable`, plus the numbers of degraded and unknown ones.
    pub fn headline(self) -> String {
        let notes: String = self
            .notes()
            .iter()
            .map(|note| format!(", {note}"))
            .collect();
        format!("{}/{} reachable{notes}", self.reachable, self.total)
    }

    fn notes(self) -> Vec<String> {
        [(self.degraded, "degraded"), (self.unknown, "unknown")]
            .into_iter()
            .filter(|(count, _)| *count > 0)
            .map(|(count, what)| format!("{count} {what}"))
            .collect()
    }
}

impl FromIterator<Reachability> for Tally {
    fn from_iter<I: IntoIterator<Item = Reachability>>(all: I) -> Self {
        let mut tally = Self::default();
        all.into_iter().for_each(|one| tally.add(one));
        tally
    }
}

/// `reachable/total (k unknown)`, for a cell.
impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.reachable, self.total)?;
        match self.notes().join(", ") {
            notes if notes.is_empty() => Ok(()),
            notes => write!(f, " ({notes})"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn degraded_counts_as_reachable_and_is_said() {
        use Reachability::{Degraded, Reachable, Unknown, Unreachable};
        let tally = Tally::from_iter([Reachable, Degraded, Unreachable, Unknown, Unknown]);
        assert_eq!(tally.headline(), "2/5 reachable, 1 degraded, 2 unknown");
        assert_eq!(tally.to_string(), "2/5 (1 degraded, 2 unknown)");
        assert_eq!(tally.unreachable(), 1);
        let tally = Tally::from_iter([Reachable, Unreachable]);
        assert_eq!(tally.headline(), "1/2 reachable");
        assert_eq!(tally.to_string(), "1/2");
    }
}

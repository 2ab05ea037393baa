//! Tracks whether the prober gets its probes out, and on time, over a short recent period.

use std::fmt;
use std::time::Duration;

use health_model::activity::Problem;
use health_model::duration::duration_text;
use nix::errno::Errno;

use super::failure::Failure;
use super::target::Protocol;

/// Problems cover the last one to two windows, or the last one in which a probe was sent.
const WINDOW: Duration = Duration::from_secs(10);
/// A probe delayed by at least this is worth a warning.
const LATE: Duration = Duration::from_secs(5);

/// The counts. Times are relative to the mesh's start.
#[derive(Debug, Default)]
pub(super) struct Sending {
    current: Counts,
    former: Counts,
    since: Duration,
}

#[derive(Debug, Default)]
struct Counts {
    icmp: Attempts,
    http: Attempts,
    /// Maximum delay of a probe.
    late: Duration,
}

#[derive(Clone, Debug, Default)]
struct Attempts {
    all: u64,
    /// Attempts for which no packet left the host.
    unsent: u64,
    /// Why the last unsent probe was not sent.
    reason: Option<Failure>,
    /// Attempts that failed because this host lacked resources.
    lacked_resources: u64,
    /// What the last of these attempts lacked.
    lack: Option<Failure>,
}

impl Sending {
    /// Records an attempt to send a probe that was due `late` ago.
    pub(super) fn tried(&mut self, protocol: Protocol, now: Duration, late: Duration) {
        if now >= self.since + WINDOW {
            let ended = std::mem::take(&mut self.current);
            self.former = match now < self.since + 2 * WINDOW {
                true => ended,
                false => Counts::default(),
            };
            self.since = now;
        }
        self.current.late = self.current.late.max(late);
        self.current.of(protocol).all += 1;
    }

    /// Records that an attempted probe was not sent.
    pub(super) fn unsent(&mut self, protocol: Protocol, failure: &Failure) {
        let attempts = self.current.of(protocol);
        attempts.unsent += 1;
        attempts.reason = Some(failure.clone());
        if is_lack_of_resources(failure) {
            attempts.lacked_resources += 1;
            attempts.lack = Some(failure.clone());
        }
    }

    /// What is wrong, if anything. If only one path is broken, its target's result reports that.
    pub(super) fn problem(&self) -> Option<Problem> {
        let of_icmp = self.former.icmp.and(&self.current.icmp);
        let of_http = self.former.http.and(&self.current.http);
        let late = self.former.late.max(self.current.late);
        let unsent = of_icmp.problem("ICMP").or(of_http.problem("HTTP"));
        unsent.or_else(|| {
            let text = duration_text(Duration::from_millis(late.as_millis() as u64));
            (late >= LATE).then(|| Problem::warning(format!("probes were sent up to {text} late")))
        })
    }
}

impl Counts {
    fn of(&mut self, protocol: Protocol) -> &mut Attempts {
        match protocol {
            Protocol::Icmp => &mut self.icmp,
            Protocol::Http => &mut self.http,
        }
    }
}

impl Attempts {
    fn and(&self, later: &Self) -> Self {
        Self {
            all: self.all + later.all,
            unsent: self.unsent + later.unsent,
            reason: later.reason.clone().or_else(|| self.reason.clone()),
            lacked_resources: self.lacked_resources + later.lacked_resources,
            lack: later.lack.clone().or_else(|| self.lack.clone()),
        }
    }

    fn problem(&self, protocol: impl fmt::Display) -> Option<Problem> {
        let reason = self.reason.as_ref()?;
        let Self {
            all,
            unsent,
            lacked_resources,
            ..
        } = self;
        if unsent >= all {
            let text = format!("none of {all} {protocol} probes could be sent: {reason}");
            // A new agent gets its own descriptors and memory, but this host's network and firewall stay the same.
            return Some(match self.lacked_resources >= *unsent {
                true => Problem::failure(text),
                false => Problem::warning(text),
            });
        }
        let lack = self.lack.as_ref()?;
        Some(Problem::warning(format!(
            "{lacked_resources} of {all} {protocol} probes could not be sent for lack of resources: {lack}"
        )))
    }
}

/// Whether this host lacks memory, file descriptors or ports; otherwise the problem is the path.
pub(super) fn is_lack_of_resources(failure: &Failure) -> bool {
    matches!(
        failure,
        Failure::Os(
            Errno::EAGAIN
                | Errno::ENOBUFS
                | Errno::ENOMEM
                | Errno::EMFILE
                | Errno::ENFILE
                | Errno::EADDRNOTAVAIL
        )
    )
}

#[cfg(test)]
mod tests {
    use health_model::activity::Severity;

    use super::*;

    const NOT_LATE: Duration = Duration::ZERO;
    const SECOND: Duration = Duration::from_secs(1);

    fn reported(sending: &Sending) -> Option<(Severity, String)> {
        let problem = sending.problem()?;
        Some((problem.severity, problem.reason))
    }

    #[test]
    fn that_no_probe_can_be_sent_for_lack_of_resources_is_a_failure_until_one_is() {
        let mut sending = Sending::default();
        for _ in 0..3 {
            sending.tried(Protocol::Icmp, SECOND, NOT_LATE);
            sending.unsent(Protocol::Icmp, &Failure::Os(Errno::ENOBUFS));
            sending.tried(Protocol::Http, SECOND, NOT_LATE);
        }
        let (severity, reason) = reported(&sending).unwrap();
        assert_eq!(severity, Severity::Failure);
        assert!(reason.starts_with("none of 3 ICMP probes could be sent: No buffer space"));
        sending.tried(Protocol::Icmp, SECOND, NOT_LATE);
        assert_eq!(reported(&sending).unwrap().0, Severity::Warning);
    }

    #[test]
    fn probes_that_lack_resources_are_a_warning_while_others_are_sent() {
        let mut sending = Sending::default();
        for failure in [Errno::EMFILE, Errno::EHOSTUNREACH] {
            sending.tried(Protocol::Http, SECOND, NOT_LATE);
            sending.unsent(Protocol::Http, &Failure::Os(failure));
        }
        sending.tried(Protocol::Http, SECOND, NOT_LATE);
        let (severity, reason) = reported(&sending).unwrap();
        assert_eq!(severity, Severity::Warning);
        let said =
            "1 of 3 HTTP probes could not be sent for lack of resources: Too many open files";
        assert!(reason.starts_with(said), "{reason}");
        for at in [11, 22] {
            assert!(reported(&sending).is_some());
            sending.tried(Protocol::Http, SECOND * at, NOT_LATE);
        }
        assert_eq!(reported(&sending), None);
    }

    #[test]
    fn what_a_new_agent_could_not_send_either_is_a_warning() {
        let mut sending = Sending::default();
        for failure in [Errno::ENOBUFS, Errno::EPERM, Errno::ENETUNREACH] {
            sending.tried(Protocol::Icmp, SECOND, NOT_LATE);
            sending.unsent(Protocol::Icmp, &Failure::Os(failure));
        }
        let (severity, reason) = reported(&sending).unwrap();
        assert_eq!(severity, Severity::Warning);
        assert!(reason.starts_with("none of 3 ICMP probes could be sent: Network is unreachable"));
        // Then the problem is the path's own, except for the lack of resources.
        sending.tried(Protocol::Icmp, SECOND, NOT_LATE);
        let (_, reason) = reported(&sending).unwrap();
        assert!(reason.starts_with("1 of 4 ICMP probes could not be sent for lack of resources"));
    }

    #[test]
    fn probes_that_are_late_are_a_warning_for_a_while() {
        let mut sending = Sending::default();
        sending.tried(Protocol::Icmp, SECOND, LATE - Duration::from_millis(1));
        assert_eq!(reported(&sending), None);
        sending.tried(Protocol::Icmp, SECOND, Duration::from_millis(6_200));
        let late = "probes were sent up to 6.2s late".to_owned();
        assert_eq!(reported(&sending), Some((Severity::Warning, late)));
        sending.tried(Protocol::Icmp, SECOND * 40, NOT_LATE);
        assert_eq!(reported(&sending), None);
    }
}

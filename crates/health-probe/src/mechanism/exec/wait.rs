//! How long commands may take. The time counts from the command's start, as with the kubelet, whose runtimes start
//! counting when the command runs: on a busy machine, starting a command may take longer than the command itself.

use std::pin::pin;
use std::time::Duration;

use tokio::time::Instant;

use crate::mechanism::Deadline;

/// How long the start of a command may take in addition to its timeout: as long as the timeout, within these bounds.
const START_MIN: Duration = Duration::from_secs(1);
const START_MAX: Duration = Duration::from_secs(10);
/// Pause between two checks for a command that has not started.
const PAUSE: Duration = Duration::from_millis(100);

/// When a command started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Start {
    /// Unknown: the time counts from the request.
    Unknown,
    /// The command has not started, or has already exited.
    NotNow,
    /// The command started this long ago.
    Ago(Duration),
}

/// A requested command.
pub(super) trait Command {
    /// When the command started.
    fn start(&mut self) -> impl Future<Output = Start> + Send;
}

/// The result of waiting for a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Waited<T> {
    /// The command finished with this result.
    Ended(T),
    /// The command ran for too long.
    TooLong,
    /// The command was not started.
    NotStarted,
}

/// Waits for `end`, the end of a command, for as long as the command may take from its start.
pub(super) async fn wait<T>(
    deadline: Deadline,
    end: impl Future<Output = T>,
    command: &mut impl Command,
) -> Waited<T> {
    let timeout = deadline.timeout();
    let mut end = pin!(end);
    let mut until = deadline.at();
    let asked = until - timeout;
    let patience = until + timeout.clamp(START_MIN, START_MAX);
    // The last time that the command was seen not to have started.
    let mut unstarted = asked;
    let given_up = loop {
        if let Some(ended) = deadline.bound_until(until, &mut end).await {
            return Waited::Ended(ended);
        }
        let looked = Instant::now();
        until = match command.start().await {
            Start::Unknown => break Waited::TooLong,
            Start::Ago(age) => {
                let process = Instant::now().checked_sub(age).unwrap_or(asked);
                let began = process.max(unstarted);
                // The process exists before the runtime has executed the command in it, and the runtime starts to
                // count even later. We assume that this takes no longer than the time before `began`.
                let rest = began.saturating_duration_since(asked).min(timeout);
                began + rest + timeout
            }
            Start::NotNow if looked < patience => {
                unstarted = looked;
                (looked + PAUSE).min(patience)
            }
            Start::NotNow => break Waited::NotStarted,
        };
        if until <= looked {
            break Waited::TooLong;
        }
    };
    // On a busy machine the check takes long enough for the command to end meanwhile.
    let ended = deadline.bound_until(Instant::now(), end).await;
    ended.map_or(given_up, Waited::Ended)
}

#[cfg(test)]
mod tests {
    use tokio::time::{sleep, sleep_until};

    use super::*;

    /// A command that starts some time after the request, and whose process appears halfway.
    struct Begins {
        asked: Instant,
        after: Option<Duration>,
        /// How long after the appearance of its process the command is executed in it.
        executed: Duration,
        /// How long a check takes.
        check: Duration,
    }

    impl Command for Begins {
        async fn start(&mut self) -> Start {
            let process = self.after.map(|after| self.asked + after);
            let age = process.and_then(|began| Instant::now().checked_duration_since(began));
            sleep(self.check).await;
            match age {
                Some(age) if age >= self.executed => Start::Ago(age + self.check),
                _ => Start::NotNow,
            }
        }
    }

    impl Begins {
        /// The result for a command that exits `took` ms after the request, and the time in ms that it took.
        async fn waited(mut self, took: Option<u64>) -> (Waited<()>, u128) {
            let asked = self.asked;
            let deadline = Deadline::after(Duration::from_secs(1)).unwatched();
            let end = async {
                match took {
                    Some(took) => sleep_until(asked + Duration::from_millis(took)).await,
                    None => std::future::pending().await,
                }
            };
            let waited = wait(deadline, end, &mut self).await;
            (waited, asked.elapsed().as_millis())
        }
    }

    /// The result for a command whose process appears `after` and that exits `took` ms after the request.
    async fn waited(after: Option<u64>, took: Option<u64>) -> (Waited<()>, u128) {
        let command = Begins {
            asked: Instant::now(),
            after: after.map(Duration::from_millis),
            executed: Duration::ZERO,
            check: Duration::ZERO,
        };
        command.waited(took).await
    }

    #[tokio::test(start_paused = true)]
    async fn a_commands_time_counts_from_its_start() {
        assert_eq!(waited(Some(0), Some(999)).await, (Waited::Ended(()), 999));
        assert_eq!(waited(Some(0), Some(1001)).await, (Waited::TooLong, 1000));
        // The process appeared after 600 ms, and executing the command may have taken as long again.
        assert_eq!(
            waited(Some(600), Some(2100)).await,
            (Waited::Ended(()), 2100)
        );
        assert_eq!(waited(Some(600), None).await, (Waited::TooLong, 2200));
        // Even that is longer than the timeout.
        assert_eq!(
            waited(Some(1500), Some(2400)).await,
            (Waited::Ended(()), 2400)
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_commands_time_does_not_count_while_its_process_is_still_the_runtimes() {
        let executed_late = || Begins {
            asked: Instant::now(),
            after: Some(Duration::from_millis(100)),
            executed: Duration::from_millis(1450),
            check: Duration::ZERO,
        };
        // The command is executed after 1550 ms.
        let waited = executed_late().waited(Some(2500)).await;
        assert_eq!(waited, (Waited::Ended(()), 2500));
        // It was last seen unstarted after 1500 ms, and the rest may have taken another second.
        assert_eq!(executed_late().waited(None).await, (Waited::TooLong, 3500));
    }

    #[tokio::test(start_paused = true)]
    async fn a_command_that_ends_during_a_slow_check_has_ended() {
        for took in [1200, 1499] {
            let slow = Begins {
                asked: Instant::now(),
                after: Some(Duration::ZERO),
                executed: Duration::ZERO,
                check: Duration::from_millis(500),
            };
            assert_eq!(slow.waited(Some(took)).await, (Waited::Ended(()), 1500));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_command_that_does_not_begin_is_given_up() {
        assert_eq!(waited(None, None).await, (Waited::NotStarted, 2000));
        // The command exited, but its end is reported late.
        assert_eq!(waited(None, Some(1900)).await, (Waited::Ended(()), 1900));
    }

    #[tokio::test(start_paused = true)]
    async fn where_a_start_cannot_be_seen_the_time_counts_from_the_request() {
        struct Hidden;
        impl Command for Hidden {
            async fn start(&mut self) -> Start {
                Start::Unknown
            }
        }
        let deadline = Deadline::after(Duration::from_secs(1)).unwatched();
        let end = sleep(Duration::from_millis(1001));
        assert_eq!(wait(deadline, end, &mut Hidden).await, Waited::TooLong);
    }
}

//! STATUS: whether containers can be added now.

use std::time::Duration;

use health_api::client::Client;
use health_model::api::AgentState;
use tokio::time::{Instant, sleep};

use super::error::{CniError, Code};

/// How long an agent may be away before STATUS fails. Runtimes report a failed STATUS to the kubelet, which marks its
/// node as not ready; services then lose the endpoints on that node. An upgrade replaces the agent within this time.
const PATIENCE: Duration = Duration::from_secs(10);
/// Time between two attempts.
const PAUSE: Duration = Duration::from_millis(200);

/// Succeeds if the agent can create endpoints. Fails with [`Code::NotAvailable`] and the reason if it cannot for 10 s.
pub(super) async fn status(client: &Client) -> Result<(), CniError> {
    let ready = patiently(|| async {
        let _: AgentState = client.get("/v1/endpoints/readiness").await?;
        Ok(())
    });
    ready
        .await
        .map_err(|error| error.with_code(Code::NotAvailable))
}

/// Repeats a request while an agent may be about to start.
async fn patiently(request: impl AsyncFn() -> Result<(), CniError>) -> Result<(), CniError> {
    let end = Instant::now() + PATIENCE;
    loop {
        match request().await {
            Err(error) if error.code() == Code::TryAgainLater && Instant::now() < end => {
                sleep(PAUSE).await;
            }
            answered => return answered,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The outcome of requests that fail with this code for some time, and how long it took.
    async fn outcome(code: Code, away: Duration) -> (bool, Duration) {
        let start = Instant::now();
        let request = async || match start.elapsed() < away {
            true => Err(CniError::new(code, "away")),
            false => Ok(()),
        };
        (patiently(request).await.is_ok(), start.elapsed())
    }

    #[tokio::test(start_paused = true)]
    async fn an_agent_that_is_being_replaced_does_not_make_the_node_unready() {
        let (is_ready, after) = outcome(Code::TryAgainLater, Duration::from_secs(8)).await;
        assert!(is_ready);
        assert_eq!(after, Duration::from_secs(8));
    }

    #[tokio::test(start_paused = true)]
    async fn an_agent_that_stays_away_does() {
        let (is_ready, after) = outcome(Code::TryAgainLater, Duration::MAX).await;
        assert!(!is_ready);
        assert_eq!(after, PATIENCE);
    }

    #[tokio::test(start_paused = true)]
    async fn other_errors_are_reported_at_once() {
        let (is_ready, after) = outcome(Code::Failed, Duration::MAX).await;
        assert!(!is_ready);
        assert_eq!(after, Duration::ZERO);
    }
}

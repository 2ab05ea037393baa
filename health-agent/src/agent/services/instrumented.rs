//! Measures syncs, and passes their results to the health checks.

use std::sync::Arc;

use health_metrics::services::ServiceMetrics;
use health_model::activity::Reporter;
use health_model::ipam::Family;
use health_server::services::listeners::HealthChecks;
use health_service::services::{Provider, Work};
use health_service::spec::PortKey;
use jiff::Timestamp;
use tokio::sync::watch;
use tokio::time::Instant;

/// Measures a provider's syncs. After each sync whose state is in force, passes that state to the health checks.
pub(super) struct InstrumentedProvider<P> {
    provider: P,
    metrics: Arc<ServiceMetrics>,
    checks: watch::Sender<Arc<HealthChecks>>,
    reporter: Reporter,
}

impl<P> InstrumentedProvider<P> {
    pub(super) fn new(
        provider: P,
        metrics: Arc<ServiceMetrics>,
        checks: watch::Sender<Arc<HealthChecks>>,
        reporter: Reporter,
    ) -> Self {
        Self {
            provider,
            metrics,
            checks,
            reporter,
        }
    }
}

impl<P: Provider> Provider for InstrumentedProvider<P> {
    type Error = P::Error;

    fn refused(error: &P::Error) -> impl Iterator<Item = (PortKey, String)> {
        P::refused(error)
    }

    async fn sync(&mut self, work: Work<'_>) -> Result<(), P::Error> {
        let begin = Instant::now();
        let result = self.provider.sync(work).await;
        let (took, end) = (begin.elapsed(), Timestamp::now());
        match &result {
            Ok(()) => self.reporter.succeeded(),
            Err(error) => self.reporter.failed(error),
        }
        let is_in_force = P::is_in_force(&result);
        let refused: Vec<_> = result
            .as_ref()
            .err()
            .into_iter()
            .flat_map(P::refused)
            .collect();
        self.metrics
            .note_refused(refused.iter().map(|(port, _)| port));
        self.metrics
            .note_sync(&work, took, result.is_ok(), is_in_force, end);
        if is_in_force {
            let checks = Family::ALL.map(|family| work.state.health_checks(family).clone());
            self.checks.send_replace(Arc::new(checks));
        }
        result
    }
}

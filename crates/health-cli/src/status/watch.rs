//! `status --watch`: the report at intervals, with changes marked.

use std::time::Duration;

use health_api::client::Client;
use health_model::api::HealthStatus;
use health_model::settings::Location;

use super::StatusArgs;
use super::agent::WholeReport;
use super::view::Changes;
use crate::output::Format;
use crate::watch::{self, Pace};

/// Shows the report every `period`.
pub(super) async fn watch(
    args: &StatusArgs,
    client: &Client,
    location: &Location,
    period: Duration,
) -> anyhow::Result<()> {
    let format = args.output.output;
    let pace = Pace {
        period,
        is_drawn: format == Format::Table,
        is_separated: matches!(format, Format::Table | Format::Yaml),
        is_first_awaited: false,
    };
    let mut before: Option<HealthStatus> = None;
    watch::watch(pace, async || {
        let now: HealthStatus = client.get("/v1beta/status").await?;
        let detail = args.detail(client, location).await?;
        let own = args.own_report(client).await?;
        let mut report = Vec::new();
        {
            let view = args.filter.apply(&now)?;
            let text = |_: &WholeReport| {
                let changes = before.as_ref().map(|before| Changes::between(before, &now));
                args.text(&view, &detail, own.as_ref(), changes.as_ref())
            };
            format.write_object(
                &mut report,
                &WholeReport::new(&view.report(), own.as_ref()),
                text,
            )?;
        }
        before = Some(now);
        Ok(report)
    })
    .await
}

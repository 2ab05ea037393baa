//! The paths under `/v1/services`.

use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use axum::response::Response;
use health_model::api::ServiceSummary;
use health_service::spec::ServiceName;
use serde::Deserialize;

use crate::answer::{Refusal, answer};
use crate::server::Shared;
use crate::source::Source;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ListQuery {
    service: Option<String>,
    namespace: Option<String>,
}

impl ListQuery {
    fn has(&self, name: &ServiceName) -> bool {
        let service = self.service.as_deref();
        let namespace = self.namespace.as_deref();
        service.is_none_or(|wanted| name.is_named(wanted))
            && namespace.is_none_or(|wanted| *name.namespace == *wanted)
    }
}

pub(crate) async fn list<S: Source>(
    State(api): Shared<S>,
    query: Result<Query<ListQuery>, QueryRejection>,
) -> Result<Response, Refusal> {
    let Query(query) = query?;
    answer(move || {
        let catalog = api.source.services();
        let services = catalog.map(|catalog| catalog.services(|service| query.has(service)));
        Ok(services.unwrap_or_default())
    })
    .await
}

pub(crate) async fn summary<S: Source>(State(api): Shared<S>) -> Result<Response, Refusal> {
    answer(move || {
        let catalog = api.source.services();
        let mode = api.source.settings().services.service_proxy_mode;
        Ok(catalog.map_or_else(ServiceSummary::default, |catalog| catalog.summary(mode)))
    })
    .await
}

//! The paths under `/v1/services`.

use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use health_model::api::{ServiceEntry, ServiceSummary};
use health_service::spec::ServiceName;
use serde::Deserialize;

use crate::answer::{Answer, Refusal, answer};
use crate::server::Shared;
use crate::source::Source;

#[derive(Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub(crate) struct ListQuery {
    /// Only this service, `NAMESPACE/NAME` or `NAME`.
    #[cfg_attr(test, schemars(example = "shop/web"))]
    service: Option<String>,
    /// Only services of this namespace.
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
) -> Result<Answer<Vec<ServiceEntry>>, Refusal> {
    let Query(query) = query?;
    answer(move || {
        let catalog = api.source.services();
        let services = catalog.map(|catalog| catalog.services(|service| query.has(service)));
        Ok(services.unwrap_or_default())
    })
    .await
}

pub(crate) async fn summary<S: Source>(
    State(api): Shared<S>,
) -> Result<Answer<ServiceSummary>, Refusal> {
    answer(move || {
        let catalog = api.source.services();
        let mode = api.source.settings().services.service_proxy_mode;
        Ok(catalog.map_or_else(ServiceSummary::default, |catalog| catalog.summary(mode)))
    })
    .await
}

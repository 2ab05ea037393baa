//! Commands that create, change and delete endpoints.

use std::fmt::Write as _;

use health_api::client::Client;
use health_model::api::{
    Deleted, Endpoint, EndpointRequest, EndpointSettings, EndpointSettingsChange, LabelChange,
};
use health_net::netns;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};

use super::{ConfigArgs, CreateArgs, DeleteArgs, LabelsArgs, endpoints_table};
use crate::output::print;

impl CreateArgs {
    pub(super) async fn execute(self, client: &Client) -> anyhow::Result<()> {
        let request = EndpointRequest {
            netns: netns::resolved(&self.netns).display().to_string(),
            labels: self.labels.iter().map(ToString::to_string).collect(),
            name: self.name,
            container_id: self.container_id,
            pod: None,
            network: None,
            ifname: self.ifname,
            default_route: self.default_route,
            ipv4: self.ipv4.map(|address| address.to_string()),
            ipv6: self.ipv6.map(|address| address.to_string()),
        };
        let made: Endpoint = client.post("/v1/endpoints", &request).await?;
        self.output.output.print_object(&made, |one| {
            endpoints_table(std::slice::from_ref(one), true)
        })
    }
}

impl DeleteArgs {
    pub(super) async fn execute(self, client: &Client) -> anyhow::Result<()> {
        let encoded = |text: &str| utf8_percent_encode(text, NON_ALPHANUMERIC).to_string();
        let path = match (self.id, &self.container_id, &self.netns) {
            (Some(id), ..) => format!("/v1/endpoints/{id}"),
            (_, Some(id), _) => format!("/v1/endpoints?container-id={}", encoded(id)),
            (.., Some(path)) => {
                format!(
                    "/v1/endpoints?netns={}",
                    encoded(&netns::resolved(path).to_string_lossy())
                )
            }
            (None, None, None) => {
                anyhow::bail!("give an endpoint: its id, --container-id or --netns")
            }
        };
        let Deleted { deleted } = client.delete(&path).await?;
        let mut text = String::new();
        for id in &deleted {
            // Writing to a string cannot fail.
            let _ = writeln!(text, "endpoint {id} deleted");
        }
        if deleted.is_empty() {
            text.push_str("no such endpoint; nothing to delete\n");
        }
        print(|out| out.write_all(text.as_bytes()))
    }
}

impl LabelsArgs {
    pub(super) async fn execute(self, client: &Client) -> anyhow::Result<()> {
        let texts = |labels: &[health_model::labels::Label]| {
            labels.iter().map(ToString::to_string).collect::<Vec<_>>()
        };
        let change = LabelChange {
            add: texts(&self.add),
            remove: texts(&self.remove),
        };
        let path = format!("/v1/endpoints/{}/labels", self.id);
        let changed: Endpoint = client.patch(&path, &change).await?;
        self.output.output.print_object(&changed, |one| {
            endpoints_table(std::slice::from_ref(one), true)
        })
    }
}

impl ConfigArgs {
    pub(super) async fn execute(self, client: &Client) -> anyhow::Result<()> {
        let path = format!("/v1/endpoints/{}", self.id);
        let changes = self.settings.iter().copied();
        let change = changes.fold(Default::default(), EndpointSettingsChange::then);
        let endpoint: Endpoint = match self.settings.is_empty() {
            true => client.get(&path).await?,
            false => client.patch(&format!("{path}/config"), &change).await?,
        };
        let text = |settings: &EndpointSettings| format!("{}\n", settings.words().join("\n"));
        self.output.output.print_object(&endpoint.settings, text)
    }
}

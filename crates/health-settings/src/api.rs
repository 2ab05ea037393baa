//! Who may use the agent's socket, and where it serves monitoring pages.

use clap::Args;

use super::form::{Common, Live};
use super::listen::ListenAddress;

/// The API and the monitoring pages.
#[derive(Args, Clone, Debug, PartialEq, Eq)]
#[command(next_help_heading = "API")]
pub struct ApiSettings {
    /// Group that may use the agent's socket [default: the agent's own group]
    #[arg(long, value_name = "GROUP")]
    pub socket_group: Option<String>,
    /// Address of GET /metrics: ADDRESS:PORT, localhost:PORT (both IP versions) or off
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:9962", add = Common)]
    pub metrics_address: ListenAddress,
    /// Export series for every target, not only for failing ones
    #[arg(long, add = Live)]
    pub metrics_per_target: bool,
    /// Address of GET /healthz, /livez and /readyz: ADDRESS:PORT, localhost:PORT (both IP versions) or off
    #[arg(long, value_name = "ADDRESS", default_value = "localhost:9879")]
    pub healthz_address: ListenAddress,
}

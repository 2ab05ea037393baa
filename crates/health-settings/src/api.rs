//! Who may use the agent's API, and where it serves monitoring pages.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::Args;
use health_model::address::parse_socket_address;
use health_model::settings::InvalidSetting;

use super::form::{Common, Live};
use super::listen::ListenAddress;
use super::node::absolute_path;

/// The API and the monitoring pages.
#[derive(Args, Clone, Debug, PartialEq, Eq)]
#[command(next_help_heading = "API")]
pub struct ApiSettings {
    /// Group that may use the agent's socket [default: the agent's own group]
    #[arg(long, value_name = "GROUP")]
    pub socket_group: Option<String>,
    /// Group that may read from the agent through a socket of its own, reader.sock [default: no such socket]
    #[arg(long, value_name = "GROUP")]
    pub read_only_socket_group: Option<String>,
    /// Address of the API over TLS, ADDRESS:PORT (repeatable or comma-separated) [default: only the unix socket]
    #[arg(
        long = "api-address", value_name = "ADDRESS", value_parser = parse_socket_address,
        value_delimiter = ','
    )]
    pub api_addresses: Vec<SocketAddr>,
    /// The agent's certificate for --api-address, in PEM, with any intermediate ones after it
    #[arg(long, value_name = "FILE", value_parser = absolute_path())]
    pub api_certificate: Option<PathBuf>,
    /// The key of that certificate, in PEM
    #[arg(long, value_name = "FILE", value_parser = absolute_path())]
    pub api_key: Option<PathBuf>,
    /// CA certificates in PEM; clients with a certificate from one of them may do everything
    #[arg(long, value_name = "FILE", value_parser = absolute_path())]
    pub api_client_ca: Option<PathBuf>,
    /// CA certificates in PEM; clients with a certificate from one of them may only read
    #[arg(long, value_name = "FILE", value_parser = absolute_path())]
    pub api_client_ca_read_only: Option<PathBuf>,
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

impl ApiSettings {
    /// Checks that the API over TLS has the certificates that it needs.
    pub(super) fn check(&self) -> Result<(), InvalidSetting> {
        let Some(address) = self.api_addresses.first() else {
            return Ok(());
        };
        let missing = match self {
            Self {
                api_certificate: None,
                ..
            } => "--api-certificate",
            Self { api_key: None, .. } => "--api-key",
            Self {
                api_client_ca: None,
                api_client_ca_read_only: None,
                ..
            } => "--api-client-ca, --api-client-ca-read-only or both",
            _ => return Ok(()),
        };
        let why = format!("needs {missing}");
        Err(InvalidSetting::new("--api-address", address, why))
    }
}

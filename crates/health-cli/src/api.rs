//! Chooses the agent whose API a command uses: the one of this machine, or one on another machine.

use std::path::{Path, PathBuf};

use clap::Args;
use health_api::client::{ApiUrl, Client, TlsMaterial};
use health_model::file::read_regular;
use health_model::settings::{InvalidSetting, Location};

/// Maximum size of a file in bytes.
const MAX_FILE: u64 = 1 << 20;

/// Flags for the agent's API.
#[derive(Args, Debug)]
#[command(next_help_heading = "Global options")]
pub struct ApiArgs {
    /// The agent's API, unix:PATH or https://HOST:PORT [default: the socket in --runtime-dir]
    #[arg(
        long,
        global = true,
        env = "HEALTH_AGENT_API_URL",
        value_name = "URL",
        hide_short_help = true
    )]
    api_url: Option<ApiUrl>,
    /// CA certificates in PEM, one of which has signed the certificate of an https agent
    #[arg(
        long,
        global = true,
        env = "HEALTH_AGENT_API_CA",
        value_name = "FILE",
        hide_short_help = true
    )]
    api_ca: Option<PathBuf>,
    /// The certificate in PEM to show to an https agent
    #[arg(
        long,
        global = true,
        env = "HEALTH_AGENT_API_CLIENT_CERTIFICATE",
        value_name = "FILE",
        hide_short_help = true
    )]
    api_client_certificate: Option<PathBuf>,
    /// The key of that certificate, in PEM
    #[arg(
        long,
        global = true,
        env = "HEALTH_AGENT_API_CLIENT_KEY",
        value_name = "FILE",
        hide_short_help = true
    )]
    api_client_key: Option<PathBuf>,
}

impl ApiArgs {
    /// A client of the chosen agent: by default, the one at `location`.
    pub(super) fn client(&self, location: &Location) -> Result<Client, InvalidSetting> {
        match &self.api_url {
            None => Ok(Client::new(location.socket())),
            Some(ApiUrl::Unix(path)) => Ok(Client::new(path)),
            Some(url @ ApiUrl::Https { host, port }) => self.over_tls(url, host, *port),
        }
    }

    /// Fails if the chosen agent may be on another machine. `what` completes "this command".
    pub(super) fn require_local(&self, what: &str) -> Result<(), InvalidSetting> {
        match &self.api_url {
            Some(url @ ApiUrl::Https { .. }) => {
                let why = format!("this command {what}");
                Err(InvalidSetting::new("--api-url", url, why))
            }
            _ => Ok(()),
        }
    }

    fn over_tls(&self, url: &ApiUrl, host: &str, port: u16) -> Result<Client, InvalidSetting> {
        let invalid = |why: String| InvalidSetting::new("--api-url", url, why);
        let Some(ca) = &self.api_ca else {
            return Err(invalid("needs --api-ca".to_owned()));
        };
        let authorities = read("--api-ca", ca)?;
        let identity = match (&self.api_client_certificate, &self.api_client_key) {
            (Some(certificate), Some(key)) => Some((
                read("--api-client-certificate", certificate)?,
                read("--api-client-key", key)?,
            )),
            (None, None) => None,
            _ => {
                let why = "needs both --api-client-certificate and --api-client-key, or neither";
                return Err(invalid(why.to_owned()));
            }
        };
        let material = TlsMaterial {
            authorities: authorities.as_bytes(),
            identity: identity
                .as_ref()
                .map(|(certificate, key)| (certificate.as_bytes(), key.as_bytes())),
        };
        Client::over_tls(host, port, &material).map_err(|error| invalid(error.to_string()))
    }
}

fn read(flag: &'static str, path: &Path) -> Result<String, InvalidSetting> {
    read_regular(path, MAX_FILE).map_err(|error| {
        InvalidSetting::new(flag, path.display(), format!("cannot read it: {error}"))
    })
}

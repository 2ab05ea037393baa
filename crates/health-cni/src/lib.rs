//! The CNI plugin: container runtimes call it to connect and disconnect containers.
//!
//! It asks this host's agent to create the endpoint. The plugin itself stores only the [`deletions`] that no agent has
//! carried out yet, and changes neither namespaces nor maps. It implements the CNI specification 1.1.0 and earlier
//! versions from 0.3.0 on (<https://github.com/containernetworking/cni/blob/main/SPEC.md>).

#![forbid(unsafe_code)]

mod check;
mod config;
mod deletion;
pub mod deletions;
mod environment;
mod error;
pub mod install;
mod result;
mod status;
mod version;

use std::io::{self, Read, Write};
use std::process::ExitCode;

use health_api::client::{Client, ClientError};
use health_endpoint::lifecycle::State;
use health_model::api::{Deleted, Endpoint, EndpointRequest};
use health_model::settings::Location;
use health_net::stdout::stdout;
use hyper::StatusCode;
use serde::Serialize;

use self::config::NetworkConfig;
use self::environment::{Attachment, CniCommand, Environment};
use self::error::{CniError, Code};
use self::result::AddResult;
use self::version::Version;

/// Name of the link to the agent's program through which runtimes may call the plugin.
pub const LINK_NAME: &str = "health-agent-cni";

/// Maximum size of a network configuration in bytes.
const MAX_CONFIG: u64 = 1024 * 1024;

/// Carries out the request in the environment and on stdin, and answers on stdout. `default` is the agent to use if the
/// configuration names none.
pub async fn run(default: &Location) -> ExitCode {
    let asked = Invocation::read();
    let version = asked.version;
    let outcome = match asked.request {
        Ok(request) => request.execute(version, default).await,
        Err(error) => Err(error),
    };
    let (written, code) = match &outcome {
        Ok(None) => (Ok(()), ExitCode::SUCCESS),
        Ok(Some(answer)) => (print(answer), ExitCode::SUCCESS),
        Err(error) => (print(&error.answer(version)), ExitCode::FAILURE),
    };
    match written {
        Ok(()) => code,
        Err(_) => ExitCode::FAILURE,
    }
}

fn print(answer: &impl Serialize) -> io::Result<()> {
    let mut line = serde_json::to_vec(answer)?;
    line.push(b'\n');
    stdout()?.lock().write_all(&line)
}

/// The runtime's request, as far as it is readable.
struct Invocation {
    /// CNI version of the answer.
    version: Version,
    request: Result<Request, CniError>,
}

struct Request {
    command: CniCommand,
    environment: Environment,
    config: NetworkConfig,
}

impl Invocation {
    fn read() -> Self {
        let environment = Environment::of_process();
        let bytes = read_config();
        let (version, config) = match &bytes {
            Ok(bytes) => NetworkConfig::read(bytes),
            Err(error) => (Version::NEWEST, Err(error.clone())),
        };
        let of_deletion = || NetworkConfig::of_deletion(bytes.as_deref().ok()?);
        let request = environment
            .command()
            .and_then(|command| match (command, config) {
                // VERSION only asks for the supported versions, so it needs no configuration.
                (CniCommand::Version, _) => Ok(Request {
                    command,
                    environment,
                    config: NetworkConfig::default(),
                }),
                // DEL uses whatever part of the configuration is readable, so that no configuration change blocks the
                // deletion of a container.
                (CniCommand::Del, Err(error)) => Ok(Request {
                    command,
                    environment,
                    config: of_deletion().ok_or(error)?,
                }),
                (_, config) => Ok(Request {
                    command,
                    environment,
                    config: config?,
                }),
            });
        Self { version, request }
    }
}

fn read_config() -> Result<Vec<u8>, CniError> {
    let mut bytes = Vec::new();
    io::stdin()
        .lock()
        .take(MAX_CONFIG + 1)
        .read_to_end(&mut bytes)
        .map_err(|error| CniError::new(Code::Io, format!("cannot read stdin: {error}")))?;
    if bytes.len() as u64 > MAX_CONFIG {
        let problem = format!("the network configuration is larger than {MAX_CONFIG} bytes");
        return Err(CniError::new(Code::Decode, problem));
    }
    Ok(bytes)
}

/// Output on success.
#[derive(Serialize)]
#[serde(untagged)]
enum Answer {
    Added(Box<AddResult>),
    Versions(version::Versions),
}

impl Request {
    async fn execute(
        self,
        version: Version,
        default: &Location,
    ) -> Result<Option<Answer>, CniError> {
        let Self {
            command,
            environment,
            config,
        } = self;
        if command == CniCommand::Version {
            return Ok(Some(Answer::Versions(version::Versions::of(version))));
        }
        if command == CniCommand::Del {
            // The namespace may be gone by now.
            let attachment = environment.attachment()?;
            let location = config.location(default).unwrap_or(default.clone());
            deletion::delete(&location, &attachment).await?;
            return Ok(None);
        }
        config.require_version(command)?;
        if config.is_disabled(command) {
            return Ok(None);
        }
        let location = config.location(default)?;
        let client = Client::new(location.socket());
        match command {
            CniCommand::Add => {
                let attachment = environment.attachment()?;
                let sandbox = environment.netns()?;
                config.refuse_previous()?;
                deletion::finish(&location, &client, &attachment).await?;
                let netns = environment.resolved_netns()?;
                let wanted = wanted(&environment, &config, attachment, netns)?;
                let endpoint: Endpoint = client.post("/v1/endpoints", &wanted).await?;
                let added = AddResult::of(&endpoint, &config, sandbox);
                Ok(Some(Answer::Added(Box::new(added))))
            }
            CniCommand::Check => {
                let attachment = environment.attachment()?;
                let netns = environment.netns()?;
                let previous = config.previous()?;
                let endpoint = of_attachment(&client, &attachment).await?;
                check::check(&attachment, &netns, &previous, endpoint.as_ref()).await?;
                Ok(None)
            }
            CniCommand::Gc => {
                collect(&client, &config).await?;
                Ok(None)
            }
            CniCommand::Status => {
                status::status(&client).await?;
                Ok(None)
            }
            CniCommand::Del | CniCommand::Version => Ok(None),
        }
    }
}

/// The request to the agent.
fn wanted(
    environment: &Environment,
    config: &NetworkConfig,
    attachment: Attachment,
    netns: String,
) -> Result<EndpointRequest, CniError> {
    let arguments = environment.arguments()?;
    let [ipv4, ipv6] = config.addresses(&arguments)?;
    Ok(EndpointRequest {
        netns,
        labels: config.labels(&arguments)?,
        name: arguments.endpoint_name(),
        pod: arguments.pod(),
        container_id: Some(attachment.container_id),
        ifname: Some(attachment.ifname),
        network: Some(config.name.clone()),
        default_route: config.default_route,
        ipv4: ipv4.map(|address| address.to_string()),
        ipv6: ipv6.map(|address| address.to_string()),
    })
}

/// The endpoint of an attachment, if it exists.
async fn of_attachment(
    client: &Client,
    attachment: &Attachment,
) -> Result<Option<Endpoint>, ClientError> {
    let endpoints = living(client).await?;
    Ok(endpoints.into_iter().find(|one| attachment.is_of(one)))
}

/// The endpoints that are not deleted. The agent also lists recently deleted endpoints, whose attachments may have new
/// endpoints by now.
async fn living(client: &Client) -> Result<Vec<Endpoint>, ClientError> {
    let mut endpoints: Vec<Endpoint> = client.get("/v1/endpoints").await?;
    endpoints.retain(|one| State::of(one) != Some(State::Disconnected));
    Ok(endpoints)
}

async fn delete_one(client: &Client, id: u16) -> Result<(), ClientError> {
    let path = format!("/v1/endpoints/{id}");
    match client.delete::<Deleted>(&path).await {
        Ok(_) => Ok(()),
        // Another process deleted it first.
        Err(ClientError::Refused {
            code: StatusCode::NOT_FOUND,
            ..
        }) => Ok(()),
        Err(error) => Err(error),
    }
}

/// Deletes this network's endpoints that the runtime does not list as valid. Continues with the remaining endpoints
/// after a failure.
async fn collect(client: &Client, config: &NetworkConfig) -> Result<(), CniError> {
    let valid = config.valid_attachments()?;
    let endpoints = living(client).await?;
    let stale = endpoints.iter().filter(|endpoint| {
        endpoint.network.as_deref() == Some(config.name.as_str())
            && !valid.iter().any(|attachment| attachment.is_of(endpoint))
    });
    let mut outcome = Ok(());
    for endpoint in stale {
        outcome = outcome.and(delete_one(client, endpoint.id).await);
    }
    Ok(outcome?)
}

//! One run of an agent, from its settings to its shutdown.

use std::sync::Arc;

use anyhow::Context as _;
use health_datapath::kernel::{self, SuitableKernel};
use health_datapath::process;
use health_mesh::mesh_key;
use health_mesh::proof::HelloKeys;
use health_registry::nodes;
use health_server::server;
use health_settings::Settings;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use tokio::sync::watch::{Receiver, channel};
use tracing::{info, warn};

use super::api_access::ApiAccess;
use super::assembly::{self, StartInputs};
use super::folders::NewFolders;
use super::node_condition::ReportedCondition;
use super::own_node;
use super::reload::{Reloadable, Reread, reload_while_waiting};
use super::source::AgentSource;
use super::stop::StopRequests;
use crate::pidfile::PidFile;

/// Runs an agent until it is asked to stop. Its kernel state stays and keeps working; only
/// [`cleanup`](super::cleanup()) removes it.
pub async fn run(config: Settings, reread: Reread) -> anyhow::Result<()> {
    let reloadable =
        Reloadable::new(config, reread).context("cannot install the SIGHUP handler")?;
    let stop = StopRequests::new().context("cannot install the SIGTERM handler")?;
    let config = &reloadable.settings;
    let kernel = kernel::require(&config.location.bpf_root, config.endpoints.attach_mode)?;
    // Comes before the first request to a registry: services left by an earlier agent must not intercept that request.
    process::spare_own_sockets(&config.location)
        .context("cannot exempt this agent's sockets from services")?;
    let access = ApiAccess::open(&config.api)?;
    let keys = mesh_key::of_mesh(config.node.mesh_key_file.as_deref())?;
    config
        .services
        .check_forwarding_key(keys.hello.is_public())?;
    let settings = own_node::from_settings(config).await?;
    let registry = nodes::open(config, settings)?;
    let inputs = StartInputs {
        attachments: kernel.attachments,
        keys,
        own: own_node::known(&*registry, config)?,
        registry,
    };

    let mut folders = NewFolders::default();
    let result = run_in_folders((reloadable, stop), kernel, access, inputs, &mut folders);
    let result = result.await;
    if result.is_err() {
        folders.remove();
    }
    result
}

async fn run_in_folders(
    (reloadable, mut stop): (Reloadable, StopRequests),
    kernel: SuitableKernel,
    access: ApiAccess,
    inputs: StartInputs,
    new_folders: &mut NewFolders,
) -> anyhow::Result<()> {
    raise_open_files_limit();
    let Reloadable {
        settings: config,
        reread,
        requests: mut reloads,
    } = reloadable;
    let config = &config;
    match access.groups.is_any() {
        true => new_folders.make_reachable(&config.location.runtime_dir)?,
        false => new_folders.make(&config.location.runtime_dir)?,
    }
    let _pid_file = PidFile::acquire(&config.location.pid_file())?;
    // A cleanup may have removed this folder in the meantime.
    new_folders.make(&config.location.state_dir)?;
    new_folders.close(&config.location, access.groups)?;
    let entrances = access.listen(config)?;
    let source = Arc::new(AgentSource::new(config.clone(), &inputs.keys.hello));
    source.list_controllers(inputs.registry.controllers());
    let condition = ReportedCondition::start(config, source.clone())?;
    source.list_controllers(condition.iter().map(ReportedCondition::controller));
    let (end, ended) = channel(false);
    let api = tokio::spawn(server::serve(entrances, source.clone(), until(ended)));

    let started = tokio::select! {
        started = assembly::start(config, inputs, source.clone()) => Some(started),
        // Nothing has been created yet.
        () = stopped_while_waiting(&mut stop, &source) => None,
        never = reload_while_waiting(&source, reread, &mut reloads) => match never {},
    };
    let result = match started {
        Some(Ok(agent)) => {
            // Logged only now: a failed start reports only why it failed.
            kernel.log();
            log_mesh_keys(&agent.node.keys.hello);
            agent.supervise(reread, reloads, stop).await
        }
        Some(Err(error)) => Err(error),
        None => {
            info!("agent stopped before it finished starting");
            Ok(())
        }
    };
    if let Some(condition) = condition {
        condition.stop().await;
    }
    end.send_replace(true);
    match api.await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => warn!(%error, "the API did not shut down cleanly"),
        Err(error) => warn!(%error, "the API did not shut down cleanly"),
    }
    result
}

/// Waits until a stop is requested and the start is waiting for this node's entry. Later stages of the start are not
/// interrupted.
async fn stopped_while_waiting(stop: &mut StopRequests, source: &AgentSource) {
    stop.requested().await;
    source.until_waiting().await;
}

/// Logs which keys are in force. Warns if they are public.
fn log_mesh_keys(keys: &HelloKeys) {
    if keys.is_public() {
        warn!(
            "the mesh key is the public default: anyone can answer for a peer; set --mesh-key-file"
        );
    }
    if let Some(age) = keys.other() {
        info!(second = ?age, "two mesh keys are in force");
        if keys.other_is_public() {
            warn!(second = ?age, "the second mesh key is the public default: anyone can answer for a peer; remove it once all nodes have the first");
        }
    }
}

/// Waits until the channel's value is true or the channel is closed.
async fn until(mut stopped: Receiver<bool>) {
    // A closed channel means the same.
    let _ = stopped.wait_for(|stop| *stop).await;
}

/// Raises the limit on open files to the hard limit: each HTTP probe in flight takes one.
fn raise_open_files_limit() {
    let raised = getrlimit(Resource::RLIMIT_NOFILE)
        .and_then(|(_, hard)| setrlimit(Resource::RLIMIT_NOFILE, hard, hard));
    if let Err(error) = raised {
        warn!(%error, "cannot raise the limit on open files; fewer probes will run at once");
    }
}

//! A health endpoint in a private network namespace, for measurements on its veth pair.

use std::collections::BTreeSet;
use std::net::Ipv4Addr;
use std::process::Command;

use anyhow::{Context as _, ensure};
use health_common::config::DatapathConfig;
use health_datapath::dump::Pinned;
use health_datapath::{Datapath, LoadSettings};
use health_endpoint::health::{self, HealthEndpoint, HealthEndpointSpec};
use health_model::settings::Location;
use nix::sched::{CloneFlags, unshare};

use crate::testrun::Bpffs;

/// The host's address.
pub(super) const NODE: Ipv4Addr = Ipv4Addr::new(172, 30, 0, 1);

/// Calls `work` in a namespace with the health endpoint of `instance` and a datapath that is not attached yet.
pub(super) fn with_endpoint<T: Send + 'static>(
    instance: &'static str,
    work: impl AsyncFnOnce(&HealthEndpoint, &mut Datapath, &Pinned) -> anyhow::Result<T>
    + Send
    + 'static,
) -> anyhow::Result<T> {
    // A dedicated thread, so that the network namespace disappears when the thread exits.
    std::thread::spawn(move || {
        unshare(CloneFlags::CLONE_NEWNET).context("cannot create a network namespace")?;
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        runtime.block_on(in_namespace(instance, work))
    })
    .join()
    .map_err(|_| anyhow::anyhow!("the measuring thread panicked"))?
}

async fn in_namespace<T>(
    instance: &str,
    work: impl AsyncFnOnce(&HealthEndpoint, &mut Datapath, &Pinned) -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    let bpffs = Bpffs::mount();
    let state_dir = tempfile::tempdir()?;
    ip(&["link", "set", "lo", "up"])?;
    ip(&["address", "add", &format!("{NODE}/32"), "dev", "lo"])?;
    let spec = HealthEndpointSpec {
        excluded: Vec::new(),
        taken_ids: BTreeSet::new(),
        instance: instance.to_owned(),
        node_addresses: vec![NODE.into()],
        unusable_addresses: Vec::new(),
        pod_cidrs: vec!["10.244.1.0/24".parse()?],
        fixed_addresses: Vec::new(),
        mtu_device: None,
        uplinks: Vec::new(),
        state_dir: state_dir.path().to_owned(),
    };
    let result = async {
        let (endpoint, _) = HealthEndpoint::ensure(&spec).await?;
        let location = Location {
            instance: instance.to_owned(),
            runtime_dir: "/nonexistent".into(),
            state_dir: "/nonexistent".into(),
            bpf_root: bpffs.path().to_owned(),
        };
        let mut datapath = load(&location, &endpoint)?;
        work(&endpoint, &mut datapath, &Pinned::open(&location)?).await
    }
    .await;
    let cleanup = health::cleanup(instance, state_dir.path()).await;
    ensure!(
        cleanup.failed.is_empty(),
        "cannot remove the health endpoint: {:?}",
        cleanup.failed
    );
    result
}

fn load(location: &Location, endpoint: &HealthEndpoint) -> anyhow::Result<Datapath> {
    let address = endpoint
        .ipv4()
        .context("the endpoint has no IPv4 address")?;
    let gateway = endpoint
        .gateways()
        .next()
        .context("the endpoint has no gateway")?;
    // Otherwise eBPF would answer neighbour requests: apart from the programs, everything must be the same.
    endpoint.netns().run_in(|| {
        ip(&[
            "neighbour",
            "replace",
            &gateway.to_string(),
            "lladdr",
            &endpoint.host_mac().to_string(),
            "dev",
            health::INNER_DEVICE,
            "nud",
            "permanent",
        ])
    })??;
    let mut datapath = Datapath::load(location, LoadSettings::default())?;
    datapath.set_endpoints(&[(address.into(), endpoint.info())])?;
    datapath.configure(DatapathConfig {
        layout_version: health_common::LAYOUT_VERSION,
        health_ifindex: endpoint.ifindex(),
        health4: address.into(),
        health_mac: endpoint.mac().0,
        ..DatapathConfig::default()
    })?;
    Ok(datapath)
}

/// Runs `ip`.
pub(super) fn ip(args: &[&str]) -> anyhow::Result<()> {
    output("ip", args, "iproute2").map(drop)
}

/// Output of a tool, which is in this Debian package.
pub(super) fn output(tool: &str, args: &[&str], package: &str) -> anyhow::Result<String> {
    let output = Command::new(tool)
        .args(args)
        .output()
        .with_context(|| format!("cannot run {tool} (Debian: {package})"))?;
    ensure!(
        output.status.success(),
        "{tool} {}: {}",
        args.join(" "),
        String::from_utf8_lossy(&output.stderr).trim()
    );
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

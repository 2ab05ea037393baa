//! Very many services: how soon a change takes effect, how long startup takes, and how much memory they need.

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use health_datapath::services::{ServiceMapSizes, ServiceMaps, ServiceTables};
use health_model::ipam::Family;
use health_net::clock;
use health_service::choice::Topology;
use health_service::provider::ebpf::{self, EbpfProvider};
use health_service::runner::Intervals;
use health_service::services::{Provider, Services, SyncSettings, Work};
use health_service::source::{Gathered, KnownService, KnownSlice, ServiceSet, Synced};
use health_service::spec::Selection;
use imbl::OrdMap;
use jiff::Timestamp;
use nix::sched::{CloneFlags, unshare};
use nix::unistd::Pid;
use serde_json::Value;
use tokio::sync::watch;

use super::cluster::{self, BACKENDS, endpoint_count};
use super::ruleset::{self, Text};
use super::stand::pinned;
use crate::bench::endpoint::output;
use crate::bench::requests::quantile;
use crate::bench::usage::ResidentMemory;
use crate::bench::{Figure, MIB, Options, Target};
use crate::process::{print_line, run_with_input};
use crate::served::Manifests;
use crate::{Bed, wait_for};

const SERVICES: u32 = 50_000;
/// Number of changes, each to the endpoints of a different service.
const CHANGES: u32 = 101;
/// Pause between two changes.
const PAUSE: Duration = Duration::from_millis(50);
/// Number of services per `nft` call.
const BATCH: usize = 500;
const NODE: &str = "hnode1";
/// The first endpoint address. All endpoints have different addresses.
const FIRST_ENDPOINT: Ipv4Addr = Ipv4Addr::new(10, 128, 0, 1);

const CHANGE_LIMIT_MS: f64 = 20.0;
const START_LIMIT_S: f64 = 5.0;
const MEMORY_LIMIT_MIB: f64 = 512.0;
const START_PATIENCE: Duration = Duration::from_secs(300);

const SIZES: ServiceMapSizes = ServiceMapSizes {
    frontends: 65_536,
    // A single network namespace can have 2^18 backends.
    backends: (1 << 18) + (1 << 15),
    slots: 1 << 19,
    maglev: health_service::maglev::SIZE,
    source_ranges: 1_024,
    affinity: 1_024,
    flows: 1_024,
    flows_any: 1_024,
    sockets: 1_024,
};

pub(super) fn figures(options: &Options) -> anyhow::Result<Vec<Figure>> {
    let changes = options.rounds_or(CHANGES);
    let by_nft = thread::spawn(move || by_nft(changes)).join();
    let (nft_start, nft_changes) = by_nft.map_err(|_| anyhow::anyhow!("a thread panicked"))??;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()?;
    let Found {
        start,
        changes,
        memory,
    } = runtime.block_on(by_maps(changes))?;
    let count = changes.len();
    let named = format!(
        "{SERVICES} services, {} endpoints",
        BACKENDS * SERVICES as usize
    );
    let mut figures = Vec::new();
    for (what, part) in [("p50", 0.5), ("p99", 0.99)] {
        let ms = quantile(&changes, part)?.as_secs_f64() * 1e3;
        let figure = |other: &str, value, limit| Figure {
            name: format!(
                "{named}: a change, from its object to the maps, {what} of {count} (other: {other})"
            ),
            unit: "ms",
            ours: ms,
            other: Some(value),
            target: Some(Target::RatioAtMost(limit)),
        };
        figures.push(figure("the limit", CHANGE_LIMIT_MS, 1.0));
        let nft = quantile(&nft_changes, part)?.as_secs_f64() * 1e3;
        figures.push(figure("nft -f with fewer endpoints", nft, 1.0));
    }
    let seconds = |name: String, ours: Duration, other| Figure {
        name,
        unit: "s",
        ours: ours.as_secs_f64(),
        other: Some(other),
        target: Some(Target::RatioAtMost(1.0)),
    };
    figures.push(seconds(
        format!("{named}: objects into empty maps (other: the limit)"),
        start,
        START_LIMIT_S,
    ));
    figures.push(Figure {
        name: format!("{named}: resident memory for them"),
        unit: MIB,
        ours: memory,
        other: None,
        target: Some(Target::MibAtMost(MEMORY_LIMIT_MIB)),
    });

    let agent = by_agent()?;
    let named = format!(
        "{SERVICES} services, {} endpoints, the agent",
        endpoint_count(SERVICES)
    );
    figures.push(seconds(
        format!("{named}: from its start to all in force, out of a folder (other: the limit)"),
        agent.start,
        START_LIMIT_S,
    ));
    figures.push(seconds(
        format!("{named}: the same (other: nft -f, {BATCH} services at a time)"),
        agent.start,
        nft_start.as_secs_f64(),
    ));
    for (what, ours, target) in [
        (
            "resident memory",
            agent.memory.now,
            Some(Target::MibAtMost(MEMORY_LIMIT_MIB)),
        ),
        ("resident memory at its peak", agent.memory.peak, None),
        (
            "what the kernel charges for the maps of services",
            agent.maps,
            None,
        ),
    ] {
        figures.push(Figure {
            name: format!("{named}: {what}"),
            unit: MIB,
            ours,
            other: None,
            target,
        });
    }
    Ok(figures)
}

/// Prints how long changes took. The times must be sorted.
fn print_change_times(what: &str, times: &[Duration]) -> anyhow::Result<()> {
    let ms = |part| anyhow::Ok(quantile(times, part)?.as_secs_f64() * 1e3);
    print_line(format_args!(
        "  {what}: {:.1} ms, p99 {:.1} ms",
        ms(0.5)?,
        ms(0.99)?
    ));
    Ok(())
}

/// Measurements of the agent's code that writes API objects into maps.
struct Found {
    start: Duration,
    /// Times of changes in ascending order.
    changes: Vec<Duration>,
    /// Resident memory, MiB.
    memory: f64,
}

/// The API objects, as the agent stores them.
#[derive(Default)]
struct Objects {
    services: OrdMap<String, Arc<KnownService>>,
    slices: OrdMap<String, Arc<KnownSlice>>,
    gathered: Gathered,
}

impl Objects {
    /// Parses a service and its slice, as they arrive from the API.
    fn read(&mut self, number: u32, [service, slice]: [Value; 2]) {
        let selection = Selection::default();
        let number = number.to_string();
        let before = self.services.get(&number).map(Arc::as_ref);
        let service = KnownService::of_api(service, before, &selection);
        self.services.insert(number.clone(), Arc::new(service));
        let before = self.slices.get(&number).map(Arc::as_ref);
        let slice = KnownSlice::of_api(slice, before, &selection);
        self.slices.insert(number, Arc::new(slice));
    }

    /// All services, as a source reports them.
    fn set(&mut self) -> Arc<ServiceSet> {
        self.gathered.take_services(&self.services);
        self.gathered.take_slices(&self.slices);
        let synced = Synced {
            services: true,
            slices: true,
        };
        Arc::new(self.gathered.set([], synced))
    }
}

/// The API objects of service `number` with this many endpoints: the service and its slice.
fn objects(number: u32, endpoints: usize) -> anyhow::Result<[Value; 2]> {
    let first = FIRST_ENDPOINT.to_bits() + number * BACKENDS as u32;
    let endpoints: Vec<Ipv4Addr> = (first..).take(endpoints).map(Ipv4Addr::from_bits).collect();
    let mut list = cluster::manifest(number, &endpoints, NODE).json();
    let items = list["items"]
        .as_array_mut()
        .context("not a list of objects")?;
    // The items that follow are a slice of the other IP version.
    items.truncate(2);
    <[Value; 2]>::try_from(std::mem::take(items))
        .ok()
        .context("objects are missing")
}

/// A provider that reports when it has finished its work.
struct ReportingProvider {
    provider: EbpfProvider,
    done: watch::Sender<u64>,
}

impl Provider for ReportingProvider {
    type Error = ebpf::EbpfError;

    async fn sync(&mut self, work: Work<'_>) -> Result<(), ebpf::EbpfError> {
        self.provider.sync(work).await?;
        self.done.send_modify(|done| *done += 1);
        Ok(())
    }
}

async fn by_maps(changes: u32) -> anyhow::Result<Found> {
    let before = ResidentMemory::of(Pid::this())?.now;
    let tables = ServiceTables::open(ServiceMaps::unpinned(SIZES)?)?;
    let settings = ebpf::Settings::new(clock::now_ns);
    let addresses = watch::channel(Arc::default());
    let (done, mut is_done) = watch::channel(0);
    let provider = ReportingProvider {
        provider: EbpfProvider::new(tables, settings, addresses.1)?,
        done,
    };
    let (source, reported) = watch::channel(Arc::<ServiceSet>::default());
    let topology = Topology {
        node: NODE.into(),
        zone: None,
    };
    let services = Services::start(
        SyncSettings {
            intervals: Intervals {
                min: Duration::from_millis(20),
                retry: Duration::from_secs(1),
                // Long, so that only changes are measured.
                max: Duration::from_secs(3_600),
            },
            families: Family::ALL.to_vec(),
            health_timeout: Duration::from_secs(7_200),
            clock: Timestamp::now,
        },
        watch::channel(topology).1,
        vec![reported],
        provider,
    )?;
    let mut known = Objects::default();
    let mut start = Duration::ZERO;
    for number in 0..SERVICES {
        let objects = objects(number, BACKENDS)?;
        let begun = Instant::now();
        known.read(number, objects);
        start += begun.elapsed();
    }
    let begun = Instant::now();
    source.send_replace(known.set());
    is_done.changed().await?;
    start += begun.elapsed();
    let memory = ResidentMemory::of(Pid::this())?.now - before;
    print_line(format_args!(
        "  all in the maps after {:.1} s",
        start.as_secs_f64()
    ));

    let [mut times, mut sets] = [(); 2].map(|()| Vec::new());
    for change in 0..changes {
        tokio::time::sleep(PAUSE).await;
        let number = change * (SERVICES / changes);
        let objects = objects(number, BACKENDS - 1)?;
        is_done.borrow_and_update();
        let start = Instant::now();
        known.read(number, objects);
        source.send_replace(known.set());
        sets.push(start.elapsed());
        is_done.changed().await?;
        times.push(start.elapsed());
    }
    services.stop().await;
    times.sort_unstable();
    sets.sort_unstable();
    print_change_times("a change", &times)?;
    print_change_times("of which until its source has reported all", &sets)?;
    Ok(Found {
        start,
        changes: times,
        memory,
    })
}

/// How long `nft` takes to load all services and to change one of them. The change times are in ascending order.
fn by_nft(changes: u32) -> anyhow::Result<(Duration, Vec<Duration>)> {
    // The namespace disappears when this thread exits.
    unshare(CloneFlags::CLONE_NEWNET).context("cannot create a network namespace")?;
    let backends: Vec<Ipv4Addr> = (1..=BACKENDS as u8)
        .map(|last| Ipv4Addr::new(10, 244, 1, last))
        .collect();
    let nft = |text: &str| -> anyhow::Result<Duration> {
        let start = Instant::now();
        run_with_input(std::process::Command::new("nft").args(["-f", "-"]), text)?.success()?;
        Ok(start.elapsed())
    };
    let mut start = nft(&ruleset::base(Ipv4Addr::new(172, 30, 0, 2)))?;
    let numbers: Vec<u32> = (0..SERVICES).collect();
    for some in numbers.chunks(BATCH) {
        let mut text = Text::default();
        for number in some {
            ruleset::add(&mut text, *number, &backends);
        }
        start += nft(&text.0)?;
    }
    print_line(format_args!(
        "  nft has all after {:.1} s",
        start.as_secs_f64()
    ));
    let mut times = Vec::new();
    for change in 0..changes {
        let mut text = Text::default();
        // The services to change have all endpoints.
        let of = &backends[..BACKENDS - 1];
        ruleset::change(&mut text, 1 + change, of);
        times.push(nft(&text.0)?);
    }
    times.sort_unstable();
    print_change_times("a change by nft", &times)?;
    Ok((start, times))
}

/// Measurements of a whole agent.
struct AgentFound {
    start: Duration,
    memory: ResidentMemory,
    /// Memory of the maps for services, MiB.
    maps: f64,
}

/// Measures an agent that starts with all services in its folder.
fn by_agent() -> anyhow::Result<AgentFound> {
    let manifests = Manifests::new()?;
    let bed = Bed::builder().nodes(1).without_agents();
    let bed = bed.agent_args(&manifests.agent_args()).start()?;
    let node = bed.node(1);
    let backends: Vec<Ipv4Addr> = (1..=BACKENDS as u8)
        .map(|last| Ipv4Addr::new(10, 244, 1, 10 + last))
        .collect();
    cluster::write(&manifests, 0..SERVICES, &backends, node.name())?;
    let begun = Instant::now();
    node.start_agent()?;
    wait_for("the agent to serve", START_PATIENCE, || {
        let frontends = pinned(node)?.frontend4_rows()?.collect()?;
        let wanted = cluster::cluster_ip_ports(SERVICES);
        ensure!(
            frontends.len() >= wanted,
            "{} of {wanted} frontends",
            frontends.len()
        );
        Ok(Some(()))
    })?;
    let start = begun.elapsed();
    let mut maps = 0.0;
    for name in super::MAPS {
        let path = node.pins().join(name);
        let shown = output(
            "bpftool",
            &["-j", "map", "show", "pinned", &path.display().to_string()],
            "bpftool",
        )?;
        let shown: Value = serde_json::from_str(&shown)?;
        let bytes = shown["bytes_memlock"].as_f64();
        maps += bytes.with_context(|| format!("bpftool did not print the size of {name}"))?;
    }
    Ok(AgentFound {
        start,
        memory: ResidentMemory::of(node.agent_pid()?)?,
        maps: maps / f64::from(1 << 20),
    })
}

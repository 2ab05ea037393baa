//! The cost of one change does not grow with the number of services. Counted in bytes allocated from the event until
//! the provider is done, which does not depend on the machine's speed.

use std::alloc::{GlobalAlloc, Layout, System};
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use health_model::ipam::Family;
use health_model::policy::Protocol;
use health_service::choice::Topology;
use health_service::runner::Intervals;
use health_service::services::{Provider, Services, SyncSettings, Work};
use health_service::source::{Probed, Readiness, ServiceSet, Sourced, Synced};
use health_service::spec::{
    Common, Conditions, EndpointSlice, Service, ServiceName, ServicePort, ServiceType,
    SliceEndpoint, SliceName, SlicePort, SourceRanges, TrafficPolicy,
};
use jiff::Timestamp;
use tokio::sync::{mpsc, watch};

/// The system's allocator, with a counter.
struct Counting;

static ALLOCATED: AtomicU64 = AtomicU64::new(0);

// SAFETY: all requests go to the system's allocator as they came; counting allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATED.fetch_add(layout.size() as u64, Ordering::Relaxed);
        // SAFETY: the caller keeps what `alloc` asks for.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: `at` is of `System`, with this layout.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Reports how many ports it was asked to write into the kernel, and how many bytes were allocated by then.
struct ReportingProvider(mpsc::UnboundedSender<(usize, u64)>);

impl Provider for ReportingProvider {
    type Error = &'static str;

    async fn sync(&mut self, work: Work<'_>) -> Result<(), &'static str> {
        let allocated = ALLOCATED.load(Ordering::Relaxed);
        let reported = self.0.send((work.changes.ports.len(), allocated));
        reported.map_err(|_| "nobody listens")
    }
}

const ENDPOINTS: u32 = 5;

fn service(number: u32) -> (ServiceName, Sourced<Service>) {
    let name = ServiceName::new("shop", &format!("web-{number}"));
    let common = Arc::new(Common {
        name: name.clone(),
        kind: ServiceType::LoadBalancer,
        created: None,
        cluster_ips: vec![Ipv4Addr::from_bits(0x0a60_0000 + number).into()],
        external_ips: Vec::new(),
        load_balancer_ips: Vec::new(),
        source_ranges: SourceRanges::default(),
        affinity: None,
        internal_policy: TrafficPolicy::Cluster,
        external_policy: TrafficPolicy::Local,
        health_check_node_port: u16::try_from(number).ok(),
        algorithm: None,
        forwarding: None,
        local_readiness: false,
    });
    let port = ServicePort {
        name: "http".into(),
        protocol: Protocol::TCP,
        port: 80,
        node_port: None,
        service: common.clone(),
    };
    (
        name,
        sourced(Service {
            common,
            ports: vec![port],
        }),
    )
}

fn address(service: u32, endpoint: u32) -> IpAddr {
    Ipv4Addr::from_bits(0x0af4_0000 + service * ENDPOINTS + endpoint).into()
}

fn slice(number: u32) -> (SliceName, Sourced<EndpointSlice>) {
    let text = format!("web-{number}");
    let name = SliceName::new("shop", &text);
    let endpoints = (0..ENDPOINTS).map(|endpoint| SliceEndpoint {
        address: address(number, endpoint),
        conditions: Conditions {
            ready: true,
            serving: true,
            terminating: false,
        },
        node: Some("here".into()),
        zone: None,
        hints: None,
    });
    let slice = EndpointSlice {
        name: name.clone(),
        service: ServiceName::new("shop", &text),
        family: Family::V4,
        ports: vec![SlicePort {
            name: "http".into(),
            protocol: Protocol::TCP,
            port: 8080,
        }],
        endpoints: endpoints.collect(),
        weight: 1,
    };
    (name, sourced(slice))
}

fn sourced<T>(object: T) -> Sourced<T> {
    Sourced {
        object: Some(Arc::new(object)),
        trigger_time: None,
        source: "test".into(),
    }
}

/// Bytes allocated for a failing probe, an added service, and a removed one, among this many services from two sources.
async fn costs(services: u32) -> [u64; 3] {
    let mut set = ServiceSet {
        services: (0..services).map(service).collect(),
        slices: (0..services).map(slice).collect(),
        synced: Synced {
            services: true,
            slices: true,
        },
        ..ServiceSet::default()
    };
    let (source, manifests) = watch::channel(Arc::new(set.clone()));
    let (probes, readiness) = watch::channel(Arc::<Readiness>::default());
    let probed = Probed::of(manifests, "here".into(), readiness);
    let other = ServiceSet {
        services: (services..2 * services).map(service).collect(),
        synced: set.synced,
        ..ServiceSet::default()
    };
    let (_other, other) = watch::channel(Arc::new(other));
    let (reported, mut done) = mpsc::unbounded_channel();
    let settings = SyncSettings {
        intervals: Intervals {
            min: Duration::ZERO,
            retry: Duration::from_secs(3600),
            max: Duration::from_secs(3600),
        },
        families: Family::ALL.to_vec(),
        health_timeout: Duration::from_secs(3600),
        clock: Timestamp::now,
    };
    let topology = watch::channel(Topology {
        node: "here".into(),
        zone: None,
    });
    let sources = vec![probed.services(), other];
    let served = Services::start(settings, topology.1, sources, ReportingProvider(reported))
        .expect("intervals that fit");
    let ports = 2 * services as usize;
    while done.recv().await.expect("a sync").0 != ports {}
    let mut view = served.handle().view();

    let mut cost = async |change: &mut dyn FnMut()| {
        view.mark_unchanged();
        let before = ALLOCATED.load(Ordering::Relaxed);
        change();
        let (ports, allocated) = loop {
            match done.recv().await.expect("a sync") {
                (0, _) => {}
                changed => break changed,
            }
        };
        assert_eq!(ports, 1, "one port has changed");
        assert!(view.has_changed().expect("the services still run"));
        allocated - before
    };
    let probe = Readiness::from([(address(services / 2, 0), false)]);
    let probe = Arc::new(probe);
    let fails = cost(&mut || drop(probes.send_replace(probe.clone()))).await;
    set.services.extend([service(2 * services)]);
    let comes = cost(&mut || drop(source.send_replace(Arc::new(set.clone())))).await;
    set.services.remove(&service(7).0);
    let goes = cost(&mut || drop(source.send_replace(Arc::new(set.clone())))).await;
    [fails, comes, goes]
}

#[tokio::test]
async fn one_change_costs_the_same_among_a_hundred_services_and_among_ten_thousand() {
    let few = costs(100).await;
    let many = costs(10_000).await;
    println!("bytes allocated: {few:?} among 100 services, {many:?} among 10,000");
    for (few, many) in few.into_iter().zip(many) {
        // Trees of more services are deeper.
        assert!(many < 4 * few, "{many} bytes after {few}");
    }
}

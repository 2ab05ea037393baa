//! Runs the datapath's programs on crafted packets with `BPF_PROG_TEST_RUN`, without devices or traffic.

pub mod contents;
mod pool;

use std::fs::{self, File};
use std::net::{Ipv4Addr, Ipv6Addr};
use std::ops::{Deref, DerefMut};
use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::{process, thread};

use anyhow::Context as _;
use aya::maps::{HashMap, Map, MapData};
use aya::programs::{ProgramError, SchedClassifier, TestRun as _};
use aya::{Pod, TestRunOptions};
use health_common::config::DatapathConfig;
use health_common::ct::{CtEntry, Timeouts};
use health_common::endpoint::{ENDPOINT_HEALTH, EndpointInfo};
use health_common::{LAYOUT_VERSION, identity};
use health_datapath::dump::Pinned;
use health_datapath::services::ServiceMapSizes;
use health_datapath::{Datapath, LoadSettings, MapSizes};
use health_model::settings::Location;
use nix::mount::{MntFlags, MsFlags, mount, umount2};

pub use self::pool::Pool;
use self::pool::{SHARED, Set};

/// Return value for a packet that continues (`TC_ACT_UNSPEC`).
pub const GO_ON: i32 = -1;
/// Return value for a dropped packet (`TC_ACT_SHOT`).
pub const DROP: i32 = 2;
/// Return value for a redirected packet (`TC_ACT_REDIRECT`).
pub const REDIRECT: i32 = 7;
/// The device that test runs pretend to use: the loopback device.
pub const IFINDEX: u32 = 1;

/// Timeouts in seconds that outlast any test, however busy the machine is.
pub const LONG_TIMEOUTS: Timeouts = Timeouts {
    tcp_syn: 36_000,
    tcp_established: 36_000,
    tcp_close: 36_000,
    udp: 36_000,
    icmp: 36_000,
    sctp: 36_000,
    any: 36_000,
    fragment: 36_000,
};

/// Size of `struct __sk_buff`, and offsets of some of its fields (`linux/bpf.h`).
const SK_BUFF_LEN: usize = 192;
const SK_BUFF_MARK: usize = 8;
const SK_BUFF_INGRESS_IFINDEX: usize = 36;
const SK_BUFF_TSTAMP: usize = 152;
const SK_BUFF_GSO_SIZE: usize = 176;

/// Context of a packet that the kernel timestamped on receipt, in nanoseconds since 1970.
pub fn stamped(at_ns: u64) -> Vec<u8> {
    context(SK_BUFF_TSTAMP, &at_ns.to_ne_bytes())
}

/// Context of a packet that the device will split into segments of `size` bytes of data (GSO).
pub fn offloaded(size: u32) -> Vec<u8> {
    context(SK_BUFF_GSO_SIZE, &size.to_ne_bytes())
}

/// Context of a packet with a mark.
pub fn marked(mark: u32) -> Vec<u8> {
    context(SK_BUFF_MARK, &mark.to_ne_bytes())
}

/// Context of a packet with a mark that arrived at a device.
pub fn forwarded(mark: u32) -> Vec<u8> {
    let mut context = marked(mark);
    context[SK_BUFF_INGRESS_IFINDEX..][..4].copy_from_slice(&IFINDEX.to_ne_bytes());
    context
}

fn context(at: usize, field: &[u8]) -> Vec<u8> {
    let mut context = vec![0; SK_BUFF_LEN];
    context[at..][..field.len()].copy_from_slice(field);
    context
}

/// Wall-clock time in nanoseconds since 1970.
pub fn utc_ns() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.expect("a time after 1970").as_nanos() as u64
}

/// The result of a test run.
#[derive(Debug, PartialEq, Eq)]
pub struct Outcome {
    /// The program's return value.
    pub code: i32,
    /// The packet after the run.
    pub bytes: Vec<u8>,
}

/// A private bpffs, unmounted on drop.
pub struct Bpffs(PathBuf);

impl Bpffs {
    /// Mounts a bpffs in a fresh folder.
    pub fn mount() -> Self {
        let dir = tempfile::Builder::new()
            .prefix("health-bpffs-")
            .tempdir()
            .expect("a temporary folder")
            .keep();
        mount(
            Some("bpf"),
            &dir,
            Some("bpf"),
            MsFlags::empty(),
            None::<&str>,
        )
        .unwrap_or_else(|error| panic!("cannot mount a bpffs at {}: {error}", dir.display()));
        Self(dir)
    }

    /// Path of the mount point.
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Bpffs {
    fn drop(&mut self) {
        // Open files keep the filesystem alive, but not its mount point.
        let _ = umount2(&self.0, MntFlags::MNT_DETACH);
        let _ = fs::remove_dir(&self.0);
    }
}

/// Runs a program on a packet, with an optional context. Returns `None` if the kernel rejects the packet for a test
/// run: the packet must have the IP header that its EtherType announces.
pub fn run_program(
    program: &SchedClassifier,
    packet: &[u8],
    context: Option<&[u8]>,
) -> Option<Outcome> {
    run_program_often(program, packet, context, 1)
}

fn run_program_often(
    program: &SchedClassifier,
    packet: &[u8],
    context: Option<&[u8]>,
    times: u32,
) -> Option<Outcome> {
    let mut out = vec![0; packet.len() + 256];
    let options = TestRunOptions {
        data_in: Some(packet),
        data_out: Some(&mut out),
        ctx_in: context,
        repeat: times,
        ..TestRunOptions::new()
    };
    let result = match program.test_run(options) {
        Ok(result) => result,
        Err(ProgramError::SyscallError(error))
            if error.io_error.kind() == std::io::ErrorKind::InvalidInput =>
        {
            return None;
        }
        Err(error) => panic!("a test run on {} bytes: {error:?}", packet.len()),
    };
    out.truncate(result.data_size_out as usize);
    Some(Outcome {
        code: result.return_value as i32,
        bytes: out,
    })
}

/// A bpffs that is no longer mounted anywhere. It disappears with the process that has it open, even if that process is
/// killed.
#[derive(Debug)]
struct DetachedBpffs {
    path: PathBuf,
    _root: File,
}

impl DetachedBpffs {
    fn open() -> Self {
        let mounted = Bpffs::mount();
        let root = File::open(mounted.path()).expect("the folder of the bpffs");
        // Other processes can use this path too.
        let path = format!("/proc/{}/fd/{}", process::id(), root.as_raw_fd());
        Self {
            path: path.into(),
            _root: root,
        }
    }
}

/// Programs and maps, loaded and pinned.
pub struct Loaded {
    /// The datapath, which owns the typed maps.
    pub datapath: Datapath,
    /// The location of the pins.
    pub location: Location,
    _bpffs: DetachedBpffs,
}

impl Loaded {
    fn new(sizes: MapSizes) -> Self {
        let bpffs = DetachedBpffs::open();
        let location = Location {
            instance: "packets".to_owned(),
            runtime_dir: PathBuf::from("/nonexistent"),
            state_dir: PathBuf::from("/nonexistent"),
            bpf_root: bpffs.path.clone(),
        };
        let settings = LoadSettings {
            sizes,
            ..LoadSettings::default()
        };
        let datapath = Datapath::load(&location, settings);
        Self {
            datapath: datapath.expect("the programs load"),
            location,
            _bpffs: bpffs,
        }
    }
}

/// Map sizes that are enough for the tests. Arrays of the default sizes have a million more slots, all of which are
/// read after each test.
fn shared_sizes() -> MapSizes {
    const PART: u32 = 16;
    let services = ServiceMapSizes::default();
    let flows = MapSizes::default();
    MapSizes {
        conntrack: flows.conntrack / PART,
        nat: flows.nat / PART,
        services: Some(ServiceMapSizes {
            backends: services.backends / PART,
            slots: services.slots / PART,
            maglev: services.maglev / PART,
            flows: services.flows / PART,
            ..services
        }),
        ..flows
    }
}

/// The owner of the programs that a test uses.
enum Owner {
    /// The test itself owns them.
    Alone(Box<Loaded>),
    /// A pool owns them.
    Pool(Box<Set>, Arc<Pool>),
    /// They were returned to the pool.
    Nobody,
}

/// The loaded datapath of one test. Other tests in the process use it before and after: dropping this value resets the
/// maps to their state after loading. If a test panics, its programs are not reused.
pub struct TestRun(Owner);

impl Deref for TestRun {
    type Target = Loaded;

    fn deref(&self) -> &Loaded {
        match &self.0 {
            Owner::Alone(loaded) => loaded,
            Owner::Pool(set, _) => &set.loaded,
            Owner::Nobody => unreachable!("programs are given back last"),
        }
    }
}

impl DerefMut for TestRun {
    fn deref_mut(&mut self) -> &mut Loaded {
        match &mut self.0 {
            Owner::Alone(loaded) => loaded,
            Owner::Pool(set, _) => &mut set.loaded,
            Owner::Nobody => unreachable!("programs are given back last"),
        }
    }
}

impl Drop for TestRun {
    fn drop(&mut self) {
        if thread::panicking() {
            return;
        }
        if let Err(error) = self.return_to_pool() {
            panic!("{error:#}");
        }
    }
}

impl TestRun {
    /// Takes idle programs from the pool, or loads new ones. The maps are in their state after loading.
    ///
    /// Tests that do more than run programs and change map contents must use [`load_alone`](Self::load_alone): those
    /// that attach programs, add or remove pins, or depend on the order in which a full map evicts entries.
    pub fn load() -> Self {
        Self::of_pool(&SHARED)
    }

    /// Like [`load`](Self::load), but from this pool instead of the process-wide one.
    pub fn of_pool(pool: &Arc<Pool>) -> Self {
        let set = pool.take().unwrap_or_else(|| {
            let loaded = Loaded::new(shared_sizes());
            Set::new(loaded).expect("the contents of the maps")
        });
        Self(Owner::Pool(Box::new(set), Arc::clone(pool)))
    }

    /// Loads programs that only this test uses.
    pub fn load_alone() -> Self {
        Self::load_sized(MapSizes::default())
    }

    /// Like [`load_alone`](Self::load_alone), with maps of these sizes.
    pub fn load_sized(sizes: MapSizes) -> Self {
        Self(Owner::Alone(Box::new(Loaded::new(sizes))))
    }

    /// Returns the programs to the pool, as dropping does. After an error, the programs are not reused.
    pub fn give_back(mut self) -> anyhow::Result<()> {
        self.return_to_pool()
    }

    fn return_to_pool(&mut self) -> anyhow::Result<()> {
        match std::mem::replace(&mut self.0, Owner::Nobody) {
            Owner::Pool(set, pool) => pool.give_back(*set).context(
                "cannot pass the programs to the next test; use `TestRun::load_alone` to avoid this",
            ),
            Owner::Alone(_) | Owner::Nobody => Ok(()),
        }
    }

    /// Opens a pinned program.
    pub fn program(&self, name: &str) -> SchedClassifier {
        SchedClassifier::from_pin(self.location.pins().join("programs").join(name))
            .expect("a pinned program")
    }

    /// Opens a pinned hash map, LRU or not.
    pub fn hash_map<K: Pod, V: Pod>(&self, name: &str) -> HashMap<MapData, K, V> {
        let data = MapData::from_pin(self.location.pins().join(name)).expect("a pinned map");
        let map = Map::from_map_data(data).expect("a known kind");
        map.try_into().expect("a hash map")
    }

    /// Modifies every conntrack entry of a map.
    pub fn change_flows<K: Pod>(&self, name: &str, change: impl Fn(&mut CtEntry)) {
        let mut flows: HashMap<MapData, K, CtEntry> = self.hash_map(name);
        let keys: Vec<K> = flows.keys().map(|key| key.expect("a key")).collect();
        for key in keys {
            let mut entry = flows.get(&key, 0).expect("its entry");
            change(&mut entry);
            flows.insert(key, entry, 0).expect("an entry");
        }
    }

    /// Runs a program on a packet.
    pub fn run(&self, program: &str, packet: &[u8]) -> Outcome {
        self.try_run(program, packet)
            .unwrap_or_else(|| panic!("the kernel takes no test run of {} bytes", packet.len()))
    }

    /// Runs a program on a packet `times` times in one call.
    pub fn run_often(&self, program: &str, packet: &[u8], times: u32) {
        let outcome = run_program_often(&self.program(program), packet, None, times);
        assert!(outcome.is_some(), "the kernel takes no such test run");
    }

    /// Runs a program on a packet that the device will split into segments of `size` bytes of data (GSO).
    pub fn run_offloaded(&self, program: &str, packet: &[u8], size: u32) -> Outcome {
        self.run_with(program, packet, &offloaded(size))
    }

    /// Runs a program on a packet with this context (`struct __sk_buff`).
    pub fn run_with(&self, program: &str, packet: &[u8], context: &[u8]) -> Outcome {
        run_program(&self.program(program), packet, Some(context)).unwrap_or_else(|| {
            panic!(
                "the kernel takes no such test run of {} bytes",
                packet.len()
            )
        })
    }

    /// Runs a program on a packet. Returns `None` if the kernel rejects the packet for a test run.
    pub fn try_run(&self, program: &str, packet: &[u8]) -> Option<Outcome> {
        run_program(&self.program(program), packet, None)
    }

    /// The pinned maps.
    pub fn maps(&self) -> Pinned {
        Pinned::open(&self.location).expect("pinned maps")
    }

    /// Number of packets counted for a reason, in both directions.
    pub fn counted(&self, reason: health_common::metrics::Reason) -> u64 {
        let rows = self.maps().metrics().expect("the counters");
        rows.iter()
            .filter(|row| row.reason == reason as u8)
            .map(|row| row.packets)
            .sum()
    }

    /// Configures the health endpoint: its IP and MAC addresses and the other settings.
    pub fn set_health_endpoint(
        &mut self,
        addresses: (Ipv4Addr, Ipv6Addr),
        mac: [u8; 6],
        host_mac: [u8; 6],
        config: DatapathConfig,
    ) {
        let (ipv4, ipv6) = addresses;
        let info = EndpointInfo {
            ifindex: IFINDEX,
            identity: identity::HEALTH,
            flags: ENDPOINT_HEALTH,
            policy: 0,
            id: 77,
            mac,
            host_mac,
            pad: 0,
        };
        self.datapath
            .set_endpoints(&[(ipv4.into(), info), (ipv6.into(), info)])
            .expect("the endpoints");
        let config = DatapathConfig {
            layout_version: LAYOUT_VERSION,
            health_ifindex: IFINDEX,
            health4: ipv4.into(),
            health6: ipv6.into(),
            health_mac: mac,
            ..config
        };
        self.datapath.configure(config).expect("the settings");
    }
}

//! The datapath's programs run on crafted packets with `BPF_PROG_TEST_RUN`: no device, no traffic.

use std::fs;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::path::{Path, PathBuf};

use aya::TestRunOptions;
use aya::programs::{ProgramError, SchedClassifier, TestRun as _};
use health_common::config::DatapathConfig;
use health_common::endpoint::{ENDPOINT_HEALTH, EndpointInfo};
use health_common::{LAYOUT_VERSION, identity};
use health_datapath::MapSizes;
use health_datapath::dump::Pinned;
use health_datapath::loader::{Datapath, ProgramLog};
use health_model::settings::Location;
use nix::mount::{MntFlags, MsFlags, mount, umount2};

/// Return value for a packet that goes on (`TC_ACT_UNSPEC`).
pub const GO_ON: i32 = -1;
/// Return value for a dropped packet (`TC_ACT_SHOT`).
pub const DROP: i32 = 2;
/// Return value for a packet handed to a device (`TC_ACT_REDIRECT`).
pub const REDIRECT: i32 = 7;
/// The device that test runs pretend to be at: the loopback.
pub const IFINDEX: u32 = 1;

/// Size of `struct __sk_buff`, and where some of its fields are (`linux/bpf.h`).
const SK_BUFF_LEN: usize = 192;
const SK_BUFF_MARK: usize = 8;
const SK_BUFF_TSTAMP: usize = 152;
const SK_BUFF_GSO_SIZE: usize = 176;

/// The context of a packet that the kernel stamped when it took it from the device: nanoseconds since 1970.
pub fn stamped(at_ns: u64) -> Vec<u8> {
    context(SK_BUFF_TSTAMP, &at_ns.to_ne_bytes())
}

/// The context of a packet that the device is to cut into segments of `size` bytes of data (GSO).
pub fn offloaded(size: u32) -> Vec<u8> {
    context(SK_BUFF_GSO_SIZE, &size.to_ne_bytes())
}

/// The context of a packet with a mark.
pub fn marked(mark: u32) -> Vec<u8> {
    context(SK_BUFF_MARK, &mark.to_ne_bytes())
}

fn context(at: usize, field: &[u8]) -> Vec<u8> {
    let mut context = vec![0; SK_BUFF_LEN];
    context[at..][..field.len()].copy_from_slice(field);
    context
}

/// The time of day, nanoseconds since 1970.
pub fn utc_ns() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.expect("a time after 1970").as_nanos() as u64
}

/// What became of a packet.
#[derive(Debug, PartialEq, Eq)]
pub struct Outcome {
    /// The program's return value.
    pub code: i32,
    /// The packet afterwards.
    pub bytes: Vec<u8>,
}

/// A bpffs of one's own, unmounted on drop.
pub struct Bpffs(PathBuf);

impl Bpffs {
    /// Mounts one in a fresh folder.
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

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Bpffs {
    fn drop(&mut self) {
        // What is still open keeps the filesystem, not its place.
        let _ = umount2(&self.0, MntFlags::MNT_DETACH);
        let _ = fs::remove_dir(&self.0);
    }
}

/// Runs a program on a packet, with a context if it is to have one; `None` where the kernel takes no such
/// packet for a test run: it wants the IP header that the Ethernet type announces.
pub fn run_program(
    program: &SchedClassifier,
    packet: &[u8],
    context: Option<&[u8]>,
) -> Option<Outcome> {
    let mut out = vec![0; packet.len() + 256];
    let options = TestRunOptions {
        data_in: Some(packet),
        data_out: Some(&mut out),
        ctx_in: context,
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

/// The loaded datapath of one test.
pub struct TestRun {
    /// For its typed maps.
    pub datapath: Datapath,
    /// Where its pins are.
    pub location: Location,
    _bpffs: Bpffs,
}

impl TestRun {
    /// Loads the programs into a bpffs of their own.
    pub fn load() -> Self {
        Self::load_sized(MapSizes::default())
    }

    /// As [`load`](Self::load), with maps of these sizes.
    pub fn load_sized(sizes: MapSizes) -> Self {
        let bpffs = Bpffs::mount();
        let location = Location {
            instance: "packets".to_owned(),
            runtime_dir: PathBuf::from("/nonexistent"),
            state_dir: PathBuf::from("/nonexistent"),
            bpf_root: bpffs.path().to_owned(),
        };
        let datapath = Datapath::load_sized(&location, sizes, ProgramLog::Warn);
        let datapath = datapath.expect("the programs load");
        Self {
            datapath,
            location,
            _bpffs: bpffs,
        }
    }

    /// A pinned program.
    pub fn program(&self, name: &str) -> SchedClassifier {
        SchedClassifier::from_pin(self.location.pins().join("programs").join(name))
            .expect("a pinned program")
    }

    /// Runs a program on a packet.
    pub fn run(&self, program: &str, packet: &[u8]) -> Outcome {
        self.try_run(program, packet)
            .unwrap_or_else(|| panic!("the kernel takes no test run of {} bytes", packet.len()))
    }

    /// Runs a program on a packet that the device is to cut into segments of `size` bytes of data (GSO).
    pub fn run_offloaded(&self, program: &str, packet: &[u8], size: u32) -> Outcome {
        self.run_with(program, packet, &offloaded(size))
    }

    /// Runs a program on a packet with a context, a `struct __sk_buff`.
    pub fn run_with(&self, program: &str, packet: &[u8], context: &[u8]) -> Outcome {
        run_program(&self.program(program), packet, Some(context)).unwrap_or_else(|| {
            panic!(
                "the kernel takes no such test run of {} bytes",
                packet.len()
            )
        })
    }

    /// Runs a program on a packet; `None` where the kernel takes no such packet for a test run.
    pub fn try_run(&self, program: &str, packet: &[u8]) -> Option<Outcome> {
        run_program(&self.program(program), packet, None)
    }

    /// The pinned maps.
    pub fn maps(&self) -> Pinned {
        Pinned::open(&self.location).expect("pinned maps")
    }

    /// Packets counted for a reason, both directions.
    pub fn counted(&self, reason: health_common::metrics::Reason) -> u64 {
        let rows = self.maps().metrics().expect("the counters");
        rows.iter()
            .filter(|row| row.reason == reason as u8)
            .map(|row| row.packets)
            .sum()
    }

    /// Sets up the health endpoint: its addresses and hardware addresses, and the rest of the settings.
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

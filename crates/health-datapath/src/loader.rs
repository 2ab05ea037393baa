//! Loads the programs and shares the pinned maps with earlier agents.

use std::collections::HashMap as StdHashMap;
use std::fs::{self, File};
use std::io::ErrorKind;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use aya::maps::{Array, HashMap, Map, MapData, MapError, PerCpuArray, ProgramArray, RingBuf};
use aya::pin::PinError;
use aya::programs::{Program, ProgramError, SchedClassifier};
use aya::{Ebpf, EbpfLoader};
use aya_log::EbpfLogger;
use health_common::addr::Addr;
use health_common::config::{DatapathConfig, SERVICES};
use health_common::endpoint::EndpointInfo;
use health_common::masquerade::MasqueradeConfig;
use health_common::service::direct::DirectConfig;
use health_common::service::xdp::XdpTimes;
use health_model::settings::Location;
use health_net::clock;
use tracing::info;

use super::arrival_store::KernelArrivals;
use super::attach::{self, Attachment, Attachments, Clsact};
use super::collect::KernelTables;
use super::connections::Connections;
use super::events::{KernelRing, KernelSwitch};
use super::ipcache::Ipcache;
use super::kernel_rtt::{Account, KernelRtt};
use super::layout::{self, PROGRAM_PINS};
use super::layout_change::{make_room, set_aside};
use super::load_all::load_all;
use super::own::OwnAddresses;
use super::parts::{HOLDS_FROM, Parts, holds_from};
use super::pin_folder::{lock, locked, make_folders, remove_tree};
use super::policy::PolicyTables;
use super::resize::{MapSizes, PendingResize};
use super::rings::tell_first_places;
use super::services::{ServiceMaps, ServiceTables, ServicesError, SocketTable};
use super::sockets::Sockets;
use super::table::Table;
use super::workloads::{Workloads, with_link_local};
use super::xdp::{ServiceProgram, xdp_times};
use super::{DatapathError, Hook, PROGRAMS};

/// How much the programs log. Levels above it are cut out of the programs at load time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProgramLog {
    /// Warnings and errors.
    Warn,
    /// Everything: a line for each refused packet.
    Debug,
}

/// What the programs are loaded for.
#[derive(Clone, Copy, Debug)]
pub struct LoadSettings {
    /// Maximum entries per map. [`Datapath::attach`] carries entries over from maps of other sizes. Services need the
    /// service maps.
    pub sizes: MapSizes,
    /// Whether [`Datapath::set_masquerade`] may turn masquerading on. Services need it.
    pub masquerade: bool,
    /// How much they log.
    pub log: ProgramLog,
}

impl Default for LoadSettings {
    /// Everything.
    fn default() -> Self {
        Self {
            sizes: MapSizes::default(),
            masquerade: true,
            log: ProgramLog::Warn,
        }
    }
}

pub(super) type Programs = StdHashMap<&'static str, SchedClassifier>;

/// Program log output, as lines of the agent's log.
pub(super) type ProgramLines = EbpfLogger<&'static dyn ::log::Log>;

/// The loaded programs and their maps. Dropping it leaves everything pinned and attached.
pub struct Datapath {
    pub(super) pins: PathBuf,
    /// The parts that the programs are loaded with.
    pub(super) parts: Parts,
    /// By name, as opened from their pins. The object they were loaded from, about a megabyte, is not kept.
    pub(super) programs: Programs,
    pub(super) maps: StdHashMap<String, Map>,
    /// Program log output, until it is forwarded.
    pub(super) log: Option<ProgramLines>,
    /// Where programs must be attached.
    pub(super) hooks: Vec<Hook>,
    pub(super) attachments: Attachments,
    pub(super) attached: attach::AttachedPrograms,
    pub(super) clsact: Clsact,
    pub(super) xdp: ServiceProgram,
    /// Why optional programs could not be attached.
    pub(super) refused: Vec<DatapathError>,
    /// Whether a former agent may have attached by clsact what must now have links: until the first [`Datapath::attach`]
    /// completes, and while its programs serve endpoints.
    pub(super) may_have_filters: bool,
    /// Set until the programs are attached where they must be.
    pub(super) resizing: Option<PendingResize>,
    pub(super) endpoints: HashMap<MapData, Addr, EndpointInfo>,
    devices: HashMap<MapData, u32, u32>,
    pub(super) workloads: Workloads,
    pub(super) sockets: Sockets,
    config: Array<MapData, DatapathConfig>,
    xdp_times: Array<MapData, XdpTimes>,
    masquerade: Array<MapData, MasqueradeConfig>,
    direct: Array<MapData, DirectConfig>,
    // Holds the lock on the pin folder; closing it releases the lock.
    lock: File,
}

impl Datapath {
    /// Loads the programs alongside those of an earlier agent, on the same maps, and pins what is not pinned yet. Attaches
    /// and replaces nothing: [`Datapath::attach`] does that.
    ///
    /// If pinned maps have another layout, all pins are set aside in a folder named `INSTANCE_old`; maps whose own layout is
    /// unchanged are in both folders. The other maps serve until the new programs are attached; the endpoint maps serve each
    /// workload until it is [set](Self::set_workload). If an upgrade does not get that far, the previous version finds its
    /// own maps there.
    pub fn load(location: &Location, settings: LoadSettings) -> Result<Self, DatapathError> {
        let pins = location.pins();
        // The lock on a folder that is set aside is of no further use.
        let former = lock(&pins)?;
        make_room(&pins)?;
        make_folders(&pins)?;
        drop(former);
        let lock = locked(&pins)?;
        let resizing = PendingResize::prepare(&pins, settings.sizes)?;
        let level: u8 = match settings.log {
            ProgramLog::Warn => ::log::Level::Warn as u8,
            ProgramLog::Debug => ::log::Level::Debug as u8,
        };
        let parts = Parts {
            services: settings.sizes.services.is_some(),
            masquerade: settings.masquerade,
        };
        let names = || {
            let all = layout::PROGRAMS.into_iter();
            all.filter(|name| parts.have(name))
        };
        let from = holds_from();
        let mut loader = EbpfLoader::new();
        resizing.apply(&mut loader);
        parts.apply(&mut loader);
        let mut ebpf = loader
            .default_map_pin_directory(&pins)
            .override_global(aya_log::LEVEL, &level, false)
            .override_global(HOLDS_FROM, &from, true)
            .load(PROGRAMS)?;
        let of_sockets = Sockets::program_names().filter(|_| parts.services);
        let mut refused = load_all(&mut ebpf, names().chain(of_sockets));
        if let Some(error) = names().find_map(|name| refused.remove(name)) {
            return Err(error);
        }
        let endpoints = typed(&pins, &layout::ENDPOINTS, HashMap::try_from)?;
        let devices = typed(&pins, &layout::DEVICES, HashMap::try_from)?;
        let config = typed(&pins, &layout::CONFIG, Array::try_from)?;
        let xdp_times = typed(&pins, &layout::XDP_TIMES, Array::try_from)?;
        let masquerade = typed(&pins, &layout::MASQUERADE, Array::try_from)?;
        let direct = typed(&pins, &layout::DIRECT, Array::try_from)?;
        tell_first_places(&pins)?;
        let mut programs = Programs::new();
        for name in names() {
            programs.insert(name, reopened(&pins, name, loaded(&mut ebpf, name)?)?);
        }
        let sockets = if parts.services {
            Sockets::take(&mut ebpf, refused, &pins)?
        } else {
            Sockets::default()
        };
        let log = EbpfLogger::init(&mut ebpf).ok();
        let maps = take_maps(ebpf);
        let clsact = Clsact::of(&pins);
        let mut datapath = Self {
            pins,
            parts,
            programs,
            maps,
            log,
            hooks: Vec::new(),
            attachments: Attachments::all(Attachment::Tcx),
            attached: attach::AttachedPrograms::default(),
            clsact,
            xdp: ServiceProgram::default(),
            refused: Vec::new(),
            may_have_filters: true,
            resizing: resizing.is_needed().then_some(resizing),
            endpoints,
            devices,
            workloads: Workloads::default(),
            sockets,
            config,
            xdp_times,
            masquerade,
            direct,
            lock,
        };
        // Programs that others tail-call serve from this point on, so the maps must hold what they need first.
        if datapath.resizing.is_none() {
            datapath.connect_programs()?;
        }
        Ok(datapath)
    }

    /// Whether only map contents have changed since the programs were loaded.
    pub fn is_as_loaded(&self) -> bool {
        // Names all fields, so that a new field must be considered here. Maps and programs are handles.
        let Self {
            pins: _,
            parts: _,
            programs: _,
            maps: _,
            log: _,
            hooks,
            attachments,
            attached,
            clsact: _,
            xdp,
            refused: _,
            may_have_filters,
            resizing,
            endpoints: _,
            devices: _,
            workloads,
            sockets,
            config: _,
            xdp_times: _,
            masquerade: _,
            direct: _,
            lock: _,
        } = self;
        hooks.is_empty()
            && *attachments == Attachments::all(Attachment::Tcx)
            && attached.is_empty()
            && xdp.program().is_none()
            && *may_have_filters
            && resizing.is_none()
            && *workloads == Workloads::default()
            && sockets.are_as_loaded()
    }

    /// Connects the programs to those that they tail-call.
    pub(super) fn connect_programs(&mut self) -> Result<(), DatapathError> {
        self.connect(&layout::CALLS, &layout::CALLED)?;
        if self.has_ip_programs() {
            self.connect(&layout::IP_CALLS, &layout::IP_CALLED)?;
        }
        Ok(())
    }

    /// Puts the loaded programs into their slots of a map.
    pub(super) fn connect(
        &mut self,
        map: &layout::MapLayout,
        called: &[(u32, &str)],
    ) -> Result<(), DatapathError> {
        let mut calls = typed(&self.pins, map, ProgramArray::try_from)?;
        for &(index, name) in called {
            if !self.parts.have(name) {
                continue;
            }
            let program = classifier(&mut self.programs, name)?;
            let fd = program.fd().map_err(program_error("open", name))?;
            calls
                .set(index, fd, 0)
                .map_err(map_error("write", map.name))?;
        }
        Ok(())
    }

    /// Sets the configuration that the programs read. Fails if it needs programs that were not loaded.
    pub fn configure(&mut self, config: DatapathConfig) -> Result<(), DatapathError> {
        if config.flags & SERVICES != 0 && !self.parts.services {
            return Err(DatapathError::NotLoaded(layout::TO_SERVICE));
        }
        self.config
            .set(0, config, 0)
            .map_err(map_error("write", layout::CONFIG.name))?;
        self.note_change()
    }

    /// Prevents new service and masquerade flows for this long; zero allows them again.
    pub(super) fn hold_flows(&mut self, time: Duration) -> Result<(), DatapathError> {
        let name = layout::CONFIG.name;
        let config = self.config.get(&0, 0).map_err(map_error("read", name))?;
        let flows_held_until_ns = match time.as_nanos() as u64 {
            0 => 0,
            time_ns => clock::now_ns() + time_ns,
        };
        self.configure(DatapathConfig {
            flows_held_until_ns,
            ..config
        })
    }

    /// Sets the keys for the tags on packets that nodes forward to each other's backends: the key that makes tags here, and
    /// those accepted from others.
    pub fn set_direct(&mut self, direct: DirectConfig) -> Result<(), DatapathError> {
        self.direct
            .set(0, direct, 0)
            .map_err(map_error("write", layout::DIRECT.name))
    }

    /// Sets whose packets are masqueraded. Flows that are already translated stay translated. Fails if it needs programs
    /// that were not loaded.
    pub fn set_masquerade(&mut self, masquerade: MasqueradeConfig) -> Result<(), DatapathError> {
        if masquerade.is_on() && !self.parts.masquerade {
            return Err(DatapathError::NotLoaded(layout::MASQUERADE_OUT));
        }
        self.masquerade
            .set(0, masquerade, 0)
            .map_err(map_error("write", layout::MASQUERADE.name))?;
        self.note_change()
    }

    /// Makes XDP relearn how it forwards packets, after a change that affects that.
    pub(super) fn note_change(&mut self) -> Result<(), DatapathError> {
        self.xdp_times
            .set(0, xdp_times(), 0)
            .map_err(map_error("write", layout::XDP_TIMES.name))
    }

    /// Makes these addresses, plus those of workloads, exactly the local endpoints. Entries that stay are never missing in
    /// between.
    pub fn set_endpoints(
        &mut self,
        wanted: &[(IpAddr, EndpointInfo)],
    ) -> Result<(), DatapathError> {
        let own = wanted
            .iter()
            .flat_map(|(addr, info)| with_link_local(Addr::from(*addr), *info));
        let wanted: StdHashMap<Addr, EndpointInfo> = own.chain(self.workloads.entries()).collect();
        for (addr, endpoint) in &wanted {
            self.write_endpoint(*addr, endpoint)?;
        }
        let known: Vec<Addr> = self.endpoints.keys().filter_map(Result::ok).collect();
        for addr in known.into_iter().filter(|addr| !wanted.contains_key(addr)) {
            self.remove_endpoint(addr)?;
        }
        let wanted: StdHashMap<u32, u16> = self.workloads.devices().collect();
        for (ifindex, id) in &wanted {
            self.write_device(*ifindex, *id)?;
        }
        let known: Vec<u32> = self.devices.keys().filter_map(Result::ok).collect();
        for ifindex in known
            .into_iter()
            .filter(|known| !wanted.contains_key(known))
        {
            self.remove_device(ifindex)?;
        }
        Ok(())
    }

    /// Attributes what happens at a device to an endpoint.
    pub(super) fn write_device(&mut self, ifindex: u32, id: u16) -> Result<(), DatapathError> {
        self.devices
            .insert(ifindex, u32::from(id), 0)
            .map_err(map_error("write", layout::DEVICES.name))
    }

    pub(super) fn remove_device(&mut self, ifindex: u32) -> Result<(), DatapathError> {
        match self.devices.remove(&ifindex) {
            Ok(()) | Err(MapError::KeyNotFound) => Ok(()),
            Err(source) => Err(map_error("write", layout::DEVICES.name)(source)),
        }
    }

    pub(super) fn write_endpoint(
        &mut self,
        addr: Addr,
        endpoint: &EndpointInfo,
    ) -> Result<(), DatapathError> {
        self.endpoints
            .insert(addr, endpoint, 0)
            .map_err(map_error("write", layout::ENDPOINTS.name))
    }

    pub(super) fn remove_endpoint(&mut self, addr: Addr) -> Result<(), DatapathError> {
        match self.endpoints.remove(&addr) {
            Ok(()) | Err(MapError::KeyNotFound) => Ok(()),
            Err(source) => Err(map_error("write", layout::ENDPOINTS.name)(source)),
        }
    }

    /// The RTT rows, and the probes in flight.
    pub fn rtt(&self) -> Result<KernelRtt, DatapathError> {
        let rows = typed(&self.pins, &layout::RTT, HashMap::try_from)?;
        let inflight = self.map_data(&layout::INFLIGHT)?;
        let account = Account::open(&self.pins.join(PROGRAM_PINS).join(layout::RTT_ACCOUNT))
            .map_err(program_error("open", layout::RTT_ACCOUNT))?;
        Ok(KernelRtt::new(rows, inflight, account, self.connections()?))
    }

    fn connections(&self) -> Result<Connections, DatapathError> {
        let peers = typed(&self.pins, &layout::PEERS, HashMap::try_from)?;
        let path = self.pins.join(PROGRAM_PINS).join(layout::TCP_ACCOUNT);
        let account =
            SchedClassifier::from_pin(&path).map_err(program_error("open", layout::TCP_ACCOUNT))?;
        Ok(Connections::new(peers, account))
    }

    /// The arrivals of other agents' probes.
    pub fn arrivals(&self) -> Result<KernelArrivals, DatapathError> {
        typed(&self.pins, &layout::ARRIVALS, HashMap::try_from).map(KernelArrivals::new)
    }

    /// The conntrack and NAT entries, for collection.
    pub fn tables(&self) -> Result<KernelTables, DatapathError> {
        let path = self.pins.join(PROGRAM_PINS).join(layout::CT_COLLECT);
        let program =
            SchedClassifier::from_pin(&path).map_err(program_error("open", layout::CT_COLLECT))?;
        KernelTables::open(program, |layout| self.map_data(layout))
    }

    /// The policy tables. Has one owner, because it remembers what it wrote.
    pub fn policy(&self) -> Result<PolicyTables, DatapathError> {
        let name = layout::POLICY.name;
        let entries = self.map_data(&layout::POLICY)?;
        let counters = typed(&self.pins, &layout::POLICY_COUNTERS, PerCpuArray::try_from)?;
        PolicyTables::open(entries, counters)
            .map_err(|source| map_error("read", name)(MapError::IoError(source)))
    }

    /// The identities by address. Has one owner, like [`Datapath::policy`].
    pub fn ipcache(&self) -> Result<Ipcache, DatapathError> {
        let name = layout::IPCACHE.name;
        Ipcache::open(self.map_data(&layout::IPCACHE)?)
            .map_err(|source| map_error("read", name)(MapError::IoError(source)))
    }

    /// The host's own addresses. Has one owner, like [`Datapath::policy`].
    pub fn own_addresses(&self) -> Result<OwnAddresses, DatapathError> {
        let name = layout::OWN.name;
        OwnAddresses::open(self.map_data(&layout::OWN)?)
            .map_err(|source| map_error("read", name)(MapError::IoError(source)))
    }

    /// The service tables. Has one owner, like [`Datapath::policy`].
    pub fn services(&self) -> Result<ServiceTables, ServicesError> {
        ServiceTables::open(ServiceMaps::from_pins(&self.pins)?)
    }

    /// What the host's own sockets are connected to.
    pub fn socket_table(&self) -> Result<SocketTable, DatapathError> {
        Ok(SocketTable {
            sockets: Table::new(self.map_data(&layout::SOCKETS)?),
            backends: Table::new(self.map_data(&layout::BACKENDS)?),
            frontends4: Table::new(self.map_data(&layout::SVC4)?),
            frontends6: Table::new(self.map_data(&layout::SVC6)?),
        })
    }

    fn map_data(&self, layout: &layout::MapLayout) -> Result<MapData, DatapathError> {
        MapData::from_pin(self.pins.join(layout.name)).map_err(map_error("open", layout.name))
    }

    /// The ring buffer that programs write events to. Has one reader, because reading consumes events. Must be called in a
    /// tokio runtime.
    pub fn ring(&self) -> Result<KernelRing, DatapathError> {
        let ring = typed(&self.pins, &layout::EVENTS, RingBuf::try_from)?;
        let counters = typed(&self.pins, &layout::METRICS, PerCpuArray::try_from)?;
        KernelRing::new(ring, counters)
            .map_err(|source| map_error("poll", layout::EVENTS.name)(MapError::IoError(source)))
    }

    /// Selects which events the programs write.
    pub fn event_switch(&self) -> Result<KernelSwitch, DatapathError> {
        typed(&self.pins, &layout::MONITOR, Array::try_from).map(KernelSwitch::new)
    }

    /// Creates missing pin folders.
    pub(super) fn make_folders(&mut self) -> Result<(), DatapathError> {
        let had_pins = self.pins.exists();
        make_folders(&self.pins)?;
        if !had_pins {
            self.lock = locked(&self.pins)?;
        }
        Ok(())
    }

    /// Removes what an agent of another map layout left, once the new programs serve everything that the former ones did.
    pub(super) fn remove_set_aside(&self) -> Result<(), DatapathError> {
        let aside = set_aside(&self.pins);
        if aside.exists() && !self.workloads.are_held_back() {
            remove_tree(&aside)?;
            info!(pins = %aside.display(), "removed the maps of the former layout");
        }
        Ok(())
    }
}

pub(super) fn typed<T>(
    pins: &Path,
    layout: &layout::MapLayout,
    convert: impl FnOnce(Map) -> Result<T, MapError>,
) -> Result<T, DatapathError> {
    MapData::from_pin(pins.join(layout.name))
        .and_then(Map::from_map_data)
        .and_then(convert)
        .map_err(map_error("open", layout.name))
}

pub(super) fn classifier<'a>(
    programs: &'a mut Programs,
    name: &str,
) -> Result<&'a mut SchedClassifier, DatapathError> {
    programs
        .get_mut(name)
        .ok_or_else(|| DatapathError::Missing(name.to_owned()))
}

/// A program of the object.
pub(super) fn loaded<'a>(
    ebpf: &'a mut Ebpf,
    name: &str,
) -> Result<&'a mut SchedClassifier, DatapathError> {
    match ebpf.program_mut(name) {
        Some(Program::SchedClassifier(program)) => Ok(program),
        _ => Err(DatapathError::Missing(name.to_owned())),
    }
}

/// Takes the object's maps and drops the object.
fn take_maps(mut ebpf: Ebpf) -> StdHashMap<String, Map> {
    let names: Vec<String> = ebpf.maps().map(|(name, _)| name.to_owned()).collect();
    names
        .into_iter()
        .filter_map(|name| ebpf.take_map(&name).map(|map| (name, map)))
        .collect()
}

/// Pins a loaded program and reopens it from the pin.
pub(super) fn reopened(
    pins: &Path,
    name: &str,
    program: &mut SchedClassifier,
) -> Result<SchedClassifier, DatapathError> {
    let path = pin_program(pins, name, program)?;
    SchedClassifier::from_pin(path).map_err(program_error("open", name))
}

/// Pins a program, atomically replacing another's pin of the same name. Returns the path.
pub(super) fn pin_program(
    pins: &Path,
    name: &str,
    program: &mut SchedClassifier,
) -> Result<PathBuf, DatapathError> {
    pin_at(pins, name, |path| program.pin(path))
}

/// Like [`pin_program`], with a function that pins at a path.
pub(super) fn pin_at(
    pins: &Path,
    name: &str,
    pin: impl FnOnce(&Path) -> Result<(), PinError>,
) -> Result<PathBuf, DatapathError> {
    let folder = pins.join(PROGRAM_PINS);
    let path = folder.join(name);
    let fresh = folder.join(format!("{name}_new"));
    remove_tree(&fresh)?;
    pin(&fresh).map_err(|source| DatapathError::Pin {
        path: fresh.clone(),
        source,
    })?;
    fs::rename(&fresh, &path).map_err(file_error("rename", &fresh))?;
    Ok(path)
}

/// Maximum number of attempts to load a program when signals interrupt it.
const LOAD_ATTEMPTS: usize = 100;

/// Loads a program. The kernel gives up with `EAGAIN` when the thread gets a signal (`do_check` in `kernel/bpf/verifier.c`),
/// which says nothing about the program.
pub(super) fn load_program(
    name: &str,
    mut load: impl FnMut() -> Result<(), ProgramError>,
) -> Result<(), DatapathError> {
    let mut attempts = 1;
    loop {
        match load() {
            Err(ProgramError::LoadError { io_error, .. })
                if io_error.kind() == ErrorKind::WouldBlock && attempts < LOAD_ATTEMPTS =>
            {
                attempts += 1;
            }
            result => return result.map_err(program_error("load", name)),
        }
    }
}

pub(super) fn file_error<'a>(
    what: &'static str,
    path: &'a Path,
) -> impl FnOnce(std::io::Error) -> DatapathError + 'a {
    move |source| DatapathError::File {
        what,
        path: path.to_owned(),
        source,
    }
}

pub(super) fn map_error(
    what: &'static str,
    map: &'static str,
) -> impl FnOnce(MapError) -> DatapathError {
    move |source| DatapathError::Map { what, map, source }
}

pub(super) fn program_error(
    what: &'static str,
    program: &str,
) -> impl FnOnce(ProgramError) -> DatapathError {
    let program = program.to_owned();
    move |source| DatapathError::Program {
        what,
        program,
        on: String::new(),
        source: Box::new(source),
    }
}

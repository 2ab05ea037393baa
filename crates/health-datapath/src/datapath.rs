//! The loaded datapath: the programs, their maps, and what they are attached to, in one instance's pin folder.

use std::collections::BTreeSet;
use std::fs;
use std::net::IpAddr;
use std::path::Path;
use std::time::Instant;

use health_common::config::DatapathConfig;
use health_common::endpoint::EndpointInfo;
use health_common::masquerade::MasqueradeConfig;
use health_common::service::direct::DirectConfig;
use health_model::settings::{Location, ServiceXdp};
use tracing::{info, warn};

use crate::arrival_store::KernelArrivals;
use crate::attach::{Attacher, Attachments, Clsact, Hook, HookFault, Hooks, SocketFault};
use crate::conntrack::KernelTables;
use crate::error::DatapathError;
use crate::events::{KernelRing, KernelSwitch};
use crate::ipcache::Ipcache;
use crate::kernel_rtt::KernelRtt;
use crate::maps::{MapSizes, Maps, PendingResize, move_other_layout_aside};
use crate::optional_parts::OptionalParts;
use crate::own::OwnAddresses;
use crate::pin_folder::{PinFolder, former_layout_pins, remove_tree};
use crate::policy::PolicyTables;
use crate::programs::{LoadedObject, LogError, ProgramLog, Programs};
use crate::services::{ServiceMaps, ServiceTables, ServicesError, SocketTable};
use crate::workloads::{Workload, Workloads};

/// The settings with which the programs are loaded.
#[derive(Clone, Copy, Debug)]
pub struct LoadSettings {
    /// Maximum number of entries per map. [`Datapath::attach`] carries entries over from maps of other sizes. Services
    /// need the service maps.
    pub sizes: MapSizes,
    /// Whether [`Datapath::set_masquerade`] may turn masquerading on. Services need it.
    pub masquerade: bool,
    /// How much they log.
    pub log: ProgramLog,
}

impl Default for LoadSettings {
    /// Loads everything.
    fn default() -> Self {
        Self {
            sizes: MapSizes::default(),
            masquerade: true,
            log: ProgramLog::Warn,
        }
    }
}

/// The loaded programs and their maps. Dropping this leaves everything pinned and attached.
pub struct Datapath {
    workloads: Workloads,
    hooks: Hooks,
    programs: Programs,
    maps: Maps,
    // Dropped last, so that the folder stays locked until maps that were set aside are back.
    folder: PinFolder,
}

impl Datapath {
    /// Loads the programs alongside those of an earlier agent, on the same maps, and pins whatever is not pinned yet.
    /// Attaches and replaces nothing: [`Datapath::attach`] does that.
    ///
    /// If pinned maps have another layout, all pins are set aside in a folder named `INSTANCE_old`; maps whose own
    /// layout is unchanged are in both folders. The other maps are used until the new programs are attached; the
    /// endpoint maps are used for each workload until it is [set](Self::set_workload). If an upgrade fails before that,
    /// the previous version finds its own maps there.
    pub fn load(location: &Location, settings: LoadSettings) -> Result<Self, DatapathError> {
        let parts = OptionalParts {
            services: settings.sizes.services.is_some(),
            masquerade: settings.masquerade,
        };
        let folder = PinFolder::open(location.pins(), move_other_layout_aside)?;
        let pins = folder.path();
        let resizing = PendingResize::prepare(pins, settings.sizes)?;
        let object = LoadedObject::load(pins, parts, settings.log, &resizing)?;
        let mut maps = Maps::open(pins, parts, resizing)?;
        let (programs, opened) = object.pin(pins)?;
        maps.keep(opened);
        // Tail-called programs run from this point on, so the maps must be complete before.
        if !maps.are_resizing() {
            programs.connect(pins, &maps)?;
        }
        Ok(Self {
            workloads: Workloads::default(),
            hooks: Hooks::of(pins),
            programs,
            maps,
            folder,
        })
    }

    /// Detaches all programs of an instance and removes all its pins, which frees everything without another user.
    /// Returns descriptions of what was removed.
    pub fn remove(location: &Location) -> Result<Vec<String>, DatapathError> {
        let pins = location.pins();
        let mut removed = Clsact::of(&pins).remove_others(&[])?;
        for path in [former_layout_pins(&pins), pins.clone()] {
            if path.exists() {
                // Removing the pins ends the instance's links: none of its programs may stay attached.
                remove_tree(&path)?;
                removed.push(format!("pins {}", path.display()));
            }
        }
        // The parent folder of all instances is removed with the last one.
        if let Some(parent) = pins.parent() {
            let _ = fs::remove_dir(parent);
        }
        Ok(removed)
    }

    /// Whether only map contents have changed since the programs were loaded.
    pub fn is_as_loaded(&self) -> bool {
        // Names all fields, so that a new field must be considered here.
        let Self {
            workloads,
            hooks,
            programs,
            maps,
            folder: _,
        } = self;
        hooks.are_as_loaded()
            && programs.are_as_loaded()
            && maps.are_as_loaded()
            && *workloads == Workloads::default()
    }

    fn attacher(&mut self) -> Attacher<'_> {
        self.split().1
    }

    /// Splits off the workloads from the parts that attach their programs.
    fn split(&mut self) -> (&mut Workloads, Attacher<'_>) {
        let Self {
            workloads,
            hooks,
            programs,
            maps,
            folder,
        } = self;
        let attacher = Attacher {
            hooks,
            programs,
            maps,
            folder,
        };
        (workloads, attacher)
    }

    /// Sets the configuration that the programs read. Fails if it needs programs that were not loaded.
    pub fn configure(&mut self, config: DatapathConfig) -> Result<(), DatapathError> {
        self.maps.settings.configure(config)
    }

    /// Sets the keys of the tags on packets that nodes forward to each other's backends: the key for tagging packets
    /// here, and the keys accepted from other nodes.
    pub fn set_direct(&mut self, direct: DirectConfig) -> Result<(), DatapathError> {
        self.maps.settings.set_direct(direct)
    }

    /// Sets whose packets are masqueraded. Flows that are already masqueraded stay so. Fails if this needs programs
    /// that were not loaded.
    pub fn set_masquerade(&mut self, masquerade: MasqueradeConfig) -> Result<(), DatapathError> {
        self.maps.settings.set_masquerade(masquerade)
    }

    /// Replaces the local endpoints by these addresses plus those of workloads. Entries that stay are never missing in
    /// between.
    pub fn set_endpoints(
        &mut self,
        wanted: &[(IpAddr, EndpointInfo)],
    ) -> Result<(), DatapathError> {
        let (of_workloads, devices) = (self.workloads.entries(), self.workloads.devices());
        let endpoints = &mut self.maps.endpoints;
        endpoints.set_all(wanted, of_workloads, devices)
    }

    /// Chooses how programs are attached; the default is TCX links. Must be called before anything is attached:
    /// attaching then detaches whatever a former agent attached in another way.
    pub fn set_attachments(&mut self, attachments: Attachments) {
        self.hooks.set_attachments(attachments);
    }

    /// Chooses how the [XDP hooks](Hook::xdp) run. Must be called before anything is attached.
    pub fn set_xdp(&mut self, wanted: ServiceXdp) {
        self.hooks.set_xdp(wanted);
    }

    /// From the next [`Datapath::attach`] on, lets the host's own sockets reach services, by programs attached to the
    /// root cgroup that is mounted at `root`. `None` turns this off.
    pub fn set_socket_root(&mut self, root: Option<&Path>) -> Result<(), DatapathError> {
        self.hooks.sockets.set_root(root)
    }

    /// Forwards program log output to the agent's log until the runtime stops. Must be called in a tokio runtime.
    pub fn forward_log(&mut self) -> Result<(), LogError> {
        self.programs.forward_log()
    }

    /// Attaches this agent's programs to exactly these hooks of this instance. Replaces a former agent's programs in
    /// place, so that every packet passes a program.
    ///
    /// If one hook fails, the others are still served, and [`Datapath::hook_faults`] names the one that failed. If an
    /// [optional](Hook::is_optional) hook fails, [`Datapath::refused`] says why, and it is not an error.
    pub fn attach(&mut self, hooks: &[Hook]) -> Result<(), DatapathError> {
        self.hooks.want(hooks);
        self.folder.make_folders()?;
        let loaded = self.attacher().load_for(hooks);
        let holds = self.maps.would_lose_flows();
        let start = Instant::now();
        // Copies most entries first, to hold flows as briefly as possible. Former programs know only the former maps,
        // and new programs only the new ones.
        self.maps.carry_over()?;
        self.maps.hold_flows()?;
        let held = Instant::now();
        let replaced = self.replace_programs(hooks, loaded);
        if holds {
            self.maps.release_flows()?;
            let (before, held) = (held - start, held.elapsed());
            info!(copied_in = ?before, ?held, "new flows were held while maps were replaced");
        }
        replaced?;
        let pins = self.folder.path();
        self.maps.end_resizing(pins)?;
        self.programs.clear_unused_calls(&mut self.maps)?;
        self.programs.remove_unused_pins(pins, &self.maps)?;
        self.note_xdp_devices()?;
        self.workloads.remove_former_layout(self.folder.path())
    }

    /// Attaches programs to these hooks and copies entries that former programs wrote into the new maps. Detaches
    /// programs from other hooks if everything was `loaded`.
    fn replace_programs(
        &mut self,
        hooks: &[Hook],
        loaded: Result<(), DatapathError>,
    ) -> Result<(), DatapathError> {
        if self.maps.are_resizing() {
            self.maps.catch_up()?;
            self.programs.connect(self.folder.path(), &self.maps)?;
        }
        let (workloads, mut attacher) = self.split();
        let mut outcome = loaded;
        let (optional, needed): (Vec<&Hook>, Vec<&Hook>) =
            hooks.iter().partition(|hook| hook.is_optional());
        for hook in needed {
            outcome = outcome.and(attacher.attach(hook));
        }
        attacher.attach_optional(&optional);
        workloads.attach_adopted(&mut attacher);
        // Everything else works without the socket programs; the fault check retries them.
        if let Err(error) = attacher.attach_sockets() {
            warn!(%error, "host sockets cannot reach services");
        }
        outcome?;
        let (pins, held_back) = (attacher.folder.path(), workloads.hooks_held_back());
        let of_workloads = workloads.hooks();
        attacher
            .hooks
            .remove_others(pins, of_workloads, &held_back)?;
        self.maps.remove_formers()
    }

    /// Returns the errors of optional programs that the last [`Datapath::attach`] could not attach.
    pub fn refused(&self) -> &[DatapathError] {
        self.hooks.refused()
    }

    /// The hooks of the last [`Datapath::attach`].
    pub fn hooks(&self) -> &[Hook] {
        self.hooks.wanted()
    }

    /// The faults at the hooks of the last [`Datapath::attach`].
    pub fn hook_faults(&self) -> Vec<HookFault> {
        let hooks = self.hooks.wanted().iter();
        hooks.filter_map(|hook| self.hook_fault(hook)).collect()
    }

    fn hook_fault(&self, hook: &Hook) -> Option<HookFault> {
        self.hooks.fault(hook, &self.programs, self.folder.path())
    }

    /// Repairs a fault found by [`Datapath::hook_faults`].
    pub fn repair_hook(&mut self, fault: &HookFault) -> Result<(), DatapathError> {
        self.attacher().repair(fault)
    }

    /// The faults of the programs for the host's own sockets.
    pub fn socket_faults(&self) -> Vec<SocketFault> {
        let sockets = &self.hooks.sockets;
        sockets.faults(&self.programs.sockets, self.folder.path())
    }

    /// Repairs a fault found by [`Datapath::socket_faults`].
    pub fn repair_sockets(&mut self, fault: SocketFault) -> Result<(), DatapathError> {
        self.attacher().repair_sockets(fault)
    }

    /// Tells the XDP program which devices it is attached to, with their current ifindexes and hardware addresses. The
    /// program leaves packets from any other device to the host's stack.
    pub fn note_xdp_devices(&mut self) -> Result<(), DatapathError> {
        let devices = self.hooks.xdp_devices();
        self.maps
            .settings
            .set_xdp_devices(self.folder.path(), devices)
    }

    /// Restores missing pins. Returns the names of the restored objects.
    pub fn repair_pins(&mut self) -> Result<Vec<String>, DatapathError> {
        self.programs.repair_pins(&mut self.folder, &self.maps)
    }

    /// Whether all maps and programs have their pins.
    pub fn pins_are_there(&self) -> bool {
        let pins = self.folder.path();
        self.maps.are_pinned(pins) && self.programs.are_pinned(pins)
    }

    /// Takes over a former agent's endpoints. Must be called before anything is attached. The endpoints' map entries
    /// stay until the endpoints are [set](Self::set_workload). If the former agent's endpoint maps had another layout,
    /// its programs and maps serve the endpoints until then.
    pub fn adopt_workloads(&mut self, workloads: impl IntoIterator<Item = Workload>) {
        let (endpoints, pins) = (&self.maps.endpoints, self.folder.path());
        self.workloads
            .adopt(workloads, endpoints, &self.hooks, pins);
    }

    /// Adds an endpoint, or changes its entry. Each packet meets the old or the new state. On failure, nothing changes.
    pub fn set_workload(&mut self, workload: Workload) -> Result<(), DatapathError> {
        let (workloads, mut attacher) = self.split();
        workloads.set(workload, &mut attacher)
    }

    /// Switches an endpoint that these programs serve to another policy table, without touching its device or its
    /// programs. An unknown endpoint is not an error. On failure, nothing changes.
    pub fn set_workload_policy(&mut self, id: u16, table: u32) -> Result<(), DatapathError> {
        let (workloads, mut attacher) = self.split();
        workloads.set_policy(id, table, &mut attacher)
    }

    /// Drops all traffic of an endpoint by pointing it at `table`, provided that this table has no entries. An unknown
    /// endpoint is not an error. On failure, nothing changes.
    pub fn shut_off_workload(&mut self, id: u16, table: u32) -> Result<(), DatapathError> {
        let (workloads, mut attacher) = self.split();
        workloads.shut_off(id, table, &mut attacher)
    }

    /// Removes an endpoint. Returns whether it existed.
    pub fn remove_workload(&mut self, id: u16) -> Result<bool, DatapathError> {
        let (workloads, mut attacher) = self.split();
        workloads.remove(id, &mut attacher)
    }

    /// The endpoints that are served.
    pub fn workloads(&self) -> impl Iterator<Item = &Workload> {
        self.workloads.all()
    }

    /// Whether programs of another map layout serve some endpoints.
    pub fn is_changing_layout(&self) -> bool {
        self.workloads.are_held_back()
    }

    /// The endpoints that lack an attached program although their device exists.
    pub fn workloads_without_programs(&self) -> BTreeSet<u16> {
        self.workloads.without_programs(&self.hooks)
    }

    /// Returns faults at the hooks of up to `count` endpoints, a different set at each call. An endpoint whose device
    /// is gone has no hooks.
    pub fn workload_faults(&mut self, count: usize) -> Vec<HookFault> {
        let (programs, pins) = (&self.programs, self.folder.path());
        let hooks = self.workloads.hooks_in_turn(count);
        hooks
            .filter_map(|hook| self.hooks.fault(&hook, programs, pins))
            .collect()
    }

    /// The RTT rows, and the probes in flight.
    pub fn rtt(&self) -> Result<KernelRtt, DatapathError> {
        KernelRtt::from_pins(self.folder.path())
    }

    /// The arrivals of other agents' probes.
    pub fn arrivals(&self) -> Result<KernelArrivals, DatapathError> {
        KernelArrivals::from_pins(self.folder.path())
    }

    /// The conntrack and NAT entries, for collection.
    pub fn tables(&self) -> Result<KernelTables, DatapathError> {
        KernelTables::from_pins(self.folder.path())
    }

    /// The policy tables. Has one owner, because it remembers what it wrote.
    pub fn policy(&self) -> Result<PolicyTables, DatapathError> {
        PolicyTables::from_pins(self.folder.path())
    }

    /// The identities by address. Has one owner, like [`Datapath::policy`].
    pub fn ipcache(&self) -> Result<Ipcache, DatapathError> {
        Ipcache::from_pins(self.folder.path())
    }

    /// The host's own addresses. Has one owner, like [`Datapath::policy`].
    pub fn own_addresses(&self) -> Result<OwnAddresses, DatapathError> {
        OwnAddresses::from_pins(self.folder.path())
    }

    /// The service tables. Has one owner, like [`Datapath::policy`].
    pub fn services(&self) -> Result<ServiceTables, ServicesError> {
        ServiceTables::open(ServiceMaps::from_pins(self.folder.path())?)
    }

    /// The backends that the host's own sockets are connected to.
    pub fn socket_table(&self) -> Result<SocketTable, DatapathError> {
        SocketTable::from_pins(self.folder.path())
    }

    /// The ring buffer that programs write events to. Has one reader, because reading consumes events. Must be called
    /// in a tokio runtime.
    pub fn ring(&self) -> Result<KernelRing, DatapathError> {
        KernelRing::from_pins(self.folder.path())
    }

    /// Selects which events the programs write.
    pub fn event_switch(&self) -> Result<KernelSwitch, DatapathError> {
        KernelSwitch::from_pins(self.folder.path())
    }
}

//! Programs on their devices: attached by TCX and XDP links or by clsact filters, replaced in place, watched and reattached.

mod clsact;
mod tcx;
mod xdp;

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::fs;
use std::io;
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use aya::programs::links::{FdLink, PinnedLink};
use aya::programs::{ProgramError, TcAttachType};
use nix::net::if_::if_nametoindex;
use tracing::{info, warn};

use super::layout::{self, LINK_PINS, SOCKET_PROGRAMS};
use super::layout_change::set_aside;
use super::loader::{classifier, file_error};
use super::resize::PendingResize;
use super::rings::tell_places;
use super::{Datapath, DatapathError, link_pin};

pub(super) use clsact::Clsact;

const FROM_ENDPOINT: &str = "from_endpoint";
const TO_ENDPOINT: &str = "to_endpoint";

/// The longest hold on new flows after each step of replacing maps. If the agent is killed meanwhile, flows resume by
/// themselves.
const LONGEST_HOLD: Duration = Duration::from_secs(10);

/// What holds programs on their devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attachment {
    /// Pinned TCX links, from Linux 6.6 on.
    Tcx,
    /// Filters of clsact qdiscs.
    Clsact,
}

impl fmt::Display for Attachment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Tcx => "tcx",
            Self::Clsact => "clsact",
        })
    }
}

/// What holds the programs of the node's own devices, and those of endpoints.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attachments {
    /// On uplinks and on the health endpoint's device, which are attached once.
    pub node: Attachment,
    /// On workload devices, which come and go. The kernel waits for an RCU grace period per TCX link, but for none until a
    /// clsact qdisc has its first filters.
    pub endpoints: Attachment,
}

impl Attachments {
    /// The same on all devices.
    pub const fn all(attachment: Attachment) -> Self {
        Self {
            node: attachment,
            endpoints: attachment,
        }
    }
}

/// The direction of the packets that a program sees, from the device's point of view.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Direction {
    /// Received by the device.
    Ingress,
    /// Sent by the device.
    Egress,
}

impl Direction {
    pub(super) fn attach_type(self) -> TcAttachType {
        match self {
            Self::Ingress => TcAttachType::Ingress,
            Self::Egress => TcAttachType::Egress,
        }
    }
}

impl fmt::Display for Direction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ingress => "ingress",
            Self::Egress => "egress",
        })
    }
}

/// One program on one device.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Hook {
    /// The program's name.
    pub program: &'static str,
    /// The device's name.
    pub device: String,
    /// The device's number, if an agent created it: another device with the same name does not match.
    pub number: Option<u32>,
    /// Packet direction.
    pub direction: Direction,
}

impl Hook {
    /// Both programs of an endpoint's device with this number, which an agent created.
    pub fn endpoint(device: &str, number: u32) -> [Self; 2] {
        Self::pair(device, Some(number), FROM_ENDPOINT, TO_ENDPOINT)
    }

    /// Both programs of an uplink.
    pub fn uplink(device: &str) -> [Self; 2] {
        Self::pair(device, None, layout::FROM_NETDEV, layout::TO_NETDEV)
    }

    /// Both programs of an uplink whose packets begin with the IP header.
    pub fn ip_uplink(device: &str) -> [Self; 2] {
        Self::pair(device, None, layout::FROM_IP_NETDEV, layout::TO_IP_NETDEV)
    }

    /// The XDP program of an uplink.
    pub fn xdp(device: &str) -> Self {
        Self {
            program: layout::XDP_NETDEV,
            device: device.to_owned(),
            number: None,
            direction: Direction::Ingress,
        }
    }

    /// Whether everything works without the program too: XDP only makes it faster.
    pub fn is_optional(&self) -> bool {
        self.program == layout::XDP_NETDEV
    }

    fn pair(
        device: &str,
        number: Option<u32>,
        ingress: &'static str,
        egress: &'static str,
    ) -> [Self; 2] {
        [(ingress, Direction::Ingress), (egress, Direction::Egress)].map(|(program, direction)| {
            Self {
                program,
                device: device.to_owned(),
                number,
                direction,
            }
        })
    }

    /// The number of the hook's device; an error if the device is gone, or if another one has its name.
    fn device_number(&self) -> io::Result<u32> {
        let number = if_nametoindex(self.device.as_str())?;
        if self.number.is_some_and(|meant| meant != number) {
            let problem = format!("{} now names another device", self.device);
            return Err(io::Error::new(io::ErrorKind::NotFound, problem));
        }
        Ok(number)
    }

    /// Whether agents create the device: anything else they attach to it goes with it.
    fn is_on_own_device(&self) -> bool {
        [FROM_ENDPOINT, TO_ENDPOINT].contains(&self.program)
    }

    fn pin_name(&self) -> String {
        link_pin::name(self.program, &self.device)
    }

    /// Error: the program could not be attached or replaced here.
    fn program_error(&self, what: &'static str) -> impl FnOnce(ProgramError) -> DatapathError {
        let (program, on) = (self.program.to_owned(), format!(" on {}", self.device));
        move |source| DatapathError::Program {
            what,
            program,
            on,
            source: Box::new(source),
        }
    }

    /// Error: the kernel refused an operation on a filter here.
    fn failed(&self, what: &'static str) -> impl FnOnce(io::Error) -> DatapathError {
        let hook = self.to_string();
        move |source| DatapathError::Filter { what, hook, source }
    }
}

impl fmt::Display for Hook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            program, device, ..
        } = self;
        match self.is_optional() {
            true => write!(f, "{program} of {device}"),
            false => write!(f, "{program} at {} of {device}", self.direction),
        }
    }
}

/// What was wrong with a hook.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HookFault {
    /// The program was not attached to the device.
    Detached(Hook),
    /// The program was attached, but its link's pin was missing.
    PinLost(Hook),
}

impl HookFault {
    /// The hook that has the fault.
    pub const fn hook(&self) -> &Hook {
        match self {
            Self::Detached(hook) | Self::PinLost(hook) => hook,
        }
    }

    /// A short fixed word, for counters.
    pub const fn cause(&self) -> &'static str {
        match self {
            Self::Detached(_) => "program-detached",
            Self::PinLost(_) => "link-pin-lost",
        }
    }
}

impl fmt::Display for HookFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Detached(hook) => write!(f, "program {hook} was detached"),
            Self::PinLost(hook) => write!(f, "the pinned link of program {hook} was removed"),
        }
    }
}

/// What holds an attached program.
#[derive(Debug)]
pub(super) enum ProgramHolder {
    /// A link, kept open so that removing its pin does not detach the program.
    Link(PinnedLink),
    /// A filter, which needs no handle to persist.
    Filter,
}

/// How a program is attached to its device.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Means {
    Tc(Attachment),
    Xdp,
}

/// Where programs are attached.
pub(super) type AttachedPrograms = HashMap<Hook, ProgramHolder>;

impl Datapath {
    /// Chooses what holds the programs; the default is TCX links. Must be called before anything is attached: attaching then
    /// detaches what a former agent attached in another way.
    pub fn set_attachments(&mut self, attachments: Attachments) {
        self.attachments = attachments;
    }

    fn means_at(&self, hook: &Hook) -> Means {
        match self.hooks.contains(hook) {
            _ if hook.is_optional() => Means::Xdp,
            true => Means::Tc(self.attachments.node),
            false => Means::Tc(self.attachments.endpoints),
        }
    }

    /// Attaches this agent's programs to exactly these hooks of this instance. Replaces a former agent's programs in place,
    /// so that no packet meets no program.
    ///
    /// If one hook fails, the others are still served, and [`Datapath::hook_faults`] names the one that failed. If an
    /// [optional](Hook::is_optional) hook fails, [`Datapath::refused`] says why, and it is not an error.
    pub fn attach(&mut self, hooks: &[Hook]) -> Result<(), DatapathError> {
        self.hooks = hooks.to_vec();
        self.make_folders()?;
        let loaded = self.load_ip_programs_for(hooks);
        let loaded = loaded.and(self.load_xdp_for(hooks));
        let holds = self.holds_flows();
        let start = Instant::now();
        // Copies most entries first, to hold flows as briefly as possible. Former programs know only the former maps, and
        // new programs only the new ones.
        if let Some(resizing) = &self.resizing {
            resizing.carry_over()?;
        }
        self.hold_on()?;
        let held = Instant::now();
        let replaced = self.replace_programs(hooks, loaded);
        if holds {
            self.hold_flows(Duration::ZERO)?;
            let (before, held) = (held - start, held.elapsed());
            info!(copied_in = ?before, ?held, "new flows were held while maps were replaced");
        }
        replaced?;
        self.resizing = None;
        tell_places(&self.pins)?;
        self.clear_unused_calls()?;
        self.remove_unused_pins()?;
        self.note_xdp_devices()?;
        self.remove_set_aside()
    }

    /// Attaches programs to these hooks and copies what former programs know into the new maps. Detaches programs from other
    /// hooks if everything was `loaded`.
    fn replace_programs(
        &mut self,
        hooks: &[Hook],
        loaded: Result<(), DatapathError>,
    ) -> Result<(), DatapathError> {
        if let Some(resizing) = &mut self.resizing {
            resizing.catch_up()?;
            self.connect_programs()?;
        }
        let mut outcome = loaded;
        let (optional, needed): (Vec<&Hook>, Vec<&Hook>) =
            hooks.iter().partition(|hook| hook.is_optional());
        for hook in needed {
            outcome = outcome.and(self.take_over_or_attach(hook));
        }
        self.refused.clear();
        for hook in optional {
            if let Err(error) = self.take_over_or_attach(hook) {
                self.refused.push(error);
            }
        }
        self.attach_adopted();
        // The rest works without them; the fault check retries them.
        if let Err(error) = self.sockets.attach(&self.pins) {
            warn!(%error, "host sockets cannot reach services");
        }
        outcome?;
        self.remove_others(hooks)?;
        match &mut self.resizing {
            Some(resizing) => resizing.finish(),
            None => Ok(()),
        }
    }

    /// Whether new flows would be lost with the former maps, or on programs that still use those.
    fn holds_flows(&self) -> bool {
        self.resizing.as_ref().is_some_and(PendingResize::has_flows)
    }

    /// Holds flows, or extends the hold, if they would be lost.
    fn hold_on(&mut self) -> Result<(), DatapathError> {
        match self.holds_flows() {
            true => self.hold_flows(LONGEST_HOLD),
            false => Ok(()),
        }
    }

    /// Why the last [`Datapath::attach`] could not attach optional programs.
    pub fn refused(&self) -> &[DatapathError] {
        &self.refused
    }

    /// The hooks of the last [`Datapath::attach`].
    pub fn hooks(&self) -> &[Hook] {
        &self.hooks
    }

    /// The faults at the hooks of the last [`Datapath::attach`].
    pub fn hook_faults(&self) -> Vec<HookFault> {
        self.hooks
            .iter()
            .filter_map(|hook| self.hook_fault(hook))
            .collect()
    }

    /// Repairs what [`Datapath::hook_faults`] found.
    pub fn repair_hook(&mut self, fault: &HookFault) -> Result<(), DatapathError> {
        // Without a folder to pin it in, a link would be closed, which detaches its program.
        self.make_folders()?;
        match fault {
            HookFault::Detached(hook) => {
                self.attached.remove(hook);
                let hooks = std::slice::from_ref(hook);
                self.load_ip_programs_for(hooks)?;
                self.load_xdp_for(hooks)?;
                self.take_over_or_attach(hook)
            }
            HookFault::PinLost(hook) => {
                let Some(ProgramHolder::Link(link)) = self.attached.remove(hook) else {
                    return Ok(());
                };
                let link = self.pin_link(hook, FdLink::from(link))?;
                self.attached
                    .insert(hook.clone(), ProgramHolder::Link(link));
                Ok(())
            }
        }
    }

    pub(super) fn hook_fault(&self, hook: &Hook) -> Option<HookFault> {
        let means = self.means_at(hook);
        let program = match means {
            Means::Tc(_) => self
                .programs
                .get(hook.program)
                .map(|program| program.info()),
            Means::Xdp => self.xdp.program().map(|program| program.info()),
        };
        let Some(program) = program else {
            return Some(HookFault::Detached(hook.clone()));
        };
        let program = program.ok()?.id();
        let is_there = match means {
            Means::Tc(Attachment::Tcx) => tcx::has_program(hook, program),
            Means::Tc(Attachment::Clsact) => self.clsact.has_program(hook, program),
            Means::Xdp => xdp::has_program(hook, self.xdp.mode(), program),
        };
        match self.attached.get(hook) {
            Some(ProgramHolder::Link(_)) if is_there && !self.link_pin(hook).exists() => {
                Some(HookFault::PinLost(hook.clone()))
            }
            Some(_) if is_there => None,
            _ => Some(HookFault::Detached(hook.clone())),
        }
    }

    fn take_over_or_attach(&mut self, hook: &Hook) -> Result<(), DatapathError> {
        self.attach_hook(hook, tcx::pins_of_program)
    }

    /// Like [`take_over_or_attach`](Self::take_over_or_attach), but looks for a former agent's link only under the hook's
    /// own name: there may be very many endpoints.
    pub(super) fn attach_to_own(&mut self, hook: &Hook) -> Result<(), DatapathError> {
        self.attach_hook(hook, |hook, folder| vec![folder.join(hook.pin_name())])
    }

    fn attach_hook(
        &mut self,
        hook: &Hook,
        candidates: fn(&Hook, &Path) -> Vec<PathBuf>,
    ) -> Result<(), DatapathError> {
        self.hold_on()?;
        let folders = [&self.pins, &set_aside(&self.pins)].map(|pins| pins.join(LINK_PINS));
        let former = folders.iter().flat_map(|folder| candidates(hook, folder));
        let means = self.means_at(hook);
        let held = match means {
            Means::Xdp => {
                let former = former.collect();
                let (mode, program) = (self.xdp.mode(), self.xdp.program());
                let program = program.ok_or_else(|| DatapathError::Missing(hook.program.into()))?;
                let program = program.fd().map_err(hook.program_error("attach"))?;
                let link = xdp::attach(program.as_fd(), hook, mode, former)?;
                ProgramHolder::Link(self.pin_object(hook, |path| link.pin(path))?)
            }
            Means::Tc(Attachment::Tcx) => {
                let program = classifier(&mut self.programs, hook.program)?;
                let link = tcx::attach(program, hook, former.collect())?;
                let link = self.pin_link(hook, link)?;
                // Only now: in between, a packet may meet both programs, but never none.
                if self.may_have_filters {
                    self.clsact.detach(hook)?;
                }
                ProgramHolder::Link(link)
            }
            Means::Tc(Attachment::Clsact) => {
                let program = classifier(&mut self.programs, hook.program)?;
                self.clsact.attach(hook, program)?;
                if let Some(pin) = tcx::pin_on_device(hook, former.collect()) {
                    fs::remove_file(&pin).map_err(file_error("remove", &pin))?;
                }
                ProgramHolder::Filter
            }
        };
        self.attached.insert(hook.clone(), held);
        Ok(())
    }

    /// Pins a link under its hook's name, replacing an existing pin.
    fn pin_link(&self, hook: &Hook, link: FdLink) -> Result<PinnedLink, DatapathError> {
        self.pin_object(hook, |path| {
            link.pin(path).map_err(|source| DatapathError::Pin {
                path: path.to_owned(),
                source,
            })
        })
    }

    fn pin_object(
        &self,
        hook: &Hook,
        pin: impl FnOnce(&Path) -> Result<PinnedLink, DatapathError>,
    ) -> Result<PinnedLink, DatapathError> {
        let path = self.link_pin(hook);
        let fresh = path.with_file_name(link_pin::fresh(&hook.pin_name()));
        let _ = fs::remove_file(&fresh);
        let pinned = pin(&fresh)?;
        fs::rename(&fresh, &path).map_err(file_error("rename", &fresh))?;
        Ok(pinned)
    }

    /// Detaches this instance's programs from all hooks that are no longer wanted.
    fn remove_others(&mut self, wanted: &[Hook]) -> Result<(), DatapathError> {
        let wanted: HashSet<Hook> = wanted
            .iter()
            .cloned()
            .chain(self.workloads.hooks())
            .collect();
        self.attached.retain(|hook, _| wanted.contains(hook));
        let (links, mut filters): (Vec<Hook>, Vec<Hook>) = wanted
            .into_iter()
            .partition(|hook| self.means_at(hook) != Means::Tc(Attachment::Clsact));
        let held_back = self.workloads.hooks_held_back();
        filters.extend_from_slice(&held_back);
        self.remove_other_links(&links)?;
        for removed in self.clsact.remove_others(&filters)? {
            info!(%removed, "removed unused programs");
        }
        self.may_have_filters = !held_back.is_empty();
        Ok(())
    }

    /// Removes the link pins of other hooks, which detaches their programs.
    fn remove_other_links(&self, wanted: &[Hook]) -> Result<(), DatapathError> {
        let folder = self.pins.join(LINK_PINS);
        let of_sockets = SOCKET_PROGRAMS.map(|(name, _)| name.to_owned());
        let names = wanted.iter().map(Hook::pin_name).chain(of_sockets);
        let names: HashSet<String> = names.collect();
        for entry in fs::read_dir(&folder).map_err(file_error("read", &folder))? {
            let path = entry.map_err(file_error("read", &folder))?.path();
            let known = path
                .file_name()
                .and_then(|name| name.to_str())
                .is_some_and(|name| names.contains(name));
            if !known {
                fs::remove_file(&path).map_err(file_error("remove", &path))?;
            }
        }
        Ok(())
    }

    /// Detaches a program from its device.
    pub(super) fn detach(&mut self, hook: &Hook) -> Result<(), DatapathError> {
        match self.means_at(hook) {
            Means::Tc(Attachment::Tcx) | Means::Xdp => {
                self.attached.remove(hook);
                let pin = self.link_pin(hook);
                match fs::remove_file(&pin) {
                    Err(error) if error.kind() != io::ErrorKind::NotFound => {
                        Err(file_error("remove", &pin)(error))
                    }
                    _ => Ok(()),
                }
            }
            Means::Tc(Attachment::Clsact) => {
                self.clsact.detach(hook)?;
                self.attached.remove(hook);
                Ok(())
            }
        }
    }

    pub(super) fn link_pin(&self, hook: &Hook) -> PathBuf {
        self.pins.join(LINK_PINS).join(hook.pin_name())
    }
}

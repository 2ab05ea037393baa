//! The XDP program for services, loaded where it is needed, and the devices through which it may send packets.

use std::collections::HashMap as StdHashMap;

use aya::EbpfLoader;
use aya::maps::HashMap;
use aya::programs::{Program, Xdp};
use aya_obj::programs::XdpAttachType;
use health_common::service::xdp::{XDP_RETURNS, XDP_SENDS, XDP_WAY_NS, XdpDevice, XdpTimes};
use health_model::settings::ServiceXdp;
use health_net::xdp::{self, Mode};
use health_net::{clock, ethtool};
use nix::net::if_::if_nametoindex;

use super::layout::{self, XDP_NETDEV};
use super::loader::{load_program, map_error, pin_at, program_error, typed};
use super::{Datapath, DatapathError, Hook, PROGRAMS};

/// The driver of virtual Ethernet pairs.
const VETH: &str = "veth";

/// The program, and the mode to run it in.
#[derive(Debug, Default)]
pub(super) struct ServiceProgram {
    wanted: ServiceXdp,
    program: Option<Xdp>,
}

impl ServiceProgram {
    pub(super) const fn mode(&self) -> Mode {
        match self.wanted {
            ServiceXdp::Native => Mode::Native,
            ServiceXdp::Off | ServiceXdp::Generic => Mode::Generic,
        }
    }

    /// The program, once loaded.
    pub(super) const fn program(&self) -> Option<&Xdp> {
        self.program.as_ref()
    }

    pub(super) const fn program_mut(&mut self) -> Option<&mut Xdp> {
        self.program.as_mut()
    }
}

impl Datapath {
    /// Chooses how the [XDP hooks](Hook::xdp) run. Must be called before anything is attached.
    pub fn set_xdp(&mut self, wanted: ServiceXdp) {
        self.xdp.wanted = wanted;
    }

    /// Loads the program if a hook needs it and it is not loaded yet. Parses the object a second time: the one that the
    /// other programs were loaded from is not kept, and few agents need this program.
    pub(super) fn load_xdp_for(&mut self, hooks: &[Hook]) -> Result<(), DatapathError> {
        if self.xdp.program.is_some() || !hooks.iter().any(|hook| hook.program == XDP_NETDEV) {
            return Ok(());
        }
        // The loader creates maps whose pins are missing, so the program would not share them.
        self.repair_pins()?;
        let mut ebpf = EbpfLoader::new()
            .default_map_pin_directory(&self.pins)
            // It logs nothing; the other programs' logging code is cut out at load time.
            .override_global(aya_log::LEVEL, &(::log::Level::Warn as u8), false)
            .load(PROGRAMS)?;
        let Some(Program::Xdp(program)) = ebpf.program_mut(XDP_NETDEV) else {
            return Err(DatapathError::Missing(XDP_NETDEV.to_owned()));
        };
        load_program(XDP_NETDEV, || program.load())?;
        let path = pin_at(&self.pins, XDP_NETDEV, |path| program.pin(path))?;
        let program = Xdp::from_pin(path, XdpAttachType::Interface)
            .map_err(program_error("open", XDP_NETDEV))?;
        self.xdp.program = Some(program);
        Ok(())
    }

    /// Gives the program the devices that it is on, with their current numbers and hardware addresses. It leaves packets
    /// from any other device to the host's stack.
    pub fn note_xdp_devices(&mut self) -> Result<(), DatapathError> {
        let hooks = self.hooks.iter().filter(|hook| hook.program == XDP_NETDEV);
        let wanted: StdHashMap<u32, XdpDevice> = hooks
            .filter(|hook| self.attached.contains_key(hook))
            .filter_map(|hook| {
                let number = if_nametoindex(hook.device.as_str()).ok()?;
                let mac = xdp::device(number).ok()?.mac?;
                let device = XdpDevice {
                    mac: mac.0,
                    flags: abilities(self.xdp.mode(), &hook.device, number),
                };
                Some((number, device))
            })
            .collect();
        let failed = || map_error("write", layout::XDP_DEVICES.name);
        let mut devices: HashMap<_, u32, XdpDevice> =
            typed(&self.pins, &layout::XDP_DEVICES, HashMap::try_from)?;
        let known: StdHashMap<u32, XdpDevice> = devices.iter().filter_map(Result::ok).collect();
        if wanted == known {
            return Ok(());
        }
        for number in known.keys().filter(|number| !wanted.contains_key(number)) {
            devices.remove(number).map_err(failed())?;
        }
        for (number, device) in wanted {
            if known.get(&number) != Some(&device) {
                devices.insert(number, device, 0).map_err(failed())?;
            }
        }
        self.note_change()
    }
}

/// The entry that notifies the program of a change right now.
pub(super) fn xdp_times() -> XdpTimes {
    XdpTimes {
        changed_ns: clock::now_ns(),
        way_ticks: XDP_WAY_NS / clock::tick_ns().max(1),
    }
}

/// What a device does with packets that the program passes to it.
fn abilities(mode: Mode, device: &str, number: u32) -> u16 {
    // The host's stack sends them, through any device.
    if mode == Mode::Generic {
        return XDP_RETURNS | XDP_SENDS;
    }
    let sends = match xdp::sends(number) {
        Ok(Some(true)) => XDP_SENDS,
        _ => 0,
    };
    // A driver that runs programs sends what they return. veth's driver leaves it in the peer's ring, unless the peer has a
    // program too (drivers/net/veth.c, `veth_xdp_flush`).
    let returns = match ethtool::driver(device) {
        Ok(driver) if driver != VETH => XDP_RETURNS,
        _ => 0,
    };
    sends | returns
}

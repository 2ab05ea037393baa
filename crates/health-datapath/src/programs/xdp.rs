//! The XDP program for services, loaded where it is needed.

use aya::EbpfLoader;
use aya::programs::{Program, Xdp};
use aya_obj::programs::XdpAttachType;

use super::Programs;
use super::load_all::load_program;
use super::object::programs;
use super::pins::pin_at;
use crate::error::{DatapathError, program_error};
use crate::maps::Maps;
use crate::pin_folder::PinFolder;
use crate::program::DatapathProgram::{self, XdpNetdev};

impl Programs {
    /// Loads the program if a hook needs it and it is not loaded yet. Parses the object a second time: the first object
    /// is not kept, because few agents need this program.
    pub(crate) fn load_xdp_for(
        &mut self,
        mut wanted: impl Iterator<Item = DatapathProgram>,
        folder: &mut PinFolder,
        maps: &Maps,
    ) -> Result<(), DatapathError> {
        if self.xdp.is_some() || !wanted.any(|program| program == XdpNetdev) {
            return Ok(());
        }
        // The loader creates maps whose pins are missing, and the program would not share them.
        self.repair_pins(folder, maps)?;
        let mut ebpf = EbpfLoader::new()
            .default_map_pin_directory(folder.path())
            // It logs nothing, so its logging code is removed at load time; other programs are not affected.
            .override_global(aya_log::LEVEL, &(::log::Level::Warn as u8), false)
            .load(&programs()?)?;
        let name = XdpNetdev.object_name();
        let Some(Program::Xdp(program)) = ebpf.program_mut(name) else {
            return Err(DatapathError::Missing(name.to_owned()));
        };
        load_program(XdpNetdev, || program.load())?;
        let path = pin_at(folder.path(), XdpNetdev, |path| program.pin(path))?;
        let program = Xdp::from_pin(path, XdpAttachType::Interface)
            .map_err(program_error("open", XdpNetdev))?;
        self.xdp = Some(program);
        Ok(())
    }
}

//! Repairs pins that others remove, and removes unused ones.

use super::layout::{self, MAPS, MapLayout, PROGRAM_PINS, SOCKET_PROGRAMS, XDP_NETDEV};
use super::loader::{classifier, pin_at, pin_program};
use super::pin_folder::remove_tree;
use super::{Datapath, DatapathError};

impl Datapath {
    /// Pins again what lost its pin. Returns the names of what was pinned again.
    pub fn repair_pins(&mut self) -> Result<Vec<String>, DatapathError> {
        let mut lost = Vec::new();
        self.make_folders()?;
        for map in self.pinned_maps().collect::<Vec<_>>() {
            let path = self.pins.join(map.name);
            if path.exists() {
                continue;
            }
            let handle = self
                .maps
                .get(map.name)
                .ok_or_else(|| DatapathError::Missing(map.name.into()))?;
            handle
                .pin(&path)
                .map_err(|source| DatapathError::Pin { path, source })?;
            lost.push(map.name.to_owned());
        }
        let missing: Vec<&str> = self
            .pinned_programs()
            .filter(|name| !self.pins.join(PROGRAM_PINS).join(name).exists())
            .collect();
        for name in missing {
            match self.xdp.program_mut().filter(|_| name == XDP_NETDEV) {
                Some(program) => pin_at(&self.pins, name, |path| program.pin(path))?,
                None => pin_program(&self.pins, name, classifier(&mut self.programs, name)?)?,
            };
            lost.push(name.to_owned());
        }
        for name in self.sockets.without_pin(&self.pins) {
            self.sockets.pin_program(&self.pins, name)?;
            lost.push(name.to_owned());
        }
        Ok(lost)
    }

    /// Whether all maps and programs have their pins.
    pub fn pins_are_there(&self) -> bool {
        let folder = self.pins.join(PROGRAM_PINS);
        self.pinned_maps()
            .all(|map| self.pins.join(map.name).exists())
            && self
                .pinned_programs()
                .all(|name| folder.join(name).exists())
            && self.sockets.without_pin(&self.pins).is_empty()
    }

    /// Removes a former agent's pins for what this agent did not load.
    pub(super) fn remove_unused_pins(&self) -> Result<(), DatapathError> {
        let of_sockets = SOCKET_PROGRAMS.map(|(name, _)| name);
        let used: Vec<&str> = self.pinned_programs().chain(self.sockets.names()).collect();
        let unused = layout::program_names()
            .chain(of_sockets)
            .filter(|name| !used.contains(name));
        for name in unused {
            remove_tree(&self.pins.join(PROGRAM_PINS).join(name))?;
        }
        if self.has_ip_programs() {
            return Ok(());
        }
        remove_tree(&self.pins.join(layout::IP_CALLS.name))
    }

    /// The maps that have pins.
    fn pinned_maps(&self) -> impl Iterator<Item = MapLayout> {
        let of_ip = self.has_ip_programs().then_some(layout::IP_CALLS);
        MAPS.into_iter().chain(of_ip)
    }

    /// The names of the programs that have pins.
    fn pinned_programs(&self) -> impl Iterator<Item = &'static str> {
        let has_xdp = self.xdp.program().is_some();
        layout::program_names()
            .filter(move |name| self.programs.contains_key(name) || has_xdp && *name == XDP_NETDEV)
    }
}

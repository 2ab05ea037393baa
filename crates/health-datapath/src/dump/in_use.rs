//! Finds which of several maps the programs use: an interrupted size change leaves former maps beside the new ones.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::PathBuf;

use aya::programs::links::{FdLink, PinnedLink};
use aya::programs::{ProgramInfo, loaded_programs};

use super::map::OpenMap;
use super::objects::hook_of;
use super::{DumpError, Pinned, files};
use crate::attach::Clsact;
use crate::layout::{self, MapLayout};
use crate::maps::formers;
use crate::pin_folder::{LINK_PINS, PROGRAM_PINS};

impl Pinned {
    /// Returns the hooks where programs are attached, by program id.
    pub(super) fn attachments(&self) -> Result<BTreeMap<u32, Vec<String>>, DumpError> {
        let mut attached: BTreeMap<u32, Vec<String>> = BTreeMap::new();
        for (name, pin) in files(&self.dir.join(LINK_PINS))? {
            let link = PinnedLink::from_pin(&pin).map(FdLink::from);
            let program = link
                .and_then(|link| link.info())
                .map_err(|error| DumpError::Kernel {
                    what: "open",
                    path: pin.clone(),
                    source: io::Error::other(error),
                })?;
            attached
                .entry(program.program_id())
                .or_default()
                .push(hook_of(&name));
        }
        let filters = Clsact::of(&self.dir).attached();
        for (program, place) in filters.map_err(|source| DumpError::Kernel {
            what: "list the filters of the programs in",
            path: self.dir.clone(),
            source,
        })? {
            attached.entry(program).or_default().push(place);
        }
        Ok(attached)
    }

    /// Returns the pin of the map that programs use. Normally the pin has the layout's name, except after a size change
    /// that was interrupted before the programs switched to the new map.
    pub(super) fn pin_of(&self, map: &MapLayout) -> Result<PathBuf, DumpError> {
        let pin = self.dir.join(map.name);
        let formers = formers(&self.dir, map);
        if formers.is_empty() {
            return Ok(pin);
        }
        let used = self.used_maps()?;
        // Latest first: if only some programs were replaced, the latest map has the other programs' entries too.
        for candidate in std::iter::once(&pin).chain(formers.iter().rev()) {
            if candidate.exists() && used.contains(&OpenMap::open(candidate)?.info().id) {
                return Ok(candidate.clone());
            }
        }
        Ok(pin)
    }

    /// Returns the names of pinned maps that no program uses, among former maps and maps that have a former one.
    pub(super) fn unused_maps(&self) -> Result<BTreeSet<String>, DumpError> {
        let mut unused = BTreeSet::new();
        let mut used = None;
        for map in layout::MAPS {
            let formers = formers(&self.dir, &map);
            if formers.is_empty() {
                continue;
            }
            let used = match &used {
                Some(used) => used,
                None => used.insert(self.used_maps()?),
            };
            let pin = self.dir.join(map.name);
            for pin in formers.iter().chain([&pin]).filter(|pin| pin.exists()) {
                let is_used = used.contains(&OpenMap::open(pin)?.info().id);
                let name = pin.file_name().and_then(|name| name.to_str());
                unused.extend(name.filter(|_| !is_used).map(str::to_owned));
            }
        }
        Ok(unused)
    }

    /// Returns the ids of the maps that programs use: attached programs and those that they tail-call. If none is
    /// attached, all pinned programs count.
    fn used_maps(&self) -> Result<BTreeSet<u32>, DumpError> {
        let mut programs: BTreeSet<u32> = self.attachments()?.into_keys().collect();
        for calls in [&layout::CALLS, &layout::IP_CALLS] {
            if self.dir.join(calls.name).exists() {
                programs.extend(self.calls(calls)?.into_iter().map(|(_, program)| program));
            }
        }
        if programs.is_empty() {
            for (_, pin) in files(&self.dir.join(PROGRAM_PINS))? {
                let info = ProgramInfo::from_pin(&pin).map_err(|error| DumpError::Kernel {
                    what: "open",
                    path: pin.clone(),
                    source: io::Error::other(error),
                })?;
                programs.insert(info.id());
            }
        }
        let failed = |error| DumpError::Kernel {
            what: "list the maps of the programs pinned in",
            path: self.dir.clone(),
            source: io::Error::other(error),
        };
        let mut maps = BTreeSet::new();
        // Foreign programs may disappear during the listing.
        for program in loaded_programs().filter_map(Result::ok) {
            if programs.contains(&program.id()) {
                maps.extend(program.map_ids().map_err(failed)?.unwrap_or_default());
            }
        }
        Ok(maps)
    }
}

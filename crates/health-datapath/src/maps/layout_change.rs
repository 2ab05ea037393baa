//! Handles pinned maps whose layout differs from these programs' layout.
//!
//! The pin folder is renamed to `INSTANCE_old`, and everything in it serves until the new programs take over. Maps
//! whose own layout is unchanged are in both folders: their contents outlive the change.

use std::os::fd::AsFd as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::{fs, io};

use health_common::LAYOUT_VERSION;
use tracing::{info, warn};

use super::open::{formers, open};
use crate::error::{DatapathError, file_error};
use crate::layout::{CONFIG, ENDPOINT_MAPS, FAMILIES, MAPS, MapLayout, OWN_MAPS};
use crate::pin_folder::{LINK_PINS, former_layout_pins, make_folder, remove_tree};
use crate::sys;

/// Ensures that the pin folder has no maps of another layout, and that all active links stay pinned, either there or in
/// the folder set aside.
pub(crate) fn move_other_layout_aside(pins: &Path) -> Result<(), DatapathError> {
    let aside = former_layout_pins(pins);
    if has_other_layout(pins)? {
        if aside.exists() {
            // A layout change was interrupted. The links of the earlier programs are pinned in the folder set aside.
            // This folder has pins of the links that the change had already taken over, which are the same links, and
            // of those that it created.
            move_links(pins, &aside)?;
            // No link is left there, so this detaches nothing.
            remove_tree(pins)?;
        } else {
            // All maps and links stay pinned, so the programs keep running.
            fs::rename(pins, &aside).map_err(file_error("rename", pins))?;
        }
    }
    if !aside.exists() {
        return Ok(());
    }
    if !pins.exists() && !has_other_layout(&aside)? {
        // The version that owns this folder is back before another version has replaced anything.
        return fs::rename(&aside, pins).map_err(file_error("rename", &aside));
    }
    share_maps(&aside, pins)
}

/// Whether programs of another layout exist that use their own endpoint maps.
pub(crate) fn has_other_endpoints(pins: &Path) -> bool {
    let aside = former_layout_pins(pins);
    aside.exists()
        && !ENDPOINT_MAPS
            .iter()
            .all(|map| is_same(&pins.join(map.name), &aside.join(map.name)))
}

/// Removes the pins of an agent with another map layout. Must be called when the new programs serve everything that the
/// former ones did.
pub(crate) fn remove_former_layout(pins: &Path) -> Result<(), DatapathError> {
    let aside = former_layout_pins(pins);
    if aside.exists() {
        // The links in use are pinned in the instance's folder by now, as are the maps that both layouts share.
        remove_tree(&aside)?;
        info!(pins = %aside.display(), "removed the maps of the previous layout");
    }
    Ok(())
}

/// Moves all pinned links from one instance's folder to another, replacing those with the same name.
fn move_links(from: &Path, to: &Path) -> Result<(), DatapathError> {
    let (from, to) = (from.join(LINK_PINS), to.join(LINK_PINS));
    let entries = match fs::read_dir(&from) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        entries => entries.map_err(file_error("read", &from))?,
    };
    make_folder(&to)?;
    for entry in entries {
        let entry = entry.map_err(file_error("read", &from))?;
        let path = entry.path();
        // The link stays pinned all the time. Any pin that is replaced belongs to the same link.
        fs::rename(&path, to.join(entry.file_name())).map_err(file_error("rename", &path))?;
    }
    Ok(())
}

/// Whether pinned maps exist that these programs would misread.
fn has_other_layout(pins: &Path) -> Result<bool, DatapathError> {
    for map in &MAPS {
        if has_other_sizes(pins, map)? {
            return Ok(true);
        }
    }
    let version = version(pins)?;
    // Without a version: an agent created the map, but stopped before it wrote the settings.
    Ok(version.is_some_and(|version| version != LAYOUT_VERSION))
}

fn has_other_sizes(pins: &Path, map: &MapLayout) -> Result<bool, DatapathError> {
    let pinned = open(&pins.join(map.name))?;
    Ok(pinned.is_some_and(|(_, info)| {
        (info.key_size, info.value_size) != (map.key_size, map.value_size)
    }))
}

/// Returns the version of the agent that wrote the settings. The version is the first field in every layout.
fn version(pins: &Path) -> Result<Option<u32>, DatapathError> {
    let pin = pins.join(CONFIG.name);
    let Some((settings, info)) = open(&pin)? else {
        return Ok(None);
    };
    let mut value = vec![0; info.value_size as usize];
    let is_there = sys::lookup(settings.as_fd(), sys::bytes_of(&0_u32), &mut value)
        .map_err(file_error("read", &pin))?;
    let version = is_there.then(|| sys::read(&value)).flatten();
    Ok(version.filter(|version| *version != 0))
}

/// Links maps with unchanged layout into both folders, unless other maps are pinned there by now.
fn share_maps(from: &Path, to: &Path) -> Result<(), DatapathError> {
    let version = version(from)?.unwrap_or_default();
    let is_first = !to.exists();
    make_folder(to)?;
    let mut anew = Vec::new();
    for map in MAPS.iter().filter(|map| !OWN_MAPS.contains(map)) {
        let family = FAMILIES.into_iter().find(|family| family.contains(map));
        let family = family.unwrap_or(std::slice::from_ref(map));
        if !from.join(map.name).exists() {
            continue;
        }
        if !are_as_then(from, family, version)? {
            anew.push(map.name);
            continue;
        }
        if to.join(map.name).exists() {
            continue;
        }
        // Former maps first, whose entries an interrupted size change has not copied yet: if the map itself is pinned,
        // its former maps are pinned too.
        for shared in formers(from, map).into_iter().chain([from.join(map.name)]) {
            let pin = shared.file_name().map(|name| to.join(name));
            if let Some(pin) = pin.filter(|pin| !pin.exists()) {
                fs::hard_link(&shared, &pin).map_err(file_error("link", &shared))?;
            }
        }
    }
    if !is_first {
        return Ok(());
    }
    if anew.is_empty() {
        info!(
            from = version,
            to = LAYOUT_VERSION,
            "pinned maps have a different layout; keeping all flows and counters"
        );
    } else {
        warn!(
            from = version,
            to = LAYOUT_VERSION,
            maps = anew.join(" "),
            "pinned maps have a different layout; these start empty, the others keep their entries"
        );
    }
    Ok(())
}

/// Whether all these maps, in a folder of this version, match these programs' layout.
fn are_as_then(pins: &Path, maps: &[MapLayout], version: u32) -> Result<bool, DatapathError> {
    for map in maps {
        if has_other_sizes(pins, map)? || map.since > version {
            return Ok(false);
        }
    }
    // Changes after this version are unknown.
    Ok(version <= LAYOUT_VERSION)
}

/// Whether two pins refer to the same object.
fn is_same(one: &Path, other: &Path) -> bool {
    let inode = |pin: &Path| fs::metadata(pin).map(|data| (data.dev(), data.ino())).ok();
    inode(one).is_some_and(|found| inode(other) == Some(found))
}

//! Full maps.

use std::io;

use anyhow::Context as _;
use aya::Pod;
use aya::maps::lpm_trie::{Key, LpmTrie};
use aya::maps::{Array, HashMap, Map, MapData, MapError};
use health_common::addr::Addr;
use health_common::ct::{CtEntry, TUPLE_OUT, Tuple4, Tuple6};
use health_common::endpoint::EndpointInfo;
use health_common::ipcache::IpcacheEntry;
use health_common::policy::{PolicyEntry, PolicyKey};
use health_datapath::layout;
use nix::libc;
use tests::Node;

/// First word of unused addresses: 2001:db8::/32.
const NOWHERE: u32 = 0x2001_0db8;
/// Prefix length that makes each LPM trie key a separate entry, bits.
const WHOLE: u32 = 128;
/// Protocol of flows that do not exist.
const PROTOCOL: u8 = 253;

/// A full map whose entries mostly belong to nothing.
pub(super) struct FullMap {
    map: Box<dyn Fillable>,
    entries: u32,
}

impl FullMap {
    pub(super) fn endpoints(node: &Node) -> anyhow::Result<Self> {
        let map: HashMap<_, Addr, EndpointInfo> = open(node, layout::ENDPOINTS.name)?;
        Self::fill(map)
    }

    pub(super) fn ipcache(node: &Node) -> anyhow::Result<Self> {
        let map: LpmTrie<_, Addr, IpcacheEntry> = open(node, layout::IPCACHE.name)?;
        Self::fill(map)
    }

    pub(super) fn policy(node: &Node) -> anyhow::Result<Self> {
        let map: LpmTrie<_, PolicyKey, PolicyEntry> = open(node, layout::POLICY.name)?;
        Self::fill(map)
    }

    fn fill(map: impl Fillable + 'static) -> anyhow::Result<Self> {
        let mut map: Box<dyn Fillable> = Box::new(map);
        let mut entries = 0;
        loop {
            match map.put(entries) {
                Ok(()) => entries += 1,
                Err(error) if has(&error, &[libc::E2BIG, libc::ENOSPC]) => {
                    return Ok(Self { map, entries });
                }
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Removes the entries that were added.
    pub(super) fn empty(&mut self) -> anyhow::Result<()> {
        for number in 0..self.entries {
            match self.map.remove(number) {
                // The agent may already have removed it as stale.
                Err(error) if has(&error, &[libc::ENOENT]) => {}
                removed => removed?,
            }
        }
        self.entries = 0;
        Ok(())
    }
}

fn open<T>(node: &Node, name: &str) -> anyhow::Result<T>
where
    T: TryFrom<Map, Error = MapError>,
{
    Ok(Map::from_map_data(data(node, name)?)?.try_into()?)
}

fn data(node: &Node, name: &str) -> anyhow::Result<MapData> {
    MapData::from_pin(node.pins().join(name)).with_context(|| name.to_owned())
}

/// Whether the kernel returned one of these codes.
fn has(error: &MapError, codes: &[i32]) -> bool {
    let MapError::SyscallError(error) = error else {
        return false;
    };
    let code = io::Error::raw_os_error(&error.io_error);
    code.is_some_and(|code| codes.contains(&code))
}

/// A map that can be filled with numbered entries that belong to nothing.
trait Fillable {
    fn put(&mut self, number: u32) -> Result<(), MapError>;
    fn remove(&mut self, number: u32) -> Result<(), MapError>;
}

impl<V: Pod + Default> Fillable for HashMap<MapData, Addr, V> {
    fn put(&mut self, number: u32) -> Result<(), MapError> {
        self.insert(address(number), V::default(), 0)
    }

    fn remove(&mut self, number: u32) -> Result<(), MapError> {
        HashMap::remove(self, &address(number))
    }
}

impl<V: Pod + Default> Fillable for LpmTrie<MapData, Addr, V> {
    fn put(&mut self, number: u32) -> Result<(), MapError> {
        self.insert(&Key::new(WHOLE, address(number)), V::default(), 0)
    }

    fn remove(&mut self, number: u32) -> Result<(), MapError> {
        LpmTrie::remove(self, &Key::new(WHOLE, address(number)))
    }
}

impl<V: Pod + Default> Fillable for LpmTrie<MapData, PolicyKey, V> {
    fn put(&mut self, number: u32) -> Result<(), MapError> {
        self.insert(&Key::new(WHOLE, rule(number)), V::default(), 0)
    }

    fn remove(&mut self, number: u32) -> Result<(), MapError> {
        LpmTrie::remove(self, &Key::new(WHOLE, rule(number)))
    }
}

fn address(number: u32) -> Addr {
    Addr::v6([NOWHERE.to_be(), 0, 0, number.to_be()])
}

/// A rule in a table that no endpoint uses.
fn rule(number: u32) -> PolicyKey {
    PolicyKey {
        table: u32::MAX,
        identity: number,
        ..PolicyKey::default()
    }
}

/// Makes a node forget its flows, and fills the flow maps with other entries.
pub(super) fn flood_flows(node: &Node) -> anyhow::Result<()> {
    for name in [layout::CT4.name, layout::CT_ANY4.name] {
        flood(node, name, |number| Tuple4 {
            saddr_be: number.to_be(),
            protocol: PROTOCOL,
            direction: TUPLE_OUT,
            ..Tuple4::default()
        })?;
    }
    for name in [layout::CT6.name, layout::CT_ANY6.name] {
        flood(node, name, |number| Tuple6 {
            saddr_be: [NOWHERE.to_be(), 0, 0, number.to_be()],
            protocol: PROTOCOL,
            direction: TUPLE_OUT,
            ..Tuple6::default()
        })?;
    }
    Ok(())
}

fn flood<K: Pod>(node: &Node, name: &str, tuple: fn(u32) -> K) -> anyhow::Result<()> {
    let map = data(node, name)?;
    let entries = map.info()?.max_entries();
    let mut map: HashMap<_, K, CtEntry> = Map::from_map_data(map)?.try_into()?;
    let known: Vec<K> = map.keys().collect::<Result<_, _>>()?;
    for key in known {
        match map.remove(&key) {
            // In the meantime, the agent may have collected the entry, or the programs may have evicted it.
            Err(error) if has(&error, &[libc::ENOENT]) => {}
            result => result?,
        }
    }
    for number in 0..entries {
        match map.insert(tuple(number), CtEntry::default(), 0) {
            // Traffic continues and takes some of the space.
            Err(error) if has(&error, &[libc::E2BIG]) => break,
            result => result?,
        }
    }
    // Record the keys as the programs do: entries whose keys are not in a ring are not evicted.
    let ring = format!("{name}_RING");
    if layout::MAPS.iter().any(|map| map.name == ring) {
        let mut ring: Array<_, K> = open(node, &ring)?;
        for number in 0..entries {
            ring.set(number, tuple(number), 0)?;
        }
    }
    Ok(())
}

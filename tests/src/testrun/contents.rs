//! Contents of the maps of loaded programs, which are recorded after loading and restored after each test.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail, ensure};
use aya::maps::{Map, MapData, ProgramArray, RingBuf};
use aya::programs::ProgramInfo;
use health_datapath::dump::OpenMap;

type Entries = BTreeMap<Vec<u8>, Vec<u8>>;

/// The contents of a map.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Content {
    /// Entries by key, which can be added and removed.
    Entries(Entries),
    /// Values by index, concatenated. For per-CPU arrays, the values of all CPUs.
    Array(Vec<u8>),
    /// Names of programs by index.
    Programs(BTreeMap<u32, String>),
    /// Unread records.
    Stream(Vec<Vec<u8>>),
}

/// The maps that programs use, by name, whether pinned or not.
pub struct Maps {
    ids: BTreeMap<String, u32>,
    programs: BTreeMap<String, ProgramInfo>,
}

impl Maps {
    /// Finds the maps pinned in a folder, and all other maps that are used by the programs pinned below the folder.
    pub fn of(pins: &Path) -> anyhow::Result<Self> {
        let mut maps = Self {
            ids: BTreeMap::new(),
            programs: BTreeMap::new(),
        };
        for (name, pin) in files(pins)? {
            maps.ids.insert(name, OpenMap::open(&pin)?.id());
        }
        for (name, pin) in files(&pins.join("programs"))? {
            let program = ProgramInfo::from_pin(&pin)
                .with_context(|| format!("cannot open {}", pin.display()))?;
            let used = program.map_ids()?;
            for id in used.with_context(|| format!("the kernel lists no maps of {name}"))? {
                maps.add(id)?;
            }
            maps.programs.insert(name, program);
        }
        Ok(maps)
    }

    fn add(&mut self, id: u32) -> anyhow::Result<()> {
        if self.ids.values().any(|known| *known == id) {
            return Ok(());
        }
        let map = OpenMap::open_id(id)?;
        let name = map.pin().display().to_string();
        let former = self.ids.insert(name.clone(), id);
        ensure!(former.is_none(), "there are two maps {name}");
        Ok(())
    }

    /// Program IDs by name.
    pub fn programs(&self) -> BTreeMap<String, u32> {
        let programs = self.programs.iter();
        programs
            .map(|(name, info)| (name.clone(), info.id()))
            .collect()
    }

    /// Names of the maps.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.ids.keys().map(String::as_str)
    }

    /// Opens a map.
    pub fn open(&self, name: &str) -> anyhow::Result<OpenMap> {
        let id = self.ids.get(name);
        let id = id.with_context(|| format!("there is no map {name}"))?;
        Ok(OpenMap::open_id(*id)?)
    }

    /// Reads all maps. This removes the records from ring buffers.
    pub fn contents(&self) -> anyhow::Result<BTreeMap<String, Content>> {
        let contents = self.names().map(|name| {
            let content = self.content(&self.open(name)?);
            let content = content.with_context(|| format!("cannot read map {name}"))?;
            Ok((name.to_owned(), content))
        });
        contents.collect()
    }

    /// Restores the contents of all maps.
    pub fn restore(&self, contents: &BTreeMap<String, Content>) -> anyhow::Result<()> {
        let known: Vec<&str> = contents.keys().map(String::as_str).collect();
        let names: Vec<&str> = self.names().collect();
        ensure!(
            names == known,
            "the maps were {known:?}, and now are {names:?}"
        );
        for (name, content) in contents {
            let restored = self.restore_map(&self.open(name)?, content);
            restored.with_context(|| format!("cannot restore map {name}"))?;
        }
        Ok(())
    }

    fn content(&self, map: &OpenMap) -> anyhow::Result<Content> {
        Ok(match map.kind().name() {
            "hash" | "lru_hash" | "lpm_trie" => Content::Entries(entries(map)?),
            "array" | "percpu_array" => {
                let mut values = Vec::new();
                map.each_raw(|_, value| values.extend_from_slice(value))?;
                Content::Array(values)
            }
            "prog_array" => {
                let programs = entries(map)?.into_iter();
                let programs = programs.map(|(index, id)| {
                    let id = number(&id)?;
                    let mut known = self.programs.iter();
                    let found = known.find(|(_, program)| program.id() == id);
                    let (name, _) = found.with_context(|| format!("program {id} is unknown"))?;
                    Ok((number(&index)?, name.clone()))
                });
                Content::Programs(programs.collect::<anyhow::Result<_>>()?)
            }
            "ringbuf" => Content::Stream(drained(map)?),
            kind => bail!("cannot restore maps of kind {kind}"),
        })
    }

    /// Writes only values that differ. Maps that are never written, such as those of constants, cannot differ.
    fn restore_map(&self, map: &OpenMap, content: &Content) -> anyhow::Result<()> {
        match content {
            Content::Entries(wanted) => restore_entries(map, wanted),
            Content::Array(wanted) => restore_array(map, wanted),
            Content::Programs(wanted) => self.restore_programs(map, wanted),
            Content::Stream(wanted) => {
                ensure!(wanted.is_empty(), "there were records when it was loaded");
                drained(map).map(drop)
            }
        }
    }

    fn restore_programs(
        &self,
        map: &OpenMap,
        wanted: &BTreeMap<u32, String>,
    ) -> anyhow::Result<()> {
        let data = Map::from_map_data(MapData::from_id(map.id())?)?;
        let mut array = ProgramArray::try_from(data)?;
        let is: Entries = entries(map)?;
        for index in is.keys() {
            let index = number(index)?;
            if !wanted.contains_key(&index) {
                array.clear_index(&index)?;
            }
        }
        for (index, name) in wanted {
            let program = self.programs.get(name);
            let program = program.with_context(|| format!("there is no program {name}"))?;
            let has = is.get(&index.to_ne_bytes()[..]);
            if has.map(|id| number(id)).transpose()? != Some(program.id()) {
                array.set(*index, &program.fd()?, 0)?;
            }
        }
        Ok(())
    }
}

fn restore_entries(map: &OpenMap, wanted: &Entries) -> anyhow::Result<()> {
    let mut foreign = Vec::new();
    let mut right = 0;
    map.each_raw(|key, value| match wanted.get(key) {
        Some(wanted) if wanted == value => right += 1,
        Some(_) => {}
        None => foreign.push(key.to_vec()),
    })?;
    for key in foreign {
        map.delete_raw(&key)?;
    }
    if right < wanted.len() {
        for (key, value) in wanted {
            map.set_raw(key, value)?;
        }
    }
    Ok(())
}

fn restore_array(map: &OpenMap, wanted: &[u8]) -> anyhow::Result<()> {
    let mut wrong = Vec::new();
    let mut rest = wanted;
    let mut is_long_enough = true;
    map.each_raw(|key, value| match rest.split_at_checked(value.len()) {
        Some((wanted, others)) => {
            rest = others;
            if value != wanted {
                wrong.push((key.to_vec(), wanted));
            }
        }
        None => is_long_enough = false,
    })?;
    ensure!(
        is_long_enough && rest.is_empty(),
        "it has a different length"
    );
    for (key, value) in wrong {
        map.set_raw(&key, value)?;
    }
    Ok(())
}

fn entries(map: &OpenMap) -> anyhow::Result<Entries> {
    let mut entries = Entries::new();
    map.each_raw(|key, value| {
        entries.insert(key.to_vec(), value.to_vec());
    })?;
    Ok(entries)
}

/// Reads and removes all records in a ring buffer. The ring's position is not restored, but this is not observable.
fn drained(map: &OpenMap) -> anyhow::Result<Vec<Vec<u8>>> {
    let mut ring = RingBuf::try_from(Map::from_map_data(MapData::from_id(map.id())?)?)?;
    let mut records = Vec::new();
    while let Some(record) = ring.next() {
        records.push(record.to_vec());
    }
    Ok(records)
}

fn number(bytes: &[u8]) -> anyhow::Result<u32> {
    Ok(u32::from_ne_bytes(bytes.try_into()?))
}

/// The files in a folder by name.
fn files(dir: &Path) -> anyhow::Result<Vec<(String, PathBuf)>> {
    let mut files = Vec::new();
    for entry in dir.read_dir()? {
        let entry = entry?;
        if !entry.file_type()?.is_dir() {
            let name = entry.file_name().to_string_lossy().into_owned();
            files.push((name, entry.path()));
        }
    }
    Ok(files)
}

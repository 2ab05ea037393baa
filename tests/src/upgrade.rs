//! Agents of other versions, derived from the current one: a different binary to upgrade to, and the remains of a
//! binary with a different map layout.

use std::fs;
use std::ops::Range;
use std::path::Path;

use anyhow::Context as _;
use aya::maps::{Array, Map, MapData};
use health_common::config::DatapathConfig;
use health_datapath::{COMPRESSED_PROGRAMS, layout, programs};
use memchr::memmem::Finder;
use miniz_oxide::deflate::compress_to_vec;
use object::read::elf::ElfFile64;
use object::{LittleEndian, Object as _, ObjectSection as _, SectionKind};

use crate::Node;
use crate::bed::agent_binary;

/// The best DEFLATE level: the changed programs must not need more space than the agent's.
const BEST: u8 = 10;
/// Size of an instruction in bytes.
const INSTRUCTION: usize = 8;
/// `BPF_LD | BPF_IMM | BPF_DW`, which takes two instruction slots.
const LOAD_WIDE: u8 = 0x18;
/// `BPF_ALU64 | BPF_MOV | BPF_K`, which sign-extends its immediate.
const MOVE_64: u8 = 0xb7;
/// `BPF_ALU | BPF_MOV | BPF_K`, which zero-extends its immediate.
const MOVE_32: u8 = 0xb4;

/// Copies the agent's binary to `path` and changes its BPF programs without changing their behaviour: each load of a
/// non-negative immediate uses the other of two equivalent instructions. Returns the number of changed instructions.
pub fn with_other_programs(path: &Path) -> anyhow::Result<usize> {
    let original = agent_binary()?;
    let mut binary =
        fs::read(&original).with_context(|| format!("cannot read {}", original.display()))?;
    let mut object = programs()?;
    let mut changed = 0;
    for section in program_sections(&object)? {
        changed += exchange_moves(&mut object[section]);
    }
    let compressed = compress_to_vec(&object, BEST);
    let place = Finder::new(COMPRESSED_PROGRAMS)
        .find(&binary)
        .with_context(|| format!("other BPF programs in {}", original.display()))?;
    // The agent ignores what follows the stream.
    binary[place..][..COMPRESSED_PROGRAMS.len()]
        .get_mut(..compressed.len())
        .context("the changed programs need more space")?
        .copy_from_slice(&compressed);
    fs::write(path, &binary).with_context(|| format!("cannot write {}", path.display()))?;
    fs::set_permissions(path, fs::metadata(&original)?.permissions())?;
    Ok(changed)
}

/// Byte ranges of an object's instructions.
fn program_sections(object: &[u8]) -> anyhow::Result<Vec<Range<usize>>> {
    let object = ElfFile64::<LittleEndian>::parse(object)?;
    let code = object
        .sections()
        .filter(|section| section.kind() == SectionKind::Text);
    let ranges = code.filter_map(|section| section.file_range());
    Ok(ranges
        .map(|(offset, size)| offset as usize..(offset + size) as usize)
        .collect())
}

/// Replaces each load of a non-negative immediate with its equivalent. Returns the number of replaced instructions.
fn exchange_moves(code: &mut [u8]) -> usize {
    let mut changed = 0;
    let mut at = 0;
    while at + INSTRUCTION <= code.len() {
        let is_negative = code[at + INSTRUCTION - 1] & 0x80 != 0;
        code[at] = match code[at] {
            MOVE_64 if !is_negative => MOVE_32,
            MOVE_32 if !is_negative => MOVE_64,
            other => {
                let places = if other == LOAD_WIDE { 2 } else { 1 };
                at += places * INSTRUCTION;
                continue;
            }
        };
        changed += 1;
        at += INSTRUCTION;
    }
    changed
}

/// Makes the maps of a node's agent look like another version's. The agent must be stopped.
pub fn pretend_layout(node: &Node, layout_version: u32) -> anyhow::Result<()> {
    let map = MapData::from_pin(node.pins().join(layout::CONFIG.name))?;
    let mut settings: Array<MapData, DatapathConfig> = Array::try_from(Map::from_map_data(map)?)?;
    let config = DatapathConfig {
        layout_version,
        ..settings.get(&0, 0)?
    };
    settings.set(0, config, 0)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_that_are_not_negative_are_loaded_by_the_other_instruction() {
        let instruction = |code: u8, number: i32| {
            let mut bytes = [code, 0, 0, 0, 0, 0, 0, 0];
            bytes[4..].copy_from_slice(&number.to_le_bytes());
            bytes
        };
        let wide = [instruction(LOAD_WIDE, 1), instruction(0, 2)].concat();
        let mut code = [
            instruction(MOVE_64, 5).to_vec(),
            instruction(MOVE_64, -1).to_vec(),
            wide.clone(),
            instruction(MOVE_32, 0).to_vec(),
        ]
        .concat();
        assert_eq!(exchange_moves(&mut code), 2);
        let expected = [
            instruction(MOVE_32, 5).to_vec(),
            instruction(MOVE_64, -1).to_vec(),
            wide,
            instruction(MOVE_64, 0).to_vec(),
        ];
        assert_eq!(code, expected.concat());
    }
}

//! Agents of other versions, derived from the current one: a different binary to upgrade to, and the remains of a
//! binary with a different map layout.

use std::fs;
use std::io::BufRead as _;
use std::iter;
use std::ops::Range;
use std::path::Path;

use anyhow::{Context as _, ensure};
use aya::maps::{Array, Map, MapData};
use health_common::config::DatapathConfig;
use health_datapath::layout;
use object::elf::{EM_BPF, FileHeader64};
use object::read::elf::{ElfFile64, FileHeader as _};
use object::{LittleEndian, Object as _, ObjectSection as _, SectionKind};

use crate::Node;
use crate::bed::agent_binary;

/// Start of a little-endian 64-bit ELF file.
const ELF: &[u8] = b"\x7fELF\x02\x01\x01";
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
    fs::copy(&original, path).with_context(|| format!("cannot write {}", path.display()))?;
    let mut binary = fs::read(path)?;
    let sections = program_sections(&binary);
    ensure!(
        !sections.is_empty(),
        "no BPF programs in {}",
        original.display()
    );
    let mut changed = 0;
    for section in sections {
        changed += exchange_moves(&mut binary[section]);
    }
    fs::write(path, &binary)?;
    Ok(changed)
}

/// Byte ranges of the instructions in embedded BPF objects.
fn program_sections(binary: &[u8]) -> Vec<Range<usize>> {
    elf_files(binary)
        .filter_map(|at| Some((at, bpf_object(&binary[at..])?)))
        .flat_map(|(at, object)| {
            let code = object
                .sections()
                .filter(|section| section.kind() == SectionKind::Text);
            let ranges = code.filter_map(|section| section.file_range());
            ranges
                .map(|(offset, size)| at + offset as usize..at + (offset + size) as usize)
                .collect::<Vec<_>>()
        })
        .collect()
}

/// Offsets of ELF files, including the binary itself. The standard library searches for the first byte: a loop here
/// would take seconds per binary in an unoptimised build.
fn elf_files(binary: &[u8]) -> impl Iterator<Item = usize> {
    let mut rest = binary;
    iter::from_fn(move || {
        // Reading from memory cannot fail.
        while rest.skip_until(ELF[0]).is_ok_and(|skipped| skipped > 0) {
            let at = binary.len() - rest.len() - 1;
            if binary[at..].starts_with(ELF) {
                return Some(at);
            }
        }
        None
    })
}

fn bpf_object(bytes: &[u8]) -> Option<ElfFile64<'_, LittleEndian>> {
    let header = FileHeader64::<LittleEndian>::parse(bytes).ok()?;
    let is_bpf = header.e_machine(LittleEndian) == EM_BPF;
    is_bpf.then(|| ElfFile64::parse(bytes).ok()).flatten()
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

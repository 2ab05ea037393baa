//! Measures the kernel verifier's work for each program in an object, as reported by the verifier.

mod kernel;

use std::collections::HashMap;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::time::Duration;

use anyhow::Context as _;
use aya::Btf;
use aya::maps::MapData;
use aya_obj::generated::{bpf_attach_type, bpf_insn, bpf_map_type, bpf_prog_type};
use aya_obj::{EbpfSectionKind, Function, Map, Object, ProgramSection};

/// A program and the verifier's statistics about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VerifiedProgram {
    /// The program's name.
    pub name: String,
    /// Number of instructions, including called functions.
    pub instructions: usize,
    /// Number of instructions that the verifier processed, counting repetitions.
    pub processed: u64,
    /// Maximum number of instructions that the verifier may process.
    pub limit: u64,
    /// Number of states that the verifier kept for comparison.
    pub states: u64,
    /// Time that the verification took.
    pub time: Duration,
    /// Largest stack frame of a function in bytes. The frames in a call chain may add up to at most 512.
    pub deepest_frame: u32,
    /// Size of the machine code in bytes; 0 without a JIT compiler.
    pub jited: u32,
}

/// Makes the kernel verify each program of an object, with separate maps that disappear after the call. Attaches and
/// pins nothing.
pub fn verify(object: &[u8]) -> anyhow::Result<Vec<VerifiedProgram>> {
    let mut object = Object::parse(object).context("cannot read the object")?;
    let features = aya::features();
    let types = match features.btf() {
        Some(btf) => object
            .fixup_and_sanitize_btf(btf)
            .context("cannot use the object's types")?,
        None => None,
    };
    let types: Option<OwnedFd> = types
        .map(|types| kernel::load_btf(&types.to_bytes()))
        .transpose()
        .context("cannot load the object's types")?;
    if object.has_btf_relocations() {
        let types = Btf::from_sys_fs().context("cannot use the kernel's types")?;
        object
            .relocate_btf(&types)
            .context("cannot relocate the object to the kernel's types")?;
    }
    let maps = make_maps(&mut object, types.as_ref())?;
    let text = object.functions.keys().map(|(section, _)| *section);
    let text = text.collect();
    let references = maps
        .iter()
        .map(|(name, (definition, map))| (name.as_str(), map.fd().as_fd().as_raw_fd(), definition));
    object
        .relocate_maps(references, &text)
        .and_then(|()| object.relocate_calls(&text))
        .context("cannot link the object")?;
    object.sanitize_functions(features);

    let mut verified = Vec::new();
    for (name, program) in &object.programs {
        let Some(function) = object.functions.get(&program.function_key()) else {
            continue;
        };
        let func_info = function.func_info.func_info_bytes();
        let line_info = function.line_info.line_info_bytes();
        let (kind, hook) = kind(&program.section);
        let unverified = kernel::Unverified {
            kind,
            hook,
            instructions: instruction_bytes(function),
            license: &program.license,
            types: types.as_ref().map(|types| types.as_fd()),
            func_info: (&func_info, function.func_info_rec_size),
            line_info: (&line_info, function.line_info_rec_size),
        };
        let (loaded, log) = kernel::verify_program(&unverified).with_context(|| {
            let said = kernel::refusal(&unverified);
            format!("the kernel's verifier rejects {name}: {said}")
        })?;
        let log = read_log(&log)
            .with_context(|| format!("the verifier log of {name} has an unknown form: {log:?}"))?;
        verified.push(VerifiedProgram {
            name: name.clone(),
            instructions: function.instructions.len(),
            jited: kernel::jited_len(loaded.as_fd())
                .with_context(|| format!("cannot query {name}"))?,
            ..log
        });
    }
    verified.sort_by(|one, other| one.name.cmp(&other.name));
    Ok(verified)
}

/// The type of a program, and its attach type if the program type has several.
fn kind(section: &ProgramSection) -> (bpf_prog_type, u32) {
    match section {
        ProgramSection::CgroupSockAddr { attach_type } => {
            let hook: bpf_attach_type = (*attach_type).into();
            (bpf_prog_type::BPF_PROG_TYPE_CGROUP_SOCK_ADDR, hook as u32)
        }
        ProgramSection::CgroupSock { attach_type } => {
            let hook: bpf_attach_type = (*attach_type).into();
            (bpf_prog_type::BPF_PROG_TYPE_CGROUP_SOCK, hook as u32)
        }
        ProgramSection::Xdp { .. } => (bpf_prog_type::BPF_PROG_TYPE_XDP, 0),
        _ => (bpf_prog_type::BPF_PROG_TYPE_SCHED_CLS, 0),
    }
}

/// Entries per map. The verifier ignores this number.
const TABLE_ENTRIES: u32 = 1024;

fn make_maps(
    object: &mut Object,
    types: Option<&OwnedFd>,
) -> anyhow::Result<HashMap<String, (Map, MapData)>> {
    let mut maps = HashMap::new();
    for (name, mut definition) in object.maps.drain() {
        if matches!(definition.map_type(), HASH | LRU_HASH | LPM_TRIE) {
            definition.set_max_entries(TABLE_ENTRIES);
        }
        let types = types.map(|types| types.as_fd());
        let map = MapData::create(definition.clone(), &name, types)
            .with_context(|| format!("cannot create map {name}"))?;
        if definition.section_kind() == EbpfSectionKind::Rodata {
            // The verifier relies on the values of read-only data.
            kernel::fill_and_freeze(map.fd().as_fd(), definition.data())
                .with_context(|| format!("cannot fill map {name}"))?;
        }
        maps.insert(name, (definition, map));
    }
    Ok(maps)
}

const HASH: u32 = bpf_map_type::BPF_MAP_TYPE_HASH as u32;
const LRU_HASH: u32 = bpf_map_type::BPF_MAP_TYPE_LRU_HASH as u32;
const LPM_TRIE: u32 = bpf_map_type::BPF_MAP_TYPE_LPM_TRIE as u32;

/// The instructions as an array of `struct bpf_insn`.
fn instruction_bytes(function: &Function) -> Vec<u8> {
    let bytes = |instruction: &bpf_insn| {
        let registers = instruction.dst_reg() | instruction.src_reg() << 4;
        let mut bytes = [0; 8];
        bytes[0] = instruction.code;
        bytes[1] = registers;
        bytes[2..4].copy_from_slice(&instruction.off.to_ne_bytes());
        bytes[4..].copy_from_slice(&instruction.imm.to_ne_bytes());
        bytes
    };
    function.instructions.iter().flat_map(bytes).collect()
}

/// Parses the output of `BPF_LOG_STATS` (kernel/bpf/verifier.c, `print_verification_stats`).
fn read_log(log: &str) -> Option<VerifiedProgram> {
    let after = |what: &str| {
        let rest = &log[log.find(what)? + what.len()..];
        let end = rest.find(|c: char| !c.is_ascii_digit())?;
        rest[..end].parse::<u64>().ok()
    };
    let line = |what: &str| log.lines().find_map(|line| line.strip_prefix(what));
    let frames = line("stack depth ")?
        .split('+')
        .map(|depth| depth.parse().ok());
    Some(VerifiedProgram {
        name: String::new(),
        instructions: 0,
        processed: after("processed ")?,
        limit: after("(limit ")?,
        states: after("total_states ")?,
        time: Duration::from_micros(after("verification time ")?),
        deepest_frame: frames.collect::<Option<Vec<u32>>>()?.into_iter().max()?,
        jited: 0,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_verifiers_account_is_read() {
        let log = "verification time 81234 usec\nstack depth 432+0+88\nprocessed 77780 insns (limit 1000000) \
                   max_states_per_insn 21 total_states 3271 peak_states 1200 mark_read 90\n";
        let expected = VerifiedProgram {
            name: String::new(),
            instructions: 0,
            processed: 77_780,
            limit: 1_000_000,
            states: 3_271,
            time: Duration::from_micros(81_234),
            deepest_frame: 432,
            jited: 0,
        };
        assert_eq!(read_log(log), Some(expected));
        for cut in [
            "",
            "processed",
            "processed 7",
            "stack depth x\nprocessed 7 insns",
        ] {
            assert_eq!(read_log(cut), None, "{cut}");
        }
    }
}

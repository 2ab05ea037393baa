//! Programs of a few instructions, put together by hand (Documentation/bpf/standardization/instruction-set.rst).

use std::os::fd::{AsRawFd as _, BorrowedFd};

use aya_obj::generated::bpf_func_id;

/// A register.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reg(pub(super) u8);

/// What functions return, and the program.
pub(super) const R0: Reg = Reg(0);
/// The first argument; the packet's `struct __sk_buff` when a program begins.
pub(super) const R1: Reg = Reg(1);
/// The second argument.
pub(super) const R2: Reg = Reg(2);
/// The third argument.
pub(super) const R3: Reg = Reg(3);
/// The fourth argument.
pub(super) const R4: Reg = Reg(4);
/// The fifth argument.
pub(super) const R5: Reg = Reg(5);

const NONE: Reg = Reg(0);
const MOV64_IMM: u8 = 0xb7;
const MOV32_IMM: u8 = 0xb4;
const LD_IMM64: u8 = 0x18;
const LDX_W: u8 = 0x61;
const STX_W: u8 = 0x63;
const JEQ_REG: u8 = 0x1d;
const CALL: u8 = 0x85;
const EXIT: u8 = 0x95;
/// Of `LD_IMM64`: the number is a map's descriptor.
const PSEUDO_MAP_FD: Reg = Reg(1);

fn instruction(code: u8, to: Reg, from: Reg, offset: i16, number: i32) -> u64 {
    let registers = if cfg!(target_endian = "little") {
        from.0 << 4 | to.0
    } else {
        to.0 << 4 | from.0
    };
    let [offset_0, offset_1] = offset.to_ne_bytes();
    let [n0, n1, n2, n3] = number.to_ne_bytes();
    u64::from_ne_bytes([code, registers, offset_0, offset_1, n0, n1, n2, n3])
}

/// `to = number`
pub(super) fn mov(to: Reg, number: i32) -> u64 {
    instruction(MOV64_IMM, to, NONE, 0, number)
}

/// `to = number`, the upper half zero.
pub(super) fn mov32(to: Reg, number: u32) -> u64 {
    instruction(MOV32_IMM, to, NONE, 0, number.cast_signed())
}

/// `to = map`
pub(super) fn load_map(to: Reg, map: BorrowedFd<'_>) -> [u64; 2] {
    [
        instruction(LD_IMM64, to, PSEUDO_MAP_FD, 0, map.as_raw_fd()),
        0,
    ]
}

/// `to = *(u32 *)(from + offset)`
pub(super) fn load_word(to: Reg, from: Reg, offset: i16) -> u64 {
    instruction(LDX_W, to, from, offset, 0)
}

/// `*(u32 *)(to + offset) = from`
pub(super) fn store_word(to: Reg, offset: i16, from: Reg) -> u64 {
    instruction(STX_W, to, from, offset, 0)
}

/// `if a == b` on behind the next `skipped` instructions.
pub(super) fn skip_if_equal(a: Reg, b: Reg, skipped: i16) -> u64 {
    instruction(JEQ_REG, a, b, skipped, 0)
}

/// Calls a helper, by its number in `enum bpf_func_id`.
pub(super) fn call(helper: bpf_func_id) -> u64 {
    instruction(CALL, NONE, NONE, 0, helper as i32)
}

/// Ends the program.
pub(super) fn exit() -> u64 {
    instruction(EXIT, NONE, NONE, 0, 0)
}

//! Hand-assembled programs of a few instructions (Documentation/bpf/standardization/instruction-set.rst).

use aya_obj::generated::bpf_func_id;

/// A register.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reg(pub(super) u8);

/// The return value of functions and of the program.
pub(super) const R0: Reg = Reg(0);
/// The second argument.
pub(super) const R2: Reg = Reg(2);
/// The third argument.
pub(super) const R3: Reg = Reg(3);
/// The fourth argument.
pub(super) const R4: Reg = Reg(4);
/// The fifth argument.
pub(super) const R5: Reg = Reg(5);

const MOV64_IMM: u8 = 0xb7;
const CALL: u8 = 0x85;
const EXIT: u8 = 0x95;

fn instruction(code: u8, to: Reg, number: i32) -> u64 {
    let registers = if cfg!(target_endian = "little") {
        to.0
    } else {
        to.0 << 4
    };
    let [n0, n1, n2, n3] = number.to_ne_bytes();
    u64::from_ne_bytes([code, registers, 0, 0, n0, n1, n2, n3])
}

/// `to = number`
pub(super) fn mov(to: Reg, number: i32) -> u64 {
    instruction(MOV64_IMM, to, number)
}

/// Calls a helper by its number in `enum bpf_func_id`.
pub(super) fn call(helper: bpf_func_id) -> u64 {
    instruction(CALL, R0, helper as i32)
}

/// Ends the program.
pub(super) fn exit() -> u64 {
    instruction(EXIT, R0, 0)
}

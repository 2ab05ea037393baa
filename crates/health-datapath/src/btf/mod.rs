//! Map values as described by the BPF type format (`Documentation/bpf/btf.rst` of the kernel).
//!
//! aya parses BTF for its own use and does not expose its types.

mod parse;
mod value;

use parse::MAGIC;
pub use value::Value;

/// Types nested more deeply than this are not followed. The kernel allows 32 (`MAX_RESOLVE_DEPTH`), and refuses types that
/// contain themselves.
const MAX_DEPTH: u32 = 64;
const POINTER_SIZE: usize = 8;

/// Why BTF cannot be interpreted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BtfError {
    /// It ends too early.
    #[error("BTF is truncated within its {0}")]
    Truncated(&'static str),
    /// It starts with another number, or comes from a machine of the other byte order.
    #[error("invalid BTF magic {0:#06x}; expected {MAGIC:#06x}")]
    Magic(u16),
    /// Newer than this program.
    #[error("BTF has a type of unknown kind {0}")]
    Kind(u32),
}

/// The types of one BTF object.
#[derive(Debug)]
pub struct Btf {
    /// By id minus one.
    types: Vec<Type>,
}

#[derive(Debug)]
enum Type {
    Int {
        size: usize,
        is_signed: bool,
        is_bool: bool,
        is_char: bool,
    },
    Float {
        size: usize,
    },
    Pointer,
    Array {
        element: u32,
        count: usize,
    },
    /// Structs, unions and data sections.
    Fields {
        size: usize,
        fields: Vec<Field>,
    },
    Enum {
        size: usize,
        is_signed: bool,
        names: Vec<(u64, String)>,
    },
    /// Another name or other qualifiers for this type.
    Alias(u32),
    /// A variable in a data section.
    Variable {
        name: String,
        kind: u32,
    },
    /// Types that a map cannot hold.
    Other,
}

#[derive(Debug)]
struct Field {
    /// Empty for a struct or union whose fields belong to its parent.
    name: String,
    kind: u32,
    offset_bits: usize,
    /// Width of a bit field.
    bits: Option<u32>,
}

impl Btf {
    /// Interprets `bytes` as the type with this id.
    pub fn value(&self, id: u32, bytes: &[u8]) -> Value {
        self.value_within(id, bytes, MAX_DEPTH)
    }

    fn get(&self, id: u32) -> Option<&Type> {
        self.types.get(id.checked_sub(1)? as usize)
    }

    /// Size in bytes; 0 if it has none.
    fn size_within(&self, id: u32, depth: u32) -> usize {
        let Some(depth) = depth.checked_sub(1) else {
            return 0;
        };
        match self.get(id) {
            Some(
                Type::Int { size, .. }
                | Type::Float { size }
                | Type::Fields { size, .. }
                | Type::Enum { size, .. },
            ) => *size,
            Some(Type::Pointer) => POINTER_SIZE,
            Some(Type::Array { element, count }) => {
                self.size_within(*element, depth).saturating_mul(*count)
            }
            Some(Type::Alias(id) | Type::Variable { kind: id, .. }) => self.size_within(*id, depth),
            Some(Type::Other) | None => 0,
        }
    }

    fn value_within(&self, id: u32, bytes: &[u8], depth: u32) -> Value {
        let (Some(kind), Some(depth)) = (self.get(id), depth.checked_sub(1)) else {
            return Value::Bytes(bytes.to_vec());
        };
        let whole = |size: usize| bytes.get(..size).map(number);
        let value = match kind {
            Type::Int {
                size,
                is_signed,
                is_bool,
                ..
            } => whole(*size).map(|number| match () {
                () if *is_bool => Value::Bool(number != 0),
                () if *is_signed => Value::Signed(signed(number, 8 * *size as u32)),
                () => Value::Unsigned(number),
            }),
            Type::Float { size } => match size {
                4 => whole(4).map(|bits| Value::Float(f32::from_bits(bits as u32).into())),
                8 => whole(8).map(|bits| Value::Float(f64::from_bits(bits as u64))),
                _ => None,
            },
            Type::Pointer => whole(POINTER_SIZE).map(Value::Pointer),
            Type::Enum {
                size,
                is_signed,
                names,
            } => whole(*size).map(|number| enumerated(number, 8 * *size as u32, *is_signed, names)),
            Type::Array { element, count } => Some(self.list(*element, *count, bytes, depth)),
            Type::Fields { fields, .. } => {
                let mut all = Vec::new();
                self.add_fields(&mut all, fields, bytes, depth);
                Some(Value::Fields(all))
            }
            Type::Alias(id) => Some(self.value_within(*id, bytes, depth)),
            // Shown as a field of its section.
            Type::Variable { name, kind } => {
                let value = self.value_within(*kind, bytes, depth);
                Some(Value::Fields(vec![(name.clone(), value)]))
            }
            Type::Other => None,
        };
        value.unwrap_or_else(|| Value::Bytes(bytes.to_vec()))
    }

    fn list(&self, element: u32, count: usize, bytes: &[u8], depth: u32) -> Value {
        let size = self.size_within(element, depth);
        let bytes = &bytes[..size.saturating_mul(count).min(bytes.len())];
        if self.is_char(element)
            && let Some(text) = text(bytes)
        {
            return Value::Text(text);
        }
        // Elements without a size yield an empty list, whatever their count.
        let elements = bytes.chunks_exact(size.max(1)).take(count);
        Value::List(
            elements
                .map(|bytes| self.value_within(element, bytes, depth))
                .collect(),
        )
    }

    fn is_char(&self, mut id: u32) -> bool {
        for _ in 0..MAX_DEPTH {
            match self.get(id) {
                Some(Type::Alias(to)) => id = *to,
                Some(Type::Int { is_char, .. }) => return *is_char,
                _ => return false,
            }
        }
        false
    }

    fn add_fields(
        &self,
        all: &mut Vec<(String, Value)>,
        fields: &[Field],
        bytes: &[u8],
        depth: u32,
    ) {
        for field in fields {
            let bytes = bytes.get(field.offset_bits / 8..).unwrap_or_default();
            let value = match field.bits {
                Some(bits) => self.bit_field(field, bits, bytes),
                None => {
                    let size = self.size_within(field.kind, depth).min(bytes.len());
                    self.value_within(field.kind, &bytes[..size], depth)
                }
            };
            match value {
                Value::Fields(inner) if field.name.is_empty() => all.extend(inner),
                value => all.push((field.name.clone(), value)),
            }
        }
    }

    /// Counts bits from the lowest up, as little-endian machines do; we only run on those.
    fn bit_field(&self, field: &Field, bits: u32, bytes: &[u8]) -> Value {
        let shift = field.offset_bits % 8;
        let len = (shift + bits as usize).div_ceil(8).min(bytes.len()).min(16);
        let number = number(&bytes[..len]) >> shift & ((1 << bits.min(64)) - 1);
        let mut id = field.kind;
        for _ in 0..MAX_DEPTH {
            return match self.get(id) {
                Some(Type::Alias(to)) => {
                    id = *to;
                    continue;
                }
                Some(Type::Int { is_bool: true, .. }) => Value::Bool(number != 0),
                Some(Type::Int {
                    is_signed: true, ..
                }) => Value::Signed(signed(number, bits)),
                Some(Type::Enum {
                    is_signed, names, ..
                }) => enumerated(number, bits, *is_signed, names),
                _ => Value::Unsigned(number),
            };
        }
        Value::Unsigned(number)
    }
}

/// Up to 16 bytes as a number, in this machine's byte order.
fn number(bytes: &[u8]) -> u128 {
    let mut all = [0; 16];
    for (to, byte) in all.iter_mut().zip(bytes) {
        *to = *byte;
    }
    u128::from_le_bytes(all)
}

/// A two's complement number with this many bits.
fn signed(number: u128, bits: u32) -> i128 {
    let unused = 128 - bits.clamp(1, 128);
    (number << unused).cast_signed() >> unused
}

fn enumerated(number: u128, bits: u32, is_signed: bool, names: &[(u64, String)]) -> Value {
    let wanted = if is_signed {
        signed(number, bits)
    } else {
        number.cast_signed()
    };
    // The values of 32-bit enums are extended to 64 bits with the enum's signedness.
    let name = names.iter().find(|(value, _)| {
        let value = if is_signed {
            i128::from(value.cast_signed())
        } else {
            i128::from(*value)
        };
        value == wanted
    });
    match name {
        Some((_, name)) => Value::Text(name.clone()),
        None => Value::Signed(wanted),
    }
}

/// A string that fills the bytes or is followed only by zeros, with printable characters only.
fn text(bytes: &[u8]) -> Option<String> {
    let end = bytes.iter().position(|byte| *byte == 0);
    let (text, rest) = bytes.split_at(end.unwrap_or(bytes.len()));
    let text = std::str::from_utf8(text).ok()?;
    let is_text = rest.iter().all(|byte| *byte == 0) && !text.contains(char::is_control);
    is_text.then(|| text.to_owned())
}

#[cfg(test)]
pub(super) mod tests;

//! Values of maps as the BPF type format describes them (`Documentation/bpf/btf.rst` of the kernel).
//!
//! aya parses BTF for itself, and shows its types to nobody.

use std::fmt;

use serde::ser::SerializeMap as _;
use serde::{Serialize, Serializer};

const MAGIC: u16 = 0xeb9f;
/// Types within types beyond this are not followed. The kernel allows 32 (`MAX_RESOLVE_DEPTH`), and refuses
/// those that contain themselves.
const MAX_DEPTH: u32 = 64;
const POINTER_SIZE: usize = 8;

const KIND_INT: u32 = 1;
const KIND_PTR: u32 = 2;
const KIND_ARRAY: u32 = 3;
const KIND_STRUCT: u32 = 4;
const KIND_UNION: u32 = 5;
const KIND_ENUM: u32 = 6;
const KIND_FWD: u32 = 7;
const KIND_TYPEDEF: u32 = 8;
const KIND_VOLATILE: u32 = 9;
const KIND_CONST: u32 = 10;
const KIND_RESTRICT: u32 = 11;
const KIND_FUNC: u32 = 12;
const KIND_FUNC_PROTO: u32 = 13;
const KIND_VAR: u32 = 14;
const KIND_DATASEC: u32 = 15;
const KIND_FLOAT: u32 = 16;
const KIND_DECL_TAG: u32 = 17;
const KIND_TYPE_TAG: u32 = 18;
const KIND_ENUM64: u32 = 19;

const INT_SIGNED: u32 = 1;
const INT_BOOL: u32 = 4;

/// Why BTF is not understood.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BtfError {
    /// It ends in the midst of something.
    #[error("BTF ends within its {0}")]
    Truncated(&'static str),
    /// It begins with something else, or is of a machine of the other byte order.
    #[error("BTF begins with {0:#06x}, not {MAGIC:#06x}")]
    Magic(u16),
    /// Newer than this program.
    #[error("BTF has a type of kind {0}, which is not known")]
    Kind(u32),
}

/// The types of one BTF object.
#[derive(Debug)]
pub struct Btf {
    /// By their ids, less one.
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
    /// Structs, unions and sections of variables.
    Fields {
        size: usize,
        fields: Vec<Field>,
    },
    Enum {
        size: usize,
        is_signed: bool,
        names: Vec<(u64, String)>,
    },
    /// Another name, or other qualifiers, of this one.
    Alias(u32),
    /// One of a section.
    Variable {
        name: String,
        kind: u32,
    },
    /// Nothing that a map could hold.
    Other,
}

#[derive(Debug)]
struct Field {
    /// Empty for a struct or union whose fields are its parent's.
    name: String,
    kind: u32,
    offset_bits: usize,
    /// Of a bit field.
    bits: Option<u32>,
}

impl Btf {
    /// Reads what the kernel hands out.
    pub fn parse(data: &[u8]) -> Result<Self, BtfError> {
        let mut header = Reader { data, of: "header" };
        let magic = u16::from_ne_bytes(header.take()?);
        if magic != MAGIC {
            return Err(BtfError::Magic(magic));
        }
        let [_version, _flags] = header.take()?;
        let header_len = header.word()? as usize;
        let [type_offset, type_len, string_offset, string_len] = header.words()?;
        let section = |offset: u32, len: u32, of| {
            let section = data
                .get(header_len..)
                .and_then(|after| after.get(offset as usize..));
            section
                .and_then(|section| section.get(..len as usize))
                .ok_or(BtfError::Truncated(of))
        };
        let strings = Strings(section(string_offset, string_len, "strings")?);
        let mut types = Reader {
            data: section(type_offset, type_len, "types")?,
            of: "types",
        };
        let mut btf = Self { types: Vec::new() };
        while !types.data.is_empty() {
            btf.types.push(Type::read(&mut types, &strings)?);
        }
        Ok(btf)
    }

    /// What `bytes` are, if they are of the type with this id.
    pub fn value(&self, id: u32, bytes: &[u8]) -> Value {
        self.value_within(id, bytes, MAX_DEPTH)
    }

    fn get(&self, id: u32) -> Option<&Type> {
        self.types.get(id.checked_sub(1)? as usize)
    }

    /// Bytes; 0 where it has none.
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
            // As the one field that it is of its section.
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
        // Elements without a size are none, however many.
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

    /// Bits are counted from the lowest on, as little-endian machines do, which are those that we run on.
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

/// Up to 16 bytes as a number, in the byte order of this machine.
fn number(bytes: &[u8]) -> u128 {
    let mut all = [0; 16];
    for (to, byte) in all.iter_mut().zip(bytes) {
        *to = *byte;
    }
    u128::from_le_bytes(all)
}

/// A number of so many bits in two's complement.
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
    // Names of 32 bits are extended to 64 as the enum's are.
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

/// A string that ends with the bytes or with zeros alone, of characters that can be shown.
fn text(bytes: &[u8]) -> Option<String> {
    let end = bytes.iter().position(|byte| *byte == 0);
    let (text, rest) = bytes.split_at(end.unwrap_or(bytes.len()));
    let text = std::str::from_utf8(text).ok()?;
    let is_text = rest.iter().all(|byte| *byte == 0) && !text.contains(char::is_control);
    is_text.then(|| text.to_owned())
}

impl Type {
    fn read(from: &mut Reader<'_>, strings: &Strings<'_>) -> Result<Self, BtfError> {
        let [name, info, size_or_type] = from.words()?;
        let (count, kind) = (info & 0xffff, info >> 24 & 0x1f);
        let has_flag = info >> 31 != 0;
        let size = size_or_type as usize;
        Ok(match kind {
            KIND_INT => {
                let encoding = from.word()? >> 24;
                Self::Int {
                    size,
                    is_signed: encoding & INT_SIGNED != 0,
                    is_bool: encoding & INT_BOOL != 0,
                    // Compilers give `char` no encoding of its own.
                    is_char: strings.get(name) == "char",
                }
            }
            KIND_PTR => Self::Pointer,
            KIND_ARRAY => {
                let [element, _index, count] = from.words()?;
                Self::Array {
                    element,
                    count: count as usize,
                }
            }
            KIND_STRUCT | KIND_UNION => {
                let mut fields = Vec::new();
                for _ in 0..count {
                    let [name, kind, offset] = from.words()?;
                    let (offset, bits) = if has_flag {
                        (
                            offset & 0xff_ffff,
                            Some(offset >> 24).filter(|bits| *bits > 0),
                        )
                    } else {
                        (offset, None)
                    };
                    fields.push(Field {
                        name: strings.get(name),
                        kind,
                        offset_bits: offset as usize,
                        bits,
                    });
                }
                Self::Fields { size, fields }
            }
            KIND_ENUM => {
                let mut names = Vec::new();
                for _ in 0..count {
                    let [name, value] = from.words()?;
                    let value = if has_flag {
                        i64::from(value.cast_signed()).cast_unsigned()
                    } else {
                        u64::from(value)
                    };
                    names.push((value, strings.get(name)));
                }
                Self::Enum {
                    size,
                    is_signed: has_flag,
                    names,
                }
            }
            KIND_ENUM64 => {
                let mut names = Vec::new();
                for _ in 0..count {
                    let [name, low, high] = from.words()?;
                    names.push((u64::from(high) << 32 | u64::from(low), strings.get(name)));
                }
                Self::Enum {
                    size,
                    is_signed: has_flag,
                    names,
                }
            }
            KIND_TYPEDEF | KIND_VOLATILE | KIND_CONST | KIND_RESTRICT | KIND_TYPE_TAG => {
                Self::Alias(size_or_type)
            }
            KIND_VAR => {
                let _linkage = from.word()?;
                Self::Variable {
                    name: strings.get(name),
                    kind: size_or_type,
                }
            }
            KIND_DATASEC => {
                let mut fields = Vec::new();
                for _ in 0..count {
                    let [variable, offset, _size] = from.words()?;
                    fields.push(Field {
                        // The variable has it.
                        name: String::new(),
                        kind: variable,
                        offset_bits: 8 * offset as usize,
                        bits: None,
                    });
                }
                Self::Fields { size, fields }
            }
            KIND_FLOAT => Self::Float { size },
            KIND_FUNC_PROTO => {
                for _ in 0..count {
                    let [_name, _type] = from.words()?;
                }
                Self::Other
            }
            KIND_DECL_TAG => {
                let _component = from.word()?;
                Self::Other
            }
            KIND_FWD | KIND_FUNC => Self::Other,
            other => return Err(BtfError::Kind(other)),
        })
    }
}

/// What is left to be read.
struct Reader<'a> {
    data: &'a [u8],
    of: &'static str,
}

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], BtfError> {
        let (taken, rest) = self
            .data
            .split_first_chunk()
            .ok_or(BtfError::Truncated(self.of))?;
        self.data = rest;
        Ok(*taken)
    }

    fn word(&mut self) -> Result<u32, BtfError> {
        self.take().map(u32::from_ne_bytes)
    }

    fn words<const N: usize>(&mut self) -> Result<[u32; N], BtfError> {
        let mut words = [0; N];
        for word in &mut words {
            *word = self.word()?;
        }
        Ok(words)
    }
}

/// The names of all types, each with a zero after it.
struct Strings<'a>(&'a [u8]);

impl Strings<'_> {
    /// Empty where there is none.
    fn get(&self, offset: u32) -> String {
        let text = self.0.get(offset as usize..).unwrap_or_default();
        let text = text.split(|byte| *byte == 0).next().unwrap_or_default();
        String::from_utf8_lossy(text).into_owned()
    }
}

/// A value, readable.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// An unsigned integer.
    Unsigned(u128),
    /// A signed integer, or an enum without a name.
    Signed(i128),
    /// A boolean.
    Bool(bool),
    /// A floating-point number.
    Float(f64),
    /// An address.
    Pointer(u128),
    /// The name of an enum's value, or characters.
    Text(String),
    /// The elements of an array.
    List(Vec<Value>),
    /// The fields of a struct, all readings of a union, or the variables of a section.
    Fields(Vec<(String, Value)>),
    /// What has no type, or one that says nothing of it; shown in hexadecimal.
    Bytes(Vec<u8>),
}

/// Shown on one line.
impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unsigned(number) => number.fmt(f),
            Self::Signed(number) => number.fmt(f),
            Self::Bool(value) => value.fmt(f),
            Self::Float(number) => number.fmt(f),
            Self::Pointer(address) => write!(f, "{address:#x}"),
            Self::Text(text) => write!(f, "{text:?}"),
            Self::List(items) => {
                f.write_str("[")?;
                for (place, item) in items.iter().enumerate() {
                    let gap = if place > 0 { " " } else { "" };
                    write!(f, "{gap}{item}")?;
                }
                f.write_str("]")
            }
            Self::Fields(fields) => {
                f.write_str("{")?;
                for (place, (name, value)) in fields.iter().enumerate() {
                    let gap = if place > 0 { " " } else { "" };
                    write!(f, "{gap}{name}={value}")?;
                }
                f.write_str("}")
            }
            Self::Bytes(bytes) => bytes.iter().try_for_each(|byte| write!(f, "{byte:02x}")),
        }
    }
}

impl Serialize for Value {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        match self {
            // JSON's readers take no longer numbers.
            Self::Unsigned(number) => match u64::try_from(*number) {
                Ok(number) => to.serialize_u64(number),
                Err(_) => to.collect_str(number),
            },
            Self::Signed(number) => match i64::try_from(*number) {
                Ok(number) => to.serialize_i64(number),
                Err(_) => to.collect_str(number),
            },
            Self::Bool(value) => to.serialize_bool(*value),
            Self::Float(number) => to.serialize_f64(*number),
            Self::Text(text) => to.serialize_str(text),
            Self::List(items) => to.collect_seq(items),
            Self::Fields(fields) => {
                let mut map = to.serialize_map(Some(fields.len()))?;
                for (name, value) in fields {
                    map.serialize_entry(name, value)?;
                }
                map.end()
            }
            Self::Pointer(_) | Self::Bytes(_) => to.collect_str(self),
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use proptest::prelude::*;

    const FLAG: u32 = 1 << 31;

    /// Types as a compiler writes them.
    #[derive(Default)]
    pub(in super::super) struct Writer {
        types: Vec<u8>,
        strings: Vec<u8>,
        count: u32,
    }

    impl Writer {
        fn string(&mut self, text: &str) -> u32 {
            if self.strings.is_empty() {
                self.strings.push(0);
            }
            if text.is_empty() {
                return 0;
            }
            let offset = self.strings.len() as u32;
            self.strings.extend_from_slice(text.as_bytes());
            self.strings.push(0);
            offset
        }

        fn add(&mut self, name: &str, info: u32, size_or_type: u32, rest: &[u32]) -> u32 {
            let name = self.string(name);
            for word in [name, info, size_or_type].iter().chain(rest) {
                self.types.extend_from_slice(&word.to_ne_bytes());
            }
            self.count += 1;
            self.count
        }

        pub(in super::super) fn int(&mut self, name: &str, size: u32, encoding: u32) -> u32 {
            let bits = 8 * size;
            self.add(name, KIND_INT << 24, size, &[encoding << 24 | bits])
        }

        pub(in super::super) fn array(&mut self, element: u32, index: u32, count: u32) -> u32 {
            self.add("", KIND_ARRAY << 24, 0, &[element, index, count])
        }

        /// Fields by name, type and offset in bits, above it the bits of a bit field.
        pub(in super::super) fn record(
            &mut self,
            kind: u32,
            name: &str,
            size: u32,
            fields: &[(&str, u32, u32)],
        ) -> u32 {
            let mut words = Vec::new();
            for (name, kind, offset) in fields {
                words.extend([self.string(name), *kind, *offset]);
            }
            self.add(name, kind | fields.len() as u32, size, &words)
        }

        pub(in super::super) fn structure(
            &mut self,
            name: &str,
            size: u32,
            fields: &[(&str, u32, u32)],
        ) -> u32 {
            self.record(KIND_STRUCT << 24, name, size, fields)
        }

        pub(in super::super) fn bytes(&self) -> Vec<u8> {
            let mut data = Vec::new();
            data.extend_from_slice(&MAGIC.to_ne_bytes());
            data.extend([1, 0]);
            let (types, strings) = (self.types.len() as u32, self.strings.len() as u32);
            for word in [24, 0, types, types, strings] {
                data.extend_from_slice(&u32::to_ne_bytes(word));
            }
            [data, self.types.clone(), self.strings.clone()].concat()
        }

        fn btf(&self) -> Btf {
            Btf::parse(&self.bytes()).unwrap()
        }
    }

    fn json(value: &Value) -> String {
        serde_json::to_string(value).unwrap()
    }

    #[test]
    fn numbers_are_read_by_size_and_sign() {
        let mut types = Writer::default();
        let byte = types.int("u8", 1, 0);
        let signed = types.int("int", 4, INT_SIGNED);
        let boolean = types.int("_Bool", 1, INT_BOOL);
        let long = types.int("unsigned __int128", 16, 0);
        let float = types.add("double", KIND_FLOAT << 24, 8, &[]);
        let pointer = types.add("", KIND_PTR << 24, byte, &[]);
        let alias = types.add("pid_t", KIND_TYPEDEF << 24, signed, &[]);
        let constant = types.add("", KIND_CONST << 24, alias, &[]);
        let btf = types.btf();
        assert_eq!(btf.value(byte, &[200]), Value::Unsigned(200));
        assert_eq!(
            btf.value(constant, &(-7_i32).to_ne_bytes()),
            Value::Signed(-7)
        );
        assert_eq!(btf.value(boolean, &[1]), Value::Bool(true));
        assert_eq!(btf.value(float, &0.5_f64.to_ne_bytes()), Value::Float(0.5));
        assert_eq!(
            json(&btf.value(pointer, &256_u64.to_ne_bytes())),
            r#""0x100""#
        );
        let largest = btf.value(long, &[0xff; 16]);
        assert_eq!(json(&largest), format!("\"{}\"", u128::MAX));
        assert_eq!(btf.value(signed, &[1, 2]).to_string(), "0102", "too short");
        assert_eq!(btf.value(0, &[1, 2]).to_string(), "0102", "void");
        assert_eq!(btf.value(99, &[3]).to_string(), "03", "no such type");
    }

    #[test]
    fn structs_show_their_fields_and_those_of_unnamed_ones_within() {
        let mut types = Writer::default();
        let word = types.int("u32", 4, 0);
        let half = types.int("u16", 2, 0);
        let character = types.int("char", 1, INT_SIGNED);
        let name = types.array(character, word, 4);
        let halves = types.array(half, word, 2);
        let both = types.record(
            KIND_UNION << 24,
            "",
            4,
            &[("whole", word, 0), ("halves", halves, 0)],
        );
        let outer = types.structure("outer", 8, &[("name", name, 0), ("", both, 32)]);
        let btf = types.btf();
        let value = btf.value(outer, b"ab\0\0\x01\0\x02\0");
        assert_eq!(
            json(&value),
            r#"{"name":"ab","whole":131073,"halves":[1,2]}"#
        );
        assert_eq!(
            value.to_string(),
            r#"{name="ab" whole=131073 halves=[1 2]}"#
        );
        let no_text = btf.value(name, &[1, 2, 0, 0]);
        assert_eq!(json(&no_text), "[1,2,0,0]");
    }

    #[test]
    fn bit_fields_and_enums_are_read() {
        let mut types = Writer::default();
        let word = types.int("unsigned int", 4, 0);
        let signed = types.int("int", 4, INT_SIGNED);
        let tcp = types.string("TCP");
        let protocol = types.add("protocol", KIND_ENUM << 24 | 1, 4, &[tcp, 6]);
        let none = types.string("NONE");
        let kind = types.add(
            "kind",
            FLAG | KIND_ENUM << 24 | 1,
            4,
            &[none, (-1_i32).cast_unsigned()],
        );
        let huge = types.string("HUGE");
        let wide = types.add("wide", KIND_ENUM64 << 24 | 1, 8, &[huge, 0, 1]);
        let flags = types.record(
            FLAG | KIND_STRUCT << 24,
            "flags",
            4,
            &[("low", word, 3 << 24), ("middle", signed, 9 << 24 | 3)],
        );
        let btf = types.btf();
        let value = btf.value(protocol, &6_u32.to_ne_bytes());
        assert_eq!(value, Value::Text("TCP".to_owned()));
        assert_eq!(btf.value(protocol, &7_u32.to_ne_bytes()), Value::Signed(7));
        let value = btf.value(kind, &(-1_i32).to_ne_bytes());
        assert_eq!(value, Value::Text("NONE".to_owned()));
        let value = btf.value(wide, &(1_u64 << 32).to_ne_bytes());
        assert_eq!(value, Value::Text("HUGE".to_owned()));
        // 9 bits of ones above 3 bits of 101.
        let value = btf.value(flags, &0b1111_1111_1101_u32.to_ne_bytes());
        assert_eq!(json(&value), r#"{"low":5,"middle":-1}"#);
    }

    #[test]
    fn variables_of_a_section_have_their_names() {
        let mut types = Writer::default();
        let word = types.int("u32", 4, 0);
        let first = types.add("first", KIND_VAR << 24, word, &[1]);
        let second = types.add("second", KIND_VAR << 24, word, &[1]);
        let section = types.add(
            ".data",
            KIND_DATASEC << 24 | 2,
            8,
            &[first, 0, 4, second, 4, 4],
        );
        let value = types.btf().value(section, &[7, 0, 0, 0, 8, 0, 0, 0]);
        assert_eq!(json(&value), r#"{"first":7,"second":8}"#);
    }

    #[test]
    fn types_without_end_or_size_are_not_followed_for_ever() {
        let mut types = Writer::default();
        let circle = types.add("circle", KIND_TYPEDEF << 24, 1, &[]);
        let empty = types.structure("empty", 0, &[]);
        let many = types.array(empty, 1, u32::MAX);
        let nested = types.array(5, 1, u32::MAX);
        types.array(nested, 1, u32::MAX);
        let btf = types.btf();
        assert_eq!(btf.value(circle, &[1]), Value::Bytes(vec![1]));
        assert_eq!(btf.value(many, &[1]), Value::List(vec![]));
        btf.value(nested, &[1, 2, 3]);
    }

    fn some_types() -> Writer {
        let mut types = Writer::default();
        let word = types.int("u32", 4, 0);
        let list = types.array(word, word, 3);
        let record = types.record(
            FLAG | KIND_STRUCT << 24,
            "record",
            16,
            &[("first", word, 5 << 24), ("list", list, 32)],
        );
        types.add("other", KIND_TYPEDEF << 24, record, &[]);
        let name = types.string("ONE");
        types.add("numbers", KIND_ENUM << 24 | 1, 4, &[name, 1]);
        types
    }

    #[test]
    fn what_ends_early_or_is_unknown_is_refused() {
        let data = some_types().bytes();
        for len in 0..data.len() {
            let error = Btf::parse(&data[..len]).unwrap_err();
            assert!(matches!(error, BtfError::Truncated(_)), "{len}: {error}");
        }
        assert_eq!(
            Btf::parse(b"\x7fELF").unwrap_err().to_string(),
            "BTF begins with 0x457f, not 0xeb9f"
        );
        let mut types = Writer::default();
        types.add("", 31 << 24, 0, &[]);
        assert_eq!(Btf::parse(&types.bytes()).unwrap_err(), BtfError::Kind(31));
    }

    proptest! {
        #[test]
        fn damaged_types_do_no_harm(
            place: prop::sample::Index,
            byte: u8,
            value: [u8; 24],
        ) {
            let mut data = some_types().bytes();
            let place = place.index(data.len());
            data[place] = byte;
            if let Ok(btf) = Btf::parse(&data) {
                for id in 0..8 {
                    for len in [0, 3, 24] {
                        let _ = json(&btf.value(id, &value[..len]));
                    }
                }
            }
        }
    }
}

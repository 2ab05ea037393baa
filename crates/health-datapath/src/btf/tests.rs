//! BTF as compilers write it, and damaged BTF.

use proptest::prelude::*;

use super::parse::*;
use super::*;

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

    /// Fields by name, type and offset in bits; the bits above hold a bit field's width.
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
        "invalid BTF magic 0x457f; expected 0xeb9f"
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

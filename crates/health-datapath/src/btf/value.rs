//! A value of any type in readable form: on one line, or as JSON.

use std::fmt;

use serde::ser::SerializeMap as _;
use serde::{Serialize, Serializer};

/// A value in readable form.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// An unsigned integer.
    Unsigned(u128),
    /// A signed integer, or an enum value without a name.
    Signed(i128),
    /// A boolean.
    Bool(bool),
    /// A floating-point number.
    Float(f64),
    /// An address.
    Pointer(u128),
    /// The name of an enum value, or characters.
    Text(String),
    /// The elements of an array.
    List(Vec<Value>),
    /// The fields of a struct, all interpretations of a union, or the variables of a section.
    Fields(Vec<(String, Value)>),
    /// A value without a usable type, shown in hexadecimal.
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
            // JSON parsers do not accept larger numbers.
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

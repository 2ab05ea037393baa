//! Parses types from the bytes that the kernel returns.

pub(super) use aya_obj::generated::{
    BTF_KIND_ARRAY as KIND_ARRAY, BTF_KIND_CONST as KIND_CONST, BTF_KIND_DATASEC as KIND_DATASEC,
    BTF_KIND_DECL_TAG as KIND_DECL_TAG, BTF_KIND_ENUM as KIND_ENUM, BTF_KIND_ENUM64 as KIND_ENUM64,
    BTF_KIND_FLOAT as KIND_FLOAT, BTF_KIND_FUNC as KIND_FUNC,
    BTF_KIND_FUNC_PROTO as KIND_FUNC_PROTO, BTF_KIND_FWD as KIND_FWD, BTF_KIND_INT as KIND_INT,
    BTF_KIND_PTR as KIND_PTR, BTF_KIND_RESTRICT as KIND_RESTRICT, BTF_KIND_STRUCT as KIND_STRUCT,
    BTF_KIND_TYPE_TAG as KIND_TYPE_TAG, BTF_KIND_TYPEDEF as KIND_TYPEDEF,
    BTF_KIND_UNION as KIND_UNION, BTF_KIND_VAR as KIND_VAR, BTF_KIND_VOLATILE as KIND_VOLATILE,
};

use super::{Btf, BtfError, Field, Type};

pub(super) const MAGIC: u16 = 0xeb9f;

pub(super) const INT_SIGNED: u32 = 1;
pub(super) const INT_BOOL: u32 = 4;

impl Btf {
    /// Parses BTF as the kernel returns it.
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
            KIND_STRUCT | KIND_UNION => Self::Fields {
                size,
                fields: read_fields(from, strings, count, has_flag)?,
            },
            KIND_ENUM => Self::Enum {
                size,
                is_signed: has_flag,
                names: read_names(from, strings, count, has_flag)?,
            },
            KIND_ENUM64 => Self::Enum {
                size,
                is_signed: has_flag,
                names: read_names64(from, strings, count)?,
            },
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
            KIND_DATASEC => Self::Fields {
                size,
                fields: read_variables(from, count)?,
            },
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

/// The fields of a structure. Whether they may be bit fields is a flag of the structure.
fn read_fields(
    from: &mut Reader<'_>,
    strings: &Strings<'_>,
    count: u32,
    has_bits: bool,
) -> Result<Vec<Field>, BtfError> {
    let mut fields = Vec::new();
    for _ in 0..count {
        let [name, kind, offset] = from.words()?;
        let (offset, bits) = if has_bits {
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
    Ok(fields)
}

/// The variables of a section, as fields.
fn read_variables(from: &mut Reader<'_>, count: u32) -> Result<Vec<Field>, BtfError> {
    let mut fields = Vec::new();
    for _ in 0..count {
        let [variable, offset, _size] = from.words()?;
        fields.push(Field {
            // The variable has the name.
            name: String::new(),
            kind: variable,
            offset_bits: 8 * offset as usize,
            bits: None,
        });
    }
    Ok(fields)
}

/// The values of an enumeration, by name.
fn read_names(
    from: &mut Reader<'_>,
    strings: &Strings<'_>,
    count: u32,
    is_signed: bool,
) -> Result<Vec<(u64, String)>, BtfError> {
    let mut names = Vec::new();
    for _ in 0..count {
        let [name, value] = from.words()?;
        let value = if is_signed {
            i64::from(value.cast_signed()).cast_unsigned()
        } else {
            u64::from(value)
        };
        names.push((value, strings.get(name)));
    }
    Ok(names)
}

/// The same for 64-bit values.
fn read_names64(
    from: &mut Reader<'_>,
    strings: &Strings<'_>,
    count: u32,
) -> Result<Vec<(u64, String)>, BtfError> {
    let mut names = Vec::new();
    for _ in 0..count {
        let [name, low, high] = from.words()?;
        names.push((u64::from(high) << 32 | u64::from(low), strings.get(name)));
    }
    Ok(names)
}

/// The unread rest.
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

/// The names of all types, each terminated by a zero.
struct Strings<'a>(&'a [u8]);

impl Strings<'_> {
    /// The name at an offset; empty if there is none.
    fn get(&self, offset: u32) -> String {
        let text = self.0.get(offset as usize..).unwrap_or_default();
        let text = text.split(|byte| *byte == 0).next().unwrap_or_default();
        String::from_utf8_lossy(text).into_owned()
    }
}

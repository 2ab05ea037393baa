//! HPACK, the header compression of HTTP/2 (RFC 7541).
//!
//! h2 does not export its decoder; this is the part that one call needs.

use std::borrow::Cow;
use std::collections::VecDeque;

use super::huffman;

/// Size of a connection's table unless negotiated otherwise (RFC 9113, 6.5.2), in bytes.
const TABLE_SIZE: usize = 4096;
/// Overhead of an entry, added to the length of its name and value (RFC 7541, 4.1).
const OVERHEAD: usize = 32;

/// The static table (RFC 7541, Appendix A). HPACK counts its indices from 1.
#[rustfmt::skip]
const STATIC: [(&str, &str); 61] = [
    (":authority", ""), (":method", "GET"), (":method", "POST"), (":path", "/"), (":path", "/index.html"),
    (":scheme", "http"), (":scheme", "https"), (":status", "200"), (":status", "204"), (":status", "206"),
    (":status", "304"), (":status", "400"), (":status", "404"), (":status", "500"), ("accept-charset", ""),
    ("accept-encoding", "gzip, deflate"), ("accept-language", ""), ("accept-ranges", ""), ("accept", ""),
    ("access-control-allow-origin", ""), ("age", ""), ("allow", ""), ("authorization", ""), ("cache-control", ""),
    ("content-disposition", ""), ("content-encoding", ""), ("content-language", ""), ("content-length", ""),
    ("content-location", ""), ("content-range", ""), ("content-type", ""), ("cookie", ""), ("date", ""), ("etag", ""),
    ("expect", ""), ("expires", ""), ("from", ""), ("host", ""), ("if-match", ""), ("if-modified-since", ""),
    ("if-none-match", ""), ("if-range", ""), ("if-unmodified-since", ""), ("last-modified", ""), ("link", ""),
    ("location", ""), ("max-forwards", ""), ("proxy-authenticate", ""), ("proxy-authorization", ""), ("range", ""),
    ("referer", ""), ("refresh", ""), ("retry-after", ""), ("server", ""), ("set-cookie", ""),
    ("strict-transport-security", ""), ("transfer-encoding", ""), ("user-agent", ""), ("vary", ""), ("via", ""),
    ("www-authenticate", ""),
];

/// Why headers cannot be decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum HpackError {
    #[error("truncated HPACK block")]
    Short,
    #[error("HPACK integer too large")]
    Number,
    #[error("invalid HPACK string")]
    String,
    #[error("invalid HPACK table index")]
    Index,
    #[error("HPACK table size update exceeds the limit")]
    TableSize,
    #[error("the headers are too large")]
    TooLarge,
}

type Bytes<'a> = Cow<'a, [u8]>;

/// Decodes the headers of one connection.
#[derive(Debug)]
pub(super) struct Decoder {
    /// The dynamic table, newest entry first.
    table: VecDeque<(Vec<u8>, Vec<u8>)>,
    size: usize,
    size_max: usize,
}

impl Default for Decoder {
    fn default() -> Self {
        Self {
            table: VecDeque::new(),
            size: 0,
            size_max: TABLE_SIZE,
        }
    }
}

impl Decoder {
    /// Decodes headers of up to `size_max` bytes when decompressed, and calls `take` with each name and value.
    pub(super) fn decode(
        &mut self,
        mut packed: &[u8],
        size_max: usize,
        mut take: impl FnMut(&[u8], &[u8]),
    ) -> Result<(), HpackError> {
        let mut size = 0;
        while let Some(first) = packed.first() {
            let rest = &mut packed;
            let (name, value, is_kept) = match first {
                0x80.. => {
                    let index = number(rest, 7)?;
                    let (name, value) = self.get(index)?;
                    (name, value, false)
                }
                0x40..=0x7f => (self.name(rest, 6)?, string(rest)?, true),
                0x20..=0x3f => {
                    let size = number(rest, 5)?;
                    if size > TABLE_SIZE {
                        return Err(HpackError::TableSize);
                    }
                    self.size_max = size;
                    self.evict();
                    continue;
                }
                // Literals that are not added to the table; whether intermediaries may index them makes no difference
                // here.
                0x00..=0x1f => (self.name(rest, 4)?, string(rest)?, false),
            };
            size += name.len() + value.len() + OVERHEAD;
            if size > size_max {
                return Err(HpackError::TooLarge);
            }
            take(&name, &value);
            if is_kept {
                let (name, value) = (name.into_owned(), value.into_owned());
                self.size += name.len() + value.len() + OVERHEAD;
                self.table.push_front((name, value));
                self.evict();
            }
        }
        Ok(())
    }

    /// A header's name, indexed or literal.
    fn name<'s, 'p: 's>(
        &'s self,
        packed: &mut &'p [u8],
        bits: u32,
    ) -> Result<Bytes<'s>, HpackError> {
        match number(packed, bits)? {
            0 => string(packed),
            index => Ok(self.get(index)?.0),
        }
    }

    fn get(&self, index: usize) -> Result<(Bytes<'_>, Bytes<'_>), HpackError> {
        let place = index.checked_sub(1).ok_or(HpackError::Index)?;
        if let Some((name, value)) = STATIC.get(place) {
            return Ok((name.as_bytes().into(), value.as_bytes().into()));
        }
        let known = self.table.get(place - STATIC.len());
        let (name, value) = known.ok_or(HpackError::Index)?;
        Ok((name.into(), value.into()))
    }

    /// Evicts the oldest entries until the others fit.
    fn evict(&mut self) {
        while self.size > self.size_max
            && let Some((name, value)) = self.table.pop_back()
        {
            self.size -= name.len() + value.len() + OVERHEAD;
        }
    }
}

/// Decodes an integer (RFC 7541, 5.1): the low bits of the first byte, and further bytes if these bits are all set.
fn number(packed: &mut &[u8], bits: u32) -> Result<usize, HpackError> {
    let (first, mut rest) = packed.split_first().ok_or(HpackError::Short)?;
    let mask = (1 << bits) - 1;
    let mut number = usize::from(*first) & mask;
    if number == mask {
        let mut shift = 0;
        loop {
            let (byte, after) = rest.split_first().ok_or(HpackError::Short)?;
            rest = after;
            // No length, index or size here needs more bits.
            if shift > 21 {
                return Err(HpackError::Number);
            }
            number += usize::from(byte & 0x7f) << shift;
            shift += 7;
            if byte & 0x80 == 0 {
                break;
            }
        }
    }
    *packed = rest;
    Ok(number)
}

/// Decodes a string (RFC 7541, 5.2).
fn string<'a>(packed: &mut &'a [u8]) -> Result<Bytes<'a>, HpackError> {
    let is_huffman = packed.first().is_some_and(|first| first & 0x80 != 0);
    let len = number(packed, 7)?;
    let (string, rest) = packed.split_at_checked(len).ok_or(HpackError::Short)?;
    *packed = rest;
    match is_huffman {
        true => huffman::decode(string)
            .map(Cow::Owned)
            .ok_or(HpackError::String),
        false => Ok(Cow::Borrowed(string)),
    }
}

/// Encodes a header that must not be indexed. `name` is an index into the static table, or a literal name.
pub(super) fn pack(packed: &mut Vec<u8>, name: Result<u8, &str>, value: &str) {
    match name {
        Ok(index) => push_number(packed, 4, usize::from(index)),
        Err(name) => {
            packed.push(0);
            push_string(packed, name);
        }
    }
    push_string(packed, value);
}

/// Encodes a header of the static table by its index.
pub(super) fn pack_known(packed: &mut Vec<u8>, index: u8) {
    packed.push(0x80 | index);
}

fn push_string(packed: &mut Vec<u8>, string: &str) {
    push_number(packed, 7, string.len());
    packed.extend_from_slice(string.as_bytes());
}

/// Encodes an integer. All bits of the first byte above `bits` are zero.
fn push_number(packed: &mut Vec<u8>, bits: u32, number: usize) {
    let mask = (1 << bits) - 1;
    if number < mask {
        packed.push(number as u8);
        return;
    }
    packed.push(mask as u8);
    let mut left = number - mask;
    while left >= 0x80 {
        packed.push(left as u8 | 0x80);
        left >>= 7;
    }
    packed.push(left as u8);
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn decode(decoder: &mut Decoder, packed: &[u8]) -> Result<Vec<(String, String)>, HpackError> {
        let mut headers = Vec::new();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        decoder.decode(packed, 1000, |name, value| {
            headers.push((text(name), text(value)))
        })?;
        Ok(headers)
    }

    fn bytes(hex: &str) -> Vec<u8> {
        let hex: String = hex.split_whitespace().collect();
        let digits = hex.as_bytes().chunks(2);
        digits
            .map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap())
            .collect()
    }

    #[test]
    fn the_responses_of_the_rfc_are_read() {
        // RFC 7541, C.6: a table of 256 bytes, in which newer entries evict older ones.
        let mut decoder = Decoder {
            size_max: 256,
            ..Decoder::default()
        };
        let named = |headers: &[(&str, &str)]| {
            let owned = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
            Ok::<Vec<_>, HpackError>(headers.iter().map(owned).collect())
        };
        let date = ("date", "Mon, 21 Oct 2013 20:13:21 GMT");
        let location = ("location", "https://www.example.com");
        let first = "4882 6402 5885 aec3 771a 4b61 96d0 7abe 9410 54d4 44a8 2005 9504 0b81 66e0 82a6 2d1b ff6e \
                     919d 29ad 1718 63c7 8f0b 97c8 e9ae 82ae 43d3";
        assert_eq!(
            decode(&mut decoder, &bytes(first)),
            named(&[
                (":status", "302"),
                ("cache-control", "private"),
                date,
                location
            ])
        );
        assert_eq!(
            decode(&mut decoder, &bytes("4883 640e ffc1 c0bf")),
            named(&[
                (":status", "307"),
                ("cache-control", "private"),
                date,
                location
            ])
        );
        let third = "88c1 6196 d07a be94 1054 d444 a820 0595 040b 8166 e084 a62d 1bff c05a 839b d9ab 77ad 94e7 \
                     821d d7f2 e6c7 b335 dfdf cd5b 3960 d5af 2708 7f36 72c1 ab27 0fb5 291f 9587 3160 65c0 03ed \
                     4ee5 b106 3d50 07";
        let date = ("date", "Mon, 21 Oct 2013 20:13:22 GMT");
        let cookie = "foo=ASDJKHQKBZXOQWEOPIUAXQWEOIU; max-age=3600; version=1";
        assert_eq!(
            decode(&mut decoder, &bytes(third)),
            named(&[
                (":status", "200"),
                ("cache-control", "private"),
                date,
                location,
                ("content-encoding", "gzip"),
                ("set-cookie", cookie),
            ])
        );
        assert_eq!(decoder.size, 215);
    }

    #[test]
    fn what_is_packed_is_read_as_it_was() {
        let long = "x".repeat(500);
        let mut packed = Vec::new();
        pack_known(&mut packed, 3);
        pack(&mut packed, Ok(31), "application/grpc");
        pack(&mut packed, Err("te"), "trailers");
        pack(&mut packed, Ok(4), &long);
        let headers = decode(&mut Decoder::default(), &packed).unwrap();
        let expected = [
            (":method", "POST"),
            ("content-type", "application/grpc"),
            ("te", "trailers"),
            (":path", &long),
        ];
        assert!(
            headers
                .iter()
                .map(|(name, value)| (name.as_str(), value.as_str()))
                .eq(expected)
        );
    }

    #[test]
    fn what_cannot_be_read_is_an_error() {
        for (packed, error) in [
            ("80", HpackError::Index),
            ("be", HpackError::Index),
            ("00", HpackError::Short),
            ("00 03 6162", HpackError::Short),
            ("ff 80 80 80 80 80 01", HpackError::Number),
            ("3f e2 1f", HpackError::TableSize),
            ("00 81 00 00", HpackError::String),
        ] {
            assert_eq!(
                decode(&mut Decoder::default(), &bytes(packed)),
                Err(error),
                "{packed}"
            );
        }
        let mut large = Vec::new();
        for _ in 0..10 {
            pack(&mut large, Err("name"), &"x".repeat(100));
        }
        assert_eq!(
            decode(&mut Decoder::default(), &large),
            Err(HpackError::TooLarge)
        );
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic_or_grow(blocks in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..80), 1..8)) {
            let mut decoder = Decoder::default();
            for block in blocks {
                let _ = decoder.decode(&block, 1000, |_, _| {});
                prop_assert!(decoder.size <= TABLE_SIZE);
                let known: usize = decoder.table.iter().map(|(name, value)| name.len() + value.len() + OVERHEAD).sum();
                prop_assert_eq!(decoder.size, known);
            }
        }
    }
}

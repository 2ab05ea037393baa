//! The Huffman code of HPACK (RFC 7541, 5.2 and Appendix B).
//!
//! The code is canonical: symbols with codes of equal length have consecutive codes in symbol order, and the codes of
//! each length continue where the shorter ones stopped. So the lengths define the whole code.

/// Number of symbols: the 256 bytes, and end of string.
const SYMBOLS: usize = 257;
const END: u16 = 256;
const LONGEST: usize = 30;

/// The length in bits of each symbol's code.
#[rustfmt::skip]
const LENGTHS: [u8; SYMBOLS] = [
    13, 23, 28, 28, 28, 28, 28, 28, 28, 24, 30, 28, 28, 30, 28, 28, 28, 28, 28, 28, 28, 28, 30, 28, 28, 28, 28, 28, 28,
    28, 28, 28, 6, 10, 10, 12, 13, 6, 8, 11, 10, 10, 8, 11, 8, 6, 6, 6, 5, 5, 5, 6, 6, 6, 6, 6, 6, 6, 7, 8, 15, 6, 12,
    10, 13, 6, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 8, 7, 8, 13, 19, 13, 14, 6, 15, 5, 6, 5,
    6, 5, 6, 6, 6, 5, 7, 7, 6, 6, 6, 5, 6, 7, 6, 5, 5, 6, 7, 7, 7, 7, 7, 15, 11, 14, 13, 28, 20, 22, 20, 20, 22, 22, 22,
    23, 22, 23, 23, 23, 23, 23, 24, 23, 24, 24, 22, 23, 24, 23, 23, 23, 23, 21, 22, 23, 22, 23, 23, 24, 22, 21, 20, 22,
    22, 23, 23, 21, 23, 22, 22, 24, 21, 22, 23, 23, 21, 21, 22, 21, 23, 22, 23, 23, 20, 22, 22, 22, 23, 22, 22, 23, 26,
    26, 20, 19, 22, 23, 22, 25, 26, 26, 26, 27, 27, 26, 24, 25, 19, 21, 26, 27, 27, 26, 27, 24, 21, 21, 26, 26, 28, 27,
    27, 27, 20, 24, 20, 21, 22, 21, 21, 23, 22, 22, 25, 25, 24, 24, 26, 23, 26, 27, 26, 26, 27, 27, 27, 27, 27, 28, 27,
    27, 27, 27, 27, 26, 30,
];

/// The symbols in code order; for each length, its first code and where its symbols start.
struct Table {
    symbols: [u16; SYMBOLS],
    first: [u32; LONGEST + 1],
    begin: [u16; LONGEST + 2],
}

const TABLE: Table = table();

const fn table() -> Table {
    let mut table = Table {
        symbols: [0; SYMBOLS],
        first: [0; LONGEST + 1],
        begin: [0; LONGEST + 2],
    };
    let (mut code, mut placed, mut length) = (0, 0, 1);
    while length <= LONGEST {
        code <<= 1;
        table.first[length] = code;
        table.begin[length] = placed as u16;
        let mut symbol = 0;
        while symbol < SYMBOLS {
            if LENGTHS[symbol] as usize == length {
                table.symbols[placed] = symbol as u16;
                placed += 1;
                code += 1;
            }
            symbol += 1;
        }
        length += 1;
    }
    table.begin[length] = placed as u16;
    table
}

/// Decodes a string; `None` if the encoding is invalid.
pub(super) fn decode(encoded: &[u8]) -> Option<Vec<u8>> {
    let mut decoded = Vec::with_capacity(encoded.len() * 8 / 5);
    let (mut code, mut length) = (0_u32, 0);
    for byte in encoded {
        for bit in (0..8).rev() {
            code = code << 1 | u32::from(byte >> bit & 1);
            length += 1;
            let begin = TABLE.begin[length];
            let of_length = u32::from(TABLE.begin[length + 1] - begin);
            let place = code.wrapping_sub(TABLE.first[length]);
            if place < of_length {
                match TABLE.symbols[usize::from(begin) + place as usize] {
                    END => return None,
                    symbol => decoded.push(symbol as u8),
                }
                (code, length) = (0, 0);
            } else if length == LONGEST {
                return None;
            }
        }
    }
    // Padding is valid if it is a prefix of the end symbol's code and shorter than a byte.
    (length < 8 && code == (1 << length) - 1).then_some(decoded)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn encode(bytes: &[u8]) -> Vec<u8> {
        let mut bits = Vec::new();
        for byte in bytes {
            let symbol = TABLE
                .symbols
                .iter()
                .position(|symbol| *symbol == u16::from(*byte));
            let length = usize::from(LENGTHS[usize::from(*byte)]);
            let place = symbol.unwrap() - usize::from(TABLE.begin[length]);
            let code = TABLE.first[length] + place as u32;
            bits.extend((0..length).rev().map(|bit| code >> bit & 1 == 1));
        }
        bits.resize(bits.len().next_multiple_of(8), true);
        let byte = |bits: &[bool]| bits.iter().fold(0, |byte, bit| byte << 1 | u8::from(*bit));
        bits.chunks(8).map(byte).collect()
    }

    #[test]
    fn the_examples_of_the_rfc_are_read() {
        // RFC 7541, C.4 and C.6.
        for (encoded, decoded) in [
            (
                &[
                    0xf1, 0xe3, 0xc2, 0xe5, 0xf2, 0x3a, 0x6b, 0xa0, 0xab, 0x90, 0xf4, 0xff,
                ][..],
                "www.example.com",
            ),
            (&[0xa8, 0xeb, 0x10, 0x64, 0x9c, 0xbf], "no-cache"),
            (&[0x64, 0x02], "302"),
            (&[0xae, 0xc3, 0x77, 0x1a, 0x4b], "private"),
        ] {
            assert_eq!(decode(encoded).as_deref(), Some(decoded.as_bytes()));
        }
    }

    #[test]
    fn all_bytes_are_read() {
        let all: Vec<u8> = (0..=255).collect();
        assert_eq!(decode(&encode(&all)), Some(all));
    }

    #[test]
    fn what_is_not_encoded_so_is_refused() {
        // The end symbol itself, a whole byte of padding, and padding with a zero bit.
        for bad in [&[0xff, 0xff, 0xff, 0xff][..], &[0x64, 0x02, 0xff], &[0x00]] {
            assert_eq!(decode(bad), None, "{bad:?}");
        }
    }
}

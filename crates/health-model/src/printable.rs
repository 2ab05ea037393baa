//! Makes text from outside, such as names, paths and messages, safe to show to people.

use std::borrow::Cow;

/// Escapes everything that would control a terminal, such as `\u{1b}`, including line breaks, so that no text can fake
/// a line or a table row. All external text passes through this before it is shown.
pub fn printable(text: &str) -> Cow<'_, str> {
    if !text.contains(is_control) {
        return Cow::Borrowed(text);
    }
    let mut shown = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            c if is_control(c) => shown.extend(c.escape_default()),
            c => shown.push(c),
        }
    }
    Cow::Owned(shown)
}

/// Whether a terminal interprets the character instead of showing it: control characters, and characters that change
/// the text direction.
fn is_control(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn what_controls_a_terminal_is_written_out() {
        for (text, shown) in [
            ("web-1 µs 世界", "web-1 µs 世界"),
            ("a\nb\r\tc", r"a\nb\r\tc"),
            ("\u{1b}[2Jgone\u{9b}1m", r"\u{1b}[2Jgone\u{9b}1m"),
            ("\u{202e}txt\u{2028}", r"\u{202e}txt\u{2028}"),
            ("\0\u{7f}\u{85}", r"\u{0}\u{7f}\u{85}"),
        ] {
            assert_eq!(printable(text), shown);
        }
    }

    proptest! {
        #[test]
        fn no_text_has_more_than_one_line(text in any::<String>()) {
            let shown = printable(&text);
            prop_assert!(!shown.contains(is_control));
            prop_assert_eq!(printable(&shown), shown.as_ref());
        }
    }
}

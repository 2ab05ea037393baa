//! Text on the terminal that is redrawn in place.

use std::io::{self, BufWriter, Write};

use crossterm::cursor::{Hide, MoveTo, MoveToPreviousLine, Show};
use crossterm::queue;
use crossterm::style::Print;
use crossterm::terminal::{BeginSynchronizedUpdate, Clear, ClearType, EndSynchronizedUpdate};
use unicode_width::UnicodeWidthChar;

/// Initial capacity of the buffer in bytes: more than the text of a large terminal.
const DRAWING_BYTES: usize = 64 * 1024;

/// The part of the terminal from the cursor down. The cursor is hidden until this is dropped, and then reappears below
/// the text.
pub(super) struct Screen<W: Write> {
    /// Buffers a drawing until it is complete, so that no partial drawing is visible.
    out: BufWriter<W>,
    /// Number of lines of the current text.
    lines: u16,
    /// Columns and rows at the last drawing.
    size: Option<(u16, u16)>,
}

impl<W: Write> Screen<W> {
    /// Starts at the cursor of the terminal behind `out`.
    pub(super) fn new(out: W) -> io::Result<Self> {
        let mut out = BufWriter::with_capacity(DRAWING_BYTES, out);
        queue!(out, Hide)?;
        Ok(Self {
            out,
            lines: 0,
            size: None,
        })
    }

    /// Replaces the last text with `text`. If it is taller than the terminal, the last line says how many lines are
    /// missing. Lines that are too wide are truncated.
    pub(super) fn draw(&mut self, text: &str, size: (u16, u16)) -> io::Result<()> {
        queue!(self.out, BeginSynchronizedUpdate)?;
        match self.size {
            // Resizing has moved and rewrapped the lines.
            Some(before) if before != size => {
                queue!(self.out, Clear(ClearType::All), MoveTo(0, 0))?;
            }
            _ if self.lines > 0 => queue!(self.out, MoveToPreviousLine(self.lines))?,
            _ => {}
        }
        let lines = clip(text, size);
        for line in &lines {
            queue!(
                self.out,
                Clear(ClearType::CurrentLine),
                Print(line),
                Print("\r\n")
            )?;
        }
        queue!(
            self.out,
            Clear(ClearType::FromCursorDown),
            EndSynchronizedUpdate
        )?;
        self.lines = u16::try_from(lines.len()).unwrap_or(u16::MAX);
        self.size = Some(size);
        self.out.flush()
    }
}

impl<W: Write> Drop for Screen<W> {
    fn drop(&mut self) {
        // If the terminal is gone, there is no cursor to show.
        let _ = queue!(self.out, Show).and_then(|()| self.out.flush());
    }
}

/// The lines that fit above the cursor's own line, each truncated to the width.
fn clip(text: &str, (columns, rows): (u16, u16)) -> Vec<String> {
    let room = usize::from(rows).saturating_sub(1).max(1);
    let lines: Vec<&str> = text.lines().collect();
    let shown = if lines.len() > room {
        room - 1
    } else {
        lines.len()
    };
    let mut clipped: Vec<String> = lines[..shown]
        .iter()
        .map(|line| beginning(line, usize::from(columns)))
        .collect();
    if lines.len() > room {
        clipped.push(format!("... {} more lines", lines.len() - shown));
    }
    clipped
}

/// The part of `line` that fits in `columns`.
fn beginning(line: &str, columns: usize) -> String {
    let mut left = columns;
    line.chars()
        .take_while(|c| {
            let width = c.width().unwrap_or(0);
            let fits = width <= left;
            left = left.saturating_sub(width);
            fits
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::num::NonZero;

    /// A terminal of 20 columns and 5 rows after writing `bytes` to it.
    fn terminal(bytes: &[u8]) -> vt100::Parser {
        let size = [5, 20].map(|n| NonZero::new(n).unwrap());
        let mut terminal = vt100::Parser::new(size[0], size[1], 0);
        terminal.process(bytes);
        terminal
    }

    /// The contents of a terminal of 20 columns and 5 rows that showed `before`, after drawing `texts`.
    fn shown(before: &str, texts: &[&str]) -> String {
        let mut bytes = before.as_bytes().to_vec();
        {
            let mut screen = Screen::new(&mut bytes).unwrap();
            for text in texts {
                screen.draw(text, (20, 5)).unwrap();
            }
        }
        let terminal = terminal(&bytes);
        assert!(!terminal.screen().hide_cursor());
        terminal.screen().contents()
    }

    #[test]
    fn a_text_takes_the_place_of_the_last_one() {
        assert_eq!(
            shown("$ status\r\n", &["one\ntwo\nthree\n", "ein\nzwei\n"]),
            "$ status\nein\nzwei"
        );
        assert_eq!(shown("", &["longer\n", "long\n"]), "long");
    }

    #[test]
    fn a_text_at_the_bottom_scrolls_once() {
        assert_eq!(
            shown("a\r\nb\r\nc\r\nd\r\n", &["1\n2\n", "3\n4\n", "5\n6\n"]),
            "c\nd\n5\n6"
        );
    }

    #[test]
    fn what_does_not_fit_is_counted() {
        assert_eq!(
            shown("", &["1\n2\n3\n4\n5\n6\n"]),
            "1\n2\n3\n... 3 more lines"
        );
        assert_eq!(shown("", &["1\n2\n3\n4\n"]), "1\n2\n3\n4");
        assert_eq!(shown("", &["0123456789abcdefghijklm\n2\n", "0\n"]), "0");
        assert_eq!(
            shown("", &["RTT=21.3µs (kernel), and more\n2\n"]),
            "RTT=21.3µs (kernel),\n2"
        );
        assert_eq!(clip("1\n2\n", (0, 0)), ["... 2 more lines"]);
    }

    #[test]
    fn another_size_begins_at_the_top() {
        let mut bytes = b"before\r\n".to_vec();
        let mut screen = Screen::new(&mut bytes).unwrap();
        screen.draw("1\n2\n", (20, 5)).unwrap();
        screen.draw("3\n4\n", (20, 4)).unwrap();
        drop(screen);
        let terminal = terminal(&bytes);
        assert_eq!(terminal.screen().contents(), "3\n4");
    }

    #[test]
    fn the_cursor_is_hidden_while_it_lasts() {
        let mut bytes = Vec::new();
        let mut screen = Screen::new(&mut bytes).unwrap();
        screen.draw("1\n", (20, 5)).unwrap();
        // Never dropped, as if it were still running.
        std::mem::forget(screen);
        let terminal = terminal(&bytes);
        assert!(terminal.screen().hide_cursor());
    }
}

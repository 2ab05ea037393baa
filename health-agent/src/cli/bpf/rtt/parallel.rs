//! Many rows written as text by all CPUs, in their order.

use std::io::{self, Write};
use std::num::NonZero;
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread;

/// Rows that one thread writes at a time.
const CHUNK: usize = 1_024;
/// Chunks of each thread that wait to be printed.
const AHEAD: usize = 2;
/// More threads wait for the printing.
const THREADS: usize = 4;

/// Has `write` write each of the rows `0..count`, and prints their texts in that order.
pub(super) fn print_rows(
    out: &mut dyn Write,
    count: usize,
    write: impl Fn(&mut Vec<u8>, usize) -> io::Result<()> + Sync,
) -> io::Result<()> {
    let chunks = count.div_ceil(CHUNK);
    let threads = thread::available_parallelism().map_or(1, NonZero::get);
    let threads = threads.min(THREADS).min(chunks);
    let write_chunk = |chunk: usize| -> io::Result<Vec<u8>> {
        let mut text = Vec::new();
        for row in (chunk * CHUNK..count).take(CHUNK) {
            write(&mut text, row)?;
        }
        Ok(text)
    };
    if threads < 2 {
        return (0..chunks).try_for_each(|chunk| out.write_all(&write_chunk(chunk)?));
    }
    thread::scope(|scope| {
        let texts: Vec<Receiver<_>> = (0..threads)
            .map(|thread| {
                let (sender, texts) = sync_channel(AHEAD);
                let write_chunk = &write_chunk;
                scope.spawn(move || {
                    let mut chunks = (thread..chunks).step_by(threads);
                    // Without a reader there is nobody to write for.
                    while let Some(chunk) = chunks.next()
                        && sender.send(write_chunk(chunk)).is_ok()
                    {}
                });
                texts
            })
            .collect();
        for chunk in 0..chunks {
            let text = texts[chunk % threads].recv();
            // A thread that panics takes the program with it.
            out.write_all(&text.map_err(|_| io::ErrorKind::UnexpectedEof)??)?;
        }
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_come_in_their_order_however_many() {
        for count in [0, 1, CHUNK, 10 * CHUNK + 7] {
            let mut out = Vec::new();
            print_rows(&mut out, count, |text, row| writeln!(text, "{row}")).unwrap();
            let expected: String = (0..count).map(|row| format!("{row}\n")).collect();
            assert!(out == expected.as_bytes(), "{count}");
        }
    }

    #[test]
    fn a_reader_that_is_gone_ends_it() {
        struct Gone;
        impl Write for Gone {
            fn write(&mut self, _: &[u8]) -> io::Result<usize> {
                Err(io::ErrorKind::BrokenPipe.into())
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let printed = print_rows(&mut Gone, 100 * CHUNK, |text, row| writeln!(text, "{row}"));
        assert_eq!(printed.unwrap_err().kind(), io::ErrorKind::BrokenPipe);
    }
}

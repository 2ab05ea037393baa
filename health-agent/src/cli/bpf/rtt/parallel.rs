//! Very many rows, read and written by several CPUs in their order.

use std::io::{self, Write};
use std::mem;
use std::num::NonZero;
use std::sync::mpsc::{Receiver, channel, sync_channel};
use std::thread;

/// Rows that one thread takes or writes at a time: few enough to stay in a CPU's cache.
const CHUNK: usize = 256;
/// Chunks that were read and wait to be taken.
const READ_AHEAD: usize = 32;
/// Chunks of each thread that wait to be printed.
const WRITTEN_AHEAD: usize = 4;
/// More threads wait for the printing.
const THREADS: usize = 4;

/// Has `read` hand over items here, while `take` takes them on another CPU, in their order.
pub(super) fn overlapped<T: Send, E>(
    read: impl FnOnce(&mut dyn FnMut(T)) -> Result<(), E>,
    mut take: impl FnMut(&T) + Send,
) -> Result<(), E> {
    let (full, chunks) = sync_channel::<Vec<T>>(READ_AHEAD);
    let (empty, taken) = channel();
    thread::scope(|scope| {
        scope.spawn(move || {
            for mut chunk in chunks {
                chunk.iter().for_each(&mut take);
                chunk.clear();
                // After the last one, nobody needs it.
                let _ = empty.send(chunk);
            }
        });
        let fresh = || {
            taken
                .try_recv()
                .unwrap_or_else(|_| Vec::with_capacity(CHUNK))
        };
        // A thread that panics takes the program with it: who takes is there to the end.
        let send = |chunk| drop(full.send(chunk));
        let mut chunk = fresh();
        let result = read(&mut |item| {
            chunk.push(item);
            if chunk.len() == CHUNK {
                send(mem::replace(&mut chunk, fresh()));
            }
        });
        send(chunk);
        drop(full);
        result
    })
}

/// Has `fetch` fetch and `write` write each of the rows `0..count`, and prints their texts in that order.
pub(super) fn print_rows<T>(
    out: &mut dyn Write,
    count: usize,
    fetch: impl Fn(usize) -> T + Sync,
    write: impl Fn(&mut Vec<u8>, T) -> io::Result<()> + Sync,
) -> io::Result<()> {
    let chunks = count.div_ceil(CHUNK);
    let threads = thread::available_parallelism().map_or(1, NonZero::get);
    let threads = threads.min(THREADS).min(chunks);
    let write_chunk = |text: &mut Vec<u8>, chunk: usize| -> io::Result<()> {
        text.clear();
        // Sorted rows lie anywhere in memory: fetched together, they are waited for together.
        let rows: Vec<T> = (chunk * CHUNK..count).take(CHUNK).map(&fetch).collect();
        rows.into_iter().try_for_each(|row| write(text, row))
    };
    if threads < 2 {
        let mut text = Vec::new();
        return (0..chunks).try_for_each(|chunk| {
            write_chunk(&mut text, chunk)?;
            out.write_all(&text)
        });
    }
    thread::scope(|scope| {
        let writers: Vec<_> = (0..threads)
            .map(|thread| {
                let (sender, texts) = sync_channel(WRITTEN_AHEAD);
                let (empty, printed) = channel::<Vec<u8>>();
                let write_chunk = &write_chunk;
                scope.spawn(move || {
                    for chunk in (thread..chunks).step_by(threads) {
                        let mut text = printed.try_recv().unwrap_or_default();
                        let text = write_chunk(&mut text, chunk).map(|()| text);
                        // Without a reader there is nobody to write for.
                        if sender.send(text).is_err() {
                            break;
                        }
                    }
                });
                (texts, empty)
            })
            .collect();
        for chunk in 0..chunks {
            let (texts, empty): &(Receiver<io::Result<Vec<u8>>>, _) = &writers[chunk % threads];
            // A thread that panics takes the program with it.
            let text = texts.recv().map_err(|_| io::ErrorKind::UnexpectedEof)??;
            out.write_all(&text)?;
            // After the last one, nobody needs it.
            let _ = empty.send(text);
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
            print_rows(
                &mut out,
                count,
                |row| row,
                |text, row| writeln!(text, "{row}"),
            )
            .unwrap();
            let expected: String = (0..count).map(|row| format!("{row}\n")).collect();
            assert!(out == expected.as_bytes(), "{count}");
        }
    }

    #[test]
    fn what_is_read_is_taken_in_its_order_to_the_last() {
        for count in [0, 1, CHUNK, 100 * CHUNK + 7] {
            let mut taken = Vec::new();
            let read = |hand_over: &mut dyn FnMut(usize)| {
                (0..count).for_each(hand_over);
                Err("the end")
            };
            assert_eq!(overlapped(read, |&item| taken.push(item)), Err("the end"));
            assert!(taken.into_iter().eq(0..count), "{count}");
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
        let printed = print_rows(
            &mut Gone,
            100 * CHUNK,
            |row| row,
            |text, row| writeln!(text, "{row}"),
        );
        assert_eq!(printed.unwrap_err().kind(), io::ErrorKind::BrokenPipe);
    }
}

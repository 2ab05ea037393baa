//! Reads and prints large numbers of rows on several CPUs.

use std::io::{self, Write};
use std::num::NonZero;
use std::panic;
use std::sync::mpsc::{Receiver, channel, sync_channel};
use std::thread;

/// Number of rows that a thread formats at a time, few enough to stay in a CPU's cache.
const CHUNK: usize = 256;
/// Maximum number of chunks per thread that wait to be printed.
const WRITTEN_AHEAD: usize = 4;
/// Maximum number of threads. More would wait for each other: only one at a time can query the kernel or print.
const THREADS: usize = 4;

/// Runs `work` on up to [`THREADS`] CPUs, and returns all results.
pub(super) fn on_all_cpus<T: Send, E: Send>(
    work: impl Fn() -> Result<T, E> + Sync,
) -> Result<Vec<T>, E> {
    thread::scope(|scope| {
        let others: Vec<_> = (1..threads()).map(|_| scope.spawn(&work)).collect();
        let mut made = vec![work()];
        made.extend(others.into_iter().map(|other| {
            other
                .join()
                .unwrap_or_else(|panic| panic::resume_unwind(panic))
        }));
        made.into_iter().collect()
    })
}

fn threads() -> usize {
    thread::available_parallelism()
        .map_or(1, NonZero::get)
        .min(THREADS)
}

/// Fetches and formats each of the rows `0..count` with `fetch` and `write`, and prints them in order.
pub(super) fn print_rows<T>(
    out: &mut dyn Write,
    count: usize,
    fetch: impl Fn(usize) -> T + Sync,
    write: impl Fn(&mut Vec<u8>, T) -> io::Result<()> + Sync,
) -> io::Result<()> {
    let chunks = count.div_ceil(CHUNK);
    let threads = threads().min(chunks);
    let write_chunk = |text: &mut Vec<u8>, chunk: usize| -> io::Result<()> {
        text.clear();
        // Sorted rows are scattered in memory. Fetching a whole chunk first overlaps the cache misses.
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
                        // The reader is gone: there is nothing left to write.
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
            // A thread that panics takes the program down with it.
            let text = texts.recv().map_err(|_| io::ErrorKind::UnexpectedEof)??;
            out.write_all(&text)?;
            // Fails after the thread's last chunk, when the buffer is no longer needed.
            let _ = empty.send(text);
        }
        Ok(())
    })
}

#[cfg(test)]
pub(super) mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    /// A pipe without a reader.
    pub(in super::super) struct Gone;

    impl Write for Gone {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(io::ErrorKind::BrokenPipe.into())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

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
    fn what_each_cpu_makes_comes_together_and_one_failure_is_enough() {
        let turns = AtomicUsize::new(0);
        let turn = || turns.fetch_add(1, Ordering::Relaxed);
        let made = on_all_cpus(|| Ok::<_, ()>(turn())).unwrap();
        assert_eq!(made.iter().sum::<usize>(), (0..made.len()).sum::<usize>());
        let last = made.len() - 1;
        turns.store(0, Ordering::Relaxed);
        let failed = on_all_cpus(|| if turn() == last { Err("it") } else { Ok(()) });
        assert_eq!(failed, Err("it"));
    }

    #[test]
    fn a_reader_that_is_gone_ends_it() {
        let printed = print_rows(
            &mut Gone,
            100 * CHUNK,
            |row| row,
            |text, row| writeln!(text, "{row}"),
        );
        assert_eq!(printed.unwrap_err().kind(), io::ErrorKind::BrokenPipe);
    }
}

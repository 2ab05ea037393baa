//! Captures packets on a device with `tcpdump`, with the kernel's timestamps. `tcpdump` reads a ring that the kernel
//! fills, so it wakes up once for many packets and takes little CPU time from senders and responders.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use tempfile::TempDir;

use crate::{PATIENCE, wait_for};

/// Number of captured bytes per packet.
const SNAP_LEN: usize = 128;
/// Lengths of the file header, of a packet's header in the file, and of the Ethernet header (pcap-savefile(5)).
const FILE_HEADER_LEN: usize = 24;
const PACKET_HEADER_LEN: usize = 16;
const ETHERNET_LEN: usize = 14;
/// First word of a file with nanosecond timestamps, in native byte order.
const MAGIC_NANOSECONDS: u32 = 0xa1b2_3c4d;

/// A packet from its IP header on, with the time since the epoch at which the kernel saw it.
pub(super) type Packet = (Duration, Vec<u8>);

/// A running `tcpdump`, which is killed on drop.
pub(super) struct Capture {
    tcpdump: Child,
    packets: usize,
    folder: TempDir,
}

impl Capture {
    /// Starts capturing the next `packets` ICMP packets on a device, in both directions. `tcpdump` is the command
    /// without arguments.
    pub(super) fn start(
        mut tcpdump: Command,
        device: &str,
        packets: usize,
    ) -> anyhow::Result<Self> {
        let folder = tempfile::tempdir().context("cannot create a folder for captured packets")?;
        tcpdump
            // Otherwise `tcpdump` writes as a user without access to the folder.
            .args(["-Z", "root", "-n", "-p", "--time-stamp-precision=nano"])
            .args(["-i", device, "-s", &SNAP_LEN.to_string()])
            .args(["-c", &packets.to_string(), "-w"])
            .arg(folder.path().join("packets"))
            .arg("icmp")
            .stdin(Stdio::null())
            .stderr(Stdio::piped());
        let mut capture = Self {
            tcpdump: tcpdump.spawn().context("cannot run tcpdump")?,
            packets,
            folder,
        };
        let stderr = capture.tcpdump.stderr.take().context("no standard error")?;
        let mut reported = Vec::new();
        for line in BufReader::new(stderr).lines() {
            let line = line.context("cannot read the output of tcpdump")?;
            if line.contains("listening on") {
                return Ok(capture);
            }
            reported.push(line);
        }
        anyhow::bail!("tcpdump ended: {}", reported.join("; "))
    }

    /// Waits until all packets are captured, and returns them.
    pub(super) fn finish(mut self) -> anyhow::Result<Vec<Packet>> {
        wait_for("tcpdump to capture all packets", PATIENCE, || {
            self.tcpdump.try_wait().context("cannot wait for tcpdump")
        })?;
        let file = self.folder.path().join("packets");
        let bytes = fs::read(&file).with_context(|| format!("cannot read {}", file.display()))?;
        let packets = parse(&bytes)?;
        ensure!(
            packets.len() == self.packets,
            "tcpdump captured {} packets, not {}",
            packets.len(),
            self.packets
        );
        Ok(packets)
    }
}

impl Drop for Capture {
    fn drop(&mut self) {
        // `tcpdump` may have exited already.
        let _ = self.tcpdump.kill();
        let _ = self.tcpdump.wait();
    }
}

fn parse(file: &[u8]) -> anyhow::Result<Vec<Packet>> {
    let word = |bytes: &[u8], at: usize| -> anyhow::Result<u32> {
        let word = bytes
            .get(at..at + 4)
            .context("a capture file is truncated")?;
        Ok(u32::from_ne_bytes(word.try_into()?))
    };
    ensure!(
        word(file, 0)? == MAGIC_NANOSECONDS,
        "tcpdump wrote no file with nanosecond timestamps"
    );
    let mut packets = Vec::new();
    let mut rest = &file[FILE_HEADER_LEN..];
    while !rest.is_empty() {
        let at = Duration::new(word(rest, 0)?.into(), word(rest, 4)?);
        let end = PACKET_HEADER_LEN + word(rest, 8)? as usize;
        let packet = rest
            .get(PACKET_HEADER_LEN + ETHERNET_LEN..end)
            .context("a captured packet is truncated")?;
        packets.push((at, packet.to_vec()));
        rest = &rest[end..];
    }
    Ok(packets)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_are_read_with_their_stamps() {
        let words = |words: &[u32]| -> Vec<u8> {
            words.iter().flat_map(|word| word.to_ne_bytes()).collect()
        };
        let mut file = words(&[MAGIC_NANOSECONDS, 0, 0, 0, 128, 1]);
        for n in 1..=2 {
            file.extend(words(&[n, 10 * n, 16, 60]));
            file.extend([0; ETHERNET_LEN]);
            file.extend([0x45, n as u8]);
        }
        let packets = parse(&file).unwrap();
        assert_eq!(
            packets,
            [
                (Duration::new(1, 10), vec![0x45, 1]),
                (Duration::new(2, 20), vec![0x45, 2])
            ]
        );
        assert!(parse(&file[..file.len() - 1]).is_err());
        assert!(parse(&file[..2]).is_err());
    }
}

//! Code shared by the first processes of machines, and the protocol between a virtual machine and the program that
//! started it: the plan in the initramfs, and frames on a serial line.

use std::io::{self, Read, Write};
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Child, ExitStatus};

use nix::errno::Errno;
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use serde::{Deserialize, Serialize};

/// Path of the plan in the initramfs: JSON of [`Plan`].
pub const PLAN: &str = "/plan.json";

/// The guest's serial line for frames. The first serial line is the kernel's console, whose type and name differ on
/// aarch64 boards.
pub const LINE: &str = if cfg!(target_arch = "aarch64") {
    "/dev/ttyS0"
} else {
    "/dev/ttyS1"
};

/// Maximum payload of a frame in bytes. A longer payload means that the line carries something else.
const MAX_PAYLOAD: u32 = 1 << 20;

/// The plan: what a virtual machine does before it powers off.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    /// Commands to run one after the other, whether they fail or not.
    pub commands: Vec<PlannedCommand>,
}

/// One program to run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlannedCommand {
    /// The program and its arguments.
    pub words: Vec<String>,
    /// Folder to run it in.
    pub folder: String,
}

impl PlannedCommand {
    /// A command that runs in the root folder.
    pub fn new(words: impl IntoIterator<Item: Into<String>>) -> Self {
        Self {
            words: words.into_iter().map(Into::into).collect(),
            folder: "/".to_owned(),
        }
    }
}

/// How a program exited.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ProgramExit {
    /// It exited with this code.
    Code(i32),
    /// This signal killed it.
    Signal(i32),
}

impl ProgramExit {
    /// The exit code that shells report for this exit.
    pub fn exit_code(self) -> u8 {
        let code = match self {
            Self::Code(code) => code,
            Self::Signal(signal) => 128 + signal,
        };
        u8::try_from(code).unwrap_or(u8::MAX)
    }
}

impl From<ExitStatus> for ProgramExit {
    fn from(status: ExitStatus) -> Self {
        status
            .code()
            .map_or_else(|| Self::Signal(status.signal().unwrap_or(0)), Self::Code)
    }
}

/// Waits for a child of a machine's first process, and reaps all orphans that exit meanwhile. Without this, exited
/// orphans would count as running.
pub fn wait_reaping(child: &Child) -> nix::Result<ProgramExit> {
    let child = Pid::from_raw(child.id().cast_signed());
    loop {
        match waitpid(None, Some(WaitPidFlag::__WALL)) {
            Ok(WaitStatus::Exited(pid, code)) if pid == child => {
                return Ok(ProgramExit::Code(code));
            }
            Ok(WaitStatus::Signaled(pid, signal, _)) if pid == child => {
                return Ok(ProgramExit::Signal(signal as i32));
            }
            Ok(_) | Err(Errno::EINTR) => {}
            Err(errno) => return Err(errno),
        }
    }
}

/// Reports from the guest, besides its programs' output.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Report {
    /// The first process is running. Always the first report.
    Booted,
    /// Sent periodically, so that silence means a hang.
    Alive,
    /// The command at this index of the plan has exited. All its output was sent before this report.
    Ended(usize, ProgramExit),
    /// The first process cannot do its work, for this reason.
    Failed(String),
    /// The plan is done; the guest powers off.
    Done,
}

/// Orders to the guest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Order {
    /// Sends SIGINT to the running command and starts no further commands.
    Interrupt,
}

/// A unit of the serial line's traffic.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Frame {
    /// Standard output of the running command.
    Stdout(Vec<u8>),
    /// Standard error of the running command.
    Stderr(Vec<u8>),
    /// A report from the guest.
    Report(Report),
    /// An order to the guest.
    Order(Order),
}

impl Frame {
    /// Writes the frame: a kind, a length (32 bits, little endian) and a payload.
    pub fn write_to(&self, line: &mut impl Write) -> io::Result<()> {
        let json;
        let (kind, payload) = match self {
            Self::Stdout(bytes) => (b'o', bytes),
            Self::Stderr(bytes) => (b'e', bytes),
            Self::Report(report) => {
                json = serde_json::to_vec(report)?;
                (b'r', &json)
            }
            Self::Order(order) => {
                json = serde_json::to_vec(order)?;
                (b'c', &json)
            }
        };
        let length = u32::try_from(payload.len()).map_err(io::Error::other)?;
        let mut frame = vec![kind];
        frame.extend(length.to_le_bytes());
        frame.extend(payload);
        line.write_all(&frame)
    }

    /// Reads a frame written by [`write_to`](Self::write_to). Returns `None` if the line closes, even in the middle of
    /// a frame, because a guest may stop at any time.
    pub fn read_from(line: &mut impl Read) -> io::Result<Option<Self>> {
        let mut header = [0; 5];
        if !read_whole(line, &mut header)? {
            return Ok(None);
        }
        let [kind, length @ ..] = header;
        let length = u32::from_le_bytes(length);
        if length > MAX_PAYLOAD {
            return Err(invalid(format!("invalid frame of {length} bytes")));
        }
        let mut payload = vec![0; length as usize];
        if !read_whole(line, &mut payload)? {
            return Ok(None);
        }
        Ok(Some(match kind {
            b'o' => Self::Stdout(payload),
            b'e' => Self::Stderr(payload),
            b'r' => Self::Report(serde_json::from_slice(&payload)?),
            b'c' => Self::Order(serde_json::from_slice(&payload)?),
            _ => return Err(invalid(format!("invalid frame kind {kind}"))),
        }))
    }
}

/// Fills the buffer; false if the line closes first.
fn read_whole(line: &mut impl Read, buffer: &mut [u8]) -> io::Result<bool> {
    match line.read_exact(buffer) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
        Err(error) => Err(error),
    }
}

fn invalid(what: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

#[cfg(test)]
mod tests {
    use super::{Frame, Order, ProgramExit, Report};

    #[test]
    fn frames_arrive_as_they_were_sent() {
        let frames = [
            Frame::Stdout(b"a line\nand \xff\0 no text".to_vec()),
            Frame::Stderr(Vec::new()),
            Frame::Report(Report::Ended(3, ProgramExit::Signal(9))),
            Frame::Order(Order::Interrupt),
        ];
        let mut line = Vec::new();
        for frame in &frames {
            frame.write_to(&mut line).expect("room");
        }
        let mut rest = &line[..];
        for frame in frames {
            assert_eq!(Frame::read_from(&mut rest).expect("a frame"), Some(frame));
        }
        assert_eq!(Frame::read_from(&mut rest).expect("an end"), None);
    }

    #[test]
    fn a_line_that_ends_amid_a_frame_has_ended() {
        let mut line = Vec::new();
        Frame::Stdout(vec![7; 100])
            .write_to(&mut line)
            .expect("room");
        for length in 0..line.len() {
            assert_eq!(
                Frame::read_from(&mut &line[..length]).expect("an end"),
                None
            );
        }
    }

    #[test]
    fn something_else_on_the_line_is_an_error() {
        assert!(Frame::read_from(&mut &b"Linux version 6.1"[..]).is_err());
        assert!(Frame::read_from(&mut &b"x\0\0\0\0"[..]).is_err());
    }
}

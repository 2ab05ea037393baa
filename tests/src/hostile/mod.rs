//! Misbehaving servers, one per behaviour and each on its own port, all in one process: the `hostile` program.

mod behaviour;
mod grpc;
mod http;
mod tcp;
mod tls;

use std::collections::HashMap;
use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Stdio};

use anyhow::Context as _;

pub use self::behaviour::Behaviour;
pub use self::tcp::listen;
use crate::process::print_line;

/// A process with all misbehaving servers, which listen on the loopback address. It stops on drop or when this process
/// exits.
#[derive(Debug)]
pub struct Hostile {
    process: Child,
    ports: HashMap<Behaviour, u16>,
}

impl Hostile {
    /// Starts `program`, the path of the `hostile` program, and waits until all servers listen.
    pub fn start(program: &str) -> anyhow::Result<Self> {
        let process = Command::new(program)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot run {program}"))?;
        let mut hostile = Self {
            process,
            ports: HashMap::new(),
        };
        let reported = hostile.process.stdout.take().context("no output")?;
        for line in BufReader::new(reported).lines().take(Behaviour::ALL.len()) {
            let line = line.context("cannot read ports")?;
            let (name, port) = line.split_once(' ').context("no port")?;
            let behaviour = Behaviour::from_name(name).context("no such behaviour")?;
            hostile.ports.insert(behaviour, port.parse()?);
        }
        Ok(hostile)
    }

    /// The port of the server with this behaviour; 0 if it never listened.
    pub fn port(&self, behaviour: Behaviour) -> u16 {
        self.ports.get(&behaviour).copied().unwrap_or_default()
    }

    /// The ports of all servers.
    pub fn ports(&self) -> Vec<u16> {
        self.ports.values().copied().collect()
    }
}

impl Drop for Hostile {
    fn drop(&mut self) {
        if let Err(error) = self
            .process
            .kill()
            .and_then(|()| self.process.wait().map(drop))
        {
            print_line(format_args!("cannot end the hostile servers: {error}"));
        }
    }
}

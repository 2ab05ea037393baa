//! A network namespace of a test, such as a container's.

use std::process::Command;

use health_net::netns::{self, NetNs};

use crate::process::run;

/// A network namespace that is removed on drop.
#[derive(Debug)]
pub struct Namespace {
    name: String,
    netns: NetNs,
}

impl Namespace {
    /// Creates the namespace `name`. Removes one that a killed test left.
    pub fn new(name: &str) -> anyhow::Result<Self> {
        netns::remove(name)?;
        Ok(Self {
            name: name.to_owned(),
            netns: NetNs::create(name)?,
        })
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The path of its file.
    pub fn path(&self) -> String {
        self.netns.path().display().to_string()
    }

    /// Runs a command in it. Arguments are separated by spaces. Fails if the command does.
    pub fn command(&self, words: &str) -> anyhow::Result<String> {
        let mut command = Command::new("nsenter");
        command
            .arg(format!("--net={}", self.path()))
            .args(words.split_whitespace());
        run(&mut command)?.success()
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        let _ = netns::remove(&self.name);
    }
}

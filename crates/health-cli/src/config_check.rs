//! `health-agent config check`: checks settings files, node registries, policies and manifests.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, anyhow};
use clap::Args;
use health_model::file::read_regular;
use health_model::folder::{LONGEST, manifests};
use health_model::settings::Location;
use health_registry::nodes::document;
use health_settings::{DEFAULT_FILE, Origin, SettingValue};

use super::exit::Failure;
use super::parse::{ParseError, check_files};

/// Flags of `config check`.
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  health-agent config check
  health-agent config check ./config.yaml
  health-agent config check --nodes nodes.yaml --policy policy.yaml
  health-agent config check --services /etc/health-agent/services --pods pods.yaml")]
pub(super) struct CheckArgs {
    /// Settings file, with the files of config.d beside it [default: /etc/health-agent/config.yaml, if no other kind of
    /// file is given]
    #[arg(env = "HEALTH_AGENT_CONFIG")]
    file: Option<PathBuf>,
    /// File of a node registry (repeatable)
    #[arg(long, value_name = "FILE")]
    nodes: Vec<PathBuf>,
    /// File of policies, or a folder of such files (repeatable)
    #[arg(long, value_name = "PATH")]
    policy: Vec<PathBuf>,
    /// Manifest of services and endpoint slices, or a folder of these (repeatable)
    #[arg(long, value_name = "PATH")]
    services: Vec<PathBuf>,
    /// Manifest of pods, or a folder of these (repeatable)
    #[arg(long, value_name = "PATH")]
    pods: Vec<PathBuf>,
}

impl CheckArgs {
    /// Checks all files. Returns one line for each valid file. Prints each problem, and fails if there are any.
    pub(super) fn execute(&self, location: Location) -> Result<String, Failure> {
        let kinds: [(&[PathBuf], Check); 4] = [
            (&self.nodes, check_nodes),
            (&self.policy, check_policy),
            (&self.services, health_service::source::check),
            (&self.pods, check_pods),
        ];
        let mut valid = String::new();
        if self.file.is_some() || kinds.iter().all(|(paths, _)| paths.is_empty()) {
            valid += &self.check_settings(location)?;
        }
        let mut problems = 0;
        for (paths, check) in kinds {
            for file in files(paths)? {
                let found = match read_regular(&file, LONGEST) {
                    Ok(text) => check(&text),
                    Err(error) => vec![error.to_string()],
                };
                let file = file.display();
                for problem in &found {
                    eprintln!("{file}: {problem}");
                }
                problems += found.len();
                if found.is_empty() {
                    valid += &format!("{file}: valid\n");
                }
            }
        }
        match problems {
            0 => Ok(valid),
            1 => Err(anyhow!("1 problem found").into()),
            _ => Err(anyhow!("{problems} problems found").into()),
        }
    }

    fn check_settings(&self, location: Location) -> Result<String, Failure> {
        let file = self.file.as_deref();
        let settings = match check_files(file, location) {
            Err(ParseError::Settings(error)) => return Err(error.into()),
            settings => settings.map_err(anyhow::Error::from)?,
        };
        let all = settings.values.len();
        let is_set = |one: &&SettingValue| matches!(one.origin, Origin::File { .. });
        let set = settings.values.iter().filter(is_set).count();
        Ok(match file {
            None if set == 0 && !Path::new(DEFAULT_FILE).exists() => {
                format!("there is no {DEFAULT_FILE}\n")
            }
            _ => format!("{set} of {all} settings are set, all valid\n"),
        })
    }
}

/// Finds the problems in a document.
type Check = fn(&str) -> Vec<String>;

/// Expands the folders among these paths to the manifests in them.
fn files(paths: &[PathBuf]) -> anyhow::Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for path in paths {
        match path.is_dir() {
            true => files.extend(
                manifests(path).with_context(|| format!("cannot read {}", path.display()))?,
            ),
            false => files.push(path.clone()),
        }
    }
    Ok(files)
}

fn check_nodes(text: &str) -> Vec<String> {
    let parsed = document::parse(text, "default");
    parsed.err().iter().map(ToString::to_string).collect()
}

fn check_policy(text: &str) -> Vec<String> {
    let parsed = health_policy::parse(text);
    parsed.err().iter().map(ToString::to_string).collect()
}

fn check_pods(text: &str) -> Vec<String> {
    let manifest = health_probe::spec::read(text);
    manifest.errors.iter().map(ToString::to_string).collect()
}

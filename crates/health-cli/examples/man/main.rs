//! Writes the man pages; `cargo xtask man` runs it. It is not part of the agent's program, which would grow.

mod pages;

use std::path::PathBuf;
use std::{env, fs};

use anyhow::Context as _;
use clap::Parser;
use jiff::Timestamp;

/// Write the man pages
#[derive(Parser)]
struct Cli {
    /// Folder to write them to, created if missing
    folder: PathBuf,
}

fn main() -> anyhow::Result<()> {
    let Cli { folder } = Cli::parse();
    fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    for page in pages::all(&date()?) {
        let path = folder.join(&page.file);
        fs::write(&path, page.text).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

/// The pages' date: today, or that of reproducible builds (<https://reproducible-builds.org/specs/source-date-epoch/>).
fn date() -> anyhow::Result<String> {
    const EPOCH: &str = "SOURCE_DATE_EPOCH";
    let time = match env::var(EPOCH) {
        Ok(seconds) => seconds
            .parse()
            .ok()
            .and_then(|seconds| Timestamp::from_second(seconds).ok())
            .with_context(|| format!("{EPOCH} '{seconds}': expected seconds since 1970"))?,
        Err(_) => Timestamp::now(),
    };
    Ok(time.strftime("%Y-%m-%d").to_string())
}

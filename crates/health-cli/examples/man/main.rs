//! Generates the man pages; run by `cargo xtask man`. An example, so that the code does not enlarge the agent's binary.

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

/// The date on the pages: today, or `SOURCE_DATE_EPOCH` for reproducible builds
/// (<https://reproducible-builds.org/specs/source-date-epoch/>).
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

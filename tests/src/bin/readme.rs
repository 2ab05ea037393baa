//! Updates the samples and figures of README.md from runs on this machine.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context as _;
use clap::Parser;
use tests::process::print_line;
use tests::readme::{map_figures, program_figure, samples, with_figures, with_samples};

#[derive(Parser)]
#[command(name = "readme", about = "Write the samples and figures of README.md")]
struct Cli {
    /// README.md to update
    readme: PathBuf,
    /// Released program; its figure stays unchanged if omitted
    program: Option<PathBuf>,
}

fn main() -> ExitCode {
    match write(&Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            print_line(format_args!("error: {error:#}"));
            ExitCode::FAILURE
        }
    }
}

fn write(cli: &Cli) -> anyhow::Result<()> {
    let path = cli.readme.display();
    let read = std::fs::read_to_string(&cli.readme);
    let mut text = read.with_context(|| format!("cannot read {path}"))?;
    if let Some(program) = &cli.program {
        text = with_figures(&text, &program_figure(program)?)?;
    }
    text = with_figures(&text, &map_figures()?)?;
    text = with_samples(&text, &samples()?)?;
    std::fs::write(&cli.readme, text).with_context(|| format!("cannot write {path}"))
}

//! Runs random and mutated packets through the datapath's programs. Exits 1 at the first finding.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Parser;
use tests::arguments::FuzzArgs;
use tests::fuzz::fuzz;

/// Time between two progress lines.
const PROGRESS_PERIOD: Duration = Duration::from_secs(5);

#[derive(Parser)]
#[command(
    name = "fuzz",
    about = "Run random and mutated packets through the datapath's programs"
)]
struct Cli {
    #[command(flatten)]
    runs: FuzzArgs,
}

fn main() -> ExitCode {
    match run(Cli::parse().runs) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(runs: FuzzArgs) -> anyhow::Result<ExitCode> {
    let start = Instant::now();
    let mut reported = start;
    let result = fuzz(runs, |done| {
        if reported.elapsed() > PROGRESS_PERIOD {
            reported = Instant::now();
            println!("{:4} s: {done}", start.elapsed().as_secs());
        }
    })?;
    Ok(match result {
        Ok(done) => {
            println!(
                "seed {}, {:.1} s: {done}; nothing found",
                runs.seed,
                start.elapsed().as_secs_f64()
            );
            ExitCode::SUCCESS
        }
        Err(finding) => {
            println!("{finding}");
            ExitCode::FAILURE
        }
    })
}

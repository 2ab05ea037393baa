//! Runs random and mutated packets through the datapath's programs. Exits 1 at the first finding.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Parser;
use tests::fuzz::{Runs, fuzz};

/// Time between two progress lines.
const TELL_EVERY: Duration = Duration::from_secs(5);

#[derive(Parser)]
#[command(
    name = "fuzz",
    about = "Run random and mutated packets through the datapath's programs"
)]
struct Cli {
    /// Number of packets
    #[arg(long, value_name = "N", default_value_t = 1_000_000)]
    runs: u64,
    /// Seed of the random packets
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Number of the first packet
    #[arg(long, value_name = "N", default_value_t = 0)]
    first: u64,
}

fn main() -> ExitCode {
    match run(&Cli::parse()) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(cli: &Cli) -> anyhow::Result<ExitCode> {
    let runs = Runs {
        seed: cli.seed,
        first: cli.first,
        count: cli.runs,
    };
    let start = Instant::now();
    let mut told = start;
    let result = fuzz(runs, |done| {
        if told.elapsed() > TELL_EVERY {
            told = Instant::now();
            println!("{:4} s: {done}", start.elapsed().as_secs());
        }
    })?;
    Ok(match result {
        Ok(done) => {
            println!(
                "seed {}, {:.1} s: {done}; nothing found",
                cli.seed,
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

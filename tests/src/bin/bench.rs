//! Runs a benchmark by name. Exits with 0 if it ran, whatever the results; the report lists what could not be measured.

use std::process::ExitCode;

use anyhow::Context as _;
use clap::Parser;
use tests::arguments::BenchArgs;
use tests::bench::{ALL, raise_open_files_limit};

#[derive(Parser)]
#[command(name = "bench", about = "Run benchmarks of health-agent")]
struct Cli {
    #[command(flatten)]
    args: BenchArgs,
}

fn main() -> ExitCode {
    match run(&Cli::parse().args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &BenchArgs) -> anyhow::Result<()> {
    let Some(name) = &args.name else {
        for benchmark in ALL {
            println!("{:10} {}", benchmark.name, benchmark.about);
        }
        return Ok(());
    };
    let benchmark = ALL
        .iter()
        .find(|benchmark| benchmark.name == name)
        .with_context(|| {
            let names: Vec<&str> = ALL.iter().map(|benchmark| benchmark.name).collect();
            format!(
                "no benchmark {name}; the benchmarks are: {}",
                names.join(", ")
            )
        })?;
    if let Some(advice) = raise_open_files_limit()? {
        eprintln!("{advice}");
    }
    let report = (benchmark.run)(&args.options)?;
    if args.json {
        println!("{}", serde_json::to_string_pretty(&report)?);
    } else {
        print!("{report}");
    }
    Ok(())
}

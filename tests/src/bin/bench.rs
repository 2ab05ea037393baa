//! Runs a benchmark by its name. Exits 0 when it measured, whatever it found.

use std::process::ExitCode;

use anyhow::Context as _;
use clap::Parser;
use tests::bench::ALL;

#[derive(Parser)]
#[command(name = "bench", about = "Benchmarks of health-agent")]
struct Cli {
    /// Which one; without a name all are listed
    name: Option<String>,
    /// Print the figures as JSON
    #[arg(long)]
    json: bool,
}

fn main() -> ExitCode {
    match run(&Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(cli: &Cli) -> anyhow::Result<()> {
    let Some(name) = &cli.name else {
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
            format!("no benchmark {name}; there are: {}", names.join(", "))
        })?;
    let report = (benchmark.run)()?;
    if cli.json {
        println!("{}", serde_json::to_string_pretty(&report)?);
    } else {
        print!("{report}");
    }
    Ok(())
}

//! Runs a benchmark by its name. Exits 0 if it measured, whatever the results; the report lists what could not be
//! measured.

use std::process::ExitCode;

use anyhow::Context as _;
use clap::Parser;
use tests::bench::{ALL, Options, raise_open_files_limit};

#[derive(Parser)]
#[command(name = "bench", about = "Run benchmarks of health-agent")]
struct Cli {
    /// Benchmark to run; list all if omitted
    name: Option<String>,
    /// Print the figures as JSON
    #[arg(long)]
    json: bool,
    /// Number of peers that `mesh` simulates (repeatable, in ascending order)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    peers: Vec<u32>,
    /// Kind of fault that `detection` causes, such as `link-down` (repeatable) [default: all, then a watch for false verdicts]
    #[arg(long, value_name = "KIND")]
    fault: Vec<String>,
    /// Number of faults of each kind that `detection` causes
    #[arg(long, value_name = "N")]
    faults: Option<u32>,
    /// Minutes that `detection` watches for false verdicts under random loss
    #[arg(long, value_name = "N")]
    minutes: Option<u32>,
    /// Seconds of each flood of `ct`
    #[arg(long, value_name = "N")]
    seconds: Option<u32>,
    /// Number of probes that `rtt` accounts for
    #[arg(long, value_name = "N")]
    probes: Option<u64>,
    /// Number of services that `service` sends traffic through (repeatable, in ascending order)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=60_000))]
    services: Vec<u32>,
    /// Rounds of each measurement of `service`
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000))]
    rounds: Option<u32>,
    /// Part of `ct`, `endpoints`, `probe`, `rtt` or `service` to run (repeatable) [default: all]
    #[arg(long, value_name = "NAME")]
    part: Vec<String>,
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
            format!(
                "no benchmark {name}; the benchmarks are: {}",
                names.join(", ")
            )
        })?;
    if let Some(advice) = raise_open_files_limit()? {
        eprintln!("{advice}");
    }
    let report = (benchmark.run)(&Options {
        peers: cli.peers.clone(),
        kinds: cli.fault.clone(),
        faults: cli.faults,
        minutes: cli.minutes,
        seconds: cli.seconds,
        probes: cli.probes,
        services: cli.services.clone(),
        rounds: cli.rounds,
        parts: cli.part.clone(),
    })?;
    if cli.json {
        println!("{}", serde_json::to_string_pretty(&report)?);
    } else {
        print!("{report}");
    }
    Ok(())
}

//! Sets up a machine, runs a local cluster, the tests and the benchmarks: `cargo xtask --help`.

mod bench;
mod fuzz;
mod packages;
mod privilege;
mod process;
mod run;
mod setup;
mod test;
mod workspace;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::workspace::Workspace;

#[derive(Parser)]
#[command(
    name = "cargo xtask",
    about = "Everything around building health-agent"
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Bring in what building needs: rust-src and bpf-linker
    Setup,
    /// Build all and run a cluster of real agents on this machine until Ctrl-C
    Run(run::Args),
    /// Run all tests
    Test(test::Args),
    /// Run random and mutated packets through the datapath's programs, and stop at what must not be
    Fuzz(fuzz::Args),
    /// Run a benchmark and print its figures
    Bench(bench::Args),
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let result = Workspace::locate().and_then(|workspace| match cli.command {
        Command::Setup => setup::setup(&workspace),
        Command::Run(args) => run::run(&workspace, &args),
        Command::Test(args) => test::test(&workspace, &args),
        Command::Fuzz(args) => fuzz::fuzz(&workspace, &args),
        Command::Bench(args) => bench::bench(&workspace, &args),
    });
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

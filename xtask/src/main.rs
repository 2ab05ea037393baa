//! Sets up a machine and runs local clusters, tests and benchmarks: `cargo xtask --help`.

mod aarch64;
mod arch;
#[path = "../../tests/src/arguments.rs"]
#[expect(unreachable_pub, reason = "it is also a module of a library")]
mod arguments;
mod bench;
mod crates;
mod debian;
#[cfg(test)]
mod doc_checks;
mod docs;
mod features;
mod fuzz;
mod helm;
mod kubernetes;
mod man;
mod openapi;
mod packages;
mod passed;
mod privilege;
mod process;
mod progress;
mod run;
mod setup;
mod test;
mod vm;
mod workspace;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::arch::Arch;
use crate::arguments::FuzzArgs;
use crate::passed::Passed;
use crate::workspace::Workspace;

#[derive(Parser)]
#[command(
    name = "cargo xtask",
    about = "Build, run, test and measure health-agent"
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Install the build tools: rust-src, bpf-linker and the ones for static programs
    Setup,
    /// Build and run a cluster of real agents until Ctrl-C, on this machine or in a virtual one
    Run(run::Args),
    /// Run all tests, on this machine or in a virtual one
    Test(test::Args),
    /// Run random and mutated packets through the datapath's programs until the first finding
    Fuzz(Passed<FuzzArgs>),
    /// Run a benchmark and print its figures
    Bench(bench::Args),
    /// Run a command in a virtual machine
    Vm(vm::CommandArgs),
    /// Write the samples and figures of README.md from runs on this machine, docs/settings.md, deploy/config.yaml and
    /// the OpenAPI document
    Docs,
    /// Write the OpenAPI document from the handlers and types of the API
    Openapi,
    /// Write the Helm chart from deploy/kubernetes
    Helm,
    /// Write the man pages of all commands and of the settings file
    Man(man::Args),
    /// Compile the crates with eBPF or system calls for aarch64, without running them
    CheckAarch64,
    /// Check that each crate uses only crates above it in docs/architecture.md
    CheckCrates,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let result = Workspace::locate().and_then(|workspace| match cli.command {
        Command::Setup => setup::setup(&workspace)
            .and_then(|()| setup::static_target(&workspace, Arch::own()?))
            .map(success),
        Command::Run(args) => run::run(&workspace, &args),
        Command::Test(args) => test::test(&workspace, &args).map(success),
        Command::Fuzz(args) => fuzz::fuzz(&workspace, &args.words).map(success),
        Command::Bench(args) => bench::bench(&workspace, &args),
        Command::Vm(args) => vm::command(&workspace, &args),
        Command::Docs => docs::write(&workspace).map(success),
        Command::Openapi => openapi::write(&workspace).map(success),
        Command::Helm => helm::write(&workspace).map(success),
        Command::Man(args) => man::write(&workspace, &args).map(success),
        Command::CheckAarch64 => aarch64::check(&workspace).map(success),
        Command::CheckCrates => crates::check(&workspace).map(success),
    });
    match result {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn success((): ()) -> ExitCode {
    ExitCode::SUCCESS
}

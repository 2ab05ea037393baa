//! The command-line program: does the setup that needs a single-threaded process, then hands over to the command.

use std::ffi::OsString;
use std::path::Path;
use std::process::{self, ExitCode};
use std::{env, io, panic};

use anyhow::Context;
use health_agent::{agent, logging};
use health_cli::exit::{self, Failure};
use health_cli::{Cli, Command, Daemon, Task, parse, reread};
use health_model::settings::Location;
use health_net::{hostns, inside};
use health_settings::{ServiceProxyMode, Settings};
use tokio::runtime::{Builder, Runtime};

/// Threads of the daemon. With one, a slow request would delay probes; more than two only cost memory.
const DAEMON_THREADS: usize = 2;

/// Probing ten thousand peers constantly allocates and frees small objects, for which the C library's allocator holds
/// twice the memory they need. `.cargo/config.toml` configures this allocator.
#[cfg(feature = "jemalloc")]
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

fn main() -> ExitCode {
    // To run a container probe's command, this program re-executes itself.
    if let Some(code) = inside::serve() {
        return code;
    }
    match parse(words()) {
        Ok(cli) => execute(cli).unwrap_or_else(|failure| failure.report()),
        Err(error) => exit::usage(error),
    }
}

/// The command-line arguments. Container runtimes call the CNI plugin through its link, without arguments.
fn words() -> Vec<OsString> {
    let mut words: Vec<OsString> = env::args_os().collect();
    let called = words.first().map(Path::new).and_then(Path::file_name);
    if called.is_some_and(|name| name == health_cni::LINK_NAME) {
        words.insert(1, "cni".into());
    }
    words
}

fn execute(cli: Cli) -> Result<ExitCode, Failure> {
    let location = cli.global.location()?;
    if let Command::Run(args) = &cli.command {
        logging::init(&args.settings.log);
        end_on_panic();
    }
    // Existing threads would stay in the old namespaces.
    hostns::leave_hidden_mounts(&location.bpf_root)
        .context("cannot leave a private mount namespace")?;
    // For `endpoint` commands, the agent enters the namespace.
    if let Some(path) = &cli.global.netns
        && !matches!(cli.command, Command::Endpoint(_))
    {
        hostns::enter(path).context("--netns")?;
    }
    let runtime = runtime(&cli.command).context("cannot start the runtime")?;
    let result = runtime.block_on(cli.command.execute(location, &cli.global.api, &Agent));
    // The command is done; a thread that is still busy must not delay the exit.
    runtime.shutdown_background();
    result
}

/// The daemon, for the commands that need it.
struct Agent;

impl Daemon for Agent {
    fn run(&self, settings: Settings) -> Task<'_, ()> {
        Box::pin(agent::run(settings, reread))
    }

    fn cleanup<'a>(&'a self, location: &'a Location) -> Task<'a, Vec<String>> {
        Box::pin(agent::cleanup(location))
    }

    fn cleanup_services<'a>(
        &'a self,
        location: &'a Location,
        modes: &'a [ServiceProxyMode],
    ) -> Task<'a, Vec<String>> {
        Box::pin(agent::cleanup_services(location, modes))
    }
}

/// Aborts the daemon on a panic in every build, not only in release builds: with a dead task, it would only seem alive.
fn end_on_panic() {
    let print = panic::take_hook();
    panic::set_hook(Box::new(move |panicked| {
        print(panicked);
        process::abort();
    }));
}

fn runtime(command: &Command) -> io::Result<Runtime> {
    let mut builder = match command {
        Command::Run(_) => {
            let mut builder = Builder::new_multi_thread();
            builder.worker_threads(DAEMON_THREADS);
            builder
        }
        _ => Builder::new_current_thread(),
    };
    builder.enable_all().build()
}

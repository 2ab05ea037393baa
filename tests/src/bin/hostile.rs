//! Runs all misbehaving servers. Prints each server's behaviour and port on a line, and serves until standard input
//! closes.

use std::io;
use std::process::ExitCode;

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use tests::hostile::{Behaviour, listen};

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() -> ExitCode {
    match serve().await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

async fn serve() -> anyhow::Result<()> {
    let (_, most) = getrlimit(Resource::RLIMIT_NOFILE)?;
    setrlimit(Resource::RLIMIT_NOFILE, most, most)?;
    for behaviour in Behaviour::ALL {
        println!("{} {}", behaviour.name(), listen(behaviour)?);
    }
    let input = tokio::task::spawn_blocking(|| io::copy(&mut io::stdin(), &mut io::sink()));
    input.await??;
    Ok(())
}

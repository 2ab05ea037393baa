//! Opens a large number of TCP connections at once, acting as a server or client process. Since the limit of open files
//! per process bounds the number of connections, several processes may share either role.

use std::io::{self, BufRead as _};
use std::net::SocketAddr;
use std::process::ExitCode;

use anyhow::{Context as _, ensure};
use clap::{Parser, Subcommand};
use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use socket2::{Domain, Socket, Type};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

/// Number of connections to open or check in parallel.
const AT_ONCE: usize = 128;
const BACKLOG: i32 = 4096;
/// The payload of a round trip.
const WORD: [u8; 4] = *b"ping";

#[derive(Parser)]
#[command(name = "connections", about = "Keep many TCP connections open at once")]
struct Cli {
    #[command(subcommand)]
    role: Role,
}

#[derive(Subcommand)]
enum Role {
    /// Print "listening" and echo all data; when stdin ends, print the sources of the connections
    Serve { address: SocketAddr },
    /// Open connections and print "open"; when stdin ends, check that all still work
    Hold { address: SocketAddr, count: usize },
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let result = match Cli::parse().role {
        Role::Serve { address } => serve(address).await,
        Role::Hold { address, count } => hold(address, count).await,
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

async fn serve(address: SocketAddr) -> anyhow::Result<()> {
    raise_limit(0)?;
    let listener = listen(address).with_context(|| format!("cannot listen on {address}"))?;
    println!("listening");
    let accepting = async {
        let mut peers = Vec::new();
        let input_ends = tokio::task::spawn_blocking(wait_for_end_of_input);
        tokio::pin!(input_ends);
        loop {
            tokio::select! {
                accepted = listener.accept() => {
                    let (stream, peer) = accepted.context("cannot accept")?;
                    peers.push(peer);
                    tokio::spawn(echo(stream));
                }
                _ = &mut input_ends => return anyhow::Ok(peers),
            }
        }
    };
    for peer in accepting.await? {
        println!("{peer}");
    }
    Ok(())
}

/// Listens with `SO_REUSEPORT`: several processes may listen on one address, and the kernel distributes connections
/// among them.
fn listen(address: SocketAddr) -> anyhow::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, None)?;
    socket.set_reuse_port(true)?;
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    Ok(TcpListener::from_std(socket.into())?)
}

async fn echo(mut stream: TcpStream) {
    let (mut from, mut to) = stream.split();
    // The client notices any failure.
    let _ = tokio::io::copy(&mut from, &mut to).await;
}

async fn hold(address: SocketAddr, count: usize) -> anyhow::Result<()> {
    raise_limit(count)?;
    let mut held: Vec<TcpStream> = stream::iter(0..count)
        .map(|_| TcpStream::connect(address))
        .buffer_unordered(AT_ONCE)
        .try_collect()
        .await
        .with_context(|| format!("cannot connect to {address}"))?;
    println!("open");
    tokio::task::spawn_blocking(wait_for_end_of_input).await?;
    stream::iter(&mut held)
        .map(Ok)
        .try_for_each_concurrent(AT_ONCE, round_trip)
        .await?;
    println!("alive");
    Ok(())
}

async fn round_trip(stream: &mut TcpStream) -> anyhow::Result<()> {
    let local = stream.local_addr()?;
    let lost = || format!("the connection from {local} is lost");
    stream.write_all(&WORD).await.with_context(lost)?;
    let mut word = [0; WORD.len()];
    stream.read_exact(&mut word).await.with_context(lost)?;
    ensure!(word == WORD, "the connection from {local} says {word:?}");
    Ok(())
}

fn wait_for_end_of_input() {
    // Any error on standard input counts as its end.
    io::stdin()
        .lock()
        .lines()
        .map_while(Result::ok)
        .for_each(drop);
}

/// Raises this process's limit of open files to the maximum. Fails if that is not enough.
fn raise_limit(connections: usize) -> anyhow::Result<()> {
    let (_, most) = getrlimit(Resource::RLIMIT_NOFILE)?;
    setrlimit(Resource::RLIMIT_NOFILE, most, most)?;
    let needed = connections as u64 + 100;
    ensure!(
        needed <= most,
        "{connections} connections need {needed} open files, and a process may have {most} (ulimit -Hn)"
    );
    Ok(())
}

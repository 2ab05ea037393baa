//! Our gRPC probe compared with the same call by the client of `h2`. Each client runs many calls at a time on one
//! thread, as the agent does, and every call has its own connection.

use std::net::SocketAddr;
use std::thread;
use std::time::Duration;

use anyhow::{bail, ensure};
use futures_util::stream::{self, StreamExt as _, TryStreamExt as _};
use health_net::tcp::{acknowledge_by_first_write, forget_after_fin};
use health_probe::RawResult;
use health_probe::mechanism::grpc::{GrpcProbe, probe};
use health_probe::mechanism::{Deadline, Host, Target as ProbeTarget};
use hyper::body::Bytes;
use hyper::{Request, StatusCode};
use nix::time::{ClockId, clock_gettime};
use tokio::net::TcpSocket;
use tokio::time::timeout;

use super::{Mechanism, Stand};
use crate::bench::{Figure, Target};

/// Number of turns. The clients alternate, so that both see the same conditions.
const TURNS: usize = 5;
/// Number of probes per turn, and how many of them are in progress at a time.
const PROBES: usize = 5_000;
const AT_A_TIME: usize = 64;
const TIMEOUT: Duration = Duration::from_secs(5);
/// The same limit as for the agent's probes.
const HEADERS_LIMIT: u32 = 16 * 1024;
/// Messages with their prefixes: the request for the whole server, and the response SERVING.
const QUESTION: &[u8] = &[0; 5];
const SERVING: &[u8] = &[0, 0, 0, 0, 2, 8, 1];
/// Limit for our CPU time relative to the other client's: having our own client must save a third.
const RATIO: f64 = 0.67;

/// Measures the CPU time per probe of each client.
pub(super) fn beside_h2() -> anyhow::Result<Figure> {
    let stand = Stand::new()?;
    let address = SocketAddr::new([10, 99, 0, 1].into(), Mechanism::Grpc.port());
    let (ours, other) = stand.prober().run_in(|| {
        let measured = thread::spawn(move || compare(address)).join();
        measured.unwrap_or_else(|_| Err(anyhow::anyhow!("a client panicked")))
    })??;
    Ok(Figure {
        name: "CPU per gRPC probe on one thread (other: h2's client)".to_owned(),
        unit: "us",
        ours,
        other: Some(other),
        target: Some(Target::RatioAtMost(RATIO)),
    })
}

fn compare(address: SocketAddr) -> anyhow::Result<(f64, f64)> {
    let ours = GrpcProbe {
        target: ProbeTarget {
            host: Host::Ip(address.ip()),
            port: address.port(),
            netns: None,
            asker: "bench".into(),
        },
        service: String::new(),
        tls: None,
    };
    let by_agent = async || {
        let outcome = probe(&ours, Deadline::after(TIMEOUT)).await;
        ensure!(outcome.result == RawResult::Success, "{}", outcome.message);
        Ok(())
    };
    let by_h2 = async || timeout(TIMEOUT, call_by_h2(address)).await?;
    let mut costs = [Vec::new(), Vec::new()];
    for _ in 0..TURNS {
        costs[0].push(cost(&by_agent)?);
        costs[1].push(cost(&by_h2)?);
    }
    let [ours, other] = costs.map(|mut costs| {
        costs.sort_by(f64::total_cmp);
        costs[TURNS / 2]
    });
    Ok((ours, other))
}

/// CPU time per probe of this thread, us.
fn cost(probe: &impl AsyncFn() -> anyhow::Result<()>) -> anyhow::Result<f64> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let used = || clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).map(Duration::from);
    let before = used()?;
    let probes = stream::iter(0..PROBES).map(|_| probe());
    runtime.block_on(probes.buffer_unordered(AT_A_TIME).try_collect::<()>())?;
    Ok((used()? - before).as_secs_f64() * 1e6 / PROBES as f64)
}

/// Performs the same exchange as a probe, on a connection with the same options.
async fn call_by_h2(address: SocketAddr) -> anyhow::Result<()> {
    let socket = TcpSocket::new_v4()?;
    acknowledge_by_first_write(&socket)?;
    let stream = socket.connect(address).await?;
    forget_after_fin(&stream)?;
    // `h2` writes more than once.
    stream.set_nodelay(true)?;
    let (client, connection) = h2::client::Builder::new()
        .enable_push(false)
        .max_header_list_size(HEADERS_LIMIT)
        .handshake::<_, Bytes>(stream)
        .await?;
    let call = async {
        let request = Request::post(format!("http://{address}/grpc.health.v1.Health/Check"))
            .header("content-type", "application/grpc")
            .header("te", "trailers")
            .header("user-agent", "kube-probe/1.35")
            .header("grpc-timeout", "5000m")
            .body(())?;
        let (response, mut sent) = client.ready().await?.send_request(request, false)?;
        sent.send_data(Bytes::from_static(QUESTION), true)?;
        let response = response.await?;
        let status = response.status();
        ensure!(status == StatusCode::OK, "the server answered {status}");
        let mut body = response.into_body();
        let mut reply = Vec::new();
        while let Some(data) = body.data().await {
            let data = data?;
            body.flow_control().release_capacity(data.len())?;
            reply.extend_from_slice(&data);
        }
        let trailers = body.trailers().await?;
        let status = trailers.as_ref().and_then(|all| all.get("grpc-status"));
        let is_ok = status.is_some_and(|status| status == "0");
        ensure!(is_ok && reply == SERVING, "the server is not serving");
        Ok(())
    };
    tokio::select! {
        biased;
        called = call => called,
        ended = connection => {
            ended?;
            bail!("the server closed the connection")
        }
    }
}

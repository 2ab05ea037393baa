//! `health-agent monitor`: drops and flows as they happen.

use std::fmt;
use std::io::{self, Write};
use std::net::SocketAddr;
use std::ops::ControlFlow;
use std::time::Duration;

use anyhow::{Context as _, bail};
use clap::Args;
use health_api::client::Client;
use health_model::duration::parse_duration;
use health_model::events::{
    CtChange, CtEvent, DropEvent, EventFilter, EventType, FlowDirection, LossCause, MonitorLine,
    PacketDirection, Place, TraceEvent, TupleShown,
};
use tokio::signal::unix::{SignalKind, signal};

use super::bpf::filter::TupleFilter;
use super::output::{Format, NONE, OutputArgs, print_more, printable, write_json_line, write_yaml};

const EXAMPLES: &str = "\
Output:
  Events are shown as they happen, until Ctrl-C. The programs in the kernel write only monitored
  events: without filters these are all drops, and every flow of an endpoint that starts or ends.
  If events are lost because there are too many or this command is too slow, a line shows how many

Examples:
  health-agent monitor --type drop
  health-agent monitor --type ct --endpoint 1017 --proto tcp --port 443
  health-agent monitor --src 10.244.0.0/16 --for 10s
  health-agent endpoint config 1017 debug=on && health-agent monitor --endpoint 1017
  health-agent monitor --type drop --count 1 && echo 'something was dropped'
  health-agent monitor -o jsonl | jq -r 'select(.type == \"drop\") | .reason'";

/// Flags of `monitor`.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct MonitorArgs {
    /// Only events of this type (repeatable)
    #[arg(long = "type", value_enum, value_name = "TYPE")]
    types: Vec<EventType>,
    #[command(flatten)]
    tuple: TupleFilter,
    /// Only events of the endpoint with this id (repeatable)
    #[arg(long = "endpoint", value_name = "ID", value_parser = clap::value_parser!(u16).range(1..=4095))]
    endpoints: Vec<u16>,
    /// Stop after this number of events
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u64).range(1..))]
    count: Option<u64>,
    /// Stop after this time
    #[arg(long = "for", value_name = "DURATION", value_parser = parse_duration)]
    limit: Option<Duration>,
    #[command(flatten)]
    output: OutputArgs,
}

impl MonitorArgs {
    pub(super) async fn execute(self, client: &Client) -> anyhow::Result<()> {
        let TupleFilter {
            protocols,
            sources,
            destinations,
            ports,
        } = self.tuple;
        let filter = EventFilter {
            types: self.types,
            protocols,
            sources,
            destinations,
            ports,
            endpoints: self.endpoints,
        };
        let mut interrupted =
            signal(SignalKind::interrupt()).context("cannot install the SIGINT handler")?;
        let mut terminated =
            signal(SignalKind::terminate()).context("cannot install the SIGTERM handler")?;
        let limit = self.limit.unwrap_or(Duration::MAX);
        let mut printer = Printer::new(self.output.output, self.count);
        let begin = || eprintln!("Monitoring; press Ctrl-C to stop");
        let ended = tokio::select! {
            ended = client.monitor(&filter, begin, |line| printer.take(&line)) => ended,
            _ = interrupted.recv() => Ok(()),
            _ = terminated.recv() => Ok(()),
            () = tokio::time::sleep(limit) => Ok(()),
        };
        printer.end()?;
        Ok(ended?)
    }
}

/// Prints lines as they arrive.
struct Printer {
    format: Format,
    /// Number of events left to print.
    left: Option<u64>,
    is_empty: bool,
    outcome: Outcome,
}

/// The result of printing.
enum Outcome {
    /// Everything was printed.
    Printed,
    /// The reader has gone, or printing failed.
    Ended(anyhow::Result<()>),
    /// The agent stopped.
    Stopped,
}

impl Printer {
    fn new(format: Format, count: Option<u64>) -> Self {
        Self {
            format,
            left: count,
            is_empty: true,
            outcome: Outcome::Printed,
        }
    }

    fn take(&mut self, line: &MonitorLine) -> ControlFlow<()> {
        match line {
            MonitorLine::End => {
                self.outcome = Outcome::Stopped;
                return ControlFlow::Break(());
            }
            MonitorLine::Lost { .. } => {}
            MonitorLine::Drop(_)
            | MonitorLine::Nat(_)
            | MonitorLine::Ct(_)
            | MonitorLine::Trace(_) => {
                self.left = self.left.map(|left| left.saturating_sub(1));
            }
        }
        let (format, is_first) = (self.format, self.is_empty);
        self.is_empty = false;
        match print_more(|out| write(out, format, is_first, line)) {
            Ok(ControlFlow::Continue(())) if self.left != Some(0) => ControlFlow::Continue(()),
            Ok(ControlFlow::Continue(())) => ControlFlow::Break(()),
            Ok(ControlFlow::Break(())) => {
                self.outcome = Outcome::Ended(Ok(()));
                ControlFlow::Break(())
            }
            Err(error) => {
                self.outcome = Outcome::Ended(Err(error));
                ControlFlow::Break(())
            }
        }
    }

    /// Completes the document, so that the output can be parsed.
    fn end(self) -> anyhow::Result<()> {
        if let Outcome::Ended(result) = self.outcome {
            return result;
        }
        // If the reader is gone, nobody misses this.
        let _ = print_more(|out| match (self.format, self.is_empty) {
            (Format::Json | Format::Yaml, true) => out.write_all(b"[]\n"),
            (Format::Json, false) => out.write_all(b"\n]\n"),
            _ => Ok(()),
        })?;
        match self.outcome {
            Outcome::Stopped => bail!("the agent stopped; run this command again when it is back"),
            _ => Ok(()),
        }
    }
}

fn write(
    out: &mut dyn Write,
    format: Format,
    is_first: bool,
    line: &MonitorLine,
) -> io::Result<()> {
    match format {
        Format::Table => writeln!(out, "{}", Line(line)),
        Format::Json => {
            out.write_all(if is_first { b"[\n" } else { b",\n" })?;
            Ok(serde_json::to_writer(out, line)?)
        }
        Format::Jsonl => write_json_line(out, line),
        Format::Yaml => write_yaml(out, &[line]),
    }
}

/// A line in human-readable form.
struct Line<'a>(&'a MonitorLine);

impl fmt::Display for Line<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            MonitorLine::Drop(dropped) => write_drop(f, "drop", dropped),
            MonitorLine::Nat(dropped) => write_drop(f, "nat", dropped),
            MonitorLine::Ct(change) => write_change(f, change),
            MonitorLine::Trace(passed) => write_passed(f, passed),
            MonitorLine::Lost { events, cause } => {
                let cause = match cause {
                    LossCause::RingFull => "the ring buffer was full",
                    LossCause::SlowReader => "this command was too slow",
                };
                write!(f, "lost {events} events: {cause}")
            }
            MonitorLine::End => f.write_str("the agent stopped"),
        }
    }
}

fn write_drop(f: &mut fmt::Formatter<'_>, of: &str, dropped: &DropEvent) -> fmt::Result {
    let DropEvent {
        time,
        reason,
        reason_code,
        direction,
        place,
        length_bytes,
        packet,
    } = dropped;
    let direction = direction_word(*direction);
    write!(
        f,
        "{time:.6} {of} {reason} ({reason_code}) {direction} {}",
        Where(place)
    )?;
    write_packet(f, packet.as_ref(), *length_bytes)
}

fn write_passed(f: &mut fmt::Formatter<'_>, passed: &TraceEvent) -> fmt::Result {
    let TraceEvent {
        time,
        direction,
        place,
        length_bytes,
        packet,
    } = passed;
    let direction = direction_word(*direction);
    write!(f, "{time:.6} trace {direction} {}", Where(place))?;
    write_packet(f, packet.as_ref(), *length_bytes)
}

const fn direction_word(direction: PacketDirection) -> &'static str {
    match direction {
        PacketDirection::Ingress => "ingress",
        PacketDirection::Egress => "egress",
    }
}

fn write_packet(
    f: &mut fmt::Formatter<'_>,
    packet: Option<&TupleShown>,
    length_bytes: u32,
) -> fmt::Result {
    if let Some(packet) = packet {
        write!(f, " {}", Tuple(packet))?;
    }
    write!(f, " {length_bytes} bytes")
}

fn write_change(f: &mut fmt::Formatter<'_>, change: &CtEvent) -> fmt::Result {
    let CtEvent {
        time,
        event,
        direction,
        place,
        source_identity,
        flow,
    } = change;
    let event = match event {
        CtChange::Created => "created",
        CtChange::Reopened => "reopened",
        CtChange::Closed => "closed",
    };
    let direction = match direction {
        FlowDirection::Out => "OUT",
        FlowDirection::In => "IN",
    };
    write!(
        f,
        "{time:.6} ct {event} {direction} {} {} identity={source_identity}",
        Where(place),
        Tuple(flow)
    )
}

struct Where<'a>(&'a Place);

impl fmt::Display for Where<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Place {
            endpoint,
            device,
            ifindex,
        } = self.0;
        match device {
            Some(device) => write!(f, "device={}", printable(device))?,
            None => write!(f, "device={ifindex}")?,
        }
        match endpoint {
            Some(id) => write!(f, " endpoint={id}"),
            None => write!(f, " endpoint={NONE}"),
        }
    }
}

struct Tuple<'a>(&'a TupleShown);

impl fmt::Display for Tuple<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let tuple = self.0;
        write!(
            f,
            "{} {} -> {}",
            tuple.protocol,
            SocketAddr::new(tuple.source, tuple.source_port),
            SocketAddr::new(tuple.destination, tuple.destination_port)
        )
    }
}

#[cfg(test)]
mod tests {
    use health_model::flow::IpProtocol;

    use super::*;

    fn tuple() -> TupleShown {
        TupleShown {
            protocol: IpProtocol(6),
            source: "10.9.9.9".parse().unwrap(),
            source_port: 4000,
            destination: "172.30.0.2".parse().unwrap(),
            destination_port: 80,
        }
    }

    fn place() -> Place {
        Place {
            endpoint: Some(1017),
            device: Some("lxc_health".to_owned()),
            ifindex: 3,
        }
    }

    fn dropped() -> MonitorLine {
        MonitorLine::Drop(DropEvent {
            time: "2026-11-21T19:00:00.123456789Z".parse().unwrap(),
            reason: "Invalid source IP".to_owned(),
            reason_code: 132,
            direction: PacketDirection::Ingress,
            place: place(),
            length_bytes: 74,
            packet: Some(tuple()),
        })
    }

    #[test]
    fn each_line_says_what_happened_where_and_to_what() {
        let opened = MonitorLine::Ct(CtEvent {
            time: "2026-11-21T19:00:00Z".parse().unwrap(),
            event: CtChange::Created,
            direction: FlowDirection::In,
            place: Place {
                endpoint: None,
                device: None,
                ..place()
            },
            source_identity: 4,
            flow: tuple(),
        });
        let passed = MonitorLine::Trace(TraceEvent {
            time: "2026-11-21T19:00:00Z".parse().unwrap(),
            direction: PacketDirection::Egress,
            place: place(),
            length_bytes: 74,
            packet: Some(tuple()),
        });
        let lost = MonitorLine::Lost {
            events: 12,
            cause: LossCause::RingFull,
        };
        for (line, expected) in [
            (
                dropped(),
                "2026-11-21T19:00:00.123456Z drop Invalid source IP (132) ingress \
                 device=lxc_health endpoint=1017 TCP 10.9.9.9:4000 -> 172.30.0.2:80 74 bytes",
            ),
            (
                opened,
                "2026-11-21T19:00:00.000000Z ct created IN device=3 endpoint=- \
                 TCP 10.9.9.9:4000 -> 172.30.0.2:80 identity=4",
            ),
            (
                passed,
                "2026-11-21T19:00:00.000000Z trace egress device=lxc_health endpoint=1017 \
                 TCP 10.9.9.9:4000 -> 172.30.0.2:80 74 bytes",
            ),
            (lost, "lost 12 events: the ring buffer was full"),
        ] {
            assert_eq!(Line(&line).to_string(), expected);
        }
    }

    #[test]
    fn a_document_of_lines_can_be_read() {
        for count in 0..3 {
            let mut json = Vec::new();
            for number in 0..count {
                write(&mut json, Format::Json, number == 0, &dropped()).unwrap();
            }
            let text = String::from_utf8(json).unwrap();
            let closed = if count == 0 {
                "[]".to_owned()
            } else {
                text + "\n]"
            };
            let lines: Vec<MonitorLine> = serde_json::from_str(&closed).unwrap();
            assert_eq!(lines, vec![dropped(); count]);
        }
    }
}

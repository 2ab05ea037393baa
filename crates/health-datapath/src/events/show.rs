//! Converts the programs' records to the form that readers see.

use health_common::ct::TUPLE_IN;
use health_common::events::{
    EVENT_CT_CLOSED, EVENT_CT_CREATED, EVENT_CT_REOPENED, EVENT_DROP, EVENT_TRACE, Event, WANT_NAT,
};
use health_common::metrics::{Direction, Reason};
use health_model::events::{
    CtChange, CtEvent, DropEvent, FlowDirection, MonitorLine, PacketDirection, Place, TraceEvent,
    TupleShown,
};
use health_model::flow::IpProtocol;
use jiff::Timestamp;

/// Returns the line for an event that happened at `time` on the device of this name; `None` for kinds that this version
/// does not know.
pub(super) fn line(event: &Event, time: Timestamp, device: Option<String>) -> Option<MonitorLine> {
    let place = Place {
        endpoint: (event.endpoint != 0).then_some(event.endpoint),
        device,
        ifindex: event.ifindex,
    };
    let change = match event.kind {
        EVENT_DROP => return Some(drop_line(event, time, place)),
        EVENT_TRACE => {
            return Some(MonitorLine::Trace(TraceEvent {
                time,
                direction: packet_direction(event),
                place,
                length_bytes: event.length,
                packet: packet(event),
            }));
        }
        EVENT_CT_CREATED => CtChange::Created,
        EVENT_CT_REOPENED => CtChange::Reopened,
        EVENT_CT_CLOSED => CtChange::Closed,
        _ => return None,
    };
    Some(MonitorLine::Ct(CtEvent {
        time,
        event: change,
        direction: if event.direction == TUPLE_IN {
            FlowDirection::In
        } else {
            FlowDirection::Out
        },
        place,
        source_identity: event.source_identity,
        flow: tuple(event),
    }))
}

fn drop_line(event: &Event, time: Timestamp, place: Place) -> MonitorLine {
    let reason = Reason::ALL
        .into_iter()
        .find(|&reason| reason as u8 == event.reason);
    let dropped = DropEvent {
        time,
        reason: reason.map_or_else(
            || format!("Unknown ({})", event.reason),
            |reason| reason.text().to_owned(),
        ),
        reason_code: event.reason,
        direction: packet_direction(event),
        place,
        length_bytes: event.length,
        packet: packet(event),
    };
    if Event::want(event.kind, event.reason) == WANT_NAT {
        MonitorLine::Nat(dropped)
    } else {
        MonitorLine::Drop(dropped)
    }
}

fn packet_direction(event: &Event) -> PacketDirection {
    if event.direction == Direction::Egress as u8 {
        PacketDirection::Egress
    } else {
        PacketDirection::Ingress
    }
}

/// The header fields of a packet; `None` without an IP header.
fn packet(event: &Event) -> Option<TupleShown> {
    (!event.source.is_unset() || !event.destination.is_unset()).then(|| tuple(event))
}

fn tuple(event: &Event) -> TupleShown {
    TupleShown {
        protocol: IpProtocol(event.protocol),
        source: event.source.to_ip(),
        source_port: u16::from_be(event.sport_be),
        destination: event.destination.to_ip(),
        destination_port: u16::from_be(event.dport_be),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn json(event: &Event) -> serde_json::Value {
        let time = Timestamp::from_second(1_700_000_000).unwrap();
        serde_json::to_value(line(event, time, Some("lxc_health".to_owned()))).unwrap()
    }

    fn event(kind: u8) -> Event {
        Event {
            kind,
            source: "10.9.9.9".parse::<std::net::IpAddr>().unwrap().into(),
            destination: "172.30.0.2".parse::<std::net::IpAddr>().unwrap().into(),
            sport_be: 4000_u16.to_be(),
            dport_be: 80_u16.to_be(),
            protocol: 6,
            ifindex: 7,
            ..Event::default()
        }
    }

    #[test]
    fn a_drop_says_why_and_of_what() {
        let dropped = Event {
            reason: Reason::InvalidSource as u8,
            direction: Direction::Ingress as u8,
            endpoint: 1017,
            length: 74,
            ..event(EVENT_DROP)
        };
        assert_eq!(
            json(&dropped),
            serde_json::json!({
                "type": "drop", "time": "2023-11-14T22:13:20Z",
                "reason": "Invalid source IP", "reason-code": 132, "direction": "ingress",
                "endpoint": 1017, "device": "lxc_health", "ifindex": 7, "length-bytes": 74,
                "packet": {
                    "protocol": "TCP", "source": "10.9.9.9", "source-port": 4000,
                    "destination": "172.30.0.2", "destination-port": 80,
                },
            })
        );
        let of_nat = json(&Event {
            reason: 167,
            ..dropped
        });
        assert_eq!(of_nat["type"], "nat");
        let arp = json(&Event {
            source: Default::default(),
            destination: Default::default(),
            ..dropped
        });
        assert_eq!(arp["packet"], serde_json::Value::Null);
    }

    #[test]
    fn a_flow_says_what_became_of_it() {
        for (kind, change) in [
            (EVENT_CT_CREATED, "created"),
            (EVENT_CT_REOPENED, "reopened"),
            (EVENT_CT_CLOSED, "closed"),
        ] {
            let flow = json(&Event {
                direction: TUPLE_IN,
                source_identity: 4,
                ..event(kind)
            });
            assert_eq!(flow["type"], "ct");
            assert_eq!(flow["event"], change);
            assert_eq!(flow["direction"], "in");
            assert_eq!(flow["endpoint"], serde_json::Value::Null);
            assert_eq!(flow["flow"]["source"], "10.9.9.9");
        }
        assert_eq!(json(&event(99)), serde_json::Value::Null);
    }
}

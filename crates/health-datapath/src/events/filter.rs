//! Which events a reader wants: the exact filter for the reader, and a wider one that the programs can apply.

use health_common::addr::Addr;
use health_common::events::{
    Event, MonitorFilter, Network as Prefix, WANT_CT, WANT_DROP, WANT_NAT, WANT_TRACE,
};
use health_model::events::{EventFilter, EventType};
use health_model::flow::Network;
use ipnet::IpNet;

/// Whether the filter passes an event.
pub(super) fn has(filter: &EventFilter, event: &Event) -> bool {
    fn any<T>(wanted: &[T], is: impl Fn(&T) -> bool) -> bool {
        wanted.is_empty() || wanted.iter().any(is)
    }
    let is_in = |network: &Network, address: &Addr| prefix(network).has(address);
    any(&filter.types, |of| {
        bit(*of) == Event::want(event.kind, event.reason)
    }) && any(&filter.protocols, |protocol| protocol.0 == event.protocol)
        && any(&filter.endpoints, |id| *id == event.endpoint)
        && any(&filter.ports, |port| {
            [event.sport_be, event.dport_be].contains(&port.to_be())
        })
        && any(&filter.sources, |network| is_in(network, &event.source))
        && any(&filter.destinations, |network| {
            is_in(network, &event.destination)
        })
}

/// Returns a filter that the programs can apply, which may pass more events: one value or any value per field.
pub(super) fn widened(filter: &EventFilter) -> MonitorFilter {
    fn only<T: Copy>(values: &[T]) -> Option<T> {
        match values {
            [one] => Some(*one),
            _ => None,
        }
    }
    let types = match &filter.types[..] {
        [] => &EventType::ALL,
        types => types,
    };
    MonitorFilter {
        wanted: types.iter().fold(0, |bits, of| bits | bit(*of)),
        endpoint: only(&filter.endpoints).unwrap_or(0),
        port_be: only(&filter.ports).unwrap_or(0).to_be(),
        source: only(&filter.sources).map_or(Prefix::default(), |network| prefix(&network)),
        destination: only(&filter.destinations)
            .map_or(Prefix::default(), |network| prefix(&network)),
        protocol: only(&filter.protocols).map_or(0, |protocol| protocol.0),
        pad: [0; 3],
    }
}

/// Returns the filter that passes every event that any of `filters` passes; without filters, it passes nothing.
pub(super) fn union(filters: impl IntoIterator<Item = MonitorFilter>) -> MonitorFilter {
    fn same<T: Default + PartialEq>(a: T, b: T) -> T {
        if a == b { a } else { T::default() }
    }
    filters
        .into_iter()
        .reduce(|a, b| MonitorFilter {
            wanted: a.wanted | b.wanted,
            endpoint: same(a.endpoint, b.endpoint),
            port_be: same(a.port_be, b.port_be),
            source: same(a.source, b.source),
            destination: same(a.destination, b.destination),
            protocol: same(a.protocol, b.protocol),
            pad: [0; 3],
        })
        .unwrap_or_default()
}

const fn bit(of: EventType) -> u32 {
    match of {
        EventType::Drop => WANT_DROP,
        EventType::Ct => WANT_CT,
        EventType::Nat => WANT_NAT,
        EventType::Trace => WANT_TRACE,
    }
}

fn prefix(network: &Network) -> Prefix {
    let len = match network.0 {
        // As an IPv4-mapped IPv6 prefix.
        IpNet::V4(v4) => v4.prefix_len() + 96,
        IpNet::V6(v6) => v6.prefix_len(),
    };
    Prefix::new(network.0.addr().into(), len)
}

#[cfg(test)]
mod tests {
    use health_common::events::{EVENT_CT_CLOSED, EVENT_CT_CREATED, EVENT_DROP, EVENT_TRACE};
    use health_model::flow::IpProtocol;
    use proptest::prelude::*;
    use proptest::sample::select;

    use super::*;

    const ADDRESSES: [&str; 4] = ["10.0.0.1", "10.0.0.2", "fd00::1", "::"];
    const NETWORKS: [&str; 5] = [
        "10.0.0.0/8",
        "10.0.0.1/32",
        "0.0.0.0/0",
        "fd00::/16",
        "::/0",
    ];
    fn some<T: Clone + std::fmt::Debug + 'static>(
        values: impl Into<Vec<T>>,
    ) -> impl Strategy<Value = Vec<T>> {
        prop::collection::vec(select(values.into()), 0..3)
    }

    fn filter() -> impl Strategy<Value = EventFilter> {
        let networks = || some(NETWORKS.map(|text| text.parse::<Network>().unwrap()));
        let numbers = || some([0_u16, 1, 2]);
        (
            some(EventType::ALL),
            some([0, 6, 17].map(IpProtocol)),
            networks(),
            networks(),
            numbers(),
            numbers(),
        )
            .prop_map(
                |(types, protocols, sources, destinations, ports, endpoints)| EventFilter {
                    types,
                    protocols,
                    sources,
                    destinations,
                    ports,
                    endpoints,
                },
            )
    }

    fn event() -> impl Strategy<Value = Event> {
        let address = || {
            select(&ADDRESSES[..]).prop_map(|text| text.parse::<std::net::IpAddr>().unwrap().into())
        };
        (
            select(
                &[
                    (EVENT_DROP, 132),
                    (EVENT_DROP, 167),
                    (EVENT_CT_CREATED, 0),
                    (EVENT_CT_CLOSED, 0),
                    (EVENT_TRACE, 0),
                ][..],
            ),
            address(),
            address(),
            0_u16..3,
            0_u16..3,
            0_u16..3,
            select(&[0_u8, 6, 17][..]),
        )
            .prop_map(
                |((kind, reason), source, destination, sport, dport, endpoint, protocol)| Event {
                    kind,
                    reason,
                    source,
                    destination,
                    sport_be: sport.to_be(),
                    dport_be: dport.to_be(),
                    endpoint,
                    protocol,
                    ..Event::default()
                },
            )
    }

    proptest! {
        #[test]
        fn the_programs_write_whatever_a_reader_wants(
            filters in prop::collection::vec(filter(), 0..4),
            event in event(),
        ) {
            let in_kernel = union(filters.iter().map(widened));
            let is_wanted = filters.iter().any(|filter| has(filter, &event));
            prop_assert!(!is_wanted || in_kernel.passes(&event));
            prop_assert_eq!(filters.is_empty(), in_kernel.wanted == 0);
        }

        #[test]
        fn of_one_reader_with_single_values_they_write_nothing_else(
            filter in filter(),
            event in event(),
        ) {
            // The programs use zero for "any".
            let mut filter = filter;
            filter.protocols.retain(|protocol| protocol.0 != 0);
            filter.protocols.truncate(1);
            filter.sources.truncate(1);
            filter.destinations.truncate(1);
            for numbers in [&mut filter.ports, &mut filter.endpoints] {
                numbers.retain(|number| *number != 0);
                numbers.truncate(1);
            }
            prop_assert_eq!(has(&filter, &event), widened(&filter).passes(&event));
        }
    }
}

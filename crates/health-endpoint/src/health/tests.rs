//! Tests on real namespaces. Each test has a host of its own: a network namespace, and a mount namespace with an empty
//! `/run`. Both end with the test's thread.

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::path::Path;
use std::time::Duration;
use std::{fs, thread};

use futures_util::TryStreamExt;
use health_model::ipam::IpamError;
use health_net::link::{Link, VethPair};
use health_net::route::{self, Route};
use health_net::{neighbour, sysctl};
use netlink_packet_route::AddressFamily;
use netlink_packet_route::address::AddressHeaderFlags;
use netlink_packet_route::route::{RouteAttribute, RouteMessage};
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use rtnetlink::{LinkUnspec, MulticastGroup};
use tempfile::TempDir;

use super::*;
use crate::peer_routes::{Change, PeerRouteError, PeerRoutes};

const UPLINK: &str = "eth0";
const UPLINK_MTU: u32 = 1400;
const PORT: u16 = 4240;
/// How long a test waits for an expected event, to allow for busy machines.
const PATIENCE: Duration = Duration::from_secs(120);

/// A host with one uplink, `eth0` with 172.30.0.1/24 and fd00:30::1/64, and a machine behind it with `.2` and `::2`.
struct Host {
    netlink: Handle,
    far: NetNs,
    state: TempDir,
}

/// Runs a test on its own host, or reports that it is skipped.
fn on_a_host(test: impl AsyncFnOnce(Host) + Send) {
    if !nix::unistd::geteuid().is_root() {
        println!("skipped: needs root");
        return;
    }
    let run = || {
        unshare(CloneFlags::CLONE_NEWNET | CloneFlags::CLONE_NEWNS).unwrap();
        let private = MsFlags::MS_REC | MsFlags::MS_PRIVATE;
        mount(None::<&str>, "/", None::<&str>, private, None::<&str>).unwrap();
        mount(
            Some("none"),
            "/run",
            Some("tmpfs"),
            MsFlags::empty(),
            None::<&str>,
        )
        .unwrap();
        tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap()
            .block_on(async { test(Host::new().await).await });
    };
    thread::scope(|scope| {
        if let Err(panic) = scope.spawn(run).join() {
            std::panic::resume_unwind(panic);
        }
    });
}

impl Host {
    async fn new() -> Self {
        let netlink = netlink::open().unwrap();
        let far = NetNs::create("far").unwrap();
        let far_netlink = netns::netlink_in(&far).unwrap();
        let no_link_local = || {
            // Duplicate address detection of link-local addresses would change the host while tests run.
            sysctl::write("ipv6/conf/default/addr_gen_mode", "1").unwrap();
            sysctl::write("ipv6/conf/default/accept_dad", "0").unwrap();
        };
        no_link_local();
        far.run_in(no_link_local).unwrap();
        let pair = VethPair {
            name: "far0",
            mac: MacAddr([2, 0, 0, 0, 0, 2]),
            peer_name: UPLINK,
            peer_mac: MacAddr([2, 0, 0, 0, 0, 1]),
            mtu: UPLINK_MTU,
        };
        link::create_veth(&netlink, &pair).await.unwrap();
        let far0 = device(&netlink, "far0").await;
        link::move_to_netns(&netlink, &far0, far.file().as_fd())
            .await
            .unwrap();
        for (handle, name, host) in [(&netlink, UPLINK, 1), (&far_netlink, "far0", 2)] {
            let nic = device(handle, name).await;
            let lo = device(handle, "lo").await;
            for (address, length) in [
                (format!("172.30.0.{host}"), 24),
                (format!("fd00:30::{host}"), 64),
            ] {
                let mut request = handle
                    .address()
                    .add(nic.index, address.parse().unwrap(), length);
                if length == 64 {
                    request.message_mut().header.flags |= AddressHeaderFlags::Nodad;
                }
                request.execute().await.unwrap();
            }
            link::set_up(handle, &lo).await.unwrap();
            link::set_up(handle, &nic).await.unwrap();
        }
        let host = Self {
            netlink,
            far,
            state: tempfile::tempdir().unwrap(),
        };
        // Changes that the kernel makes once it notices the uplink's carrier.
        let settled = |inventory: BTreeSet<String>| {
            let has = |text| inventory.iter().any(|item| item.contains(text));
            !has("Linkdown") && has("(Inet6(ff00::))") && has("(Inet6(fd00:30::1))")
        };
        while !settled(host.inventory().await) {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        host
    }

    fn spec(&self) -> HealthEndpointSpec {
        HealthEndpointSpec {
            instance: "nettest".to_owned(),
            node_addresses: vec![ip("172.30.0.1"), ip("fd00:30::1")],
            excluded: Vec::new(),
            taken_ids: BTreeSet::new(),
            unusable_addresses: Vec::new(),
            pod_cidrs: vec![cidr("10.244.1.0/24"), cidr("fd00:10:244:1::/64")],
            fixed_addresses: Vec::new(),
            mtu_device: None,
            uplinks: Vec::new(),
            state_dir: self.state.path().join("state"),
        }
    }

    fn v4_spec(&self) -> HealthEndpointSpec {
        let mut spec = self.spec();
        spec.pod_cidrs.truncate(1);
        spec
    }

    /// Returns everything that a cleanup might miss.
    async fn inventory(&self) -> BTreeSet<String> {
        let mut all = BTreeSet::new();
        for (link, addresses) in link::list_with_addresses(&self.netlink).await.unwrap() {
            all.insert(format!("{link:?}"));
            all.extend(addresses.iter().map(|address| format!("{address:?}")));
        }
        let (connection, listing, _) = rtnetlink::new_connection_with_strict_check().unwrap();
        tokio::spawn(connection);
        for family in [AddressFamily::Inet, AddressFamily::Inet6] {
            let mut filter = RouteMessage::default();
            filter.header.address_family = family;
            let routes = listing.route().get(filter).execute().try_collect();
            let routes: Vec<RouteMessage> = routes.await.unwrap();
            for mut route in routes {
                route
                    .attributes
                    .retain(|a| !matches!(a, RouteAttribute::CacheInfo(_)));
                all.insert(format!("{route:?}"));
            }
        }
        for dir in ["/proc/sys/net/ipv4/conf", "/proc/sys/net/ipv6/conf"] {
            for device in fs::read_dir(dir).unwrap() {
                for name in ["forwarding", "accept_ra", "rp_filter", "disable_ipv6"] {
                    let path = device.as_ref().unwrap().path().join(name);
                    let value = fs::read_to_string(&path).unwrap_or_default();
                    all.insert(format!("{} {value}", path.display()));
                }
            }
        }
        all.extend(files(Path::new(netns::NETNS_DIR)));
        all.extend(files(self.state.path()));
        let mounts = fs::read_to_string("/proc/thread-self/mountinfo").unwrap();
        all.extend(mounts.lines().map(str::to_owned));
        all
    }

    async fn assert_unchanged(&self, before: &BTreeSet<String>) {
        let after = self.inventory().await;
        let lost: Vec<_> = before.difference(&after).collect();
        let left: Vec<_> = after.difference(before).collect();
        assert!(
            lost.is_empty() && left.is_empty(),
            "lost {lost:#?}, left behind {left:#?}"
        );
    }

    async fn own_routes(&self) -> BTreeSet<String> {
        let routes = route::list_ours(&self.netlink).await.unwrap();
        routes.iter().map(ToString::to_string).collect()
    }
}

fn files(dir: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(dir) else {
        return Vec::new();
    };
    let paths = entries.map(|entry| entry.unwrap().path());
    paths
        .filter(|path| path.is_file())
        .map(|path| path.display().to_string())
        .collect()
}

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn cidr(text: &str) -> IpNet {
    text.parse().unwrap()
}

async fn device(handle: &Handle, name: &str) -> Link {
    link::by_name(handle, name).await.unwrap().unwrap()
}

async fn ensure(spec: &HealthEndpointSpec) -> HealthEndpoint {
    let (endpoint, repairs) = HealthEndpoint::ensure(spec).await.unwrap();
    assert_eq!(repairs, []);
    assert_eq!(endpoint.check().await.unwrap(), []);
    endpoint
}

/// The properties that identify the endpoint and survive any change of its pair.
fn identity(endpoint: &HealthEndpoint) -> (u16, Vec<IpAddr>, MacAddr, MacAddr) {
    let addresses = endpoint.plan.addresses().collect();
    (
        endpoint.id(),
        addresses,
        endpoint.mac(),
        endpoint.host_mac(),
    )
}

/// Stands in for the programs that answer for the gateway.
async fn answer_for_gateways(endpoint: &HealthEndpoint) {
    let Pair { inside, inner, .. } = &endpoint.pair;
    for stack in &endpoint.plan.stacks {
        neighbour::set_permanent(inside, inner, stack.gateway, endpoint.host_mac())
            .await
            .unwrap();
    }
}

/// Connects to each of the endpoint's addresses from the calling thread's namespace, and exchanges a byte.
fn talk_to(listeners: &[TcpListener]) -> Vec<(TcpStream, TcpStream)> {
    listeners
        .iter()
        .map(|listener| {
            let address = listener.local_addr().unwrap();
            let client = TcpStream::connect_timeout(&address, PATIENCE).unwrap();
            let (server, _) = listener.accept().unwrap();
            server.set_nonblocking(false).unwrap();
            let mut connection = (client, server);
            exchange(&mut connection);
            connection
        })
        .collect()
}

fn exchange((client, server): &mut (TcpStream, TcpStream)) {
    let mut byte = [0];
    client.write_all(b"?").unwrap();
    server.set_read_timeout(Some(PATIENCE)).unwrap();
    server.read_exact(&mut byte).unwrap();
    server.write_all(b"!").unwrap();
    client.set_read_timeout(Some(PATIENCE)).unwrap();
    client.read_exact(&mut byte).unwrap();
    assert_eq!(&byte, b"!");
}

#[test]
fn a_new_endpoint_is_complete_and_reachable_at_once() {
    on_a_host(async |host: Host| {
        let endpoint = ensure(&host.spec()).await;
        assert!(ENDPOINT_IDS.contains(&endpoint.id()));
        assert_eq!(endpoint.mtu(), UPLINK_MTU);
        let expected = ["10.244.1.1", "fd00:10:244:1::1"].map(|ip| ip.parse::<IpAddr>().unwrap());
        assert!(endpoint.gateways().eq(expected));
        assert_eq!(
            endpoint.netns().path(),
            Path::new("/run/netns/health-nettest")
        );

        let outer = device(&host.netlink, DEVICE).await;
        assert_eq!(outer.index, endpoint.ifindex());
        assert_eq!(outer.mac, Some(endpoint.host_mac()));
        assert_eq!(outer.alias.as_deref(), Some("health-agent/nettest"));
        assert_eq!((outer.mtu, outer.up), (UPLINK_MTU, true));
        let inner = device(&endpoint.pair.inside, INNER_DEVICE).await;
        assert_eq!(inner.mac, Some(endpoint.mac()));
        assert_eq!((inner.mtu, inner.up), (UPLINK_MTU, true));
        assert!(device(&endpoint.pair.inside, "lo").await.up);
        for (key, value) in [
            ("ipv4/conf/lxc_health/rp_filter", "0"),
            ("ipv4/conf/lxc_health/forwarding", "1"),
            ("ipv4/conf/lxc_health/accept_source_route", "0"),
            ("ipv4/conf/lxc_health/accept_redirects", "0"),
            ("ipv4/conf/lxc_health/route_localnet", "0"),
            ("ipv6/conf/lxc_health/accept_source_route", "0"),
            ("ipv6/conf/lxc_health/accept_redirects", "0"),
            ("ipv6/conf/lxc_health/accept_ra", "0"),
            ("ipv4/conf/eth0/forwarding", "1"),
            ("ipv6/conf/eth0/accept_ra", "2"),
            ("ipv6/conf/all/forwarding", "1"),
        ] {
            assert_eq!(sysctl::read(key).unwrap().as_deref(), Some(value), "{key}");
        }
        let (v4, v6) = (endpoint.ipv4().unwrap(), endpoint.ipv6().unwrap());
        let ifindex = endpoint.ifindex();
        assert_eq!(
            host.own_routes().await,
            [
                format!("{v4}/32 dev #{ifindex} src 172.30.0.1"),
                format!("{v6}/128 dev #{ifindex} src fd00:30::1"),
            ]
            .into()
        );

        answer_for_gateways(&endpoint).await;
        let listeners = endpoint.listen(PORT).unwrap();
        let connections = talk_to(&listeners);
        let sources: Vec<_> = connections
            .iter()
            .map(|(client, _)| client.local_addr().unwrap().ip())
            .collect();
        assert_eq!(sources, [ip("172.30.0.1"), ip("fd00:30::1")]);

        let far = netns::netlink_in(&host.far).unwrap();
        let back = [
            ("10.244.1.0/24", "172.30.0.1"),
            ("fd00:10:244:1::/64", "fd00:30::1"),
        ]
        .map(|(net, via)| (cidr(net), ip(via)));
        assert_eq!(
            PeerRoutes::default()
                .sync(&far, &back, std::time::Instant::now())
                .await
                .unwrap()
                .changes
                .len(),
            2
        );
        host.far.run_in(|| talk_to(&listeners)).unwrap();
    });
}

#[test]
fn without_ipv6_cidrs_the_endpoint_has_no_ipv6() {
    on_a_host(async |host: Host| {
        let endpoint = ensure(&host.v4_spec()).await;
        assert_eq!(endpoint.ipv6(), None);
        assert_eq!(endpoint.gateways().count(), 1);
        let disabled = endpoint
            .netns()
            .run_in(|| sysctl::read("ipv6/conf/health0/disable_ipv6"))
            .unwrap();
        assert_eq!(disabled.unwrap().as_deref(), Some("1"));
        let forwarding = sysctl::read("ipv6/conf/all/forwarding").unwrap();
        assert_eq!(forwarding.as_deref(), Some("0"));
        answer_for_gateways(&endpoint).await;
        talk_to(&endpoint.listen(PORT).unwrap());
    });
}

#[test]
fn an_ipv6_only_endpoint_works() {
    on_a_host(async |host: Host| {
        let mut spec = host.spec();
        spec.pod_cidrs.remove(0);
        spec.node_addresses.remove(0);
        let endpoint = ensure(&spec).await;
        assert_eq!(endpoint.ipv4(), None);
        answer_for_gateways(&endpoint).await;
        talk_to(&endpoint.listen(PORT).unwrap());
    });
}

#[test]
fn a_living_endpoint_is_adopted_untouched() {
    on_a_host(async |host: Host| {
        let first = ensure(&host.spec()).await;
        answer_for_gateways(&first).await;
        let listeners = first.listen(PORT).unwrap();
        let mut connections = talk_to(&listeners);

        let groups = [
            MulticastGroup::Link,
            MulticastGroup::Neigh,
            MulticastGroup::Ipv4Ifaddr,
            MulticastGroup::Ipv6Ifaddr,
            MulticastGroup::Ipv4Route,
            MulticastGroup::Ipv6Route,
        ];
        let (monitor, _keep, mut events) = rtnetlink::new_multicast_connection(&groups).unwrap();
        tokio::spawn(monitor);
        let second = ensure(&host.spec()).await;
        // The kernel reports a change before it replies to the request that caused it.
        assert!(events.try_recv().is_err());
        assert_eq!(identity(&second), identity(&first));
        assert_eq!(second.ifindex(), first.ifindex());
        assert!(first.netns().is_named());
        connections.iter_mut().for_each(exchange);
        assert_eq!(first.check().await.unwrap(), []);
    });
}

#[test]
fn every_fault_is_found_named_and_repaired() {
    on_a_host(async |host: Host| {
        let spec = host.spec();
        let mut endpoint = ensure(&spec).await;
        let known = identity(&endpoint);
        let host = &host.netlink;
        for (cause, text) in [
            ("veth-down", "veth lxc_health was down"),
            ("veth-gone", "veth lxc_health was gone"),
            (
                "netns-gone",
                "network namespace /run/netns/health-nettest was gone",
            ),
            ("peer-gone", "veth lxc_health was gone"),
            ("peer-down", "veth health0 was down"),
            ("loopback-down", "loopback in the namespace was down"),
            (
                "mac-changed",
                &format!("hardware address of lxc_health was not {}", known.3),
            ),
            ("mtu-changed", "MTU of health0 was not 1400"),
            (
                "address-missing",
                &format!("address {} was missing on health0", known.1[0]),
            ),
            (
                "address6-missing",
                &format!("address {} was missing on health0", known.1[1]),
            ),
            (
                "neighbour-missing",
                &format!(
                    "neighbour entry of {} was missing on lxc_health",
                    known.1[1]
                ),
            ),
            (
                "host-route-lost",
                &format!(
                    "route {}/32 dev lxc_health was missing or changed",
                    known.1[0]
                ),
            ),
            (
                "host-route-changed",
                &format!(
                    "route {}/32 dev lxc_health was missing or changed",
                    known.1[0]
                ),
            ),
            (
                "inner-route-lost",
                "route ::/0 dev health0 was missing or changed",
            ),
            (
                "sysctl-changed",
                "/proc/sys/net/ipv4/conf/lxc_health/rp_filter was 1 instead of 0",
            ),
        ] {
            let Pair {
                inside,
                inner,
                outer,
                ..
            } = &endpoint.pair;
            match cause {
                "veth-down" => link::set_down(host, outer).await.unwrap(),
                "veth-gone" => assert!(link::delete(host, outer).await.unwrap()),
                "netns-gone" => assert!(netns::remove("health-nettest").unwrap()),
                "peer-gone" => assert!(link::delete(inside, inner).await.unwrap()),
                "peer-down" => link::set_down(inside, inner).await.unwrap(),
                "loopback-down" => {
                    let lo = device(inside, "lo").await;
                    link::set_down(inside, &lo).await.unwrap();
                }
                "mac-changed" => {
                    let other = MacAddr([2, 9, 9, 9, 9, 9]);
                    link::set_mac(host, outer, other).await.unwrap();
                }
                "mtu-changed" => link::set_mtu(inside, inner, 1300).await.unwrap(),
                "address-missing" => remove_address(inside, inner, known.1[0]).await,
                "address6-missing" => remove_address(inside, inner, known.1[1]).await,
                "neighbour-missing" => {
                    let mut entry = host.neighbours().add(outer.index, known.1[1]);
                    let entry = entry.message_mut().clone();
                    host.neighbours().del(entry).execute().await.unwrap();
                }
                "host-route-lost" => {
                    let route = endpoint.plan.host_routes(outer.index).next().unwrap();
                    assert!(route::delete(host, &route).await.unwrap());
                }
                "host-route-changed" => {
                    let uplink = device(host, UPLINK).await;
                    let route = endpoint.plan.host_routes(uplink.index).next().unwrap();
                    route::replace(host, &route).await.unwrap();
                }
                "inner-route-lost" => {
                    let route = endpoint.plan.inner_routes(inner.index).last().unwrap();
                    assert!(route::delete(inside, &route).await.unwrap());
                }
                "sysctl-changed" => sysctl::write("ipv4/conf/lxc_health/rp_filter", "1").unwrap(),
                other => panic!("unknown fault {other}"),
            }
            assert_ne!(endpoint.check().await.unwrap(), [], "{cause}");
            let (repaired, repairs) = HealthEndpoint::ensure(&spec).await.unwrap();
            let texts: Vec<_> = repairs.iter().map(ToString::to_string).collect();
            assert!(texts.iter().any(|t| t == text), "{cause}: {texts:?}");
            assert_eq!(repaired.check().await.unwrap(), [], "{cause}");
            assert_eq!(identity(&repaired), known, "{cause}");
            answer_for_gateways(&repaired).await;
            talk_to(&repaired.listen(PORT).unwrap());
            endpoint = repaired;
        }
    });
}

async fn remove_address(handle: &Handle, link: &Link, address: IpAddr) {
    let length = if address.is_ipv4() { 32 } else { 128 };
    let mut request = handle.address().add(link.index, address, length);
    let message = request.message_mut().clone();
    handle.address().del(message).execute().await.unwrap();
}

#[test]
fn a_replaced_veth_is_foreign_and_left_alone() {
    on_a_host(async |host: Host| {
        let spec = host.spec();
        let endpoint = ensure(&spec).await;
        link::delete(&host.netlink, &endpoint.pair.outer)
            .await
            .unwrap();
        let foreign = VethPair {
            name: DEVICE,
            mac: MacAddr([2, 0, 0, 0, 1, 1]),
            peer_name: "other0",
            peer_mac: MacAddr([2, 0, 0, 0, 1, 2]),
            mtu: 1500,
        };
        link::create_veth(&host.netlink, &foreign).await.unwrap();
        assert_eq!(endpoint.check().await.unwrap(), [Fault::VethReplaced]);

        let before = host.inventory().await;
        let error = HealthEndpoint::ensure(&spec).await.unwrap_err();
        let text = error.to_string();
        assert!(matches!(error, HealthError::ForeignDevice { .. }), "{text}");
        assert!(
            text.contains("lxc_health") && !text.contains('\n'),
            "{text}"
        );
        host.assert_unchanged(&before).await;

        let report = cleanup(&spec.instance, &spec.state_dir).await;
        assert!(report.failed.is_empty(), "{:?}", report.failed);
        let kept = device(&host.netlink, DEVICE).await;
        assert_eq!(kept.mac, Some(foreign.mac));

        let before = host.inventory().await;
        HealthEndpoint::ensure(&spec).await.unwrap_err();
        host.assert_unchanged(&before).await;
    });
}

#[test]
fn a_namespace_of_someone_else_is_left_alone() {
    on_a_host(async |host| {
        let theirs = NetNs::create("health-nettest").unwrap();
        let before = host.inventory().await;
        let error = HealthEndpoint::ensure(&host.spec()).await.unwrap_err();
        assert!(
            matches!(&error, HealthError::ForeignNetns(path) if path == theirs.path()),
            "{error}"
        );
        host.assert_unchanged(&before).await;
        let Cleanup { removed, failed } = cleanup("nettest", &host.spec().state_dir).await;
        assert!(removed.is_empty() && failed.is_empty());
        host.assert_unchanged(&before).await;
        assert!(theirs.is_named());
    });
}

#[test]
fn a_renamed_veth_is_replaced_under_its_old_addresses() {
    on_a_host(async |host| {
        let mut spec = host.spec();
        spec.fixed_addresses = vec![ip("10.244.1.7"), ip("fd00:10:244:1::7")];
        let endpoint = ensure(&spec).await;
        let outer = device(&host.netlink, DEVICE).await;
        // Before Linux 6.2, only a device that is down can be renamed.
        link::set_down(&host.netlink, &outer).await.unwrap();
        let message = LinkUnspec::new_with_index(outer.index).name("renamed");
        let renamed = host.netlink.link().set(message.build()).execute().await;
        renamed.unwrap();
        assert_eq!(endpoint.check().await.unwrap(), [Fault::VethGone]);

        let (again, repairs) = HealthEndpoint::ensure(&spec).await.unwrap();
        assert_eq!(repairs, [Repair(Fault::VethGone)]);
        assert_eq!(again.check().await.unwrap(), []);
        assert_eq!(identity(&again), identity(&endpoint));
        let old = link::by_name(&host.netlink, "renamed").await.unwrap();
        assert_eq!(old, None);
    });
}

#[test]
fn a_changed_mtu_of_the_uplink_is_followed() {
    on_a_host(async |host| {
        let mut spec = host.spec();
        spec.mtu_device = Some(UPLINK.to_owned());
        let endpoint = ensure(&spec).await;
        assert_eq!(endpoint.mtu(), UPLINK_MTU);
        let uplink = device(&host.netlink, UPLINK).await;
        link::set_mtu(&host.netlink, &uplink, UPLINK_MTU - 100)
            .await
            .unwrap();

        let wanted = UPLINK_MTU - 100;
        let ends = [End::Outer, End::Inner];
        let changed = ends.map(|end| Fault::MtuChanged { end, wanted });
        assert_eq!(endpoint.check().await.unwrap(), changed);
        let (again, _) = HealthEndpoint::ensure(&spec).await.unwrap();
        assert_eq!(again.mtu(), wanted);
        assert_eq!(again.check().await.unwrap(), []);
    });
}

#[test]
fn another_instance_keeps_its_endpoint_and_routes() {
    on_a_host(async |host: Host| {
        let endpoint = ensure(&host.spec()).await;
        let routes = host.own_routes().await;
        let mut other = host.spec();
        other.instance = "other".to_owned();
        other.state_dir = host.state.path().join("other");
        let error = HealthEndpoint::ensure(&other).await.unwrap_err();
        assert!(
            error.to_string().contains("health-agent/nettest"),
            "{error}"
        );
        let report = cleanup(&other.instance, &other.state_dir).await;
        assert!(
            report.failed.is_empty() && report.removed.is_empty(),
            "{report:?}"
        );
        assert_eq!(host.own_routes().await, routes);
        assert_eq!(endpoint.check().await.unwrap(), []);
    });
}

#[test]
fn packets_pass_at_once_on_a_host_with_one_device() {
    on_a_host(async |host: Host| {
        // The host's end must not get the same ifindex as the endpoint's end.
        assert_eq!(device(&host.netlink, UPLINK).await.index, 2);
        let endpoint = ensure(&host.spec()).await;
        assert_ne!(endpoint.ifindex(), endpoint.pair.inner.index);
        for end in [DEVICE, UPLINK] {
            assert!(device(&host.netlink, end).await.running);
        }
    });
}

#[test]
fn a_node_address_is_waited_for_until_it_is_usable() {
    on_a_host(async |host: Host| {
        let uplink = device(&host.netlink, UPLINK).await;
        sysctl::write("ipv6/conf/eth0/accept_dad", "1").unwrap();
        let node = ip("fd00:30::7");
        let request = host.netlink.address().add(uplink.index, node, 64);
        request.execute().await.unwrap();
        let addresses = link::addresses(&host.netlink).await.unwrap();
        assert!(addresses.iter().any(|a| a.address == node && a.tentative));

        let mut spec = host.spec();
        spec.node_addresses[1] = node;
        let endpoint = ensure(&spec).await;
        assert_eq!(endpoint.plan.stack(Family::V6).unwrap().node, Some(node));
    });
}

#[test]
fn addresses_and_id_survive_a_reboot() {
    on_a_host(async |host: Host| {
        let spec = host.spec();
        let first = ensure(&spec).await;
        let known = identity(&first);
        link::delete(&host.netlink, &first.pair.outer)
            .await
            .unwrap();
        netns::remove("health-nettest").unwrap();
        drop(first);
        let (second, _) = HealthEndpoint::ensure(&spec).await.unwrap();
        assert_eq!(identity(&second), known);
    });
}

#[test]
fn a_lost_address_is_replaced() {
    on_a_host(async |host: Host| {
        let spec = host.v4_spec();
        let first = ensure(&spec).await;
        let (id, old, ..) = identity(&first);
        link::delete(&host.netlink, &first.pair.outer)
            .await
            .unwrap();
        let uplink = device(&host.netlink, UPLINK).await;
        link::add_address(&host.netlink, &uplink, old[0])
            .await
            .unwrap();
        let (second, _) = HealthEndpoint::ensure(&spec).await.unwrap();
        let (new_id, new, ..) = identity(&second);
        assert_eq!(new_id, id);
        assert_ne!(new, old);
        assert_eq!(second.check().await.unwrap(), []);
    });
}

#[test]
fn a_change_of_the_pod_cidr_or_the_fixed_addresses_is_followed() {
    on_a_host(async |host: Host| {
        let mut spec = host.v4_spec();
        let first = ensure(&spec).await;
        let old = first.ipv4().unwrap();
        spec.pod_cidrs = vec![cidr("10.244.9.0/24")];
        let (second, repairs) = HealthEndpoint::ensure(&spec).await.unwrap();
        let new = second.ipv4().unwrap();
        assert!(spec.pod_cidrs[0].contains(&IpAddr::from(new)));
        let texts: Vec<_> = repairs.iter().map(ToString::to_string).collect();
        assert!(
            texts.contains(&format!("address {old} was no longer this endpoint's")),
            "{texts:?}"
        );
        assert_eq!(host.own_routes().await.len(), 1);

        spec.fixed_addresses = vec![ip("10.244.9.99"), ip("fd00:10:244:1::99")];
        spec.pod_cidrs.push(cidr("fd00:10:244:1::/64"));
        let (third, _) = HealthEndpoint::ensure(&spec).await.unwrap();
        assert_eq!(third.ipv4(), Some("10.244.9.99".parse().unwrap()));
        assert_eq!(third.ipv6(), Some("fd00:10:244:1::99".parse().unwrap()));
        assert_eq!(third.id(), first.id());
        let fourth = ensure(&spec).await;
        assert_eq!(fourth.ifindex(), third.ifindex());
    });
}

#[test]
fn damaged_state_does_not_disturb_a_living_endpoint() {
    on_a_host(async |host: Host| {
        let spec = host.spec();
        let first = ensure(&spec).await;
        let (_, addresses, mac, host_mac) = identity(&first);
        let file = StateFile::in_dir(&spec.state_dir);
        fs::write(file.path(), "{ \"id\":").unwrap();
        let second = ensure(&spec).await;
        assert_eq!(second.ifindex(), first.ifindex());
        let (_, new_addresses, new_mac, new_host_mac) = identity(&second);
        assert_eq!(
            (new_addresses, new_mac, new_host_mac),
            (addresses, mac, host_mac)
        );
        assert_eq!(file.load().as_ref(), Some(second.state()));
    });
}

#[test]
fn refusals_are_one_line_and_leave_nothing() {
    on_a_host(async |host: Host| {
        let before = host.inventory().await;
        type Edit = fn(&mut HealthEndpointSpec);
        let cases: [(&str, Edit); 10] = [
            (
                "pod CIDR 172.30.0.0/16 overlaps node address 172.30.0.1: give the node a different pod CIDR",
                |spec| spec.pod_cidrs[0] = cidr("172.30.0.0/16"),
            ),
            (
                "no free address in pod CIDR 10.244.1.0/31: give the node a larger one",
                |spec| spec.pod_cidrs[0] = cidr("10.244.1.0/31"),
            ),
            (
                "address 10.9.9.9 is in none of this node's pod CIDRs (10.244.1.0/24)",
                |spec| spec.fixed_addresses = vec![ip("10.9.9.9")],
            ),
            (
                "address fd00::9 is in none of this node's pod CIDRs (none)",
                |spec| {
                    spec.pod_cidrs.truncate(1);
                    spec.fixed_addresses = vec![ip("fd00::9")];
                },
            ),
            (
                "node address 172.30.0.77 is not on any device of this host; correct it in the node registry",
                |spec| spec.node_addresses = vec![ip("172.30.0.77")],
            ),
            ("no device eth7; choose one that `ip link` lists", |spec| {
                spec.uplinks = vec!["eth7".to_owned()];
            }),
            ("no device eth8; choose one that `ip link` lists", |spec| {
                spec.mtu_device = Some("eth8".to_owned());
            }),
            (
                "this node has no pod CIDR: give it one in the node registry",
                |spec| {
                    spec.pod_cidrs.clear();
                },
            ),
            (
                "\"health-a/b\" is not a valid name for a network namespace",
                |spec| {
                    spec.instance = "a/b".to_owned();
                },
            ),
            (
                "cannot write /proc/version/state/health-endpoint.json: Not a directory (os error 20)",
                |spec| spec.state_dir = "/proc/version/state".into(),
            ),
        ];
        for (expected, edit) in cases {
            let mut spec = host.spec();
            edit(&mut spec);
            let error = HealthEndpoint::ensure(&spec).await.unwrap_err();
            assert_eq!(error.to_string(), expected);
            host.assert_unchanged(&before).await;
        }
    });
}

#[test]
fn taken_addresses_are_refused_or_passed_over() {
    on_a_host(async |host: Host| {
        let uplink = device(&host.netlink, UPLINK).await;
        let mut spec = host.v4_spec();
        spec.pod_cidrs = vec![cidr("10.244.1.0/29")];
        for n in 2..=4 {
            let taken = ip(&format!("10.244.1.{n}"));
            link::add_address(&host.netlink, &uplink, taken)
                .await
                .unwrap();
        }
        let routed = Route {
            device: Some(uplink.index),
            protocol: 4,
            ..Route::to(cidr("10.244.1.5/32"))
        };
        route::add(&host.netlink, &routed).await.unwrap();
        let before = host.inventory().await;
        for n in [2, 5] {
            let taken = ip(&format!("10.244.1.{n}"));
            spec.fixed_addresses = vec![taken];
            let error = HealthEndpoint::ensure(&spec).await.unwrap_err();
            assert!(
                matches!(error, HealthError::Ipam(IpamError::Taken(a)) if a == taken),
                "{error}"
            );
            host.assert_unchanged(&before).await;
        }
        spec.fixed_addresses.clear();
        let endpoint = ensure(&spec).await;
        assert_eq!(endpoint.ipv4(), Some("10.244.1.6".parse().unwrap()));
        cleanup(&spec.instance, &spec.state_dir).await;

        let last = ip("10.244.1.6");
        link::add_address(&host.netlink, &uplink, last)
            .await
            .unwrap();
        let error = HealthEndpoint::ensure(&spec).await.unwrap_err();
        assert!(
            matches!(error, HealthError::Ipam(IpamError::Exhausted(_))),
            "{error}"
        );
    });
}

#[test]
fn a_failure_half_way_is_undone() {
    on_a_host(async |host: Host| {
        // The namespace and its file can be created, but the veth pair cannot.
        let mut spec = host.spec();
        let uplink = device(&host.netlink, UPLINK).await;
        link::set_mtu(&host.netlink, &uplink, 65535).await.unwrap();
        let before = host.inventory().await;
        spec.uplinks = vec![UPLINK.to_owned(), "lo".to_owned()];
        spec.mtu_device = Some("lo".to_owned());
        let error = HealthEndpoint::ensure(&spec).await.unwrap_err();
        assert!(
            error
                .to_string()
                .starts_with("cannot create veth device lxc_health"),
            "{error}"
        );
        host.assert_unchanged(&before).await;
    });
}

#[test]
fn cleanup_leaves_nothing_and_is_idempotent() {
    on_a_host(async |host: Host| {
        let before = host.inventory().await;
        let spec = host.spec();
        let endpoint = ensure(&spec).await;
        let wanted = [(cidr("10.244.2.0/24"), ip("172.30.0.2"))];
        PeerRoutes::default()
            .sync(&host.netlink, &wanted, std::time::Instant::now())
            .await
            .unwrap();
        drop(endpoint);

        let report = cleanup(&spec.instance, &spec.state_dir).await;
        assert!(report.failed.is_empty(), "{:?}", report.failed);
        let removed: Vec<_> = report.removed.iter().map(ToString::to_string).collect();
        for expected in [
            "device lxc_health",
            "network namespace /run/netns/health-nettest",
            "the agent's value of /proc/sys/net/ipv4/conf/eth0/forwarding (restored to 0)",
            "the agent's value of /proc/sys/net/ipv6/conf/eth0/accept_ra (restored to 1)",
            "the agent's value of /proc/sys/net/ipv6/conf/all/forwarding (restored to 0)",
        ] {
            assert!(
                removed.iter().any(|r| r == expected),
                "{expected}: {removed:?}"
            );
        }
        assert!(
            removed
                .iter()
                .any(|r| r.starts_with("route 10.244.2.0/24 via 172.30.0.2"))
        );
        host.assert_unchanged(&before).await;

        let again = cleanup(&spec.instance, &spec.state_dir).await;
        assert!(
            again.removed.is_empty() && again.failed.is_empty(),
            "{again:?}"
        );
        host.assert_unchanged(&before).await;
    });
}

#[test]
fn peer_routes_become_exactly_the_wanted_ones() {
    on_a_host(async |host: Host| {
        let endpoint = ensure(&host.spec()).await;
        let own = host.own_routes().await;
        let sync = async |wanted: &[(&str, &str)]| {
            let wanted: Vec<_> = wanted
                .iter()
                .map(|(net, via)| (cidr(net), ip(via)))
                .collect();
            PeerRoutes::default()
                .sync(&host.netlink, &wanted, std::time::Instant::now())
                .await
                .unwrap()
        };
        let two = [
            ("10.244.2.0/24", "172.30.0.2"),
            ("fd00:10:244:2::/64", "fd00:30::2"),
        ];
        let outcome = sync(&two).await;
        assert!(outcome.failed.is_empty(), "{:?}", outcome.failed);
        assert_eq!(outcome.changes.len(), 2);
        assert_eq!(sync(&two).await.changes, []);

        let outcome = sync(&[
            ("10.244.2.0/24", "172.30.0.3"),
            ("10.244.3.0/24", "192.0.2.1"),
            ("fd00:10:244:2::/64", "fd00:30::3"),
            ("fd00:10:244:3::/64", "2001:db8::1"),
        ])
        .await;
        let expected = [
            ("10.244.2.0/24", "172.30.0.3"),
            ("fd00:10:244:2::/64", "fd00:30::3"),
        ]
        .map(|(net, via)| Change::Replaced {
            cidr: cidr(net),
            via: ip(via),
        });
        assert_eq!(outcome.changes, expected);
        assert_eq!(outcome.failed.len(), 2, "{:?}", outcome.failed);
        for error in outcome.failed {
            assert!(matches!(error, PeerRouteError::NotOnLink { .. }), "{error}");
        }

        let outcome = sync(&[]).await;
        assert_eq!(outcome.changes.len(), 2);
        assert_eq!(host.own_routes().await, own);
        assert_eq!(endpoint.check().await.unwrap(), []);
    });
}

/// Restoration of routes via nodes behind a router is delayed, except for routes whose device was away.
#[test]
fn peer_routes_are_back_as_soon_as_their_device_is() {
    on_a_host(async |host: Host| {
        let wanted = [
            ("10.244.2.0/24", "172.30.0.2"),
            ("10.244.3.0/24", "172.30.0.3"),
            ("10.244.9.0/24", "192.0.2.1"),
        ]
        .map(|(net, via)| (cidr(net), ip(via)));
        let mut routes = PeerRoutes::default();
        let now = std::time::Instant::now();
        let mut sync = async || {
            let outcome = routes.sync(&host.netlink, &wanted, now).await.unwrap();
            (outcome.changes.len(), outcome.failed.len())
        };
        assert_eq!(sync().await, (2, 1));
        let nic = device(&host.netlink, UPLINK).await;
        link::set_down(&host.netlink, &nic).await.unwrap();
        assert_eq!(sync().await, (0, 3));
        assert_eq!(sync().await, (0, 3));
        link::set_up(&host.netlink, &nic).await.unwrap();
        assert_eq!(sync().await, (2, 1));
    });
}

#[test]
fn routes_of_others_are_not_touched() {
    on_a_host(async |host: Host| {
        let foreign = Route {
            gateway: Some(ip("172.30.0.2")),
            protocol: 4,
            ..Route::to(cidr("10.244.2.0/24"))
        };
        route::add(&host.netlink, &foreign).await.unwrap();
        let before = host.inventory().await;
        let same_way = [(foreign.destination, ip("172.30.0.2"))];
        let outcome = PeerRoutes::default()
            .sync(&host.netlink, &same_way, std::time::Instant::now())
            .await
            .unwrap();
        assert!(
            outcome.changes.is_empty() && outcome.failed.is_empty(),
            "{outcome:?}"
        );
        let elsewhere = [(foreign.destination, ip("172.30.0.9"))];
        let outcome = PeerRoutes::default()
            .sync(&host.netlink, &elsewhere, std::time::Instant::now())
            .await
            .unwrap();
        assert!(
            matches!(outcome.failed[..], [PeerRouteError::Foreign { .. }]),
            "{outcome:?}"
        );
        PeerRoutes::default()
            .sync(&host.netlink, &[], std::time::Instant::now())
            .await
            .unwrap();
        host.assert_unchanged(&before).await;
    });
}

/// The daemon runs these futures on many threads.
#[test]
fn futures_can_move_between_threads() {
    fn assert_send<T: Send>(_: impl FnOnce(&'static HealthEndpoint) -> T) {}
    fn spec() -> &'static HealthEndpointSpec {
        unreachable!("is never called")
    }
    assert_send(|_| HealthEndpoint::ensure(spec()));
    assert_send(HealthEndpoint::check);
    assert_send(|_| cleanup("", Path::new("")));
    assert_send(|endpoint| async {
        let mut routes = PeerRoutes::default();
        let now = std::time::Instant::now();
        routes.sync(&endpoint.host, &[], now).await.map(|_| ())
    });
}

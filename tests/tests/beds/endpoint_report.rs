//! An agent's report about its endpoints, compared with everything that exists: devices, maps, files and namespaces.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::net::IpAddr;
use std::path::Path;
use std::process::{Child, Stdio};

use anyhow::{Context as _, ensure};
use health_common::identity;
use health_model::api::{Endpoint, Enforcement, TakenAddress};
use health_net::netns::{self, NetNs};
use ipnet::IpNet;
use serde_json::Value;
use tests::Node;
use tests::bed::command_in;
use tests::http;
use tests::process::run;

/// A network namespace for an endpoint, removed on drop.
pub(crate) struct Place {
    pub(crate) name: String,
    pub(crate) path: String,
}

impl Place {
    pub(crate) fn new(number: usize) -> anyhow::Result<Self> {
        let name = place_name(number);
        // A killed test may have left a namespace behind.
        netns::remove(&name)?;
        let path = NetNs::create(&name)?.path().display().to_string();
        Ok(Self { name, path })
    }

    /// The devices in the namespace except loopback, with their global-scope addresses.
    fn devices(&self) -> anyhow::Result<BTreeMap<String, BTreeSet<IpAddr>>> {
        let listed = run(command_in(&self.name, "ip").args(["-j", "address", "show"]))?;
        let listed: Value = serde_json::from_str(&listed.success()?)?;
        let devices = listed.as_array().context("no list of devices")?.iter();
        let devices = devices.filter(|device| device["ifname"] != "lo");
        devices
            .map(|device| {
                let name = text(&device["ifname"])?;
                let addresses = device["addr_info"].as_array().into_iter().flatten();
                let global = addresses.filter(|address| address["scope"] == "global");
                let global = global.map(|address| Ok(text(&address["local"])?.parse::<IpAddr>()?));
                Ok((name.to_owned(), global.collect::<anyhow::Result<_>>()?))
            })
            .collect()
    }
}

fn place_name(number: usize) -> String {
    format!("h-place-{number}")
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = netns::remove(&self.name);
    }
}

fn text(value: &Value) -> anyhow::Result<&str> {
    value.as_str().with_context(|| format!("no text: {value}"))
}

pub(crate) fn rows(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

pub(crate) fn addresses(endpoint: &Endpoint) -> impl Iterator<Item = IpAddr> + use<> {
    endpoint.ipv4.into_iter().chain(endpoint.ipv6)
}

/// Starts one of the agent's CLI commands.
pub(crate) fn spawn(node: &Node, words: &str) -> anyhow::Result<Child> {
    let mut command = node.cli_command();
    command.args(words.split(' '));
    let command = command.stdout(Stdio::null()).stderr(Stdio::null());
    Ok(command.spawn()?)
}

/// An agent's report about its endpoints, with the addresses of the health endpoint kept separately.
pub(crate) struct EndpointReport {
    pub(crate) endpoints: Vec<Endpoint>,
    health: BTreeSet<IpAddr>,
}

impl EndpointReport {
    pub(crate) fn by(node: &Node) -> anyhow::Result<Self> {
        let mut all: Vec<Endpoint> = serde_json::from_value(node.listing("endpoint list")?)?;
        all.retain(|one| one.state != "disconnected");
        ensure!(all.iter().all(|one| one.state == "ready"), "{all:?}");
        let (health, endpoints): (Vec<_>, Vec<_>) = all
            .into_iter()
            .partition(|one| one.identity == identity::HEALTH);
        Ok(Self {
            endpoints,
            health: health.iter().flat_map(addresses).collect(),
        })
    }

    pub(crate) fn at(&self, place: &Place) -> Option<&Endpoint> {
        self.endpoints.iter().find(|one| one.netns == place.path)
    }

    /// Whether the place with this number has an endpoint.
    pub(crate) fn has(&self, number: usize) -> bool {
        let name = place_name(number);
        let mut places = self.endpoints.iter().map(|one| Path::new(&one.netns));
        places.any(|path| path.file_name() == Some(name.as_ref()))
    }

    pub(crate) fn addresses(&self) -> BTreeSet<IpAddr> {
        self.endpoints.iter().flat_map(addresses).collect()
    }

    fn with_health(&self) -> BTreeSet<IpAddr> {
        &self.addresses() | &self.health
    }

    /// Checks that everything that belongs to these endpoints exists, and that nothing of any other endpoint does:
    /// devices, routes, pins, maps, addresses and files. `enforced` returns whether policy is enforced for packets that
    /// an endpoint receives and for those that it sends.
    pub(crate) fn is_all_there_is(
        &self,
        node: &Node,
        enforced: impl Fn(&Endpoint) -> [bool; 2],
    ) -> anyhow::Result<()> {
        let devices: BTreeSet<&str> = self
            .endpoints
            .iter()
            .map(|one| one.interface.as_str())
            .collect();
        let listed: Value = serde_json::from_str(&node.exec("ip -j link show type veth")?)?;
        let is_of_endpoint = |name: &&str| name.starts_with("lxc") && *name != "lxc_health";
        let found = rows(&listed).filter_map(|device| device["ifname"].as_str());
        same("devices", found.filter(is_of_endpoint), &devices)?;

        let mut routes = BTreeSet::new();
        for family in ["-4", "-6"] {
            let listed = node.exec(&format!("ip -j {family} route show table all"))?;
            let listed: Value = serde_json::from_str(&listed)?;
            let of_endpoint = rows(&listed).filter(|route| {
                let device = route["dev"].as_str();
                device.as_ref().is_some_and(is_of_endpoint)
            });
            let targets = of_endpoint.filter_map(|route| route["dst"].as_str()?.parse().ok());
            // Each device has the kernel's own routes for its link.
            let is_own = |ip: &IpAddr| !matches!(ip, IpAddr::V6(ip) if ip.segments()[0] == 0xfe80);
            routes.extend(targets.filter(is_own));
        }
        same("routes", routes, &self.addresses())?;

        let with_programs = devices.iter().copied().chain(["lxc_health"]);
        let of_endpoints = with_programs.map(|device| (device, "endpoint"));
        let wanted = of_endpoints
            .chain([("eth0", "netdev")])
            .flat_map(|(device, of)| {
                [("from", "ingress"), ("to", "egress")]
                    .map(|(way, direction)| format!("{way}_{of} {device}/{direction}"))
            });
        let programs = node.listing("bpf prog list")?;
        let attached = rows(&programs).flat_map(|program| {
            let places = rows(&program["attached"]).filter_map(Value::as_str);
            places.map(|place| format!("{} {place}", program["name"].as_str().unwrap_or_default()))
        });
        same("programs", attached, &wanted.collect())?;

        let mut tables = BTreeSet::from([0]);
        let entries = node.listing("bpf endpoint list")?;
        let mut known = BTreeSet::new();
        let (mut linked, mut with_ipv6) = (BTreeSet::new(), BTreeSet::new());
        for entry in rows(&entries) {
            let address: IpAddr = text(&entry["address"])?.parse()?;
            let id = entry["id"].as_u64();
            // Each endpoint with IPv6 also has an entry for its link-local address.
            match address {
                IpAddr::V6(ip) if ip.is_unicast_link_local() => {
                    linked.insert(id);
                    continue;
                }
                IpAddr::V6(_) => with_ipv6.insert(id),
                IpAddr::V4(_) => false,
            };
            known.insert(address);
            tables.insert(entry["policy"].as_u64().context("no table")?);
            let mut endpoints = self.endpoints.iter();
            let Some(endpoint) = endpoints.find(|one| addresses(one).any(|ip| ip == address))
            else {
                continue;
            };
            let reported = [endpoint.policy_ingress, endpoint.policy_egress];
            let reported = reported.map(|direction| direction == Enforcement::Enabled);
            ensure!(
                entry["id"] == endpoint.id
                    && entry["ifindex"] == endpoint.ifindex
                    && entry["identity"] == endpoint.identity
                    && entry["enforces-ingress"] == reported[0]
                    && entry["enforces-egress"] == reported[1],
                "{entry} is of {endpoint:?}"
            );
            ensure!(reported == enforced(endpoint), "{endpoint:?}");
        }
        same("HEALTH_ENDPOINTS", known, &self.with_health())?;
        same("link-local addresses", linked, &with_ipv6)?;

        let policy = node.listing("bpf policy get")?;
        for entry in rows(&policy) {
            let table = entry["table"].as_u64();
            ensure!(
                table.is_some_and(|table| tables.contains(&table)),
                "nobody names the table of {entry}"
            );
        }

        let cidrs: Vec<IpNet> = node
            .pod_cidrs()
            .iter()
            .map(|cidr| cidr.parse())
            .collect::<Result<_, _>>()?;
        let ipcache = node.listing("bpf ipcache list")?;
        let mut identities = BTreeMap::new();
        for entry in rows(&ipcache) {
            let prefix: IpNet = text(&entry["prefix"])?.parse()?;
            let is_pod = cidrs
                .iter()
                .any(|cidr| cidr.contains(&prefix) && *cidr != prefix);
            if is_pod {
                identities.insert(prefix.addr(), entry["identity"].as_u64());
            }
        }
        let of_endpoints = self.endpoints.iter().flat_map(|one| {
            let identity = Some(u64::from(one.identity));
            addresses(one).map(move |ip| (ip, identity))
        });
        let of_health = self
            .health
            .iter()
            .map(|ip| (*ip, Some(identity::HEALTH.into())));
        same(
            "HEALTH_IPCACHE",
            identities,
            &of_endpoints.chain(of_health).collect(),
        )?;

        let taken: Vec<TakenAddress> = http::of_agent(node, "/v1/ipam")?;
        let taken = taken.into_iter().map(|one| one.address);
        same("addresses taken", taken, &self.with_health())?;

        let files = fs::read_dir(node.runtime_dir().join("state/endpoints"))?;
        let files = files.map(|entry| Ok(entry?.file_name().display().to_string()));
        let files: Vec<String> = files.collect::<anyhow::Result<_>>()?;
        let wanted = self.endpoints.iter().map(|one| format!("{}.json", one.id));
        same("files", files, &wanted.collect())
    }
}

/// Checks that exactly the wanted items were found.
fn same<T: Ord + std::fmt::Debug>(
    what: &str,
    found: impl IntoIterator<Item = T>,
    wanted: &BTreeSet<T>,
) -> anyhow::Result<()> {
    let found: BTreeSet<T> = found.into_iter().collect();
    ensure!(found == *wanted, "{what}: {found:?}, not {wanted:?}");
    Ok(())
}

/// Checks that the inner end of an endpoint matches the agent's report, or that it does not exist if the agent reports
/// no endpoint.
pub(crate) fn is_whole(place: &Place, endpoint: Option<&Endpoint>) -> anyhow::Result<()> {
    let wanted = endpoint.map(|one| (one.inner_interface.clone(), addresses(one).collect()));
    let (found, wanted) = (place.devices()?, wanted.into_iter().collect());
    ensure!(found == wanted, "{}: {found:?}, not {wanted:?}", place.name);
    Ok(())
}

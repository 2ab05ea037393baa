//! Settings of the host's ends of veth pairs; they disappear with the devices.

use health_net::sysctl::Setting;

/// Returns the settings of the host's end, in the order in which to apply them. Some may not exist in a kernel.
pub(crate) fn outer_settings(device: &str, has_ipv4: bool, has_ipv6: bool) -> Vec<Setting> {
    let ipv4 = |name: &str, value| Setting::new(format!("ipv4/conf/{device}/{name}"), value);
    let ipv6 = |name: &str, value| Setting::new(format!("ipv6/conf/{device}/{name}"), value);
    let mut settings = vec![
        // Replies to the node's own probes arrive here, and the programs verify which packets belong to an endpoint.
        ipv4("rp_filter", "0"),
        // The endpoint must not choose the path of its packets, whatever the host's defaults are.
        ipv4("accept_source_route", "0"),
        ipv4("accept_redirects", "0"),
        ipv4("route_localnet", "0"),
        ipv6("accept_source_route", "0"),
        ipv6("accept_redirects", "0"),
        ipv6("accept_ra", "0"),
        ipv6("seg6_enabled", "0"),
        // Create no link-local address, as it would first have to pass duplicate address detection.
        ipv6("addr_gen_mode", "1"),
    ];
    if has_ipv4 {
        settings.push(ipv4("forwarding", "1"));
    }
    if has_ipv6 {
        settings.extend([ipv6("disable_ipv6", "0"), ipv6("forwarding", "1")]);
    }
    settings
}

//! Network namespaces, devices, addresses, routes and sysctls, by netlink and system calls.

pub mod rawsock;

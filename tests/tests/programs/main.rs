//! Tests of the datapath's programs on crafted packets, with `BPF_PROG_TEST_RUN`: no test bed, no traffic. All tests
//! run in one process, which loads the programs once.

mod conntrack_gc;
mod ct_list;
mod direct_packets;
mod early_fragments;
mod endpoint_flows;
mod endpoint_packets;
mod flood;
mod fuzz;
mod link_packets;
mod loading;
mod nat;
mod packets;
mod policy_flows;
mod policy_packets;
mod policy_verdicts;
mod service_errors;
mod service_flood;
mod service_packets;
mod service_ports;
mod spoofing;
mod tcp_rtt;
mod testrun;
mod verifier;
mod xdp;

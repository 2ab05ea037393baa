//! What can be wrong with an entry.

use std::fmt;
use std::net::IpAddr;

use ipnet::IpNet;

use super::{MAX_LIST_LEN, MAX_NAME_LEN};

/// An entry that cannot be used: what is wrong with it, and where.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{problem}")]
pub struct RefusedEntry<P: fmt::Display> {
    /// Place of the wrong piece.
    pub place: P,
    /// What is wrong.
    pub problem: Problem<P>,
}

/// What is wrong with an entry.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Problem<P: fmt::Display> {
    /// A name that cannot be part of `cluster/node`.
    #[error("{what} {name:?} must not be empty or contain white space or a slash")]
    InvalidName {
        /// `node name` or `cluster name`.
        what: &'static str,
        /// As written.
        name: String,
    },
    /// The name is longer than reports allow.
    #[error("{what} of {len} bytes is too long; at most {MAX_NAME_LEN} are allowed")]
    LongName {
        /// `node name` or `cluster name`.
        what: &'static str,
        /// Length in bytes.
        len: usize,
    },
    /// More addresses or prefixes than any node has.
    #[error("node {node} has {len} {what}; at most {MAX_LIST_LEN} are allowed")]
    TooMany {
        /// The node.
        node: String,
        /// What there is too much of.
        what: &'static str,
        /// Their number.
        len: usize,
    },
    /// The node has no address.
    #[error("node {0} has no address")]
    NoAddress(String),
    /// Two nodes have the same name.
    #[error("node {name} is listed twice, first at {first}")]
    DuplicateName {
        /// `cluster/node`.
        name: String,
        /// Place of the other node.
        first: P,
    },
    /// The text is not an IP address.
    #[error("{0:?} is not an IP address")]
    InvalidAddress(String),
    /// Other nodes cannot reach this one at such an address.
    #[error("{0} is not a unicast address")]
    NotUnicast(IpAddr),
    /// The same address is listed twice.
    #[error("address {address} is listed twice, first at {first} as {owner}")]
    DuplicateAddress {
        /// The address.
        address: IpAddr,
        /// The other place.
        first: P,
        /// Its owner there.
        owner: String,
    },
    /// The text is not a prefix.
    #[error("{0:?} is not a CIDR such as 10.244.1.0/24")]
    InvalidCidr(String),
    /// The text is an address with a length, instead of a prefix.
    #[error("CIDR {written} has host bits set; write {network}")]
    HostBits {
        /// As written.
        written: IpNet,
        /// What it should be.
        network: IpNet,
    },
    /// Pods cannot have addresses of this prefix. Routes for it would take away the host's own packets.
    #[error("CIDR {cidr} overlaps {special}, which is not allowed for pods")]
    SpecialCidr {
        /// As written.
        cidr: IpNet,
        /// What it overlaps.
        special: IpNet,
    },
    /// Two prefixes share addresses.
    #[error("pod CIDR {cidr} of {owner} overlaps {other} of {other_owner} at {place}")]
    OverlappingCidrs {
        /// The later one.
        cidr: IpNet,
        /// Its node.
        owner: String,
        /// The earlier one.
        other: IpNet,
        /// Its node.
        other_owner: String,
        /// Place of the earlier one.
        place: P,
    },
    /// A node's own address lies in a pod CIDR.
    #[error("address {address} of {node} lies in the pod CIDR {cidr} of {owner} at {place}")]
    AddressInPodCidr {
        /// The node's address.
        address: IpAddr,
        /// The node.
        node: String,
        /// The prefix.
        cidr: IpNet,
        /// The prefix's node.
        owner: String,
        /// Place of the prefix.
        place: P,
    },
    /// A pod CIDR contains the own address of an earlier node.
    #[error("pod CIDR {cidr} of {owner} holds the address {address} of {node} at {place}")]
    PodCidrOverAddress {
        /// The prefix.
        cidr: IpNet,
        /// Its node.
        owner: String,
        /// The other node's address.
        address: IpAddr,
        /// The other node.
        node: String,
        /// Place of the address.
        place: P,
    },
    /// The node cannot have assigned this health address.
    #[error("health address {address} is in none of the pod CIDRs of {node}")]
    OutsidePodCidrs {
        /// The address.
        address: IpAddr,
        /// Its node.
        node: String,
    },
}

pub(super) fn refused<P: Clone + fmt::Display>(place: &P, problem: Problem<P>) -> RefusedEntry<P> {
    RefusedEntry {
        place: place.clone(),
        problem,
    }
}

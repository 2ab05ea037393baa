//! The possible problems with an entry.

use std::fmt;
use std::net::IpAddr;

use ipnet::IpNet;

use super::{MAX_LIST_LEN, MAX_NAME_LEN};

/// An entry that cannot be used: the problem and its location.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{problem}")]
pub struct RefusedEntry<P: fmt::Display> {
    /// The location of the wrong part.
    pub place: P,
    /// The problem.
    pub problem: Problem<P>,
}

/// A problem with an entry.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Problem<P: fmt::Display> {
    /// A name that cannot be part of `cluster/node`.
    #[error("{what} {name:?} must not be empty or contain white space or a slash")]
    InvalidName {
        /// `node name` or `cluster name`.
        what: &'static str,
        /// The name as written.
        name: String,
    },
    /// The name is longer than reports allow.
    #[error("{what} of {len} bytes is too long; at most {MAX_NAME_LEN} are allowed")]
    LongName {
        /// `node name` or `cluster name`.
        what: &'static str,
        /// The length in bytes.
        len: usize,
    },
    /// More addresses or prefixes than any node has.
    #[error("node {node} has {len} {what}; at most {MAX_LIST_LEN} are allowed")]
    TooMany {
        /// The node.
        node: String,
        /// The kind of list that is too long.
        what: &'static str,
        /// The length of the list.
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
        /// The location of the other node.
        first: P,
    },
    /// The string is not an IP address.
    #[error("{0:?} is not an IP address")]
    InvalidAddress(String),
    /// Not a unicast address: other nodes cannot reach this node at it.
    #[error("{0} is not a unicast address")]
    NotUnicast(IpAddr),
    /// The same address is listed twice.
    #[error("address {address} is listed twice, first at {first} as {owner}")]
    DuplicateAddress {
        /// The address.
        address: IpAddr,
        /// The other location.
        first: P,
        /// The owner of the address there.
        owner: String,
    },
    /// The string is not a prefix.
    #[error("{0:?} is not a CIDR such as 10.244.1.0/24")]
    InvalidCidr(String),
    /// The prefix has host bits: it is an address with a prefix length.
    #[error("CIDR {written} has host bits set; write {network}")]
    HostBits {
        /// The prefix as written.
        written: IpNet,
        /// The same prefix without host bits.
        network: IpNet,
    },
    /// Pods cannot have addresses in this prefix. Routes for it would divert the host's own packets.
    #[error("CIDR {cidr} overlaps {special}, which is not allowed for pods")]
    SpecialCidr {
        /// The prefix as written.
        cidr: IpNet,
        /// The special prefix that it overlaps.
        special: IpNet,
    },
    /// Two prefixes share addresses.
    #[error("pod CIDR {cidr} of {owner} overlaps {other} of {other_owner} at {place}")]
    OverlappingCidrs {
        /// The later prefix.
        cidr: IpNet,
        /// The later prefix's node.
        owner: String,
        /// The earlier prefix.
        other: IpNet,
        /// The earlier prefix's node.
        other_owner: String,
        /// The location of the earlier prefix.
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
        /// The location of the prefix.
        place: P,
    },
    /// A pod CIDR contains the own address of an earlier node.
    #[error("pod CIDR {cidr} of {owner} contains the address {address} of {node} at {place}")]
    PodCidrOverAddress {
        /// The prefix.
        cidr: IpNet,
        /// The prefix's node.
        owner: String,
        /// The other node's address.
        address: IpAddr,
        /// The other node.
        node: String,
        /// The location of the address.
        place: P,
    },
    /// The health address is outside of the node's pod CIDRs, so the node cannot have assigned it.
    #[error("health address {address} is in none of the pod CIDRs of {node}")]
    OutsidePodCidrs {
        /// The address.
        address: IpAddr,
        /// The address's node.
        node: String,
    },
}

pub(super) fn refused<P: Clone + fmt::Display>(place: &P, problem: Problem<P>) -> RefusedEntry<P> {
    RefusedEntry {
        place: place.clone(),
        problem,
    }
}

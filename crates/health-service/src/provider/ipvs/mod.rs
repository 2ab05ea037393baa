//! Services by IPVS: a virtual server of the kernel for each address of a service.

pub mod diff;
pub mod netlink;
pub mod plan;
pub mod rules;
pub mod sets;

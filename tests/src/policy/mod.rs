//! The expected effect of policy on packets, as data for tests of the library and for tests with real packets.

pub mod cases;
pub mod examples;

//! The test bed.

pub mod bench;
pub mod packet;
pub mod testrun;

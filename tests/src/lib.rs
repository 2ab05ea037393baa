//! The test bed.

pub mod packet;
pub mod testrun;

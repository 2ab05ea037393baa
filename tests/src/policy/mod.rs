//! What policy must make of packets, as data for those who decide them: the library, and real packets.

pub mod cases;

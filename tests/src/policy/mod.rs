//! What policy must do with packets, as data for tests of the library and for real packets.

pub mod cases;

//! Speaks to an agent over its socket.

//! Builds everything, supervises the tasks, shuts down in order.

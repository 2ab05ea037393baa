pub(crate) mod bed;
pub(crate) mod events;
mod model;
mod scenarios;

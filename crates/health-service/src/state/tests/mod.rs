mod bed;
mod model;
mod scenarios;

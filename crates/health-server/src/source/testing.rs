//! A source for tests that read nothing from it.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use health_common::rtt::{RttKey, RttRow};
use health_model::api::{
    AgentReport, AgentState, Endpoint, HealthStatus, NodeList, PathMtuEntry, ProbeEvent,
    TargetHistory,
};
use health_settings::Settings;
use tokio::sync::mpsc;

use super::Source;

/// The source of an agent that is still starting. Panics when read.
pub(crate) struct Unasked;

impl Source for Unasked {
    fn status(&self) -> HealthStatus {
        unreachable!()
    }
    async fn probe(&self) -> HealthStatus {
        unreachable!()
    }
    fn probe_events(&self) -> mpsc::Receiver<ProbeEvent> {
        unreachable!()
    }
    fn path_mtus(&self, _: Option<&str>) -> Vec<PathMtuEntry> {
        unreachable!()
    }
    async fn probe_path_mtus(&self, _: Option<&str>) -> Vec<PathMtuEntry> {
        unreachable!()
    }
    fn history(&self, _: Option<&str>) -> Vec<TargetHistory> {
        unreachable!()
    }
    fn each_rtt(&self, _: &mut dyn FnMut(&RttKey, &RttRow) -> io::Result<()>) -> io::Result<()> {
        unreachable!()
    }
    fn nodes(&self) -> NodeList {
        unreachable!()
    }
    fn endpoints(&self) -> Vec<Arc<Endpoint>> {
        unreachable!()
    }
    fn settings(&self) -> Settings {
        unreachable!()
    }
    fn agent(&self) -> AgentReport {
        unreachable!()
    }
    fn state(&self) -> AgentState {
        unreachable!()
    }
    fn uptime(&self) -> Duration {
        unreachable!()
    }
    fn starting(&self) -> Option<String> {
        Some("waiting for node default/a".to_owned())
    }
}

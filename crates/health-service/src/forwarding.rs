//! How packets from external clients reach backends on other nodes.

use health_model::settings::ServiceForwarding;

/// The forwarding settings of this node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Forwarding {
    /// The default for services that do not set it.
    pub default: ServiceForwarding,
    /// Why only [`ServiceForwarding::Snat`] is possible, if that is so.
    pub hindrance: Option<&'static str>,
}

impl Forwarding {
    /// Returns the forwarding of a service, given the request in its annotation.
    pub fn of(&self, asked: Option<ServiceForwarding>) -> ServiceForwarding {
        match self.hindrance {
            Some(_) => ServiceForwarding::Snat,
            None => asked.unwrap_or(self.default),
        }
    }

    /// Explains why a service does not get the forwarding that its annotation requests; `None` if it does.
    pub fn problem(&self, asked: Option<ServiceForwarding>) -> Option<String> {
        let asked = asked.filter(|asked| self.of(Some(*asked)) != *asked)?;
        let why = self.hindrance?;
        Some(format!(
            "cannot use {asked}, which its annotation requests: {why}"
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ServiceForwarding::{Dsr, Hybrid, Snat};

    #[test]
    fn a_service_has_what_it_asks_for_unless_this_node_cannot() {
        let mut forwarding = Forwarding {
            default: Hybrid,
            hindrance: None,
        };
        for (asked, has) in [(None, Hybrid), (Some(Dsr), Dsr), (Some(Snat), Snat)] {
            assert_eq!(forwarding.of(asked), has);
            assert_eq!(forwarding.problem(asked), None);
        }
        forwarding.hindrance = Some("no key");
        for asked in [None, Some(Dsr), Some(Snat)] {
            assert_eq!(forwarding.of(asked), Snat);
        }
        assert_eq!(forwarding.problem(None), None);
        assert_eq!(forwarding.problem(Some(Snat)), None);
        assert_eq!(
            forwarding.problem(Some(Dsr)).as_deref(),
            Some("cannot use dsr, which its annotation requests: no key")
        );
    }
}

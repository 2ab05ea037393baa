//! Manifests of a service `shop/NAME` and its endpoints, and the objects read from them.

use std::fmt::{self, Write as _};

use health_model::manifest::{Object, objects};

use super::folder::KINDS;
use super::object::{Readable, read};
use super::{ServiceSet, Sourced, Synced};
use crate::spec::Selection;

/// A service with port 80, whose endpoints listen on 8080.
#[derive(Clone)]
pub(crate) struct ServiceText {
    name: String,
    ip: String,
    local_readiness: bool,
    endpoints: String,
}

impl ServiceText {
    pub(crate) fn new(name: &str, ip: &str) -> Self {
        Self {
            name: name.to_owned(),
            ip: ip.to_owned(),
            local_readiness: false,
            endpoints: String::new(),
        }
    }

    /// Sets the annotation `local-readiness`.
    pub(crate) fn local_readiness(mut self, is_set: bool) -> Self {
        self.local_readiness = is_set;
        self
    }

    /// Adds an endpoint with these conditions in YAML.
    pub(crate) fn endpoint(mut self, address: &str, node: &str, conditions: &str) -> Self {
        writeln!(
            self.endpoints,
            "- {{addresses: [{address}], nodeName: {node}, conditions: {conditions}}}"
        )
        .unwrap();
        self
    }
}

impl fmt::Display for ServiceText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            name,
            ip,
            local_readiness,
            endpoints,
        } = self;
        write!(
            f,
            "\
apiVersion: v1
kind: Service
metadata:
  namespace: shop
  name: {name}
  annotations:
    service.health-agent.io/local-readiness: '{local_readiness}'
spec: {{clusterIP: {ip}, ports: [{{port: 80}}]}}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {{namespace: shop, name: {name}, labels: {{kubernetes.io/service-name: {name}}}}}
addressType: IPv4
ports: [{{port: 8080}}]
endpoints:
{endpoints}---
"
        )
    }
}

/// The set of a source with these manifests.
pub(crate) fn service_set(source: &str, texts: &[ServiceText]) -> ServiceSet {
    let mut set = ServiceSet {
        synced: Synced {
            services: true,
            slices: true,
        },
        ..ServiceSet::default()
    };
    for text in texts {
        let [service, slice] = &objects(&text.to_string(), &KINDS)[..] else {
            panic!("{text}")
        };
        let object = |found: &Result<_, _>| Result::clone(found).expect("an object");
        let (name, service) = sourced(source, object(service));
        set.services.insert(name, service);
        let (name, slice) = sourced(source, object(slice));
        set.slices.insert(name, slice);
    }
    set
}

fn sourced<T: Readable>(source: &str, object: Object) -> (T::Name, Sourced<T>) {
    let Ok(reading) = read::<T>(object, &Selection::default()) else {
        panic!("an object without errors")
    };
    let sourced = Sourced {
        object: reading.object.ok().map(Into::into),
        trigger_time: reading.trigger_time,
        source: source.into(),
    };
    (reading.name, sourced)
}

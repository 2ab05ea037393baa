//! One object of a source that stores objects individually, with its problems.

use std::fmt;
use std::sync::Arc;

use health_model::api::ServiceProblem;
use health_model::manifest::{Problem, objects};
use serde_json::Value;
use tracing::warn;

use super::Sourced;
use super::object::{Readable, Unreadable, read, read_leniently};
use crate::spec::{EndpointSlice, Extent, Selection, Service, ServiceName, SliceName, SpecError};

/// The value of [`Sourced::source`] for objects of the API.
pub(super) const API: &str = "kubernetes";

/// The known state of an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Known<N, T> {
    /// The last readable form of the object, if there ever was one.
    good: Option<(N, Sourced<T>)>,
    /// Distinguishes API objects with the same name.
    uid: Option<String>,
    /// The object's current problems.
    problems: Vec<ServiceProblem>,
}

/// The known state of a service.
pub type KnownService = Known<ServiceName, Service>;
/// The known state of an endpoint slice.
pub type KnownSlice = Known<SliceName, EndpointSlice>;

impl<T: Readable> Known<T::Name, T> {
    /// Reads an API object; `before` is the previous state under this name. A field with an error is left out and the
    /// rest of the object is used, as in kube-proxy. If this leaves nothing to serve, the last good form stays.
    pub fn of_api(object: Value, before: Option<&Self>, selection: &Selection) -> Self {
        let uid = object.pointer("/metadata/uid").and_then(Value::as_str);
        let uid = uid.map(str::to_owned);
        let read = read_leniently::<T>(object, selection);
        let is_whole = read.errors.is_empty();
        let good = match read.reading {
            Some(reading) if is_whole || (read.is_typed && reading.object.is_ok()) => {
                let sourced = Sourced {
                    object: reading.object.ok().map(Arc::new),
                    trigger_time: reading.trigger_time,
                    source: API.into(),
                };
                Some((reading.name, sourced))
            }
            _ => {
                let before = before.filter(|before| before.uid == uid);
                before.and_then(|before| before.good.clone())
            }
        };
        Self {
            good,
            uid,
            problems: problems(API, read.errors.iter()),
        }
        .log_new_problems(before)
    }

    /// Reads the manifest of an object with this `NAMESPACE/NAME`; `before` is the previous state from the same place.
    /// List members with an error are left out; with any other error, the last good form stays.
    pub(crate) fn of_manifest(
        name: &str,
        text: Result<&[u8], String>,
        source: &str,
        before: Option<&Self>,
        selection: &Selection,
    ) -> Self {
        let (good, problems) = match read_manifest::<T>(name, text, source, selection) {
            Ok((good, errors)) => (Some(good), problems(source, errors.iter())),
            Err(wrong) => {
                let before = before.and_then(|before| before.good.clone());
                (before, problems(source, wrong.iter()))
            }
        };
        Self {
            good,
            uid: None,
            problems,
        }
        .log_new_problems(before)
    }
}

impl<N, T> Known<N, T> {
    /// Returns the object's problems.
    pub fn problems(&self) -> &[ServiceProblem] {
        &self.problems
    }

    /// Returns the object, if it ever was readable.
    pub(super) fn good(&self) -> Option<&(N, Sourced<T>)> {
        self.good.as_ref()
    }

    /// Logs the problems that did not exist before.
    fn log_new_problems(self, before: Option<&Self>) -> Self {
        let is_new =
            |one: &&ServiceProblem| before.is_none_or(|before| !before.problems.contains(one));
        for ServiceProblem { subject, problem } in self.problems.iter().filter(is_new) {
            warn!(source = subject, problem, "a service object has an error");
        }
        self
    }
}

/// An object with its name, and the errors in parts that were left out.
type Read<T> = ((<T as Readable>::Name, Sourced<T>), Vec<SpecError>);

fn read_manifest<T: Readable>(
    name: &str,
    text: Result<&[u8], String>,
    source: &str,
    selection: &Selection,
) -> Result<Read<T>, Vec<String>> {
    let wrong = |path: &str, problem: Problem| {
        let error = SpecError {
            kind: T::KIND,
            object: name.to_owned(),
            path: path.to_owned(),
            problem,
            extent: Extent::Object,
        };
        vec![error.to_string()]
    };
    let text = text.map_err(|error| vec![error])?;
    let text = std::str::from_utf8(text).map_err(|error| vec![error.to_string()])?;
    let mut found = objects(text, &T::KINDS);
    let object = match (found.pop(), found.is_empty()) {
        (Some(Ok(object)), true) if object.prefix.is_empty() => object,
        (Some(Err(none)), true) => {
            return Err(match &*none.path {
                "" => vec![none.problem.to_string()],
                path => wrong(path, none.problem),
            });
        }
        _ => {
            let noun = T::KINDS.noun;
            return Err(vec![format!("must be exactly one {noun}")]);
        }
    };
    let reading = match read::<T>(object, selection) {
        Ok(reading) => reading,
        Err(Unreadable { errors, .. }) => {
            return Err(errors.iter().map(ToString::to_string).collect());
        }
    };
    if reading.name.to_string() != name {
        let detail = format!("must be {name}, as in its key");
        let problem = Problem::invalid(&reading.name.to_string(), detail);
        return Err(wrong("metadata", problem));
    }
    let sourced = Sourced {
        object: reading.object.ok().map(Arc::new),
        trigger_time: reading.trigger_time,
        source: source.into(),
    };
    Ok(((reading.name, sourced), reading.errors))
}

fn problems<E: fmt::Display>(
    subject: &str,
    errors: impl Iterator<Item = E>,
) -> Vec<ServiceProblem> {
    let problem = |error: E| ServiceProblem {
        subject: subject.to_owned(),
        problem: error.to_string(),
    };
    errors.map(problem).collect()
}

/// The manifest of one object, from a store with the keys `services/NAMESPACE/NAME` and
/// `endpointslices/NAMESPACE/NAME`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ServiceDocument {
    /// A service.
    Service(KnownService),
    /// An endpoint slice.
    Slice(KnownSlice),
    /// A document whose key is of neither kind.
    Other(ServiceProblem),
}

impl ServiceDocument {
    /// Reads the document at a key, or the reason why it could not be fetched. `source` names its location, and
    /// `before` is the previous state from there.
    pub fn read(
        key: &str,
        text: Result<&[u8], String>,
        source: &str,
        before: Option<&Self>,
        selection: &Selection,
    ) -> Self {
        let is_full_name = |name: &&str| name.split('/').count() == 2;
        let of = |folder: &str| key.strip_prefix(folder).filter(is_full_name);
        if let Some(name) = of("services/") {
            let before = before.and_then(Self::service);
            let known = KnownService::of_manifest(name, text, source, before, selection);
            return Self::Service(known);
        }
        if let Some(name) = of("endpointslices/") {
            let before = before.and_then(Self::slice);
            let known = KnownSlice::of_manifest(name, text, source, before, selection);
            return Self::Slice(known);
        }
        Self::Other(ServiceProblem {
            subject: source.to_owned(),
            problem: "the key must be services/NAMESPACE/NAME or endpointslices/NAMESPACE/NAME"
                .to_owned(),
        })
    }

    pub(super) fn service(&self) -> Option<&KnownService> {
        match self {
            Self::Service(known) => Some(known),
            _ => None,
        }
    }

    pub(super) fn slice(&self) -> Option<&KnownSlice> {
        match self {
            Self::Slice(known) => Some(known),
            _ => None,
        }
    }

    pub(super) fn other(&self) -> &[ServiceProblem] {
        match self {
            Self::Other(problem) => std::slice::from_ref(problem),
            _ => &[],
        }
    }
}

#[cfg(test)]
mod tests {
    use imbl::OrdMap;
    use serde_json::json;

    use super::super::{Gathered, ServiceSet, Synced};
    use super::*;

    /// Gathers documents, each under its own key.
    fn gathered<'a>(documents: impl IntoIterator<Item = &'a ServiceDocument>) -> ServiceSet {
        let documents = documents.into_iter().cloned().map(Arc::new).enumerate();
        let table: OrdMap<_, _> = documents
            .map(|(key, document)| (key.to_string(), document))
            .collect();
        let mut gathered = Gathered::default();
        gathered.take_documents(&table);
        gathered.set([], Synced::default())
    }

    const ALL: Selection = Selection { proxy_name: None };

    fn service(ip: &str) -> Value {
        json!({
            "apiVersion": "v1", "kind": "Service",
            "metadata": { "namespace": "shop", "name": "web", "uid": "u-1" },
            "spec": { "clusterIP": ip, "ports": [{ "port": 80 }] },
        })
    }

    fn slice(endpoint: &str) -> Value {
        json!({
            "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
            "metadata": {
                "namespace": "shop", "name": "web-1", "uid": "u-2",
                "labels": { "kubernetes.io/service-name": "web" },
            },
            "addressType": "IPv4", "ports": [{ "name": "", "port": 8080 }],
            "endpoints": [{ "addresses": [endpoint] }],
        })
    }

    /// Returns the first ClusterIP of a service, if the service is served.
    fn ip(known: &KnownService) -> Option<String> {
        let (_, sourced) = known.good.as_ref()?;
        let service = sourced.object.as_ref()?;
        Some(service.common.cluster_ips[0].to_string())
    }

    fn reported(problems: &[ServiceProblem]) -> Vec<String> {
        let line = |one: &ServiceProblem| format!("{}: {}", one.subject, one.problem);
        problems.iter().map(line).collect()
    }

    #[test]
    fn of_an_object_of_the_api_a_field_with_an_error_is_left_out_and_the_rest_holds() {
        let mut object = slice("10.1.0.1");
        object["metadata"]["annotations"] = json!({ "service.health-agent.io/weight": "much" });
        let first = KnownSlice::of_api(slice("10.1.0.9"), None, &ALL);
        assert_eq!(first.problems(), []);
        let known = KnownSlice::of_api(object, Some(&first), &ALL);
        let set = gathered([&ServiceDocument::Slice(known)]);
        let read = set.slices[&SliceName::new("shop", "web-1")].object.as_ref();
        let read = read.expect("a slice");
        assert_eq!(read.endpoints[0].address.to_string(), "10.1.0.1");
        assert_eq!(read.weight, 1);
        let reported = reported(&set.problems);
        assert_eq!(reported.len(), 1);
        assert!(
            reported[0].starts_with("kubernetes: endpoint slice shop/web-1: metadata.annotations"),
            "{reported:?}"
        );
    }

    #[test]
    fn of_an_object_of_the_api_that_cannot_be_read_the_last_good_form_stays() {
        let first = KnownService::of_api(service("10.96.0.1"), None, &ALL);
        let mut wrong_type = service("10.96.0.2");
        wrong_type["spec"]["ports"] = json!("http");
        for bad in [wrong_type.clone(), service("10.96.0.999")] {
            let kept = KnownService::of_api(bad, Some(&first), &ALL);
            assert_eq!(ip(&kept).as_deref(), Some("10.96.0.1"));
            assert!(!kept.problems().is_empty());
        }
        // Another object with the same name inherits nothing from the first.
        wrong_type["metadata"]["uid"] = "u-3".into();
        let other = KnownService::of_api(wrong_type, Some(&first), &ALL);
        assert_eq!(ip(&other), None);
    }

    #[test]
    fn a_service_of_the_api_without_an_address_is_no_error() {
        let mut object = service("");
        let known = KnownService::of_api(object.clone(), None, &ALL);
        assert_eq!((ip(&known), known.problems()), (None, &[][..]));
        object["spec"]["clusterIP"] = "None".into();
        let known = KnownService::of_api(object, None, &ALL);
        assert_eq!((ip(&known), known.problems()), (None, &[][..]));
    }

    fn document(key: &str, text: &str, before: Option<&ServiceDocument>) -> ServiceDocument {
        ServiceDocument::read(
            key,
            Ok(text.as_bytes()),
            &format!("etcd:{key}"),
            before,
            &ALL,
        )
    }

    #[test]
    fn a_broken_document_is_named_by_its_key_and_keeps_its_last_good_form() {
        const KEY: &str = "services/shop/web";
        let good = document(KEY, &service("10.96.0.1").to_string(), None);
        let list = json!({ "kind": "List", "apiVersion": "v1", "items": [service("10.96.0.2")] });
        let mut unknown_type = service("10.96.0.2");
        unknown_type["spec"]["type"] = "Magic".into();
        for (text, expected) in [
            ("{".to_owned(), "etcd:services/shop/web: "),
            (String::new(), "no service found"),
            (
                slice("10.1.0.1").to_string(),
                r#"kind: Unsupported value: "EndpointSlice": supported values: "Service""#,
            ),
            (list.to_string(), "must be exactly one service"),
            (
                service("10.96.0.2").to_string().replace("shop", "other"),
                r#"metadata: Invalid value: "other/web": must be shop/web"#,
            ),
            (service("").to_string(), "spec.clusterIP: Required value"),
            (
                unknown_type.to_string(),
                r#"spec.type: Unsupported value: "Magic""#,
            ),
        ] {
            let kept = document(KEY, &text, Some(&good));
            let set = gathered([&kept]);
            let read = &set.services[&ServiceName::new("shop", "web")];
            assert_eq!(&*read.source, "etcd:services/shop/web");
            let reported = reported(&set.problems);
            assert!(reported[0].contains(expected), "{reported:?} for {text}");
            assert!(
                reported[0].starts_with("etcd:services/shop/web: "),
                "{reported:?}"
            );
            let again = document(KEY, &service("10.96.0.3").to_string(), Some(&kept));
            let ServiceDocument::Service(again) = again else {
                panic!("{again:?}")
            };
            assert_eq!(ip(&again).as_deref(), Some("10.96.0.3"));
        }
        let unread =
            ServiceDocument::read(KEY, Err("too large".to_owned()), "etcd", Some(&good), &ALL);
        let set = gathered([&unread]);
        assert_eq!(
            (set.services.len(), reported(&set.problems)),
            (1, vec!["etcd: too large".to_owned()])
        );
    }

    #[test]
    fn a_document_may_be_yaml_and_has_fewer_fields_than_the_api_gives() {
        let text = "\
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {namespace: shop, name: web-1, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
ports: [{port: 8080}]
endpoints:
- {addresses: [10.244.1.7], nodeName: hnode1}
- {addresses: [10.244.2.9], nodeName: hnode2}
";
        let known = document("endpointslices/shop/web-1", text, None);
        let set = gathered([&known]);
        let slice = set.slices[&SliceName::new("shop", "web-1")].object.as_ref();
        assert_eq!(slice.expect("a slice").endpoints.len(), 2);
        assert_eq!(*set.problems, []);
    }

    #[test]
    fn a_key_of_something_else_is_named_and_the_others_are_there() {
        let slice = document(
            "endpointslices/shop/web-1",
            &slice("10.1.0.1").to_string(),
            None,
        );
        let others = ["services/web", "services/a/b/c", "pods/shop/web", ""];
        let others = others.map(|key| document(key, "{}", None));
        let set = gathered(others.iter().chain([&slice]));
        assert_eq!(
            (set.services.len(), set.slices.len(), set.problems.len()),
            (0, 1, 4)
        );
        assert!(set.problems[0].problem.contains("services/NAMESPACE/NAME"));
    }
}

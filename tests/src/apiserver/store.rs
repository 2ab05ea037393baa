//! Objects of one kind and their changes by revision, as an API server stores them. No network involved.

use std::collections::{BTreeMap, HashMap};

use serde_json::{Map, Value, json};

/// A change, as watches report it.
#[derive(Debug)]
struct Change {
    revision: u64,
    before: Option<Value>,
    after: Option<Value>,
}

/// The rest of a list, for its next page.
#[derive(Debug)]
struct Rest {
    revision: u64,
    objects: Vec<Value>,
}

/// A page of a list.
#[derive(Debug)]
pub(super) struct Page {
    pub(super) revision: u64,
    pub(super) objects: Vec<Value>,
    /// Token to request the next page.
    pub(super) token: Option<String>,
}

/// The requested revision is no longer available.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Gone;

/// The contents of a store at one moment.
#[derive(Clone, Debug)]
pub(super) struct Snapshot {
    objects: BTreeMap<String, Value>,
    revision: u64,
}

/// All objects of one kind.
#[derive(Debug, Default)]
pub(super) struct Store {
    objects: BTreeMap<String, Value>,
    revision: u64,
    changes: Vec<Change>,
    /// Changes up to this revision are no longer kept.
    compacted: u64,
    lists: HashMap<String, Rest>,
}

impl Store {
    pub(super) fn revision(&self) -> u64 {
        self.revision
    }

    pub(super) fn get(&self, name: &str) -> Option<&Value> {
        self.objects.get(name)
    }

    /// Creates or replaces an object. Returns the new revision.
    pub(super) fn put(&mut self, mut object: Value) -> u64 {
        let name = key(&object);
        let before = self.objects.get(&name).cloned();
        self.revision += 1;
        let metadata = &mut object["metadata"];
        if metadata["creationTimestamp"].is_null() {
            // Timestamps increase in the order of creation.
            let (minutes, seconds) = (self.revision / 60, self.revision % 60);
            let (hours, minutes) = (minutes / 60, minutes % 60);
            let time = format!("2026-01-01T{hours:02}:{minutes:02}:{seconds:02}Z");
            metadata["creationTimestamp"] = before.as_ref().map_or_else(
                || time.into(),
                |before| before["metadata"]["creationTimestamp"].clone(),
            );
        }
        metadata["resourceVersion"] = self.revision.to_string().into();
        self.objects.insert(name, object.clone());
        self.note(before, Some(object))
    }

    /// Deletes an object if it exists. Returns the new revision.
    pub(super) fn delete(&mut self, name: &str) -> u64 {
        let Some(mut before) = self.objects.remove(name) else {
            return self.revision;
        };
        self.revision += 1;
        before["metadata"]["resourceVersion"] = self.revision.to_string().into();
        self.note(Some(before), None)
    }

    fn note(&mut self, before: Option<Value>, after: Option<Value>) -> u64 {
        self.changes.push(Change {
            revision: self.revision,
            before,
            after,
        });
        self.revision
    }

    /// Applies a JSON merge patch (RFC 7396), or a strategic one, which merges the conditions of a status by type.
    /// Returns `None` if the object does not exist. A patch that changes nothing creates no revision.
    pub(super) fn patch(&mut self, name: &str, patch: &Value, is_strategic: bool) -> Option<Value> {
        let before = self.objects.get(name)?;
        let mut after = before.clone();
        merge(&mut after, patch);
        if is_strategic && let Some(own) = patch["status"]["conditions"].as_array() {
            let others = before["status"]["conditions"]
                .as_array()
                .into_iter()
                .flatten();
            let is_other = |one: &&Value| own.iter().all(|own| own["type"] != one["type"]);
            let merged = others.filter(is_other).chain(own).cloned();
            after["status"]["conditions"] = merged.collect();
        }
        if after != *before {
            self.put(after);
        }
        self.objects.get(name).cloned()
    }

    /// Loses all objects and all changes. Returns the new revision.
    pub(super) fn lose_all(&mut self) -> u64 {
        self.objects.clear();
        self.revision += 1;
        self.compact();
        self.revision
    }

    /// The present contents, for [`Self::restore`].
    pub(super) fn snapshot(&self) -> Snapshot {
        Snapshot {
            objects: self.objects.clone(),
            revision: self.revision,
        }
    }

    /// Returns to earlier contents and an earlier revision, as an etcd that is restored from a backup.
    pub(super) fn restore(&mut self, snapshot: Snapshot) {
        self.objects = snapshot.objects;
        self.revision = snapshot.revision;
        self.compact();
    }

    pub(super) fn compact(&mut self) {
        self.compacted = self.revision;
        self.changes.clear();
        self.lists.clear();
    }

    pub(super) fn list(&mut self, selector: &Selector, limit: Option<usize>) -> Page {
        let matching = self
            .objects
            .values()
            .filter(|object| selector.matches(object));
        let objects = matching.cloned().collect();
        let revision = self.revision;
        self.page(Rest { revision, objects }, limit)
    }

    /// Returns the next page, from the same revision as the first one.
    pub(super) fn continue_list(
        &mut self,
        token: &str,
        limit: Option<usize>,
    ) -> Result<Page, Gone> {
        let rest = self.lists.remove(token).ok_or(Gone)?;
        Ok(self.page(rest, limit))
    }

    fn page(&mut self, mut rest: Rest, limit: Option<usize>) -> Page {
        let revision = rest.revision;
        let limit = limit.unwrap_or(usize::MAX).min(rest.objects.len());
        let later = rest.objects.split_off(limit);
        let token = (!later.is_empty()).then(|| {
            let token = format!("{revision}-{}", later.len());
            let objects = later;
            self.lists.insert(token.clone(), Rest { revision, objects });
            token
        });
        Page {
            revision,
            objects: rest.objects,
            token,
        }
    }

    /// The events after a revision. An object that starts or stops matching the selector is reported as added or
    /// deleted.
    pub(super) fn events(&self, after: u64, selector: &Selector) -> Result<Vec<Value>, Gone> {
        if after < self.compacted {
            return Err(Gone);
        }
        let from = self
            .changes
            .partition_point(|change| change.revision <= after);
        let newer = self.changes[from..].iter();
        Ok(newer.filter_map(|change| change.event(selector)).collect())
    }
}

impl Change {
    fn event(&self, selector: &Selector) -> Option<Value> {
        let matching = |object: &Option<Value>| object.clone().filter(|o| selector.matches(o));
        let (kind, mut object) = match (matching(&self.before), matching(&self.after)) {
            (None, Some(after)) => ("ADDED", after),
            (Some(_), Some(after)) => ("MODIFIED", after),
            (Some(before), None) => ("DELETED", before),
            (None, None) => return None,
        };
        object["metadata"]["resourceVersion"] = self.revision.to_string().into();
        Some(json!({ "type": kind, "object": object }))
    }
}

/// `NAME`, or `NAMESPACE/NAME` for namespaced objects.
fn key(object: &Value) -> String {
    let metadata = &object["metadata"];
    let name = metadata["name"].as_str().unwrap_or_default();
    match metadata["namespace"].as_str() {
        Some(namespace) => format!("{namespace}/{name}"),
        None => name.to_owned(),
    }
}

fn merge(target: &mut Value, patch: &Value) {
    let Value::Object(patch) = patch else {
        *target = patch.clone();
        return;
    };
    if !target.is_object() {
        *target = Value::Object(Map::new());
    }
    for (key, value) in patch {
        if value.is_null() {
            if let Value::Object(target) = target {
                target.remove(key);
            }
        } else {
            merge(&mut target[key.as_str()], value);
        }
    }
}

/// A selector: labels in the forms `key`, `!key`, `key=value` and `key!=value`, and fields in the last two forms.
#[derive(Debug, Default)]
pub(super) struct Selector {
    labels: Vec<(String, Requirement)>,
    /// Field requirements by JSON pointer.
    fields: Vec<(String, Requirement)>,
}

#[derive(Debug)]
enum Requirement {
    Exists,
    Absent,
    Is(String),
    IsNot(String),
}

impl Selector {
    pub(super) fn parse(labels: &str, fields: &str) -> Self {
        let fields = requirements(fields).into_iter();
        Self {
            labels: requirements(labels),
            fields: fields
                .map(|(path, requirement)| (format!("/{}", path.replace('.', "/")), requirement))
                .collect(),
        }
    }

    fn matches(&self, object: &Value) -> bool {
        let labels = &object["metadata"]["labels"];
        let mut labels = self
            .labels
            .iter()
            .map(|(key, requirement)| (labels.get(key), requirement));
        let mut fields = self
            .fields
            .iter()
            .map(|(path, requirement)| (object.pointer(path), requirement));
        let is_met = |(value, requirement): (Option<&Value>, &Requirement)| {
            requirement.is_met_by(value.and_then(Value::as_str))
        };
        labels.all(is_met) && fields.all(is_met)
    }
}

fn requirements(text: &str) -> Vec<(String, Requirement)> {
    let terms = text.split(',').filter(|term| !term.is_empty());
    terms
        .map(|term| {
            if let Some((key, value)) = term.split_once("!=") {
                (key.to_owned(), Requirement::IsNot(value.to_owned()))
            } else if let Some((key, value)) = term.split_once('=') {
                let value = value.trim_start_matches('=');
                (key.to_owned(), Requirement::Is(value.to_owned()))
            } else if let Some(key) = term.strip_prefix('!') {
                (key.to_owned(), Requirement::Absent)
            } else {
                (term.to_owned(), Requirement::Exists)
            }
        })
        .collect()
}

impl Requirement {
    fn is_met_by(&self, value: Option<&str>) -> bool {
        match self {
            Self::Exists => value.is_some(),
            Self::Absent => value.is_none(),
            Self::Is(wanted) => value == Some(wanted),
            Self::IsNot(unwanted) => value != Some(unwanted),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(name: &str) -> Value {
        json!({ "metadata": { "name": name } })
    }

    #[test]
    fn pages_are_of_one_moment_and_gone_after_a_compaction() {
        let mut store = Store::default();
        for name in ["a", "b", "c"] {
            store.put(named(name));
        }
        let all = Selector::default();
        let first = store.list(&all, Some(2));
        store.delete("c");
        let token = first.token.unwrap();
        let second = store.continue_list(&token, Some(2)).unwrap();
        assert_eq!(
            (second.revision, second.objects.len(), second.token),
            (3, 1, None)
        );
        let token = store.list(&all, Some(1)).token.unwrap();
        store.compact();
        assert_eq!(store.continue_list(&token, None).unwrap_err(), Gone);
        assert_eq!(store.events(3, &all).unwrap_err(), Gone);
        assert!(store.events(4, &all).unwrap().is_empty());
    }

    #[test]
    fn a_field_makes_an_object_come_into_a_watch() {
        let mut store = Store::default();
        let pod = |node: Option<&str>| json!({ "metadata": { "namespace": "shop", "name": "web" }, "spec": { "nodeName": node } });
        store.put(pod(None));
        store.put(pod(Some("n1")));
        let of = |node: &str| Selector::parse("", &format!("spec.nodeName={node}"));
        let events = store.events(0, &of("n1")).unwrap();
        assert_eq!((events.len(), &events[0]["type"]), (1, &json!("ADDED")));
        assert!(store.events(0, &of("n2")).unwrap().is_empty());
        assert!(store.get("shop/web").is_some());
    }

    #[test]
    fn a_label_makes_an_object_leave_a_watch_and_a_null_removes_a_key() {
        let mut store = Store::default();
        store.put(named("a"));
        let selector = Selector::parse("!out,type!=virtual", "");
        store
            .patch(
                "a",
                &json!({ "metadata": { "labels": { "out": "" } } }),
                false,
            )
            .unwrap();
        store
            .patch(
                "a",
                &json!({ "metadata": { "labels": { "out": null } } }),
                false,
            )
            .unwrap();
        let events = store.events(0, &selector).unwrap();
        let kinds: Vec<_> = events
            .iter()
            .map(|event| event["type"].as_str().unwrap())
            .collect();
        assert_eq!(kinds, ["ADDED", "DELETED", "ADDED"]);
        let revision = store.revision();
        store
            .patch(
                "a",
                &json!({ "metadata": { "labels": { "none": null } } }),
                false,
            )
            .unwrap();
        assert_eq!(store.revision(), revision);
    }
}

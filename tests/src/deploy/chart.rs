//! The Helm chart in `deploy/helm/health-agent`: made from the objects of the kustomization, without and with each
//! component.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail, ensure};
use serde_json::{Map, Value};

use super::kustomization::{self, API_SERVER, Inputs};
use super::{template, yaml};

/// The chart's folder.
const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy/helm/health-agent");
/// First line of each file.
const HEAD: &str =
    "# Made by `cargo xtask helm` from deploy/kubernetes, which has the reasons in comments.\n";
/// Keys that come first in a map.
const FIRST_KEYS: [&str; 4] = ["apiVersion", "kind", "metadata", "name"];
/// The object with the settings of all agents.
const SETTINGS: &str = "health-agent-config";

/// The files of the chart.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chart(BTreeMap<PathBuf, String>);

impl Chart {
    /// Makes the chart from the kustomization.
    pub fn generate() -> anyhow::Result<Self> {
        let names = kustomization::components()?;
        let inputs = Inputs {
            api_server: API_SERVER,
            mesh_key: "",
        };
        let base = kustomization::objects(&[], inputs)?;
        let mut variants = Vec::new();
        for name in &names {
            variants.push((
                name.as_str(),
                kustomization::objects(&[name.as_str()], inputs)?,
            ));
        }
        let mut files = BTreeMap::new();
        files.insert("Chart.yaml".into(), description());
        files.insert("values.yaml".into(), values(&base, &names)?);
        for object in &base {
            let others = variants.iter().map(|(component, objects)| {
                let other = objects.iter().find(|other| key(other) == key(object));
                let other =
                    other.with_context(|| format!("{component} removes {}", key(object)))?;
                Ok((*component, other))
            });
            let others: anyhow::Result<Vec<_>> = others.collect();
            let writer = Writer::new(object);
            let mut text = writer.node("", object, &others?, 0)?;
            if object["kind"] == "Secret" {
                text = guarded(".Values.meshKey", &text);
            }
            files.insert(file_name(object), format!("{HEAD}{text}"));
        }
        for (component, objects) in &variants {
            for object in objects {
                if base.iter().any(|other| key(other) == key(object)) {
                    continue;
                }
                let text = Writer::new(object).node("", object, &[], 0)?;
                let text = guarded(&switch(component), &text);
                let former = files.insert(file_name(object), format!("{HEAD}{text}"));
                ensure!(former.is_none(), "two components have {}", key(object));
            }
        }
        Ok(Self(files))
    }

    /// Reads the chart that is in the repository.
    pub fn committed() -> anyhow::Result<Self> {
        let mut files = BTreeMap::new();
        for folder in ["", "templates"] {
            let folder = Path::new(folder);
            let path = Path::new(FOLDER).join(folder);
            let entries = fs::read_dir(&path);
            for entry in entries.with_context(|| format!("cannot list {}", path.display()))? {
                let entry = entry?;
                if entry.file_type()?.is_file() {
                    let text = fs::read_to_string(entry.path())?;
                    files.insert(folder.join(entry.file_name()), text);
                }
            }
        }
        Ok(Self(files))
    }

    /// Writes the chart into the repository in place of the former one.
    pub fn write(&self) -> anyhow::Result<()> {
        let templates = Path::new(FOLDER).join("templates");
        if templates.exists() {
            fs::remove_dir_all(&templates).context("cannot remove the former templates")?;
        }
        fs::create_dir_all(&templates).context("cannot create the chart's folder")?;
        for (name, text) in &self.0 {
            let path = Path::new(FOLDER).join(name);
            fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
        }
        Ok(())
    }

    /// The objects that `helm install` creates with these values in place of those of `values.yaml`.
    pub fn render(&self, changed: &Value) -> anyhow::Result<Vec<Value>> {
        let values = self.0.get(Path::new("values.yaml"));
        let mut values: Value = serde_saphyr::from_str(values.context("no values.yaml")?)?;
        json_patch::merge(&mut values, changed);
        let mut objects = Vec::new();
        for (name, text) in self
            .0
            .iter()
            .filter(|(name, _)| name.starts_with("templates"))
        {
            let name = name.display().to_string();
            let text = template::render(&name, text, &values)?;
            let documents: Vec<Option<Value>> = serde_saphyr::from_multiple(&text)
                .with_context(|| format!("{name} does not render YAML:\n{text}"))?;
            objects.extend(documents.into_iter().flatten());
        }
        Ok(objects)
    }
}

/// What identifies an object.
fn key(object: &Value) -> String {
    let metadata = &object["metadata"];
    format!(
        "{} {} {}",
        object["kind"], metadata["namespace"], metadata["name"]
    )
}

fn file_name(object: &Value) -> PathBuf {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let kind = text(&object["kind"]).to_lowercase();
    let name = text(&object["metadata"]["name"]);
    Path::new("templates").join(format!("{kind}-{name}.yaml"))
}

fn description() -> String {
    let version = env!("CARGO_PKG_VERSION");
    format!(
        "{HEAD}apiVersion: v2\n\
         name: health-agent\n\
         description: Connectivity health, endpoints, policies and services of a cluster's nodes\n\
         type: application\n\
         version: {version}\n\
         appVersion: \"{version}\"\n"
    )
}

/// The values that users may change, with those of the kustomization.
fn values(base: &[Value], components: &[String]) -> anyhow::Result<String> {
    let agents = base.iter().find(|object| object["kind"] == "DaemonSet");
    let pod = &agents.context("no DaemonSet")?["spec"]["template"]["spec"];
    let (repository, tag) = image(pod)?;
    let settings = base
        .iter()
        .find(|object| object["metadata"]["name"] == SETTINGS);
    let settings = settings.context("no settings")?["data"]["config.yaml"].as_str();
    let settings = settings.context("no config.yaml")?;
    let mut text = format!(
        "{HEAD}
# The image of all containers.
image:
  repository: {repository}
  tag: {tag}
  pullPolicy: {policy}

# Parts that are off by default: docs/kubernetes.md describes them.
components:
",
        tag = yaml::scalar_text(tag),
        policy = yaml::flow(&pod["containers"][0]["imagePullPolicy"]),
    );
    for component in components {
        writeln!(text, "  {}: false", yaml::scalar_text(component))?;
    }
    write!(
        text,
        "
# With services: an address of the API server that works while nobody serves its ClusterIP.
apiServer:
  host: {API_SERVER}
  port: 6443

# The mesh key: --set-file meshKey=FILE. Without it, create the Secret health-agent-mesh-key yourself.
meshKey: \"\"

# Settings of all agents: --set-file config=FILE. A text with the keys of docs/settings.md.
config: |
"
    )?;
    for line in settings.lines() {
        writeln!(text, "  {line}")?;
    }
    write!(
        text,
        "
priorityClassName: {priority}
tolerations:
{tolerations}
# Requests and limits of the agent in place of those in the template, which depend on the components.
resources: {{}}
",
        priority = yaml::flow(&pod["priorityClassName"]),
        tolerations = yaml::block(&pod["tolerations"], 2),
    )?;
    Ok(text)
}

/// Repository and tag of the agent's image.
fn image(pod: &Value) -> anyhow::Result<(&str, &str)> {
    let image = pod["containers"][0]["image"].as_str();
    let parts = image.and_then(|image| image.rsplit_once(':'));
    parts.context("the agent's image has no tag")
}

/// The value that turns a component on.
fn switch(component: &str) -> String {
    format!(".Values.components.{component}")
}

/// Lines that are rendered only under a condition.
fn guarded(condition: &str, lines: &str) -> String {
    format!("{{{{- if {condition} }}}}\n{lines}{{{{- end }}}}\n")
}

/// What replaces a value in a template.
enum Substitute {
    /// A scalar.
    Scalar(&'static str),
    /// A string of several lines.
    Text(&'static str),
    /// A list or map.
    Block(&'static str),
    /// A map that replaces the value unless it is empty.
    Override(&'static str),
}

/// Writes the template of an object.
struct Writer<'a> {
    kind: &'a str,
    name: &'a str,
    image: String,
}

/// The value with each component that changes it.
type Variants<'a> = [(&'a str, &'a Value)];

impl<'a> Writer<'a> {
    fn new(object: &'a Value) -> Self {
        let pod = &object["spec"]["template"]["spec"];
        let image = image(pod).map(|(repository, tag)| format!("{repository}:{tag}"));
        Self {
            kind: object["kind"].as_str().unwrap_or_default(),
            name: object["metadata"]["name"].as_str().unwrap_or_default(),
            image: image.unwrap_or_default(),
        }
    }

    fn substitute(&self, pointer: &str, value: &Value) -> Option<Substitute> {
        use Substitute::{Block, Override, Scalar, Text};
        if self.kind == "DaemonSet" && *value == *self.image {
            return Some(Scalar(
                "\"{{ .Values.image.repository }}:{{ .Values.image.tag }}\"",
            ));
        }
        if pointer.ends_with("/imagePullPolicy") {
            return Some(Scalar("{{ .Values.image.pullPolicy }}"));
        }
        match (self.kind, self.name, pointer) {
            ("DaemonSet", _, "/spec/template/spec/tolerations") => Some(Block("tolerations")),
            ("DaemonSet", _, "/spec/template/spec/priorityClassName") => {
                Some(Scalar("{{ .Values.priorityClassName }}"))
            }
            ("DaemonSet", _, "/spec/template/spec/containers/0/resources") => {
                Some(Override("resources"))
            }
            ("ConfigMap", SETTINGS, "/data/config.yaml") => Some(Text("config")),
            ("ConfigMap", _, "/data/KUBERNETES_SERVICE_HOST") => {
                Some(Scalar("{{ .Values.apiServer.host | quote }}"))
            }
            ("ConfigMap", _, "/data/KUBERNETES_SERVICE_PORT") => {
                Some(Scalar("{{ .Values.apiServer.port | quote }}"))
            }
            ("Secret", _, "/stringData/mesh-key") => Some(Scalar("{{ .Values.meshKey | quote }}")),
            _ => None,
        }
    }

    /// Lines of a value that takes lines of its own, indented by `indent`.
    fn node(
        &self,
        pointer: &str,
        value: &Value,
        variants: &Variants<'_>,
        indent: usize,
    ) -> anyhow::Result<String> {
        match value {
            Value::Object(map) => self.map(pointer, map, variants, indent),
            Value::Array(items) => self.list(pointer, items, variants, indent),
            _ => bail!("{pointer}: neither a map nor a list"),
        }
    }

    fn map(
        &self,
        pointer: &str,
        map: &Map<String, Value>,
        variants: &Variants<'_>,
        indent: usize,
    ) -> anyhow::Result<String> {
        let mut text = String::new();
        for key in ordered(map) {
            let value = &map[key];
            let inner: anyhow::Result<Vec<_>> = variants
                .iter()
                .map(|(component, other)| {
                    let other = other.get(key);
                    let other =
                        other.with_context(|| format!("{component} removes {pointer}/{key}"))?;
                    Ok((*component, other))
                })
                .collect();
            text += &self.entry(&format!("{pointer}/{key}"), key, value, &inner?, indent)?;
        }
        // Keys that only a component has come last: a list's dash is never in its condition.
        let mut added = BTreeMap::new();
        for (component, other) in variants {
            let other = other.as_object();
            let other = other.with_context(|| format!("{component}: {pointer} is no map"))?;
            for key in ordered(other)
                .into_iter()
                .filter(|key| !map.contains_key(*key))
            {
                let former = added.insert(key, component);
                ensure!(former.is_none(), "two components add {pointer}/{key}");
                let at = format!("{pointer}/{key}");
                let lines = self.entry(&at, key, &other[key], &[], indent)?;
                text += &guarded(&switch(component), &lines);
            }
        }
        Ok(text)
    }

    /// A key with its value.
    fn entry(
        &self,
        pointer: &str,
        key: &str,
        value: &Value,
        variants: &Variants<'_>,
        indent: usize,
    ) -> anyhow::Result<String> {
        let spaces = " ".repeat(indent);
        let head = format!("{spaces}{}:", yaml::scalar_text(key));
        let deeper = indent + 2;
        let changed = variants.iter().filter(|(_, other)| *other != value);
        let changed: Vec<_> = changed.copied().collect();
        let of_values = |name: &str| format!("{{{{- toYaml .Values.{name} | nindent {deeper} }}}}");
        Ok(match self.substitute(pointer, value) {
            Some(Substitute::Scalar(text)) => format!("{head} {text}\n"),
            Some(Substitute::Text(name)) => {
                format!("{head} |\n{spaces}  {{{{- .Values.{name} | nindent {deeper} }}}}\n")
            }
            Some(Substitute::Block(name)) => format!("{head}\n{spaces}  {}\n", of_values(name)),
            Some(Substitute::Override(name)) => format!(
                "{head}\n{{{{- if .Values.{name} }}}}\n{spaces}  {}\n{{{{- else }}}}\n{}{{{{- end }}}}\n",
                of_values(name),
                self.node(pointer, value, &changed, deeper)?,
            ),
            None if yaml::is_nested(value) => {
                format!("{head}\n{}", self.node(pointer, value, &changed, deeper)?)
            }
            None => cases(&changed, value, |value| {
                Ok(format!("{head} {}\n", plain(value)?))
            })?,
        })
    }

    fn list(
        &self,
        pointer: &str,
        items: &[Value],
        variants: &Variants<'_>,
        indent: usize,
    ) -> anyhow::Result<String> {
        let mut others = Vec::new();
        for (component, other) in variants {
            let other = other.as_array().filter(|other| other.len() >= items.len());
            let other = other.with_context(|| format!("{component} shortens {pointer}"))?;
            others.push((*component, other));
        }
        let mut text = String::new();
        for (index, item) in items.iter().enumerate() {
            let inner = others
                .iter()
                .map(|(component, other)| (*component, &other[index]));
            let inner: Vec<_> = inner.filter(|(_, other)| *other != item).collect();
            text += &self.item(&format!("{pointer}/{index}"), item, &inner, indent)?;
        }
        for (component, other) in others {
            let mut added = String::new();
            for (index, item) in other.iter().enumerate().skip(items.len()) {
                added += &self.item(&format!("{pointer}/{index}"), item, &[], indent)?;
            }
            if !added.is_empty() {
                text += &guarded(&switch(component), &added);
            }
        }
        Ok(text)
    }

    fn item(
        &self,
        pointer: &str,
        item: &Value,
        variants: &Variants<'_>,
        indent: usize,
    ) -> anyhow::Result<String> {
        if yaml::is_nested(item) {
            let lines = self.node(pointer, item, variants, indent + 2)?;
            return Ok(yaml::listed(&lines, indent));
        }
        let dash = format!("{}-", " ".repeat(indent));
        cases(variants, item, |item| {
            Ok(format!("{dash} {}\n", plain(item)?))
        })
    }
}

/// The keys of a map, in the order of the template.
fn ordered(map: &Map<String, Value>) -> Vec<&String> {
    let mut keys: Vec<_> = map.keys().collect();
    let rank = |key: &str| FIRST_KEYS.iter().position(|first| *first == key);
    keys.sort_by_key(|key| (rank(key).unwrap_or(FIRST_KEYS.len()), *key));
    keys
}

/// Lines of a scalar that is another one with some components.
fn cases(
    variants: &Variants<'_>,
    value: &Value,
    line: impl Fn(&Value) -> anyhow::Result<String>,
) -> anyhow::Result<String> {
    variants
        .iter()
        .try_fold(line(value)?, |rest, (component, other)| {
            let (condition, line) = (switch(component), line(other)?);
            Ok(format!(
                "{{{{- if {condition} }}}}\n{line}{{{{- else }}}}\n{rest}{{{{- end }}}}\n"
            ))
        })
}

/// A scalar that is not read as part of the template.
fn plain(value: &Value) -> anyhow::Result<String> {
    let text = yaml::flow(value);
    ensure!(
        !text.contains("{{"),
        "{text} would be read as an action of the template"
    );
    Ok(text)
}

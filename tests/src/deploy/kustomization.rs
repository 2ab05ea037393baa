//! The objects of `deploy/kubernetes`, as `kubectl apply -k` makes them except for the hashes in names. The tests
//! render them without kubectl: that of Debian 12 does not support components.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, ensure};
use json_patch::Patch;
use serde::Deserialize;
use serde_json::{Map, Value, json};

/// The folder of the kustomization.
const DEPLOY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy/kubernetes");
/// The address that users replace with that of their API server.
pub(super) const API_SERVER: &str = "api.example.com";

/// The fields that the project's kustomizations have.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Kustomization {
    #[serde(rename = "apiVersion")]
    _version: String,
    kind: String,
    #[serde(default)]
    resources: Vec<PathBuf>,
    #[serde(default)]
    patches: Vec<TargetedPatch>,
    #[serde(default)]
    secret_generator: Vec<Generator>,
    #[serde(default)]
    config_map_generator: Vec<Generator>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TargetedPatch {
    target: Target,
    /// A JSON patch (RFC 6902) in YAML.
    patch: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Target {
    kind: String,
    name: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Generator {
    name: String,
    namespace: String,
    #[serde(default)]
    files: Vec<String>,
    #[serde(default)]
    literals: Vec<String>,
    /// They concern only the name.
    #[serde(default, rename = "options")]
    _options: Value,
}

impl Generator {
    fn object(&self, kind: &str, field: &str, data: Map<String, Value>) -> Value {
        json!({
            "apiVersion": "v1", "kind": kind, field: data,
            "metadata": { "name": self.name, "namespace": self.namespace },
        })
    }
}

/// What users set before they apply the objects.
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a> {
    /// The address of the API server, for the component `services`.
    pub api_server: &'a str,
    /// The mesh key.
    pub mesh_key: &'a str,
}

/// The objects of the kustomization with these components.
pub fn objects(components: &[&str], inputs: Inputs<'_>) -> anyhow::Result<Vec<Value>> {
    let mut objects = Vec::new();
    for folder in [""].iter().chain(components) {
        add(&Path::new(DEPLOY).join(folder), inputs, &mut objects)
            .with_context(|| format!("component {folder:?}"))?;
    }
    Ok(objects)
}

/// The objects that remove agents from the nodes.
pub fn removal() -> anyhow::Result<Vec<Value>> {
    let mut objects = Vec::new();
    let inputs = Inputs {
        api_server: API_SERVER,
        mesh_key: "",
    };
    add(&Path::new(DEPLOY).join("uninstall"), inputs, &mut objects)?;
    Ok(objects)
}

/// The names of all components, sorted.
pub fn components() -> anyhow::Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(DEPLOY).with_context(|| format!("cannot list {DEPLOY}"))? {
        let path = entry?.path();
        let Ok(text) = fs::read_to_string(path.join("kustomization.yaml")) else {
            continue;
        };
        let kustomization: Kustomization = serde_saphyr::from_str(&text)?;
        if kustomization.kind == "Component" {
            let name = path.file_name().and_then(|name| name.to_str());
            names.push(name.context("a folder's name is not UTF-8")?.to_owned());
        }
    }
    names.sort_unstable();
    Ok(names)
}

/// Adds the objects of a folder's kustomization, and applies its patches to all objects so far.
fn add(folder: &Path, inputs: Inputs<'_>, objects: &mut Vec<Value>) -> anyhow::Result<()> {
    let read = |path: &Path| {
        let path = folder.join(path);
        fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))
    };
    let text = read(Path::new("kustomization.yaml"))?;
    let kustomization: Kustomization = serde_saphyr::from_str(&text)?;
    for resource in &kustomization.resources {
        let documents: Vec<Value> = serde_saphyr::from_multiple(&read(resource)?)?;
        objects.extend(documents);
    }
    for generator in &kustomization.secret_generator {
        let keys = generator.files.iter();
        let data = keys.map(|key| (key.clone(), inputs.mesh_key.into()));
        objects.push(generator.object("Secret", "stringData", data.collect()));
    }
    for generator in &kustomization.config_map_generator {
        let mut data = Map::new();
        for file in &generator.files {
            data.insert(file.clone(), read(Path::new(file))?.into());
        }
        for literal in &generator.literals {
            let (key, value) = literal.split_once('=').context("a literal has no value")?;
            data.insert(
                key.to_owned(),
                value.replace(API_SERVER, inputs.api_server).into(),
            );
        }
        objects.push(generator.object("ConfigMap", "data", data));
    }
    for TargetedPatch { target, patch } in &kustomization.patches {
        let patch: Value = serde_saphyr::from_str(patch)?;
        let patch: Patch = serde_json::from_value(patch)?;
        let matching = objects.iter_mut().filter(|object| {
            object["kind"] == *target.kind && object["metadata"]["name"] == *target.name
        });
        let mut patched = 0;
        for object in matching {
            json_patch::patch(object, &patch)?;
            patched += 1;
        }
        ensure!(patched > 0, "no {} {}", target.kind, target.name);
    }
    Ok(())
}

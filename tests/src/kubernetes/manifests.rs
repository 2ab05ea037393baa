//! The objects of `deploy/kubernetes`, as `kubectl apply -k` makes them. The kubectl of Debian 12 has no components.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, ensure};
use json_patch::Patch;
use serde::Deserialize;
use serde_json::{Value, json};

/// The folder of the kustomization.
const DEPLOY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy/kubernetes");
/// The address that users replace with that of their API server.
const API_SERVER: &str = "api.example.com";

/// The fields that the project's kustomizations have.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Kustomization {
    #[serde(rename = "apiVersion")]
    _version: String,
    #[serde(rename = "kind")]
    _kind: String,
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
}

/// The objects of the kustomization with these components, and with the API server at this address. Each file of a secret
/// has this text.
pub(super) fn render(
    components: &[&str],
    api_server: &str,
    secret: &str,
) -> anyhow::Result<Vec<Value>> {
    let mut objects = Vec::new();
    for folder in [""].iter().chain(components) {
        add(&Path::new(DEPLOY).join(folder), secret, &mut objects)
            .with_context(|| format!("component {folder:?}"))?;
    }
    let text = serde_json::to_string(&objects)?.replace(API_SERVER, api_server);
    Ok(serde_json::from_str(&text)?)
}

/// Adds the objects of a folder's kustomization, and applies its patches to all objects so far.
fn add(folder: &Path, secret: &str, objects: &mut Vec<Value>) -> anyhow::Result<()> {
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
        let files = generator.files.iter();
        let data: serde_json::Map<_, _> = files.map(|name| (name.clone(), secret.into())).collect();
        objects.push(json!({
            "apiVersion": "v1", "kind": "Secret", "stringData": data,
            "metadata": { "name": generator.name, "namespace": generator.namespace },
        }));
    }
    for generator in &kustomization.config_map_generator {
        let literals = generator.literals.iter();
        let pairs = literals.filter_map(|literal| literal.split_once('='));
        let data: serde_json::Map<_, _> = pairs
            .map(|(key, value)| (key.to_owned(), value.into()))
            .collect();
        objects.push(json!({
            "apiVersion": "v1", "kind": "ConfigMap", "data": data,
            "metadata": { "name": generator.name, "namespace": generator.namespace },
        }));
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

//! Settings files: YAML, with a map for each group of settings.

use std::fmt;
use std::fs;
use std::io;
use std::marker::PhantomData;
use std::path::{Path, PathBuf};

use clap::{Arg, Command};
use serde::de::{self, Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_saphyr::{Location, MessageFormatter as _, Spanned, UserMessageFormatter};

use super::form::{GROUPS, check, group, is_list, name};

/// The file that is read if it exists and no other is named.
pub(super) const DEFAULT: &str = "/etc/health-agent/config.yaml";
/// The folder beside a file, whose files take precedence over it, and later ones over earlier ones by name.
const FOLDER: &str = "config.d";
/// How different a key may be from the one that is suggested: 1 is the same.
const SIMILAR: f64 = 0.7;
/// Maximum size of a file in YAML nodes.
const YAML_NODES: usize = 10_000;

/// A settings file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// It cannot be read.
    #[error("cannot read {}", path.display())]
    Unreadable {
        /// The file or folder.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// It is not valid YAML, or not of the form of settings.
    #[error("{}:{line}:{column}: {problem}", path.display())]
    Invalid {
        /// The file.
        path: PathBuf,
        /// From 1; 0 if unknown.
        line: u64,
        /// From 1; 0 if unknown.
        column: u64,
        /// What is wrong there, and what is valid.
        problem: String,
    },
}

/// A setting in a file.
pub(super) struct FileSetting {
    pub(super) name: String,
    /// Valid values of the setting.
    pub(super) values: Vec<String>,
    pub(super) path: PathBuf,
    pub(super) line: u64,
}

/// Reads the settings of `run` from this file and its folder, in order of precedence. Without a path, those at the default
/// place, if there are any.
pub(super) fn read(run: &Command, path: Option<&Path>) -> Result<Vec<FileSetting>, FileError> {
    let file = path.unwrap_or(Path::new(DEFAULT));
    let mut all = Vec::new();
    match fs::read_to_string(file) {
        Ok(text) => all.extend(parse(run, file, &text)?),
        Err(error) if path.is_none() && error.kind() == io::ErrorKind::NotFound => {}
        Err(source) => {
            let path = file.to_owned();
            return Err(FileError::Unreadable { path, source });
        }
    }
    for file in fragments(&file.with_file_name(FOLDER))? {
        let text = fs::read_to_string(&file).map_err(|source| FileError::Unreadable {
            path: file.clone(),
            source,
        })?;
        all.extend(parse(run, &file, &text)?);
    }
    Ok(all)
}

/// The files of a folder, by name; none if it does not exist.
fn fragments(folder: &Path) -> Result<Vec<PathBuf>, FileError> {
    let unreadable = |source| FileError::Unreadable {
        path: folder.to_owned(),
        source,
    };
    let entries = match fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(unreadable)?,
    };
    let mut files = Vec::new();
    for entry in entries {
        let path = entry.map_err(unreadable)?.path();
        let is_yaml = path
            .extension()
            .is_some_and(|end| end == "yaml" || end == "yml");
        let is_hidden = path
            .file_name()
            .is_some_and(|name| name.as_encoded_bytes()[0] == b'.');
        if is_yaml && !is_hidden {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

/// Parses a file and checks each setting by itself.
fn parse(run: &Command, path: &Path, text: &str) -> Result<Vec<FileSetting>, FileError> {
    let at = |location: Location, problem: String| FileError::Invalid {
        path: path.to_owned(),
        line: location.line(),
        column: location.column(),
        problem,
    };
    let limits = serde_saphyr::options! {
        budget: serde_saphyr::budget! {
            max_nodes: YAML_NODES,
            max_events: 2 * YAML_NODES,
        },
        // Otherwise only 32 lines of comments may stand in one place.
        emit_comments: false,
        // `off` is a word of some settings.
        strict_booleans: true,
    };
    type Document = Option<Pairs<Option<Pairs<Spanned<Written>>>>>;
    let document: Document =
        serde_saphyr::from_str_with_options(text, limits).map_err(|error| {
            let error = error.without_snippet();
            let problem = UserMessageFormatter.format_message(error).into_owned();
            at(error.location().unwrap_or(Location::UNKNOWN), problem)
        })?;
    let mut settings = Vec::new();
    for (key, pairs) in document.into_iter().flat_map(|groups| groups.0) {
        let groups = GROUPS.map(|(heading, _)| heading.to_lowercase());
        if !groups.contains(&key.value) {
            let groups = groups.iter().map(String::as_str);
            return Err(at(key.referenced, unknown("group", &key.value, groups)));
        }
        for (setting, written) in pairs.into_iter().flat_map(|pairs| pairs.0) {
            let arg =
                find(run, &key.value, &setting.value).map_err(|why| at(setting.referenced, why))?;
            let values = match written.value {
                Written::Nothing => continue,
                Written::One(text) => match arg.get_value_delimiter() {
                    Some(between) => text
                        .split(between)
                        .map(|one| one.trim().to_owned())
                        .collect(),
                    None => vec![text],
                },
                Written::Many(texts) if is_list(arg) => texts,
                Written::Many(_) => {
                    let problem = format!("{} has one value, not a list", setting.value);
                    return Err(at(written.referenced, problem));
                }
            };
            for value in &values {
                check(arg, value).map_err(|why| {
                    let value = value.escape_debug();
                    at(
                        written.referenced,
                        format!("{} '{value}': {why}", setting.value),
                    )
                })?;
            }
            settings.push(FileSetting {
                name: setting.value,
                values,
                path: path.to_owned(),
                line: setting.referenced.line(),
            });
        }
    }
    Ok(settings)
}

/// Finds a setting by its group and name. The error names the nearest one.
fn find<'a>(run: &'a Command, key: &str, wanted: &str) -> Result<&'a Arg, String> {
    let settings = || {
        run.get_arguments()
            .filter_map(|arg| Some((group(arg)?, arg)))
    };
    match settings().find(|(_, arg)| name(arg) == wanted) {
        Some((of, arg)) if of == key => Ok(arg),
        Some((of, _)) => Err(format!("{wanted} belongs to the group {of}")),
        None => Err(unknown(
            "setting",
            wanted,
            settings().map(|(_, arg)| name(arg)),
        )),
    }
}

fn unknown<'a>(kind: &str, wanted: &str, known: impl Iterator<Item = &'a str>) -> String {
    let alike = |name: &&str| strsim::jaro_winkler(wanted, name);
    let nearest = known
        .filter(|name| alike(name) >= SIMILAR)
        .max_by(|a, b| alike(a).total_cmp(&alike(b)));
    let wanted = wanted.escape_debug();
    match nearest {
        Some(nearest) => format!("unknown {kind} '{wanted}'; did you mean {nearest}?"),
        None => format!("unknown {kind} '{wanted}'"),
    }
}

/// The entries of a map, in order and with their places.
struct Pairs<T>(Vec<(Spanned<String>, T)>);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Pairs<T> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Entries<T>(PhantomData<T>);

        impl<'de, T: Deserialize<'de>> Visitor<'de> for Entries<T> {
            type Value = Pairs<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a map")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Pairs<T>, A::Error> {
                let mut pairs = Vec::new();
                while let Some(pair) = map.next_entry()? {
                    pairs.push(pair);
                }
                Ok(Pairs(pairs))
            }
        }

        from.deserialize_map(Entries(PhantomData))
    }
}

/// A value in a file, as it would stand on the command line.
enum Written {
    Nothing,
    One(String),
    Many(Vec<String>),
}

impl<'de> Deserialize<'de> for Written {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_any(Value)
    }
}

/// Reads a [`Written`].
struct Value;

impl<'de> Visitor<'de> for Value {
    type Value = Written;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value or a list of values")
    }

    fn visit_unit<E: de::Error>(self) -> Result<Written, E> {
        Ok(Written::Nothing)
    }

    fn visit_none<E: de::Error>(self) -> Result<Written, E> {
        Ok(Written::Nothing)
    }

    fn visit_bool<E: de::Error>(self, value: bool) -> Result<Written, E> {
        Ok(Written::One(value.to_string()))
    }

    fn visit_u64<E: de::Error>(self, value: u64) -> Result<Written, E> {
        Ok(Written::One(value.to_string()))
    }

    fn visit_i64<E: de::Error>(self, value: i64) -> Result<Written, E> {
        Ok(Written::One(value.to_string()))
    }

    fn visit_f64<E: de::Error>(self, value: f64) -> Result<Written, E> {
        Ok(Written::One(value.to_string()))
    }

    fn visit_str<E: de::Error>(self, value: &str) -> Result<Written, E> {
        Ok(Written::One(value.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Written, A::Error> {
        let mut values = Vec::new();
        while let Some(value) = seq.next_element()? {
            match value {
                Written::One(text) => values.push(text),
                Written::Nothing | Written::Many(_) => {
                    return Err(de::Error::custom("expected a list of plain values"));
                }
            }
        }
        Ok(Written::Many(values))
    }
}

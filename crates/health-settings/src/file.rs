//! Settings files: YAML, with a map for each group of settings.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::marker::PhantomData;
use std::path::{Path, PathBuf};

use clap::{Arg, Command};
use health_model::file::{FileIdentity, read_regular};
use health_model::folder::manifests;
use serde::de::{self, Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_saphyr::{Location, MessageFormatter as _, Spanned, UserMessageFormatter};

use super::form::{GROUPS, Kind, group, is_list, kind, name, split};
use super::invalid::{MAX_SHOWN, check_value, shown};

/// The file that is read if it exists and no other file is named.
pub const DEFAULT_FILE: &str = "/etc/health-agent/config.yaml";
/// The drop-in folder beside a settings file. Its files take precedence over that file, and files later in name order
/// over earlier ones.
const FOLDER: &str = "config.d";
/// Minimum similarity of a suggested key; 1 means equal.
const MIN_SIMILARITY: f64 = 0.7;
/// Maximum size of a file in bytes and in YAML nodes.
const MAX_LEN: u64 = 1 << 20;
const MAX_YAML_NODES: usize = 10_000;

/// Why a settings file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// It cannot be read.
    #[error("cannot read {}: {reason}", path.display())]
    Unreadable {
        /// The file or folder.
        path: PathBuf,
        /// The cause.
        reason: io::Error,
    },
    /// It is not valid YAML, or does not have the form of a settings file.
    #[error("{}:{line}:{column}: {problem}", path.display())]
    Invalid {
        /// The file.
        path: PathBuf,
        /// Counted from 1; 0 if unknown.
        line: u64,
        /// Counted from 1; 0 if unknown.
        column: u64,
        /// What is wrong there, and what is valid.
        problem: String,
    },
}

/// A setting in a file.
pub(super) struct FileSetting {
    pub(super) name: String,
    /// Valid values of the setting; an empty list resets the setting to its default.
    pub(super) values: Vec<String>,
    pub(super) path: PathBuf,
    pub(super) line: u64,
    pub(super) column: u64,
}

/// Reads the settings of `run` from this file and its drop-in folder, in increasing order of precedence. Without a
/// path, reads the files at the default location, if any.
pub(super) fn read(run: &Command, path: Option<&Path>) -> Result<Vec<FileSetting>, FileError> {
    let file = path.unwrap_or(Path::new(DEFAULT_FILE));
    let mut all = Vec::new();
    match read_regular(file, MAX_LEN) {
        Ok(text) => all.extend(parse(run, file, &text)?),
        Err(error) if path.is_none() && error.kind() == io::ErrorKind::NotFound => {}
        Err(reason) => {
            let path = file.to_owned();
            return Err(FileError::Unreadable { path, reason });
        }
    }
    for file in drop_ins(&file.with_file_name(FOLDER))? {
        let text = read_regular(&file, MAX_LEN).map_err(|reason| FileError::Unreadable {
            path: file.clone(),
            reason,
        })?;
        all.extend(parse(run, &file, &text)?);
    }
    Ok(all)
}

/// A snapshot of the settings files: which files existed, and an identity of each by which later changes are detected.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SettingsFiles {
    path: Option<PathBuf>,
    found: BTreeMap<PathBuf, Option<FileIdentity>>,
}

impl SettingsFiles {
    /// Finds the files that [`Layers::read`](super::Layers::read) would read now, given the same path.
    pub(super) fn find(path: Option<&Path>) -> Self {
        let file = path.unwrap_or(Path::new(DEFAULT_FILE));
        let folder = file.with_file_name(FOLDER);
        let mut files = vec![file.to_owned()];
        match drop_ins(&folder) {
            Ok(drop_ins) => files.extend(drop_ins),
            // Distinguishes an unreadable folder from one that does not exist.
            Err(_) => files.push(folder),
        }
        let identified = files.into_iter().map(|path| {
            let identity = FileIdentity::of(&path).ok();
            (path, identity)
        });
        Self {
            path: path.map(Path::to_owned),
            found: identified.collect(),
        }
    }

    /// A file that is empty now but was not before. This suggests a full disk or a copy in progress, rather than a wish
    /// for defaults.
    pub fn emptied_since(&self, former: &Self) -> Option<&Path> {
        let is_empty = |identity: &Option<FileIdentity>| {
            let identity = identity.as_ref();
            identity.map(|identity| identity.size() == 0)
        };
        let mut found = self.found.iter();
        let emptied = found.find(|(path, now)| {
            let before = former.found.get(*path);
            is_empty(now) == Some(true) && before.and_then(is_empty) == Some(false)
        });
        emptied.map(|(path, _)| path.as_path())
    }

    /// Finds the files at the same path again. Blocks.
    pub fn find_again(&self) -> Self {
        Self::find(self.path.as_deref())
    }
}

/// The files of a folder in name order; none if the folder does not exist.
fn drop_ins(folder: &Path) -> Result<Vec<PathBuf>, FileError> {
    let files = match manifests(folder) {
        // A dangling symlink is a mistake.
        Err(error) if error.kind() == io::ErrorKind::NotFound && !folder.is_symlink() => {
            return Ok(Vec::new());
        }
        files => files.map_err(|reason| FileError::Unreadable {
            path: folder.to_owned(),
            reason,
        })?,
    };
    let is_yaml = |path: &PathBuf| path.extension().is_none_or(|end| end != "json");
    Ok(files.into_iter().filter(is_yaml).collect())
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
            max_nodes: MAX_YAML_NODES,
            max_events: 2 * MAX_YAML_NODES,
        },
        // Otherwise, more than 32 consecutive comment lines would be an error.
        emit_comments: false,
        // Otherwise `off`, a value of several settings, would be read as false.
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
            let is_boolean = kind(arg) == Kind::Boolean;
            let all = |text: &str| -> Vec<_> {
                let values = split(arg, text).into_iter();
                values.map(|value| (value, written.referenced)).collect()
            };
            let values = match written.value {
                Written::Nothing => Vec::new(),
                Written::Text(written) => all(&written),
                Written::Boolean(value) if is_boolean => all(&value.to_string()),
                Written::Boolean(_) | Written::Number => all(source(text, written.defined)),
                Written::Many(texts) if is_list(arg) => {
                    let values = texts.into_iter();
                    values.map(|one| (one.value, one.referenced)).collect()
                }
                Written::Many(_) => {
                    let problem = format!("{} takes a single value, not a list", setting.value);
                    return Err(at(written.referenced, problem));
                }
            };
            for (value, place) in &values {
                check_value(arg, value).map_err(|why| {
                    at(
                        *place,
                        format!("{} '{}': {why}", setting.value, shown(value)),
                    )
                })?;
            }
            settings.push(FileSetting {
                name: setting.value,
                values: values.into_iter().map(|(value, _)| value).collect(),
                path: path.to_owned(),
                line: setting.referenced.line(),
                column: setting.referenced.column(),
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
        Some((of, _)) => Err(format!("{wanted} belongs in the group {of}")),
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
        .filter(|name| wanted.len() <= MAX_SHOWN && alike(name) >= MIN_SIMILARITY)
        .max_by(|a, b| alike(a).total_cmp(&alike(b)));
    let wanted = shown(wanted);
    match nearest {
        Some(nearest) => format!("unknown {kind} '{wanted}'; did you mean {nearest}?"),
        None => format!("unknown {kind} '{wanted}'"),
    }
}

/// The entries of a map, in order and with their locations.
struct Pairs<T>(Vec<(Spanned<String>, T)>);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Pairs<T> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct PairsVisitor<T>(PhantomData<T>);

        impl<'de, T: Deserialize<'de>> Visitor<'de> for PairsVisitor<T> {
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

        from.deserialize_map(PairsVisitor(PhantomData))
    }
}

/// The source text at a location, for example that of a number.
fn source(text: &str, place: Location) -> &str {
    let span = place.span();
    let range = span.byte_offset().zip(span.byte_len()).map(|(start, len)| {
        let start = start as usize;
        start..start + len as usize
    });
    let written = range.and_then(|range| text.get(range));
    written.unwrap_or_default().trim()
}

/// A value in a file.
enum Written {
    Nothing,
    Text(String),
    Boolean(bool),
    /// Only the source text shows how the number was written: `1.10` may be a name.
    Number,
    Many(Vec<Spanned<String>>),
}

impl<'de> Deserialize<'de> for Written {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_any(WrittenVisitor)
    }
}

struct WrittenVisitor;

impl<'de> Visitor<'de> for WrittenVisitor {
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
        Ok(Written::Boolean(value))
    }

    fn visit_u64<E: de::Error>(self, _: u64) -> Result<Written, E> {
        Ok(Written::Number)
    }

    fn visit_i64<E: de::Error>(self, _: i64) -> Result<Written, E> {
        Ok(Written::Number)
    }

    fn visit_f64<E: de::Error>(self, _: f64) -> Result<Written, E> {
        Ok(Written::Number)
    }

    fn visit_str<E: de::Error>(self, value: &str) -> Result<Written, E> {
        Ok(Written::Text(value.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Written, A::Error> {
        let mut values = Vec::new();
        while let Some(value) = seq.next_element()? {
            values.push(value);
        }
        Ok(Written::Many(values))
    }
}

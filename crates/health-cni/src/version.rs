//! The supported versions of the specification.

use std::fmt;
use std::str::FromStr;

use serde::{Serialize, Serializer};

/// A version of the CNI specification.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Version {
    V0_3_0,
    V0_3_1,
    V0_4_0,
    V1_0_0,
    V1_1_0,
}

impl Version {
    pub(super) const ALL: [Self; 5] = [
        Self::V0_3_0,
        Self::V0_3_1,
        Self::V0_4_0,
        Self::V1_0_0,
        Self::V1_1_0,
    ];
    pub(super) const NEWEST: Self = Self::V1_1_0;

    const fn text(self) -> &'static str {
        match self {
            Self::V0_3_0 => "0.3.0",
            Self::V0_3_1 => "0.3.1",
            Self::V0_4_0 => "0.4.0",
            Self::V1_0_0 => "1.0.0",
            Self::V1_1_0 => "1.1.0",
        }
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.text())
    }
}

/// The version is not in [`Version::ALL`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct UnsupportedVersion;

impl FromStr for Version {
    type Err = UnsupportedVersion;

    fn from_str(text: &str) -> Result<Self, UnsupportedVersion> {
        let found = Self::ALL.into_iter().find(|version| version.text() == text);
        found.ok_or(UnsupportedVersion)
    }
}

impl Serialize for Version {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.text())
    }
}

/// The result of VERSION.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Versions {
    cni_version: Version,
    supported_versions: [Version; 5],
}

impl Versions {
    pub(super) fn of(cni_version: Version) -> Self {
        Self {
            cni_version,
            supported_versions: Version::ALL,
        }
    }
}

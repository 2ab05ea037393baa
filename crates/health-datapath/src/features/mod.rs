//! Finds which kernel features the agent can use, by trying each one instead of checking the kernel's version.
//!
//! The attempts leave nothing behind: programs and maps disappear when they are closed, and whatever needs a device is
//! tried in a separate network namespace.

mod attempts;

use std::path::Path;

use serde::Serialize;

/// Whether the agent can work without a feature.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Need {
    /// The agent does not start without it.
    Required,
    /// Either TCX or clsact is required.
    OneOfTwo,
    /// The agent works without it.
    Optional,
}

/// Something that the agent uses.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Feature {
    /// A short fixed name.
    pub name: &'static str,
    /// Whether the kernel has it.
    pub available: bool,
    /// Whether the agent needs it.
    pub need: Need,
    /// What is lost without it.
    pub without: &'static str,
}

/// All features of a kernel.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Report {
    /// The kernel's own release name.
    pub kernel: String,
    /// Every feature that is tried, in a fixed order.
    pub features: Vec<Feature>,
}

/// Type information of the kernel.
pub(crate) const BTF: &str = "/sys/kernel/btf/vmlinux";
/// Name of the feature of TCX links.
pub const TCX: &str = "tcx";
/// Name of the feature of clsact qdiscs and eBPF filters on them.
pub const CLSACT: &str = "clsact";

impl Report {
    /// Tries everything on the running kernel, as root.
    pub fn of_this_kernel(bpf_root: &Path) -> Self {
        Self {
            kernel: release(),
            features: attempts::features(bpf_root),
        }
    }

    /// Whether the kernel has the feature of this name.
    pub fn has(&self, name: &str) -> bool {
        self.features
            .iter()
            .any(|feature| feature.name == name && feature.available)
    }

    /// Returns the names of all missing features.
    pub fn missing(&self) -> Vec<&'static str> {
        let missing = self.features.iter().filter(|feature| !feature.available);
        missing.map(|feature| feature.name).collect()
    }

    /// Returns the names of missing features without which the agent cannot work.
    pub fn missing_required(&self) -> Vec<&'static str> {
        let has_attachment = self.has(TCX) || self.has(CLSACT);
        let is_needed = |need| match need {
            Need::Required => true,
            Need::OneOfTwo => !has_attachment,
            Need::Optional => false,
        };
        let missing = self.features.iter().filter(|feature| !feature.available);
        let needed = missing.filter(|feature| is_needed(feature.need));
        needed.map(|feature| feature.name).collect()
    }
}

/// Returns the running kernel's release name.
pub fn release() -> String {
    nix::sys::utsname::uname()
        .map(|name| name.release().to_string_lossy().into_owned())
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(missing: &[&str]) -> Report {
        let feature = |name, need| Feature {
            name,
            available: !missing.contains(&name),
            need,
            without: "",
        };
        Report {
            kernel: "6.1.0".to_owned(),
            features: vec![
                feature("maps", Need::Required),
                feature(TCX, Need::OneOfTwo),
                feature(CLSACT, Need::OneOfTwo),
                feature("csum", Need::Optional),
            ],
        }
    }

    #[test]
    fn one_kind_of_attachment_is_enough() {
        for missing in [&[][..], &[TCX], &[CLSACT], &["csum"], &[TCX, "csum"]] {
            assert_eq!(report(missing).missing(), *missing);
            assert!(report(missing).missing_required().is_empty(), "{missing:?}");
        }
    }

    #[test]
    fn without_both_kinds_or_what_is_required_nothing_goes() {
        assert_eq!(report(&[TCX, CLSACT]).missing_required(), [TCX, CLSACT]);
        assert_eq!(report(&["maps", "csum"]).missing_required(), ["maps"]);
    }

    #[test]
    fn this_kernel_has_all_that_is_required() {
        if !nix::unistd::geteuid().is_root() {
            println!("skipped: needs root");
            return;
        }
        let report = Report::of_this_kernel(Path::new("/sys/fs/bpf"));
        let missing = report.missing_required();
        let of_machine = ["bpffs"];
        assert!(
            missing.iter().all(|name| of_machine.contains(name)),
            "{missing:?}"
        );
    }
}

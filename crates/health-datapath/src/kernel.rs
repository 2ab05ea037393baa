//! Checks the requirements on the kernel and this process before anything is changed.

use std::path::{Path, PathBuf};

use health_model::settings::AttachMode;
use nix::unistd::Uid;
use tracing::info;

use crate::attach::{Attachment, Attachments};
use crate::features::{self, BTF, Report};

/// A requirement that is not met.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum UnmetRequirement {
    /// Not root.
    #[error(
        "health-agent needs root: it loads eBPF programs and creates network namespaces; run it as root or with sudo"
    )]
    NotRoot,
    /// A kernel without type information.
    #[error("the kernel has no BTF at {BTF}; boot one built with CONFIG_DEBUG_INFO_BTF=y")]
    NoBtf,
    /// No bpffs.
    #[error("no bpffs is mounted at {0}; mount one with `mount -t bpf bpf {0}`")]
    NoBpffs(PathBuf),
    /// The kernel lacks required features.
    #[error("kernel {kernel} lacks {}; boot Linux 6.1 or newer, and see `health-agent config --probe-kernel`", .missing.join(", "))]
    Lacks {
        /// The kernel's own release name.
        kernel: String,
        /// Names of the features.
        missing: Vec<&'static str>,
    },
    /// The kernel cannot attach programs in the requested way.
    #[error("--attach-mode {mode}: kernel {kernel} cannot attach programs this way; omit the flag")]
    NoAttachment {
        /// The requested attachment.
        mode: Attachment,
        /// The kernel's own release name.
        kernel: String,
    },
}

/// A kernel that meets all requirements.
#[derive(Debug)]
pub struct SuitableKernel {
    /// How the programs must be attached.
    pub attachments: Attachments,
    /// The features that were tried.
    report: Report,
}

impl SuitableKernel {
    /// Logs the result in one line.
    pub fn log(&self) {
        let Self {
            attachments: Attachments { node, endpoints },
            report,
        } = self;
        info!(
            kernel = report.kernel,
            attachment = %node,
            endpoint_attachment = %endpoints,
            missing = ?report.missing(),
            "the kernel has all required features"
        );
    }
}

/// Checks everything that can be checked without changing anything, the most basic first.
pub fn require(bpf_root: &Path, mode: AttachMode) -> Result<SuitableKernel, UnmetRequirement> {
    if !Uid::effective().is_root() {
        return Err(UnmetRequirement::NotRoot);
    }
    if !Path::new(BTF).exists() {
        return Err(UnmetRequirement::NoBtf);
    }
    let report = Report::of_this_kernel(bpf_root);
    let attachments = choose(&report, bpf_root, mode)?;
    Ok(SuitableKernel {
        attachments,
        report,
    })
}

/// Returns how an agent with this flag would attach its programs, or why it would not start.
pub fn choose(
    report: &Report,
    bpf_root: &Path,
    mode: AttachMode,
) -> Result<Attachments, UnmetRequirement> {
    let missing = report.missing_required();
    if missing == ["bpffs"] {
        return Err(UnmetRequirement::NoBpffs(bpf_root.to_owned()));
    }
    if !missing.is_empty() {
        return Err(UnmetRequirement::Lacks {
            kernel: report.kernel.clone(),
            missing,
        });
    }
    let (attachment, feature) = match mode {
        AttachMode::Auto => {
            // At least one is available; otherwise both would count as missing.
            let [node, endpoints] = match (report.has(features::TCX), report.has(features::CLSACT))
            {
                (true, true) => [Attachment::Tcx, Attachment::Clsact],
                (true, false) => [Attachment::Tcx; 2],
                (false, _) => [Attachment::Clsact; 2],
            };
            return Ok(Attachments { node, endpoints });
        }
        AttachMode::Tcx => (Attachment::Tcx, features::TCX),
        AttachMode::Clsact => (Attachment::Clsact, features::CLSACT),
    };
    if report.has(feature) {
        Ok(Attachments::all(attachment))
    } else {
        Err(UnmetRequirement::NoAttachment {
            mode: attachment,
            kernel: report.kernel.clone(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::features::{Feature, Need};

    /// Returns what an agent does on a kernel that lacks these features.
    fn on(missing: &[&str], mode: AttachMode) -> Result<Attachments, String> {
        let feature = |name, need| Feature {
            name,
            available: !missing.contains(&name),
            need,
            without: "",
        };
        let report = Report {
            kernel: "5.10.0".to_owned(),
            features: vec![
                feature("bpffs", Need::Required),
                feature("map-ringbuf", Need::Required),
                feature(features::TCX, Need::OneOfTwo),
                feature(features::CLSACT, Need::OneOfTwo),
            ],
        };
        choose(&report, Path::new("/sys/fs/bpf"), mode).map_err(|error| error.to_string())
    }

    #[test]
    fn tcx_holds_the_node_and_clsact_its_endpoints_where_both_are() {
        let [tcx, clsact] = [Attachment::Tcx, Attachment::Clsact].map(Attachments::all);
        let both = Attachments {
            endpoints: Attachment::Clsact,
            ..tcx
        };
        assert_eq!(on(&[], AttachMode::Auto), Ok(both));
        assert_eq!(on(&["tcx"], AttachMode::Auto), Ok(clsact));
        assert_eq!(on(&["clsact"], AttachMode::Auto), Ok(tcx));
        assert_eq!(on(&[], AttachMode::Clsact), Ok(clsact));
        assert_eq!(on(&[], AttachMode::Tcx), Ok(tcx));
    }

    #[test]
    fn what_is_missing_is_named_in_one_line() {
        for (missing, mode, named) in [
            (
                &["map-ringbuf"][..],
                AttachMode::Auto,
                "5.10.0 lacks map-ringbuf; ",
            ),
            (&["tcx", "clsact"], AttachMode::Auto, "lacks tcx, clsact; "),
            (&["bpffs"], AttachMode::Auto, "mount -t bpf"),
            (
                &["tcx"],
                AttachMode::Tcx,
                "--attach-mode tcx: kernel 5.10.0",
            ),
            (
                &["clsact"],
                AttachMode::Clsact,
                "--attach-mode clsact: kernel",
            ),
        ] {
            let line = on(missing, mode).expect_err(named);
            assert!(line.contains(named) && !line.contains('\n'), "{line}");
        }
    }
}

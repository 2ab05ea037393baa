//! Tests that can't run in a guest, each with the feature that is missing there.

/// A test, or a file of tests, and what it needs.
struct Need {
    /// `FILE` or `FILE::TEST`, by which its name begins.
    tests: &'static str,
    feature: &'static str,
}

const NEEDS: &[Need] = &[Need {
    tests: "vm",
    feature: "qemu and cargo, which guests do not have",
}];

/// The feature that a test of this name (`FILE::TEST`) needs, and that guests do not have.
pub(crate) fn missing(name: &str) -> Option<&'static str> {
    NEEDS
        .iter()
        .find(|need| is_below(name, need.tests))
        .map(|need| need.feature)
}

/// Whether a name is this one, or of this file or module.
pub(crate) fn is_below(name: &str, above: &str) -> bool {
    name.strip_prefix(above)
        .is_some_and(|rest| rest.is_empty() || rest.starts_with("::"))
}

#[cfg(test)]
mod tests {
    use super::{is_below, missing};

    #[test]
    fn names_are_compared_by_whole_parts() {
        assert!(is_below("vm", "vm") && is_below("vm::a", "vm") && is_below("vm::a", "vm::a"));
        assert!(!is_below("vm_init::a", "vm") && !is_below("vm::ab", "vm::a"));
        assert!(missing("vm::a").is_some() && missing("vm_init::a").is_none());
    }
}

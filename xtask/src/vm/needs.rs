//! Tests that cannot run in guests, or not with every kernel, and the features that they lack there.

use crate::test::is_below;

/// Tests or test files, and the feature that they need.
struct Need {
    /// `FILE` or `FILE::TEST`: prefixes of the tests' names.
    tests: &'static [&'static str],
    feature: &'static str,
    /// The first Linux version with the feature; `None` if no guest has it.
    since: Option<(u32, u32)>,
}

const NEEDS: &[Need] = &[
    Need {
        tests: &["vm"],
        feature: "qemu and cargo, which guests do not have",
        since: None,
    },
    Need {
        tests: &[
            "attachment::from_one_kind_to_the_other_no_packet_goes_unhandled",
            "attachment::no_echo_is_lost_through_kills_and_restarts_with_tcx",
            "repair::a_detached_link",
            "repair::a_removed_pin_of_a_link",
            "repair::the_removed_folder_of_links",
        ],
        feature: "TCX, which Linux has since 6.6",
        since: Some((6, 6)),
    },
];

/// The feature that the test `FILE::TEST` needs and that a guest with this kernel release (`uname -r`) lacks.
pub(crate) fn missing(name: &str, release: &str) -> Option<&'static str> {
    NEEDS
        .iter()
        .filter(|need| {
            need.since
                .is_none_or(|since| version(release).is_some_and(|version| version < since))
        })
        .find(|need| need.tests.iter().any(|tests| is_below(name, tests)))
        .map(|need| need.feature)
}

/// Major and minor version of a kernel release.
fn version(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|letter: char| !letter.is_ascii_digit());
    let mut number = || numbers.next()?.parse().ok();
    Some((number()?, number()?))
}

#[cfg(test)]
mod tests {
    use super::missing;

    #[test]
    fn newer_kernels_miss_less() {
        let test = "attachment::from_one_kind_to_the_other_no_packet_goes_unhandled";
        assert!(missing(test, "6.1.0-56-amd64").is_some_and(|feature| feature.contains("TCX")));
        for release in ["6.6", "6.12.30+deb12-amd64", "7.0-rc1"] {
            assert_eq!(missing(test, release), None, "{release}");
        }
    }
}

//! Names of pinned links. Each name contains the program and the device, and is unique to its hook.

use crate::program::DatapathProgram;

/// Suffix of a pin that is about to replace another. Device names have no colon (`dev_valid_name`, net/core/dev.c).
const FRESH: &str = ":new";

/// Returns the pin name for the link of a program on a device: `to_netdev_eth0`. bpffs reserves names with dots, so
/// `eth0.100` becomes `eth0+2e100`.
pub(crate) fn name(program: DatapathProgram, device: &str) -> String {
    let device = device.replace('+', "+2b").replace('.', "+2e");
    format!("{program}_{device}")
}

/// Returns the name under which a link is pinned before it replaces the pin called `name`.
pub(crate) fn fresh(name: &str) -> String {
    format!("{name}{FRESH}")
}

/// Parses the program and the device from a pin's name.
pub(crate) fn parse(name: &str) -> Option<(DatapathProgram, String)> {
    let name = name.strip_suffix(FRESH).unwrap_or(name);
    DatapathProgram::of_devices().find_map(|program| {
        let device = name.strip_prefix(program.name())?.strip_prefix('_')?;
        Some((program, device.replace("+2e", ".").replace("+2b", "+")))
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn usual_names_stand_as_they_are() {
        assert_eq!(name(DatapathProgram::ToNetdev, "eth0"), "to_netdev_eth0");
        assert_eq!(parse("to_netdev_eth0:new"), parse("to_netdev_eth0"));
        assert_eq!(parse("foreign_eth0"), None);
    }

    proptest! {
        #[test]
        fn every_device_has_a_name_of_its_own_that_bpffs_takes(
            device in "[a-z0-9._+%@-]{1,15}|eth0(_new)?|a\\.b_new|\\+2[be]",
            program in prop::sample::select(DatapathProgram::of_devices().collect::<Vec<_>>()),
        ) {
            let name = name(program, &device);
            prop_assert!(!name.contains(['.', '/', ':']), "{name}");
            let reported = Some((program, device));
            prop_assert_eq!(&parse(&name), &reported);
            prop_assert_eq!(&parse(&fresh(&name)), &reported);
        }
    }
}

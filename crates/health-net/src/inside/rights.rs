//! A process's identity and rights, for another process to adopt.

use std::fs::File;
use std::io;

use nix::errno::Errno;
use nix::sched::{CloneFlags, setns};
use nix::sys::prctl;
use nix::unistd::{Gid, Uid, setgroups, setresgid, setresuid};

/// From linux/capability.h: the version of `capset` that handles 64 capabilities.
const CAPABILITY_VERSION_3: u32 = 0x2008_0522;

/// User, groups and capabilities of a process, by their ids in its own user namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Rights {
    uid: u32,
    gid: u32,
    groups: Vec<u32>,
    capabilities: Capabilities,
    /// Whether set-user-id programs give the process no privileges.
    no_new_privileges: bool,
}

/// Capabilities, one bit each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Capabilities {
    inheritable: u64,
    permitted: u64,
    bounding: u64,
}

/// A user namespace's mapping of users or groups to those of its parent.
#[derive(Clone, Debug)]
pub(super) struct IdMap(Vec<(u32, u32, u32)>);

impl IdMap {
    /// Parses `/proc/PID/uid_map`.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let rows = text.lines().map(|line| {
            let mut numbers = line.split_whitespace().map(str::parse);
            let mut next = || numbers.next()?.ok();
            Some((next()?, next()?, next()?))
        });
        rows.collect::<Option<_>>().map(Self)
    }

    /// Converts an id outside the namespace to the id inside.
    fn inside(&self, id: u32) -> Option<u32> {
        self.0.iter().find_map(|&(inside, outside, count)| {
            let offset = id.checked_sub(outside)?;
            (offset < count).then(|| inside + offset)
        })
    }
}

impl Rights {
    /// Parses `/proc/PID/status`. If the process is in another user namespace, uses that namespace's maps.
    pub(super) fn parse(status: &str, maps: Option<&(IdMap, IdMap)>) -> Option<Self> {
        let field = |name: &str| {
            let mut lines = status.lines();
            lines.find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))
        };
        // The fields are real, effective, saved and file system id.
        let effective = |name: &str| field(name)?.split_whitespace().nth(1)?.parse::<u32>().ok();
        let bits = |name: &str| u64::from_str_radix(field(name)?.trim(), 16).ok();
        let (mut uid, mut gid) = (effective("Uid")?, effective("Gid")?);
        let groups = field("Groups")?.split_whitespace().map(str::parse);
        let mut groups: Vec<u32> = groups.collect::<Result<_, _>>().ok()?;
        if let Some((uids, gids)) = maps {
            uid = uids.inside(uid)?;
            gid = gids.inside(gid)?;
            // Groups without an id inside are left out.
            groups = groups.iter().filter_map(|id| gids.inside(*id)).collect();
        }
        Some(Self {
            uid,
            gid,
            groups,
            capabilities: Capabilities {
                inheritable: bits("CapInh")?,
                permitted: bits("CapPrm")?,
                bounding: bits("CapBnd")?,
            },
            no_new_privileges: field("NoNewPrivs").map(str::trim) == Some("1"),
        })
    }

    /// Gives these rights to the calling process, in a user namespace if one is given. Never grants more rights than
    /// the process already has.
    pub(super) fn take(&self, user_namespace: Option<&File>) -> Result<(), Errno> {
        if let Some(namespace) = user_namespace {
            setns(namespace, CloneFlags::CLONE_NEWUSER)?;
        }
        let groups: Vec<_> = self.groups.iter().copied().map(Gid::from_raw).collect();
        match setgroups(&groups) {
            // A user namespace may forbid this; then the process has no groups from that namespace either.
            Err(Errno::EPERM) if user_namespace.is_some() => {}
            other => other?,
        }
        let gid = Gid::from_raw(self.gid);
        setresgid(gid, gid, gid)?;
        drop_bounding(self.capabilities.bounding)?;
        // A process can make only its permitted capabilities inheritable.
        let own = capabilities()?;
        let wanted = Capabilities {
            inheritable: self.capabilities.inheritable & own.permitted,
            // The change of user drops some capabilities.
            ..own
        };
        set_capabilities(wanted)?;
        let uid = Uid::from_raw(self.uid);
        setresuid(uid, uid, uid)?;
        let own = capabilities()?;
        set_capabilities(Capabilities {
            permitted: self.capabilities.permitted & own.permitted,
            ..own
        })?;
        if self.no_new_privileges {
            prctl::set_no_new_privs()?;
        }
        Ok(())
    }
}

/// Removes all capabilities that are not in `keep` from the bounding set.
fn drop_bounding(keep: u64) -> Result<(), Errno> {
    for capability in (0..64).filter(|bit| keep & (1 << bit) == 0) {
        // SAFETY: takes and returns only numbers.
        let result = unsafe { libc::prctl(libc::PR_CAPBSET_DROP, capability as libc::c_ulong) };
        match Errno::result(result) {
            // The kernel knows fewer capabilities.
            Err(Errno::EINVAL) => break,
            other => other?,
        };
    }
    Ok(())
}

/// `struct __user_cap_header_struct`.
#[repr(C)]
struct Header {
    version: u32,
    pid: i32,
}

/// `struct __user_cap_data_struct`; two of them hold 64 bits of each set.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Data {
    effective: u32,
    permitted: u32,
    inheritable: u32,
}

const HEADER: Header = Header {
    version: CAPABILITY_VERSION_3,
    pid: 0,
};

/// Returns the calling process's capabilities, without its bounding set.
fn capabilities() -> Result<Capabilities, Errno> {
    let mut header = HEADER;
    let mut data = [Data::default(); 2];
    // SAFETY: this version of the call writes two `Data` structures.
    let result = unsafe { libc::syscall(libc::SYS_capget, &raw mut header, data.as_mut_ptr()) };
    Errno::result(result)?;
    let whole =
        |part: fn(&Data) -> u32| u64::from(part(&data[1])) << 32 | u64::from(part(&data[0]));
    Ok(Capabilities {
        inheritable: whole(|data| data.inheritable),
        permitted: whole(|data| data.permitted),
        bounding: 0,
    })
}

/// Sets the calling process's capabilities. The effective set becomes equal to the permitted set.
fn set_capabilities(wanted: Capabilities) -> Result<(), Errno> {
    let half = |shift: u32| Data {
        effective: (wanted.permitted >> shift) as u32,
        permitted: (wanted.permitted >> shift) as u32,
        inheritable: (wanted.inheritable >> shift) as u32,
    };
    let mut header = HEADER;
    let data = [half(0), half(32)];
    // SAFETY: this version of the call reads two `Data` structures.
    let result = unsafe { libc::syscall(libc::SYS_capset, &raw mut header, data.as_ptr()) };
    Errno::result(result).map(drop)
}

/// Returns the error for process data that cannot be parsed.
pub(super) fn unreadable() -> io::Error {
    io::Error::new(
        io::ErrorKind::InvalidData,
        "the kernel reports it in an unexpected form",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    const STATUS: &str = "Name:\tx\nUid:\t100000\t100007\t100000\t100000\nGid:\t5\t6\t7\t8\n\
        Groups:\t1 2 \nCapInh:\t0000000000000000\nCapPrm:\t00000000a80425fb\n\
        CapEff:\t00000000a80425fb\nCapBnd:\t00000000a80425ff\nNoNewPrivs:\t1\n";

    #[test]
    fn rights_are_read_as_the_process_names_them() {
        let rights = Rights::parse(STATUS, None).unwrap();
        assert_eq!((rights.uid, rights.gid), (100_007, 6));
        assert_eq!(rights.groups, [1, 2]);
        assert_eq!(rights.capabilities.permitted, 0xa804_25fb);
        assert_eq!(rights.capabilities.bounding, 0xa804_25ff);
        assert!(rights.no_new_privileges);

        let uids = IdMap::parse("         0     100000      65536\n").unwrap();
        let gids = IdMap::parse("0 6 1\n10 2 1\n").unwrap();
        let rights = Rights::parse(STATUS, Some(&(uids.clone(), gids))).unwrap();
        assert_eq!((rights.uid, rights.gid), (7, 0));
        assert_eq!(rights.groups, [10]);
        // The user has no id inside.
        assert_eq!(Rights::parse(STATUS, Some(&(uids.clone(), uids))), None);
        assert_eq!(Rights::parse("Uid:\t0\t0\t0\t0\n", None), None);
    }
}

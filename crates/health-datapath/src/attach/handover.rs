//! From one kind of attachment to the other, on a device that serves: no packet meets none of our programs, and
//! none meets them twice.
//!
//! A packet passes TCX first, and the filters of clsact behind it unless a program of TCX has the last word, which
//! ours does not. While both kinds are there, the one in front is a program that writes a mark into the packet's
//! `cb`, which the hook's programs alone see, and goes on with ours; the one behind leaves packets with the mark
//! alone and goes on with ours for all others. So whichever of them goes, each packet has met ours once.

use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::{fs, io};

use aya::programs::SchedClassifier;
use aya_obj::generated::bpf_attach_type::{BPF_TCX_EGRESS, BPF_TCX_INGRESS};
use aya_obj::generated::bpf_func_id::BPF_FUNC_tail_call;
use aya_obj::generated::bpf_map_type::BPF_MAP_TYPE_PROG_ARRAY;

use super::clsact::Clsact;
use super::{Direction, Hook, tcx};
use crate::asm::{
    R0, R1, R2, R3, call, exit, load_map, load_word, mov, mov32, skip_if_equal, store_word,
};
use crate::sys::{self, CreateAttr};
use crate::{DatapathError, link_pin};

const TC_ACT_UNSPEC: i32 = -1;
/// Of the last word of `cb` in `struct __sk_buff`.
const CB_AT: i16 = 64;

/// Gives the TCX link among these pins that is on the hook's device up for a filter, whose program is to be
/// replaced by the hook's own. `None` where there is no link.
pub(super) fn to_clsact(
    clsact: &Clsact,
    hook: &Hook,
    program: &SchedClassifier,
    pins: Vec<PathBuf>,
) -> Result<Option<Pair>, DatapathError> {
    let Some(pin) = tcx::pin_on_device(hook, pins) else {
        return Ok(None);
    };
    let hand_over = || {
        let pair = Pair::of(program)?;
        let link = sys::open_pin(&pin)?;
        sys::update_link(link.as_fd(), pair.front.as_fd())?;
        // What has passed the former program carries no mark.
        sys::wait_for_programs()?;
        clsact.put(hook, pair.behind.as_fd())?;
        fs::remove_file(&pin)?;
        drop(link);
        // What carries one must not meet the hook's own program.
        sys::wait_for_programs()?;
        Ok::<_, io::Error>(Some(pair))
    };
    hand_over().map_err(hook.failed("hand over to clsact"))
}

/// Gives the filter at a hook up for a TCX link that is pinned at `pin`, whose program is to be replaced by the
/// hook's own. `None` where there is no filter.
pub(super) fn to_tcx(
    clsact: &Clsact,
    hook: &Hook,
    program: &SchedClassifier,
    pin: &Path,
) -> Result<Option<Pair>, DatapathError> {
    // Of a device that is gone, attaching tells.
    if clsact.filter(hook).ok().flatten().is_none() {
        return Ok(None);
    }
    let hand_over = || {
        let device = hook.device_number()?;
        let pair = Pair::of(program)?;
        clsact.put(hook, pair.behind.as_fd())?;
        let link = sys::create_tcx_link(pair.front.as_fd(), device, attach_type(hook.direction))?;
        let fresh = pin.with_file_name(link_pin::fresh(&hook.pin_name()));
        let _ = fs::remove_file(&fresh);
        sys::pin(link.as_fd(), &fresh)?;
        fs::rename(&fresh, pin)?;
        Ok::<_, io::Error>(Some(pair))
    };
    let pair = hand_over().map_err(hook.failed("hand over to TCX"))?;
    clsact.detach(hook)?;
    Ok(pair)
}

/// The programs of the time between. To be dropped when none of them is on a device any more.
#[derive(Debug)]
pub(super) struct Pair {
    front: OwnedFd,
    behind: OwnedFd,
    /// The kernel empties it when nobody has it open.
    _calls: OwnedFd,
}

impl Pair {
    fn of(program: &SchedClassifier) -> io::Result<Self> {
        let program = program.fd().map_err(io::Error::other)?;
        let calls = sys::create_map(CreateAttr {
            kind: BPF_MAP_TYPE_PROG_ARRAY as u32,
            key_size: 4,
            value_size: 4,
            max_entries: 1,
            ..CreateAttr::default()
        })?;
        let descriptor = program.as_fd().as_raw_fd();
        sys::set(
            calls.as_fd(),
            &0_u32.to_ne_bytes(),
            &descriptor.to_ne_bytes(),
        )?;
        let [map, map_end] = load_map(R2, calls.as_fd());
        let go_on = [
            map,
            map_end,
            mov(R3, 0),
            call(BPF_FUNC_tail_call),
            mov(R0, TC_ACT_UNSPEC),
            exit(),
        ];
        // Another one for each hook: a packet may pass several of them.
        let mark = rand::random();
        let front = [mov32(R2, mark), store_word(R1, CB_AT, R2)];
        let behind = [
            load_word(R2, R1, CB_AT),
            mov32(R3, mark),
            // To the last two.
            skip_if_equal(R2, R3, 4),
        ];
        let [front, behind] = [&front[..], &behind].map(|first| [first, &go_on].concat());
        Ok(Self {
            front: sys::load_classifier(&front, &mut [])?,
            behind: sys::load_classifier(&behind, &mut [])?,
            _calls: calls,
        })
    }
}

/// Of `enum bpf_attach_type`.
pub(crate) fn attach_type(direction: Direction) -> u32 {
    match direction {
        Direction::Ingress => BPF_TCX_INGRESS as u32,
        Direction::Egress => BPF_TCX_EGRESS as u32,
    }
}

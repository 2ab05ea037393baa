//! Functions that are separate in the kernel too: the verifier checks each one once, not once per path that leads
//! there, and each uses its stack only while it runs.
//!
//! The kernel verifies a function by itself if it is global (`kernel/bpf/verifier.c`, `do_check_subprogs`): it has a
//! name of its own, its arguments are numbers, or pointers that the verifier does not trust, and its result is a
//! number. The attribute [`subprogram`] puts such a function between a plain one and its callers, which see no
//! difference. This is the only place where arguments and results are numbers.

use core::mem;
use core::ptr;

use health_common::endpoint::EndpointInfo;
use health_common::metrics::Reason;

/// The packet of a program, made of the kernel's context.
pub trait Context {
    /// The context.
    type Raw;
    /// Wraps the context.
    fn of(raw: *mut Self::Raw) -> Self;
    /// The context.
    fn raw(&self) -> *mut Self::Raw;
}

/// An argument of a subprogram.
pub trait Argument: Sized {
    /// What the kernel passes: a number or a pointer.
    type Raw;
    /// Converts to what the kernel passes.
    fn pass(self) -> Self::Raw;
    /// The inverse of `pass`. The verifier requires a comparison of pointers with null: `None` for a null pointer,
    /// which no one passes.
    ///
    /// # Safety
    ///
    /// `pass` must have created `raw`, of an argument that is still valid.
    unsafe fn receive(raw: Self::Raw) -> Option<Self>;
}

/// What the kernel passes for a packet.
pub type RawContext<C> = *mut <C as Context>::Raw;
/// What the kernel passes for an argument.
pub type RawArgument<A> = <A as Argument>::Raw;

/// A result of a subprogram, as a number.
pub trait Returned: Sized {
    /// Converts to a number.
    fn encode(self) -> u32;
    /// The inverse of `encode`. 0 must be a result too.
    fn decode(number: u32) -> Self;
}

/// A result of a step without data: its variants are numbered from 0.
///
/// # Safety
///
/// It must be `repr(u32)`, without fields, and have at most 128 variants.
pub unsafe trait Stage: Copy {}

/// Number of the first [`Reason`] for drops.
const REASONS: u32 = 128;

impl<S> Argument for &mut S {
    type Raw = *mut S;

    #[inline(always)]
    fn pass(self) -> *mut S {
        self
    }

    #[inline(always)]
    unsafe fn receive(raw: *mut S) -> Option<Self> {
        // SAFETY: null, or made of a reference that is still valid, as the caller promises.
        unsafe { raw.as_mut() }
    }
}

impl Argument for Option<&EndpointInfo> {
    type Raw = *const EndpointInfo;

    #[inline(always)]
    fn pass(self) -> *const EndpointInfo {
        self.map_or(ptr::null(), ptr::from_ref)
    }

    #[inline(always)]
    unsafe fn receive(raw: *const EndpointInfo) -> Option<Self> {
        // SAFETY: as above.
        Some(unsafe { raw.as_ref() })
    }
}

impl Argument for u8 {
    type Raw = u32;

    #[inline(always)]
    fn pass(self) -> u32 {
        self.into()
    }

    #[inline(always)]
    unsafe fn receive(raw: u32) -> Option<Self> {
        Some(raw as Self)
    }
}

impl Argument for u32 {
    type Raw = Self;

    #[inline(always)]
    fn pass(self) -> Self {
        self
    }

    #[inline(always)]
    unsafe fn receive(raw: Self) -> Option<Self> {
        Some(raw)
    }
}

impl Argument for u64 {
    type Raw = Self;

    #[inline(always)]
    fn pass(self) -> Self {
        self
    }

    #[inline(always)]
    unsafe fn receive(raw: Self) -> Option<Self> {
        Some(raw)
    }
}

impl Returned for () {
    #[inline(always)]
    fn encode(self) -> u32 {
        0
    }

    #[inline(always)]
    fn decode(_number: u32) -> Self {}
}

impl Returned for bool {
    #[inline(always)]
    fn encode(self) -> u32 {
        self.into()
    }

    #[inline(always)]
    fn decode(number: u32) -> Self {
        number != 0
    }
}

impl Returned for u32 {
    #[inline(always)]
    fn encode(self) -> Self {
        self
    }

    #[inline(always)]
    fn decode(number: Self) -> Self {
        number
    }
}

impl<S: Stage> Returned for S {
    #[inline(always)]
    fn encode(self) -> u32 {
        // SAFETY: such a number in memory, as `Stage` requires.
        unsafe { mem::transmute_copy(&self) }
    }

    #[inline(always)]
    fn decode(number: u32) -> Self {
        // SAFETY: one of its variants: only `encode` creates these numbers, and 0 is the first one.
        unsafe { mem::transmute_copy(&number) }
    }
}

/// `Err`: the packet is dropped. The reason's number must be at least [`REASONS`].
impl<R: Returned> Returned for Result<R, Reason> {
    #[inline(always)]
    fn encode(self) -> u32 {
        match self {
            Ok(result) => result.encode(),
            Err(reason) => reason as u32,
        }
    }

    #[inline(always)]
    fn decode(number: u32) -> Self {
        if number.wrapping_sub(REASONS) < REASONS {
            // SAFETY: only `encode` creates these numbers, from a reason.
            Err(unsafe { mem::transmute::<u8, Reason>(number as u8) })
        } else {
            Ok(R::decode(number))
        }
    }
}

/// Makes a function a subprogram. Its first argument is the packet, a [`Context`]; the others are [`Argument`]s, and
/// its result is [`Returned`]. The attribute names the functions in the kernel, as `bpftool` and the verifier show
/// them:
///
/// - `#[subprogram(name)]` for a function that is not generic;
/// - `#[subprogram(name4, name6)]` for one that is generic over a [`Version`](crate::ip_version::Version) `T`;
/// - `#[subprogram(endpoint4, endpoint6, uplink4, uplink6)]` for `T` and a [`Hook`](crate::hook::Hook) `P`.
macro_rules! subprogram {
    attr($($symbol:ident),+) {
        $(#[$meta:meta])*
        $vis:vis fn $name:ident$(<$($generic:ident: $bound:path),+>)?(
            $frame:ident: &$context:ident
            $(, $argument:ident: $type:ty)* $(,)?
        ) $(-> $result:ty)? $body:block
    } => {
        $(#[$meta])*
        #[inline(always)]
        $vis fn $name$(<$($generic: $bound),+>)?(
            $frame: &$context
            $(, $argument: $type)*
        ) $(-> $result)? {
            #[inline(always)]
            fn body$(<$($generic: $bound),+>)?(
                $frame: &$context
                $(, $argument: $type)*
            ) $(-> $result)? $body

            let function = $crate::subprogram::subprogram!(
                @choose [$($symbol)+] []
                (body$(::<$($generic),+>)?)
                ($frame: $context)
                ($($argument: $type),*)
            );
            // SAFETY: the function of this version and hook, whose types are these.
            let function: extern "C" fn(
                $crate::subprogram::RawContext<$context>
                $(, $crate::subprogram::RawArgument<$type>)*
            ) -> u32 = unsafe { core::mem::transmute(function) };
            $crate::subprogram::Returned::decode(function(
                $crate::subprogram::Context::raw($frame)
                $(, $crate::subprogram::Argument::pass($argument))*
            ))
        }
    };
    (@choose [$symbol:ident] [] $($function:tt)+) => {
        $crate::subprogram::subprogram!(@define $symbol [] $($function)+)
    };
    (@choose [$symbol4:ident $symbol6:ident] [$($alias:item)*] $($function:tt)+) => {
        if T::IP_VERSION == 4 {
            $crate::subprogram::subprogram!(
                @define $symbol4 [$($alias)* type T = health_common::ct::Tuple4;] $($function)+
            )
        } else {
            $crate::subprogram::subprogram!(
                @define $symbol6 [$($alias)* type T = health_common::ct::Tuple6;] $($function)+
            )
        }
    };
    (
        @choose [$endpoint4:ident $endpoint6:ident $uplink4:ident $uplink6:ident] []
        $($function:tt)+
    ) => {
        if P::IS_UPLINK {
            $crate::subprogram::subprogram!(
                @choose [$uplink4 $uplink6] [type P = $crate::hook::AtUplink;] $($function)+
            )
        } else {
            $crate::subprogram::subprogram!(
                @choose [$endpoint4 $endpoint6] [type P = $crate::hook::AtEndpoint;] $($function)+
            )
        }
    };
    (
        @define $symbol:ident
        [$($alias:item)*]
        ($($body:tt)+)
        ($frame:ident: $context:ident)
        ($($argument:ident: $type:ty),*)
    ) => {{
        $($alias)*

        #[unsafe(no_mangle)]
        #[inline(never)]
        extern "C" fn $symbol(
            $frame: $crate::subprogram::RawContext<$context>
            $(, $argument: $crate::subprogram::RawArgument<$type>)*
        ) -> u32 {
            // Otherwise LLVM would not pass it where the function does not use it, which the verifier rejects.
            let $frame: $context = $crate::subprogram::Context::of($crate::bounds::forgotten($frame));
            $(
                // SAFETY: only the caller above passes it.
                let $argument = unsafe { $crate::subprogram::Argument::receive($argument) };
                let Some::<$type>($argument) = $argument else {
                    return 0;
                };
            )*
            $crate::subprogram::Returned::encode($($body)+(&$frame $(, $argument)*))
        }

        $symbol as *const ()
    }};
}
pub(crate) use subprogram;

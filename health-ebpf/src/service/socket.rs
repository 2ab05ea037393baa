//! The host's own sockets: they connect or send to a backend instead of the service, before any packet exists; and
//! answers seem to come from the service.
//!
//! Cgroup programs see the sockets of all network namespaces. These handle only the host's.

use core::ptr;

use aya_ebpf::bindings::{BPF_ANY, bpf_sock_addr};
use aya_ebpf::helpers::bpf_get_current_pid_tgid;
use aya_ebpf::helpers::generated::{bpf_get_netns_cookie, bpf_get_socket_cookie, bpf_set_retval};
use aya_ebpf::programs::SockContext;
use health_common::addr::Addr;
use health_common::config::DatapathConfig;
use health_common::ct::{IP_PROTOCOL_UDP, TUPLE_OUT, Tuple4, Tuple6};
use health_common::masquerade::Address as _;
use health_common::metrics::{Direction, Reason};
use health_common::service::Frontend;
use health_common::service::socket::{SocketFlow, SocketKey, Turns};

use super::backend::{address, count_flow, uncount_flow};
use super::choice::{Client, elect, stay};
use crate::clock::coarse_now_ns;
use crate::hook::AtEndpoint;
use crate::ip_version::Version;
use crate::maps::{HEALTH_CONFIG, HEALTH_SOCKETS, HEALTH_TURNS};
use crate::metrics::count_call;

/// The call continues.
const GO_ON: i32 = 1;
/// The call fails with the error that was set.
const REFUSED: i32 = 0;

const EPERM: i32 = 1;
const ECONNREFUSED: i32 = 111;
const EHOSTUNREACH: i32 = 113;

/// A system call that names an address, with the fields that the kernel lets a program of its version read and
/// change.
pub trait Call {
    /// Whether the address may be IPv6.
    const IS_V6: bool;
    /// The context.
    fn context(&self) -> *mut bpf_sock_addr;
    /// The address; IPv4 in its mapped form.
    fn addr(&self) -> Addr;
    /// Replaces the call's address with another one of the same version.
    fn set_addr(&self, addr: Addr);
}

/// A call with an IPv4 address.
pub struct Call4(*mut bpf_sock_addr);

/// A call with an IPv6 address.
pub struct Call6(*mut bpf_sock_addr);

impl Call4 {
    /// Wraps a context.
    #[inline(always)]
    pub fn new(context: *mut bpf_sock_addr) -> Self {
        Self(context)
    }
}

impl Call6 {
    /// Wraps a context.
    #[inline(always)]
    pub fn new(context: *mut bpf_sock_addr) -> Self {
        Self(context)
    }
}

impl Call for Call4 {
    const IS_V6: bool = false;

    #[inline(always)]
    fn context(&self) -> *mut bpf_sock_addr {
        self.0
    }

    #[inline(always)]
    fn addr(&self) -> Addr {
        // SAFETY: a field of the context that the verifier lets these programs read, in words.
        Addr::v4(unsafe { ptr::read_volatile(&raw const (*self.0).user_ip4) })
    }

    #[inline(always)]
    fn set_addr(&self, addr: Addr) {
        // SAFETY: as above, and write.
        unsafe { ptr::write_volatile(&raw mut (*self.0).user_ip4, addr.words_be[3]) }
    }
}

impl Call for Call6 {
    const IS_V6: bool = true;

    #[inline(always)]
    fn context(&self) -> *mut bpf_sock_addr {
        self.0
    }

    #[inline(always)]
    fn addr(&self) -> Addr {
        // SAFETY: fields of the context that the verifier lets these programs read, in words.
        unsafe {
            Addr {
                words_be: [
                    ptr::read_volatile(&raw const (*self.0).user_ip6[0]),
                    ptr::read_volatile(&raw const (*self.0).user_ip6[1]),
                    ptr::read_volatile(&raw const (*self.0).user_ip6[2]),
                    ptr::read_volatile(&raw const (*self.0).user_ip6[3]),
                ],
            }
        }
    }

    #[inline(always)]
    fn set_addr(&self, addr: Addr) {
        let [a, b, c, d] = addr.words_be;
        // SAFETY: as above, and write.
        unsafe {
            ptr::write_volatile(&raw mut (*self.0).user_ip6[0], a);
            ptr::write_volatile(&raw mut (*self.0).user_ip6[1], b);
            ptr::write_volatile(&raw mut (*self.0).user_ip6[2], c);
            ptr::write_volatile(&raw mut (*self.0).user_ip6[3], d);
        }
    }
}

/// The other end that a call names.
struct Named {
    addr: Addr,
    port_be: u16,
}

impl Named {
    #[inline(always)]
    fn by(call: &impl Call) -> Self {
        Self {
            addr: call.addr(),
            // SAFETY: a field of the context, which the verifier lets all of these programs read as a word.
            port_be: unsafe { ptr::read_volatile(&raw const (*call.context()).user_port) } as u16,
        }
    }

    /// Makes a call name this end.
    #[inline(always)]
    fn put_into(&self, call: &impl Call) {
        call.set_addr(self.addr);
        // SAFETY: as above, and write.
        unsafe {
            ptr::write_volatile(
                &raw mut (*call.context()).user_port,
                u32::from(self.port_be),
            );
        }
    }

    #[inline(always)]
    fn of(flow: &SocketFlow) -> Self {
        Self {
            addr: flow.addr,
            port_be: flow.port_be,
        }
    }
}

/// The socket of a call, as the key for whatever it is connected to, if it is one of the host's and not the agent's
/// own; with the settings.
#[inline(always)]
fn socket(call: &impl Call) -> Option<(SocketKey, &'static DatapathConfig)> {
    let config = HEALTH_CONFIG.get(0)?;
    let context = call.context();
    // SAFETY: helpers for this kind of context, and a field of it that may be read.
    let (netns, protocol) = unsafe {
        (
            bpf_get_netns_cookie(context.cast()),
            ptr::read_volatile(&raw const (*context).protocol),
        )
    };
    if config.netns_cookie != netns || is_agent(config) {
        return None;
    }
    // SAFETY: as above.
    let cookie = unsafe { bpf_get_socket_cookie(context.cast()) };
    Some((SocketKey::connected(cookie, protocol as u8), config))
}

/// Whether the agent makes this call.
#[inline(always)]
fn is_agent(config: &DatapathConfig) -> bool {
    // The upper half is the process, by its PID in the initial PID namespace.
    (bpf_get_current_pid_tgid() >> 32) as u32 == config.agent_tgid
}

/// Handles a socket that connects.
#[inline(always)]
pub fn connect<C: Call>(call: &C) -> i32 {
    let Some((socket, config)) = socket(call) else {
        return GO_ON;
    };
    let named = Named::by(call);
    if named.addr.is_v4() {
        connect_to::<Tuple4, C>(call, &socket, &named, config)
    } else if C::IS_V6 {
        connect_to::<Tuple6, C>(call, &socket, &named, config)
    } else {
        GO_ON
    }
}

#[inline(always)]
fn connect_to<T: Version, C: Call>(
    call: &C,
    socket: &SocketKey,
    named: &Named,
    config: &DatapathConfig,
) -> i32 {
    let backend = match frontend::<T>(socket, named) {
        None => None,
        Some((frontend, flow)) => match choose(&flow, &frontend, config) {
            Ok(backend) => Some(backend),
            // A datagram socket keeps its previous connection.
            Err(refused) => return refused,
        },
    };
    forget(socket);
    let Some(backend) = backend else {
        forget_asked(socket, named);
        return GO_ON;
    };
    // If there is no space, the process sees the backend's address, and gets no help when that backend is gone.
    if HEALTH_SOCKETS
        .insert(socket, backend, u64::from(BPF_ANY))
        .is_ok()
    {
        count_flow(backend.backend);
    }
    expect_answers(socket, named, &backend);
    Named::of(&backend).put_into(call);
    GO_ON
}

/// Handles a datagram that an unconnected socket sends.
#[inline(always)]
pub fn send<C: Call>(call: &C) -> i32 {
    let Some((socket, config)) = socket(call) else {
        return GO_ON;
    };
    let named = Named::by(call);
    if named.addr.is_v4() {
        send_to::<Tuple4, C>(call, &socket, &named, config)
    } else if C::IS_V6 {
        send_to::<Tuple6, C>(call, &socket, &named, config)
    } else {
        GO_ON
    }
}

#[inline(always)]
fn send_to<T: Version, C: Call>(
    call: &C,
    socket: &SocketKey,
    named: &Named,
    config: &DatapathConfig,
) -> i32 {
    let Some((frontend, flow)) = frontend::<T>(socket, named) else {
        note_direct(socket, named);
        return GO_ON;
    };
    let sent = SocketKey {
        addr: named.addr,
        port_be: named.port_be,
        ..*socket
    };
    let backend = match known::<T>(&sent, frontend.service) {
        Some(backend) => backend,
        None => {
            let backend = match choose(&flow, &frontend, config) {
                Ok(backend) => backend,
                Err(refused) => return refused,
            };
            // If there is no space, the next datagram may go elsewhere.
            let _ = HEALTH_SOCKETS.insert(sent, backend, u64::from(BPF_ANY));
            backend
        }
    };
    note_sent(socket, named, &backend);
    Named::of(&backend).put_into(call);
    GO_ON
}

/// Where a socket's datagrams to a frontend go, as long as that backend serves.
#[inline(always)]
fn known<T: Version>(sent: &SocketKey, service: u32) -> Option<SocketFlow> {
    // SAFETY: only calls on this socket change the entry, and values are replaced as a whole.
    let flow = *unsafe { HEALTH_SOCKETS.get(sent) }?;
    let (addr, port_be) = address::<T>(flow.backend, service)?;
    let is_same = flow.service == service && addr.to_addr() == flow.addr && port_be == flow.port_be;
    is_same.then_some(flow)
}

/// Reports the service as the sender of a datagram to a process.
#[inline(always)]
pub fn receive<C: Call>(call: &C) -> i32 {
    let Some((socket, _)) = socket(call) else {
        return GO_ON;
    };
    let named = Named::by(call);
    let answers = socket.answers(named.addr, named.port_be);
    let Some(known) = HEALTH_SOCKETS.get_ptr_mut(answers) else {
        return GO_ON;
    };
    // SAFETY: a value of that map, valid memory for the program's run. Only calls on this socket change it.
    let mut from = unsafe {
        if (*known).is_asked != 0 {
            (*known).is_asked = 0;
        }
        Named::of(&*known)
    };
    if let Some(turns) = HEALTH_TURNS.get_ptr_mut(answers)
        // SAFETY: as above.
        && let Some((addr, port_be)) = unsafe { (*turns).receive() }
    {
        from = Named { addr, port_be };
    }
    // A frontend and its backends have the same IP version.
    if C::IS_V6 || from.addr.is_v4() {
        from.put_into(call);
    }
    GO_ON
}

/// Reports the service to a process as the peer of its socket.
#[inline(always)]
pub fn report_peer<C: Call>(call: &C) -> i32 {
    let Some((socket, _)) = socket(call) else {
        return GO_ON;
    };
    let named = Named::by(call);
    let answers = socket.answers(named.addr, named.port_be);
    // SAFETY: as in `known`.
    if let Some(flow) = unsafe { HEALTH_SOCKETS.get(answers) } {
        // A frontend and its backends have the same IP version.
        if C::IS_V6 || flow.addr.is_v4() {
            Named::of(flow).put_into(call);
        }
    }
    GO_ON
}

/// Removes the record of a socket that is closed.
#[inline(always)]
pub fn release(ctx: &SockContext) -> i32 {
    let context = ctx.sock;
    let Some(config) = HEALTH_CONFIG.get(0) else {
        return GO_ON;
    };
    // SAFETY: helpers for this kind of context, and a field of it that may be read.
    let (netns, cookie, protocol) = unsafe {
        (
            bpf_get_netns_cookie(context.cast()),
            bpf_get_socket_cookie(context.cast()),
            ptr::read_volatile(&raw const (*context).protocol),
        )
    };
    if config.netns_cookie == netns {
        forget(&SocketKey::connected(cookie, protocol as u8));
    }
    GO_ON
}

/// Removes what is known about a socket's connection.
#[inline(always)]
fn forget(socket: &SocketKey) {
    // SAFETY: as in `known`.
    let Some(&flow) = (unsafe { HEALTH_SOCKETS.get(socket) }) else {
        return;
    };
    let answers = socket.answers(flow.addr, flow.port_be);
    let _ = HEALTH_SOCKETS.remove(answers);
    if HEALTH_SOCKETS.remove(socket).is_ok() {
        uncount_flow(flow.backend, flow.service);
    }
}

/// Forgets that a UDP socket used service addresses to reach this address, which it now connects to directly.
#[inline(always)]
fn forget_asked(socket: &SocketKey, named: &Named) {
    if socket.protocol == IP_PROTOCOL_UDP {
        let answers = socket.answers(named.addr, named.port_be);
        let _ = HEALTH_SOCKETS.remove(answers);
        let _ = HEALTH_TURNS.remove(answers);
    }
}

/// The frontend that a call names, if any; and the flow, of which only one end is known.
#[inline(always)]
fn frontend<T: Version>(socket: &SocketKey, named: &Named) -> Option<(Frontend, T)> {
    let source = T::Address::default();
    let destination = T::Address::of_addr(&named.addr);
    let mut flow = T::of_echo(source, destination, 0, TUPLE_OUT);
    // It has no port yet. Maglev should send different flows to different backends.
    flow.set_ports(socket.cookie as u16, named.port_be, socket.protocol);
    // SAFETY: entries are replaced as a whole.
    let frontend = unsafe { T::frontends().get(flow.frontend_key()) }?;
    Some((*frontend, flow))
}

/// A backend for a new flow of the host; on failure, the call's return value, with its error set.
#[inline(always)]
fn choose<T: Version>(
    flow: &T,
    frontend: &Frontend,
    config: &DatapathConfig,
) -> Result<SocketFlow, i32> {
    let client = Client {
        source: if T::IP_VERSION == 4 {
            config.node4
        } else {
            config.node6
        },
        // For affinity, the host is a single client, whatever its addresses.
        stays_as: Addr::default(),
    };
    let (index, (addr, port_be)) =
        elect::<T, AtEndpoint>(flow, &client, frontend, 0).map_err(refuse)?;
    if frontend.affinity_secs != 0 {
        stay(client.stays_as, frontend.service, index);
    }
    Ok(SocketFlow {
        addr: addr.to_addr(),
        port_be,
        is_asked: 0,
        backend: index,
        service: frontend.service,
    })
}

/// Fails the call: no one would notice a dropped packet.
#[inline(always)]
fn refuse(reason: Reason) -> i32 {
    let error = match reason {
        Reason::ServiceRejected => ECONNREFUSED,
        // As for a packet that the host's own firewall drops.
        Reason::ServiceSourceRange => EPERM,
        _ => EHOSTUNREACH,
    };
    count_call(reason, Direction::Egress);
    // SAFETY: a helper of these programs, from Linux 6.1 on.
    unsafe { bpf_set_retval(-error) };
    REFUSED
}

/// Records that an unconnected socket reaches a backend through a frontend.
#[inline(always)]
fn note_sent(socket: &SocketKey, named: &Named, backend: &SocketFlow) {
    let key = socket.answers(backend.addr, backend.port_be);
    let frontend = SocketFlow {
        addr: named.addr,
        port_be: named.port_be,
        is_asked: 1,
        ..*backend
    };
    if let Some(known) = HEALTH_SOCKETS.get_ptr_mut(key) {
        take_turn(&key, known, named);
        // SAFETY: a value of that map, valid memory for the program's run. Only calls on this socket change it.
        unsafe {
            (*known).is_asked = 1;
            if *known == frontend {
                return;
            }
        }
    }
    let _ = HEALTH_SOCKETS.insert(key, frontend, u64::from(BPF_ANY));
}

/// Records that an unconnected socket sends to an address that is not a service's, if it also reaches that backend
/// through a service.
#[inline(always)]
fn note_direct(socket: &SocketKey, named: &Named) {
    let key = socket.answers(named.addr, named.port_be);
    if let Some(known) = HEALTH_SOCKETS.get_ptr_mut(key) {
        // If a connected IPv6 socket sends to an IPv4 address, the kernel treats it as unconnected.
        // SAFETY: as in `known`.
        if let Some(flow) = unsafe { HEALTH_SOCKETS.get(socket) }
            && flow.addr == named.addr
            && flow.port_be == named.port_be
        {
            return;
        }
        take_turn(&key, known, named);
        // SAFETY: as in `receive`.
        unsafe { (*known).is_asked = 0 };
    }
}

/// Records the address by which a socket reaches a backend, if it uses several. `known`: the last one that it used
/// through a service.
#[inline(always)]
fn take_turn(key: &SocketKey, known: *mut SocketFlow, named: &Named) {
    let now_ms = (coarse_now_ns() / 1_000_000) as u32;
    if let Some(turns) = HEALTH_TURNS.get_ptr_mut(key) {
        // SAFETY: a value of that map, valid memory for the program's run.
        unsafe { (*turns).send(named.addr, named.port_be, now_ms) };
        return;
    }
    // SAFETY: as in `receive`.
    let known = unsafe { *known };
    if known.addr == named.addr && known.port_be == named.port_be {
        return;
    }
    let mut turns = Turns::default();
    if known.is_asked != 0 {
        turns.send(known.addr, known.port_be, now_ms);
    }
    turns.send(named.addr, named.port_be, now_ms);
    // If there is no space, all answers seem to come from the frontend.
    let _ = HEALTH_TURNS.insert(key, turns, u64::from(BPF_ANY));
}

/// Makes a backend's answers to a connected socket seem to come from the frontend.
#[inline(always)]
fn expect_answers(socket: &SocketKey, named: &Named, backend: &SocketFlow) {
    let key = socket.answers(backend.addr, backend.port_be);
    let frontend = SocketFlow {
        addr: named.addr,
        port_be: named.port_be,
        ..*backend
    };
    // SAFETY: as in `known`.
    let known = unsafe { HEALTH_SOCKETS.get(key) };
    if known != Some(&frontend) {
        let _ = HEALTH_SOCKETS.insert(key, frontend, u64::from(BPF_ANY));
    }
    // Left over from before the socket was connected.
    if socket.protocol == IP_PROTOCOL_UDP {
        let _ = HEALTH_TURNS.remove(key);
    }
}

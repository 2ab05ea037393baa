//! clsact qdiscs and the eBPF filters on them. Works in the network namespace of the calling thread, and blocks until
//! the kernel's replies, which are immediate.

use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd};

use netlink_packet_core::{
    NLM_F_CREATE, NLM_F_DUMP, NLM_F_EXCL, NlasIterator, parse_string, parse_u32,
};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::tc::{
    TcAttribute, TcBpfFlags, TcFilterBpf, TcFilterBpfOption, TcHandle, TcHeader, TcMessage,
    TcOption,
};
use netlink_sys::protocols::NETLINK_ROUTE;

use super::socket::KernelSocket;

const TCA_KIND: u16 = 1;
const TCA_OPTIONS: u16 = 2;
const TCA_BPF_NAME: u16 = 7;
const TCA_BPF_ID: u16 = 11;
/// Bytes of `struct tcmsg`.
const HEADER_LEN: usize = 20;
/// The kind of a clsact qdisc.
const CLSACT: &str = "clsact";
/// Makes filters see packets of all protocols.
const PROTOCOL: u16 = (libc::ETH_P_ALL as u16).to_be();

/// The hooks of a clsact qdisc.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// For packets that the device received.
    Ingress,
    /// For packets that the device sends.
    Egress,
}

impl Side {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Ingress, Self::Egress];

    const fn parent(self) -> TcHandle {
        TcHandle {
            major: TcHandle::CLSACT.major,
            minor: match self {
                Self::Ingress => TcHandle::MIN_INGRESS,
                Self::Egress => TcHandle::MIN_EGRESS,
            },
        }
    }
}

/// The position of a filter on one side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Filters with lower priorities run first; at least 1.
    pub priority: u16,
    /// Distinguishes filters with the same priority.
    pub handle: u32,
}

/// A filter of any kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Filter {
    /// Its position.
    pub place: Place,
    /// Its classifier: `bpf`, `flower`.
    pub kind: String,
    /// Whether the filter sees packets of all protocols.
    pub is_for_all: bool,
    /// The name of an eBPF filter, given by its creator.
    pub name: Option<String>,
    /// Id of the filter's program.
    pub program: Option<u32>,
}

impl Filter {
    /// Whether an eBPF filter for all protocols can share this filter's priority.
    pub fn is_of_our_kind(&self) -> bool {
        self.kind == TcFilterBpf::KIND && self.is_for_all
    }

    /// Whether the filter has this name.
    pub fn is_named(&self, name: &str) -> bool {
        self.name.as_deref() == Some(name)
    }
}

/// A connection to the kernel.
#[derive(Debug)]
pub struct Socket(KernelSocket);

impl Socket {
    /// Opens a connection in the calling thread's namespace.
    pub fn open() -> io::Result<Self> {
        KernelSocket::open(NETLINK_ROUTE).map(Self)
    }

    /// Lists the ifindexes of devices that have a clsact qdisc.
    pub fn devices_with_clsact(&mut self) -> io::Result<Vec<u32>> {
        let request = RouteNetlinkMessage::GetQueueDiscipline(TcMessage::default());
        let mut devices = Vec::new();
        self.request(request, NLM_F_DUMP, &mut |header, attributes| {
            if attributes.kind.as_deref() == Some(CLSACT) {
                devices.push(header.index.cast_unsigned());
            }
        })?;
        Ok(devices)
    }

    /// Adds a clsact qdisc to a device. Returns `false` if the device already has one. An ingress qdisc occupies the
    /// same slot; with it, filters for sent packets would run on received packets.
    pub fn add_clsact(&mut self, device: u32) -> io::Result<bool> {
        let request = RouteNetlinkMessage::NewQueueDiscipline(clsact(device));
        match self.request(request, NLM_F_CREATE | NLM_F_EXCL, &mut |_, _| ()) {
            Ok(()) => Ok(true),
            Err(error) if error.raw_os_error() != Some(libc::EEXIST) => Err(error),
            Err(_) if self.devices_with_clsact()?.contains(&device) => Ok(false),
            Err(_) => Err(io::Error::other(
                "the device has an ingress qdisc; replace it with clsact, which does the same and more",
            )),
        }
    }

    /// Removes a device's clsact qdisc with all its filters.
    pub fn remove_clsact(&mut self, device: u32) -> io::Result<()> {
        let request = RouteNetlinkMessage::DelQueueDiscipline(clsact(device));
        self.request(request, 0, &mut |_, _| ())
    }

    /// Lists all filters of a side, in order; empty if there is no clsact qdisc.
    pub fn filters(&mut self, device: u32, side: Side) -> io::Result<Vec<Filter>> {
        let mut message = TcMessage::with_index(device.cast_signed());
        message.header.parent = side.parent();
        let request = RouteNetlinkMessage::GetTrafficFilter(message);
        let mut filters = Vec::new();
        self.request(request, NLM_F_DUMP, &mut |header, attributes| {
            // The dump also has an entry per priority, without a handle.
            let handle = u32::from(header.handle);
            if handle != 0 {
                filters.push(Filter {
                    place: Place {
                        priority: (header.info >> 16) as u16,
                        handle,
                    },
                    kind: attributes.kind.unwrap_or_default(),
                    is_for_all: header.info as u16 == PROTOCOL,
                    name: attributes.name,
                    program: attributes.program,
                });
            }
        })?;
        Ok(filters)
    }

    /// Attaches a program that returns its own verdict on packets (`direct-action`), at a position without a filter.
    pub fn add_filter(
        &mut self,
        device: u32,
        side: Side,
        place: Place,
        name: &str,
        program: BorrowedFd<'_>,
    ) -> io::Result<()> {
        let message = filter(device, side, place, name, program);
        let request = RouteNetlinkMessage::NewTrafficFilter(message);
        self.request(request, NLM_F_CREATE | NLM_F_EXCL, &mut |_, _| ())
    }

    /// Replaces a filter's program. Each packet meets either the old or the new one (`list_replace_rcu` in
    /// net/sched/cls_bpf.c, `cls_bpf_change`).
    pub fn replace_filter(
        &mut self,
        device: u32,
        side: Side,
        place: Place,
        name: &str,
        program: BorrowedFd<'_>,
    ) -> io::Result<()> {
        let message = filter(device, side, place, name, program);
        let request = RouteNetlinkMessage::NewTrafficFilter(message);
        self.request(request, 0, &mut |_, _| ())
    }

    /// Removes an eBPF filter for all protocols.
    pub fn remove_filter(&mut self, device: u32, side: Side, place: Place) -> io::Result<()> {
        let message = filter_message(device, side, place);
        let request = RouteNetlinkMessage::DelTrafficFilter(message);
        self.request(request, 0, &mut |_, _| ())
    }

    /// Sends a request, and calls `each` with every object in the reply. Foreign objects may contain attributes that
    /// our libraries cannot parse, so only the needed attributes are parsed.
    fn request(
        &mut self,
        request: RouteNetlinkMessage,
        flags: u16,
        each: &mut dyn FnMut(&TcHeader, Attributes),
    ) -> io::Result<()> {
        self.0.request_message(&request, flags, &mut |_, payload| {
            let header = TcHeader::parse(payload).map_err(io::Error::other)?;
            let attributes = payload.get(HEADER_LEN..).unwrap_or_default();
            each(&header, Attributes::read(attributes));
            Ok(())
        })
    }
}

/// The needed attributes of a qdisc or filter.
#[derive(Default)]
struct Attributes {
    kind: Option<String>,
    name: Option<String>,
    program: Option<u32>,
}

impl Attributes {
    fn read(bytes: &[u8]) -> Self {
        let mut attributes = Self::default();
        for attribute in NlasIterator::new(bytes).map_while(Result::ok) {
            match attribute.kind() {
                TCA_KIND => attributes.kind = parse_string(attribute.value()).ok(),
                TCA_OPTIONS if attributes.kind.as_deref() == Some(TcFilterBpf::KIND) => {
                    attributes.read_bpf(attribute.value());
                }
                _ => {}
            }
        }
        attributes
    }

    fn read_bpf(&mut self, options: &[u8]) {
        for option in NlasIterator::new(options).map_while(Result::ok) {
            match option.kind() {
                TCA_BPF_NAME => self.name = parse_string(option.value()).ok(),
                TCA_BPF_ID => self.program = parse_u32(option.value()).ok(),
                _ => {}
            }
        }
    }
}

fn clsact(device: u32) -> TcMessage {
    let mut message = TcMessage::with_index(device.cast_signed());
    message.header.parent = TcHandle::CLSACT;
    message.header.handle = TcHandle {
        major: TcHandle::CLSACT.major,
        minor: 0,
    };
    message.attributes = vec![TcAttribute::Kind(CLSACT.to_owned())];
    message
}

fn filter(device: u32, side: Side, place: Place, name: &str, program: BorrowedFd<'_>) -> TcMessage {
    let mut message = filter_message(device, side, place);
    let options = [
        TcFilterBpfOption::ProgFd(program.as_raw_fd().cast_unsigned()),
        TcFilterBpfOption::ProgName(name.to_owned()),
        TcFilterBpfOption::Flags(TcBpfFlags::DirectAction),
    ];
    let options = options.map(TcOption::Bpf).to_vec();
    message.attributes.push(TcAttribute::Options(options));
    message
}

fn filter_message(device: u32, side: Side, place: Place) -> TcMessage {
    let mut message = TcMessage::with_index(device.cast_signed());
    message.header.parent = side.parent();
    message.header.handle = place.handle.into();
    message.header.info = u32::from(place.priority) << 16 | u32::from(PROTOCOL);
    message.attributes = vec![TcAttribute::Kind(TcFilterBpf::KIND.to_owned())];
    message
}

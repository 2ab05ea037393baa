//! Virtual and real servers of IPVS, through the generic netlink family `IPVS` (include/uapi/linux/ip_vs.h,
//! net/netfilter/ipvs/ip_vs_ctl.c).

mod message;
mod model;
#[cfg(test)]
mod tests;

use netlink_packet_core::DefaultNla;
use netlink_packet_generic::ctrl::{GenlCtrl, GenlCtrlCmd, nlas::GenlCtrlAttrs};
use netlink_packet_generic::{GenlFamily, GenlMessage};
use netlink_sys::protocols::NETLINK_GENERIC;

use super::attributes::{each, u16_of};
use super::connection::{Connection, NetlinkError, Refusal};
use message::{Command, IpvsMessage};

pub use model::{
    Flags, Forwarding, Info, RealServer, Scheduler, ServerId, ServerKey, Timeouts, VirtualServer,
};

/// `CTRL_ATTR_FAMILY_ID` (include/uapi/linux/genetlink.h).
const FAMILY_ID: u16 = 1;

/// A connection to IPVS.
#[derive(Debug)]
pub struct Client {
    connection: Connection,
    family: u16,
}

/// A change of servers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// Adds a virtual server.
    AddServer(VirtualServer),
    /// Changes the scheduler, flags or timeout of a virtual server.
    SetServer(VirtualServer),
    /// Deletes a virtual server with all its real servers.
    DeleteServer(ServerId),
    /// Adds a real server to a virtual server.
    AddReal(ServerId, RealServer),
    /// Changes the weight, thresholds or forwarding of a real server.
    SetReal(ServerId, RealServer),
    /// Deletes a real server. Its connections end with their next packet.
    DeleteReal(ServerId, RealServer),
}

impl Client {
    /// Opens a connection in the calling thread's network namespace. The kernel loads IPVS if available.
    pub fn open() -> Result<Self, NetlinkError> {
        let mut connection = Connection::open(NETLINK_GENERIC)?;
        let name = GenlCtrlAttrs::FamilyName(IpvsMessage::family_name().to_owned());
        let request = GenlMessage::from_payload(GenlCtrl {
            cmd: GenlCtrlCmd::GetFamily,
            nlas: vec![name],
        });
        let mut family = None;
        connection.request(request, 0, &mut |object| {
            for attribute in each(message::payload(object)?) {
                let (kind, value) = attribute?;
                if kind == FAMILY_ID {
                    family = Some(u16_of(value, "the number of a family")?);
                }
            }
            Ok(())
        })?;
        let family = family.ok_or(NetlinkError::Malformed("a family has no number"))?;
        Ok(Self { connection, family })
    }

    /// Returns all virtual servers.
    pub fn servers(&mut self) -> Result<Vec<VirtualServer>, NetlinkError> {
        let request = self.message(Command::GetService, Vec::new());
        self.connection.list(&request, message::read_server)
    }

    /// Returns a virtual server; `None` if it does not exist.
    pub fn server(&mut self, id: ServerId) -> Result<Option<VirtualServer>, NetlinkError> {
        let request = self.message(Command::GetService, vec![message::id(id)]);
        let mut server = None;
        let answer = self.connection.request(request, 0, &mut |object| {
            server = message::read_server(object)?;
            Ok(())
        });
        match answer {
            Err(error) if error.is(libc::ESRCH) => Ok(None),
            answer => answer.map(|()| server),
        }
    }

    /// Returns the real servers of a virtual server.
    pub fn real_servers(&mut self, id: ServerId) -> Result<Vec<RealServer>, NetlinkError> {
        let request = self.message(Command::GetDest, vec![message::id(id)]);
        let family = id.family();
        let read = |object: &[u8]| message::read_real(object, family);
        self.connection.list(&request, read)
    }

    /// Makes changes in order. Returns the result of each.
    pub fn change(&mut self, changes: &[Change]) -> Result<Vec<Result<(), Refusal>>, NetlinkError> {
        let requests = changes.iter().map(|change| {
            let (command, attributes) = message::change(change);
            (self.message(command, attributes), 0)
        });
        let requests = requests.collect();
        self.connection.execute(requests)
    }

    /// Deletes all virtual servers, whoever created them.
    pub fn flush(&mut self) -> Result<(), NetlinkError> {
        let request = self.message(Command::Flush, Vec::new());
        self.connection.request(request, 0, &mut |_| Ok(()))
    }

    /// Returns information about the kernel's IPVS.
    pub fn info(&mut self) -> Result<Info, NetlinkError> {
        let request = self.message(Command::GetInfo, Vec::new());
        let mut info = None;
        self.connection.request(request, 0, &mut |object| {
            info = Some(message::read_info(object)?);
            Ok(())
        })?;
        info.ok_or(NetlinkError::Malformed("no information"))
    }

    /// Returns how long the kernel keeps idle connections.
    pub fn timeouts(&mut self) -> Result<Timeouts, NetlinkError> {
        let request = self.message(Command::GetConfig, Vec::new());
        let mut timeouts = None;
        self.connection.request(request, 0, &mut |object| {
            timeouts = Some(message::read_timeouts(object)?);
            Ok(())
        })?;
        timeouts.ok_or(NetlinkError::Malformed("no timeouts"))
    }

    /// Changes how long the kernel keeps idle connections; a value of 0 leaves the current timeout unchanged.
    pub fn set_timeouts(&mut self, timeouts: Timeouts) -> Result<(), NetlinkError> {
        let request = self.message(Command::SetConfig, message::timeouts(timeouts));
        self.connection.request(request, 0, &mut |_| Ok(()))
    }

    fn message(&self, command: Command, attributes: Vec<DefaultNla>) -> GenlMessage<IpvsMessage> {
        let mut message = GenlMessage::from_payload(IpvsMessage {
            command,
            attributes,
        });
        message.set_resolved_family_id(self.family);
        message
    }
}

//! nf_tables tables (include/uapi/linux/netfilter/nf_tables.h, net/netfilter/nf_tables_api.c). A table is replaced as a
//! whole, between two packets, or deleted.

pub mod expression;

use health_model::ipam::Family;
use netlink_packet_core::{NLM_F_APPEND, NLM_F_CREATE, NLM_F_EXCL};
use netlink_packet_netfilter::nftables::{
    ChainAttribute, ChainMessage, ExpressionAttribute, Expressions, Hook, HookNumber,
    ListAttribute, NfTablesMessage, RuleAttribute, RuleMessage, TableAttribute, TableFlags,
    TableMessage,
};
use netlink_packet_netfilter::none::ControlMessage;
use netlink_packet_netfilter::{
    NetfilterHeader, NetfilterMessage, NetfilterMessageInner, NetfilterProtoFamily,
};
use netlink_sys::protocols::NETLINK_NETFILTER;

pub use netlink_packet_netfilter::nftables::InetHookNumber;

use super::attributes::{each, family_of, netfilter_attributes, text_of};
use super::connection::{Connection, NetlinkError};

/// `NFNL_SUBSYS_NFTABLES`, which names the subsystem in batch markers.
const SUBSYSTEM: u16 = 10;
/// `NFTA_RULE_CHAIN`.
const RULE_CHAIN: u16 = 2;
/// `NF_ACCEPT`, the verdict at the end of a chain.
const POLICY_ACCEPT: u32 = 1;

/// The matches that a packet must pass, in order, followed by the action.
pub type Rule = Vec<Expressions>;

/// A table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Table {
    /// The family of packets that the table handles.
    pub family: Family,
    /// The table's name.
    pub name: &'static str,
    /// The table's chains.
    pub chains: Vec<Chain>,
}

/// A chain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chain {
    /// The chain's name, unique in the table.
    pub name: &'static str,
    /// Where packets enter the chain; `None` if they enter only by jumps.
    pub base: Option<Base>,
    /// The chain's rules, in order.
    pub rules: Vec<Rule>,
}

/// Where packets enter a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Base {
    /// `filter` or `nat`.
    pub kind: &'static str,
    /// The hook.
    pub hook: InetHookNumber,
    /// The priority at the hook; lower priorities come first.
    pub priority: i32,
}

/// A connection to nf_tables.
#[derive(Debug)]
pub struct Client(Connection);

impl Client {
    /// Opens a connection in the calling thread's network namespace.
    pub fn open() -> Result<Self, NetlinkError> {
        Ok(Self(Connection::open(NETLINK_NETFILTER)?))
    }

    /// Replaces the table with the same name atomically.
    pub fn replace(&mut self, table: &Table) -> Result<(), NetlinkError> {
        let (family, name) = (table.family, table.name);
        let mut messages = vec![
            (begin(), 0),
            // A table must exist before it can be deleted.
            (message(family, new_table(name)), NLM_F_CREATE),
            (message(family, delete_table(name)), 0),
            (message(family, new_table(name)), NLM_F_CREATE),
        ];
        // Rules jump to chains defined after their own, so create all chains first.
        let chains = table.chains.iter().map(|chain| new_chain(name, chain));
        messages.extend(chains.map(|chain| (message(family, chain), NLM_F_CREATE)));
        for chain in &table.chains {
            let rules = chain.rules.iter();
            let rules = rules.map(|rule| new_rule(name, chain.name, rule));
            messages.extend(rules.map(|rule| (message(family, rule), NLM_F_CREATE | NLM_F_APPEND)));
        }
        messages.push((end(), 0));
        self.0.transact(messages)
    }

    /// Creates an empty table owned by this connection: the kernel deletes the table when the connection is closed, and
    /// until then denies all others access with `EPERM` (`NFT_TABLE_F_OWNER`, since Linux 5.12).
    pub(crate) fn create_owned(&mut self, family: Family, name: &str) -> Result<(), NetlinkError> {
        let table = NfTablesMessage::NewTable(TableMessage {
            attributes: vec![
                TableAttribute::Name(name.to_owned()),
                TableAttribute::Flags(TableFlags::Owner),
            ],
        });
        let table = (message(family, table), NLM_F_CREATE | NLM_F_EXCL);
        self.0.transact(vec![(begin(), 0), table, (end(), 0)])
    }

    /// Deletes a table with all its contents. Returns whether it existed.
    pub fn delete(&mut self, family: Family, name: &str) -> Result<bool, NetlinkError> {
        let table = message(family, delete_table(name));
        let messages = vec![(begin(), 0), (table, 0), (end(), 0)];
        match self.0.transact(messages) {
            Ok(()) => Ok(true),
            Err(error) if error.is(libc::ENOENT) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Returns the chain of each rule in a table.
    pub fn rules(&mut self, family: Family, name: &str) -> Result<Vec<String>, NetlinkError> {
        let table = RuleAttribute::Table(name.to_owned());
        let request = NfTablesMessage::GetRule(RuleMessage {
            attributes: vec![table],
        });
        self.0.list(&message(family, request), |object| {
            for attribute in each(netfilter_attributes(object)?) {
                let (kind, value) = attribute?;
                if kind == RULE_CHAIN {
                    return text_of(value, "the name of a chain").map(Some);
                }
            }
            Ok(None)
        })
    }
}

fn begin() -> NetfilterMessage {
    mark(ControlMessage::BatchBegin)
}

fn end() -> NetfilterMessage {
    mark(ControlMessage::BatchEnd)
}

fn mark(mark: ControlMessage) -> NetfilterMessage {
    let header = NetfilterHeader::new(NetfilterProtoFamily::Unspec, 0, SUBSYSTEM);
    NetfilterMessage::new(header, NetfilterMessageInner::from(mark))
}

fn message(family: Family, inner: NfTablesMessage) -> NetfilterMessage {
    NetfilterMessage::new(NetfilterHeader::new(family_of(family), 0, 0), inner)
}

fn new_table(name: &str) -> NfTablesMessage {
    NfTablesMessage::NewTable(TableMessage {
        attributes: vec![TableAttribute::Name(name.to_owned())],
    })
}

fn delete_table(name: &str) -> NfTablesMessage {
    NfTablesMessage::DeleteTable(TableMessage {
        attributes: vec![TableAttribute::Name(name.to_owned())],
    })
}

fn new_chain(table: &str, chain: &Chain) -> NfTablesMessage {
    let mut attributes = vec![
        ChainAttribute::Table(table.to_owned()),
        ChainAttribute::Name(chain.name.to_owned()),
    ];
    if let Some(base) = chain.base {
        attributes.extend([
            ChainAttribute::Hook(vec![
                Hook::Number(HookNumber::Inet(base.hook)),
                Hook::Priority(base.priority.cast_unsigned()),
            ]),
            ChainAttribute::Policy(POLICY_ACCEPT),
            ChainAttribute::Type(base.kind.to_owned()),
        ]);
    }
    NfTablesMessage::NewChain(ChainMessage { attributes })
}

fn new_rule(table: &str, chain: &str, rule: &Rule) -> NfTablesMessage {
    let expressions = rule.iter().cloned();
    let expressions = expressions.map(ListAttribute::<ExpressionAttribute>::from);
    NfTablesMessage::NewRule(RuleMessage {
        attributes: vec![
            RuleAttribute::Table(table.to_owned()),
            RuleAttribute::Chain(chain.to_owned()),
            RuleAttribute::Expressions(expressions.collect()),
        ],
    })
}

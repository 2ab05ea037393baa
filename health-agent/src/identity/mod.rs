//! Security identities: a number for each set of labels, the same on every node.

mod number;

pub use self::number::{Identity, ParseIdentityError};

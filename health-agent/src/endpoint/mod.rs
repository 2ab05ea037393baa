//! Endpoints of this node.

//! Which side a service's flows come from, and the rules for flows from outside.

use super::{
    FLOW_MASQUERADED, FLOW_OF_HOST, FRONTEND_DROPS_INSIDE, FRONTEND_DROPS_OUTSIDE,
    FRONTEND_KEEPS_SOURCE, FRONTEND_LOCAL_INSIDE, FRONTEND_LOCAL_OUTSIDE, Frontend, Pool,
};
use crate::identity;

/// Where a flow comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// From this node and its endpoints.
    Inside,
    /// From an uplink.
    Outside,
}

impl Origin {
    /// Selects the value for flows from this side.
    #[inline(always)]
    pub const fn pick<T: Copy>(self, inside: T, outside: T) -> T {
        match self {
            Self::Inside => inside,
            Self::Outside => outside,
        }
    }
}

impl Frontend {
    /// The pool for new flows.
    #[inline(always)]
    pub const fn pool(&self, origin: Origin) -> Pool {
        origin.pick(self.inside, self.outside)
    }

    /// Whether new flows are dropped silently rather than rejected if the pool is empty.
    #[inline(always)]
    pub const fn drops(&self, origin: Origin) -> bool {
        self.flags & origin.pick(FRONTEND_DROPS_INSIDE, FRONTEND_DROPS_OUTSIDE) != 0
    }

    /// Whether backends see outside clients' own addresses.
    #[inline(always)]
    pub const fn keeps_source(&self) -> bool {
        self.flags & FRONTEND_KEEPS_SOURCE != 0
    }

    /// How a flow from outside reaches a backend, as flags of its entry. `is_endpoint`: whether the backend is an
    /// endpoint of this node; `identity`: the identity of the backend's address.
    #[inline(always)]
    pub fn way(&self, is_endpoint: bool, identity: impl FnOnce() -> u32) -> u16 {
        if is_endpoint {
            0
        } else if self.keeps_source() || identity() == identity::HOST {
            FLOW_OF_HOST
        } else {
            FLOW_MASQUERADED
        }
    }

    /// Whether flows go only to backends on this node. If so, affinity to a backend on another node, which the client
    /// may have acquired through another frontend of the service, does not apply.
    #[inline(always)]
    pub const fn is_local(&self, origin: Origin) -> bool {
        self.flags & origin.pick(FRONTEND_LOCAL_INSIDE, FRONTEND_LOCAL_OUTSIDE) != 0
    }
}

/// Whether an address belongs to an endpoint of this node or, according to its identity, to this node itself, and
/// therefore not to an outside host.
#[inline(always)]
pub fn is_own(is_endpoint: bool, identity: impl FnOnce() -> u32) -> bool {
    is_endpoint || identity() == identity::HOST
}

#[cfg(test)]
mod tests {
    use super::*;

    const MASQUERADES: Frontend = Frontend {
        inside: Pool { at: 0, len: 2 },
        outside: Pool { at: 3, len: 0 },
        service: 1,
        affinity_secs: 0,
        flags: FRONTEND_DROPS_OUTSIDE,
        algorithm: 0,
        kind: 0,
        pad: 0,
    };
    const KEEPS_SOURCE: Frontend = Frontend {
        flags: FRONTEND_KEEPS_SOURCE,
        ..MASQUERADES
    };

    #[test]
    fn each_origin_has_its_pool() {
        assert_eq!(MASQUERADES.pool(Origin::Inside).len, 2);
        assert_eq!(MASQUERADES.pool(Origin::Outside).at, 3);
        assert!(MASQUERADES.drops(Origin::Outside) && !MASQUERADES.drops(Origin::Inside));
    }

    #[test]
    fn only_backends_elsewhere_get_packets_from_this_nodes_address() {
        for (frontend, is_endpoint, identity, way) in [
            (MASQUERADES, true, identity::WORLD, 0),
            (MASQUERADES, false, identity::HOST, FLOW_OF_HOST),
            (MASQUERADES, false, identity::WORLD, FLOW_MASQUERADED),
            (KEEPS_SOURCE, true, identity::WORLD, 0),
            (KEEPS_SOURCE, false, identity::WORLD, FLOW_OF_HOST),
        ] {
            assert_eq!(frontend.way(is_endpoint, || identity), way);
        }
    }

    #[test]
    fn each_origin_may_have_to_stay_on_this_node() {
        let local = |flags| Frontend {
            flags,
            ..MASQUERADES
        };
        let [inside, outside] = [FRONTEND_LOCAL_INSIDE, FRONTEND_LOCAL_OUTSIDE].map(local);
        assert!(inside.is_local(Origin::Inside) && !inside.is_local(Origin::Outside));
        assert!(outside.is_local(Origin::Outside) && !outside.is_local(Origin::Inside));
    }

    #[test]
    fn addresses_of_this_node_and_its_endpoints_are_own() {
        assert!(is_own(true, || identity::WORLD));
        assert!(is_own(false, || identity::HOST));
        assert!(!is_own(false, || identity::REMOTE_NODE));
    }
}

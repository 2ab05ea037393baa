//! Names for the numbers in a frontend's entry.

use health_common::service::{
    ALGORITHM_LEAST_CONNECTION, ALGORITHM_MAGLEV, ALGORITHM_RANDOM, ALGORITHM_ROUND_ROBIN,
    KIND_CLUSTER_IP, KIND_EXTERNAL_IP, KIND_LOAD_BALANCER, KIND_NODE_PORT,
};

/// The kind of a frontend, or its number if it has no name.
pub fn kind_name(kind: u8) -> String {
    named(
        kind,
        [
            (KIND_CLUSTER_IP, "ClusterIP"),
            (KIND_LOAD_BALANCER, "LoadBalancer"),
            (KIND_EXTERNAL_IP, "ExternalIP"),
            (KIND_NODE_PORT, "NodePort"),
        ],
    )
}

/// The algorithm by which a frontend picks a backend, or its number if it has no name.
pub fn algorithm_name(algorithm: u8) -> String {
    named(
        algorithm,
        [
            (ALGORITHM_RANDOM, "random"),
            (ALGORITHM_ROUND_ROBIN, "round-robin"),
            (ALGORITHM_MAGLEV, "maglev"),
            (ALGORITHM_LEAST_CONNECTION, "least-connection"),
        ],
    )
}

fn named(number: u8, names: [(u8, &'static str); 4]) -> String {
    let mut names = names.into_iter();
    let name = names.find_map(|(known, name)| (known == number).then_some(name));
    name.map_or_else(|| number.to_string(), str::to_owned)
}

//! The operations of the API. The router and the OpenAPI document are generated from this table.

use std::convert::Infallible;
use std::sync::Arc;

use axum::http::Method;
use axum::routing::{MethodRouter, delete, get, patch, post, put};

use super::audience::{Access, Audience};
use super::server::{self, Api};
use super::services::{paths as services, trace};
use super::source::Source;
use super::{endpoints, policies, probes};

/// A path in OpenAPI syntax, and the handler of one method.
type Route<S> = (&'static str, MethodRouter<Arc<Api<Arc<S>>>, Infallible>);

/// Each row is an operation: its summary, id, whether it reads or changes, method, path, `takes body` if it does,
/// handler, and the meanings of its status codes. The document takes parameters, request bodies and responses from the
/// handler's type. Codes that are not listed are errors as well.
macro_rules! operations {
    ($(
        $(#[doc = $summary:literal])+
        $id:ident: $access:ident $method:ident $path:literal $(takes $body:ident)? => $handler:path {
            $($code:literal: $meaning:literal,)+
        }
    )+) => {
        /// All operations. Those that this audience may not use are refused.
        pub(super) fn routes<S: Source>(audience: Audience) -> impl Iterator<Item = Route<S>> {
            [$(($path, match audience.may(Access::$access) {
                true => $method($handler),
                false => $method(server::refuse_change),
            })),+].into_iter()
        }

        /// Whether a request for a path of the table may have a body.
        pub(super) fn takes_body(method: &Method, path: &str) -> bool {
            const WITH_BODY: &[(&str, &str, &str)] =
                &[$($((stringify!($method), $path, stringify!($body)),)?)+];
            let mut known = WITH_BODY.iter();
            known.any(|(known, at, _)| known.eq_ignore_ascii_case(method.as_str()) && *at == path)
        }

        /// The operations, for the document.
        #[cfg(test)]
        pub(super) fn operations() -> Vec<crate::openapi::Operation> {
            vec![$(crate::openapi::Operation {
                id: stringify!($id),
                method: stringify!($method),
                path: $path,
                access: Access::$access,
                summary: concat!($($summary),+).trim(),
                meanings: &[$(($code, $meaning)),+],
                handler: crate::openapi::Handler::of($handler),
            }),+]
        }
    };
}

operations! {
    /// The state of the agent itself.
    getHealthz: Read get "/v1beta/healthz" => server::healthz {
        200: "The agent works.",
        500: "The agent has failed.",
    }

    /// The last result of every probe.
    getStatus: Read get "/v1beta/status" => server::status {
        200: "What is known.",
    }

    /// Probes all nodes now. Answers when all results are in, at the latest after the probe timeout plus the time that
    /// the probe rate requires.
    putStatusProbe: Change put "/v1beta/status/probe" => server::probe {
        200: "What is known then. As lines: the last one is `done`.",
        503: "Too many requests to probe are in progress.",
    }

    /// The last known path MTUs to other nodes.
    getStatusPathMtu: Read get "/v1beta/status/path-mtu" => server::path_mtus {
        200: "Every address of other nodes whose path is probed.",
        404: "The node does not exist.",
    }

    /// Probes the path MTUs to other nodes now. Answers when all results are in, after 25 s at the latest.
    putStatusPathMtu: Change put "/v1beta/status/path-mtu" => server::probe_path_mtus {
        200: "The results so far. A path that is still being probed says so; a later GET returns its result.",
        404: "The node does not exist.",
        503: "Too many requests to probe are in progress.",
    }

    /// Whether the API works.
    getHello: Read get "/v1beta/hello" => server::hello {
        200: "It works. The body is empty.",
    }

    /// How the nodes have changed since this client's last request. A client drops all its nodes if `full` is set, then
    /// removes `nodes-removed`, and then adds `nodes-added`.
    getClusterNodes: Read get "/v1beta/cluster/nodes" => server::cluster_nodes {
        200: "The changes, or all nodes.",
    }

    /// The agent's own part of `status`: its state, registries, programs and controllers.
    getAgent: Read get "/v1/agent" => server::agent {
        200: "What is known.",
    }

    /// The node registries and their nodes.
    getNodes: Read get "/v1/nodes" => server::nodes {
        200: "All nodes.",
    }

    /// Loss and round trips of the last minute, ten minutes and hour.
    getHistory: Read get "/v1/history" => server::history {
        200: "Every target that was probed.",
        404: "The node does not exist.",
    }

    /// The round trips of each address as counted in the kernel.
    getRtt: Read get "/v1/rtt" => server::rtt {
        200: "Every row, unordered. The body is sent while the rows are read; if reading fails, its end is missing.",
        503: "The maps do not exist, or cannot be read.",
    }

    /// Drops and flows from now on, as they happen, until the client disconnects or the agent stops. Each parameter may
    /// have several values, separated by commas, one of which an event must match. Without the parameter, all events
    /// match.
    getMonitor: Read get "/v1/monitor" => server::monitor {
        200: "Starts when the programs send these events.",
        503: "The programs are not loaded yet, or there are too many readers.",
    }

    /// The endpoints of this node.
    getEndpoints: Read get "/v1/endpoints" => endpoints::list {
        200: "All endpoints, sorted by id. As lines: their changes too.",
        503: "The agent has not taken over its endpoints yet, or too many clients watch them.",
    }

    /// Creates an endpoint in a network namespace. Answers when packets pass. A failed request leaves nothing behind.
    postEndpoint: Change post "/v1/endpoints" takes body => endpoints::create {
        200: "The endpoint.",
        400: "The request is invalid. The message names the field, the address or the namespace.",
        409: "The container, the device or the address already has an endpoint.",
        503: "The node has no pod CIDR, no address or id is free, or the agent has not taken over its endpoints yet.",
    }

    /// Deletes the endpoints of a container or a network namespace. It is no error if there are none.
    deleteEndpoints: Change delete "/v1/endpoints" => endpoints::delete_meant {
        200: "The deleted endpoints.",
        503: "The agent has not taken over its endpoints yet.",
    }

    /// One endpoint of this node.
    getEndpoint: Read get "/v1/endpoints/{id}" => endpoints::get {
        200: "The endpoint.",
        404: "The endpoint does not exist.",
    }

    /// Deletes an endpoint. It is no error if it does not exist. The health endpoint cannot be deleted.
    deleteEndpoint: Change delete "/v1/endpoints/{id}" => endpoints::delete_one {
        200: "The deleted endpoint, if it existed.",
        503: "The agent has not taken over its endpoints yet.",
    }

    /// The log of an endpoint: its last 256 lines, the oldest first. The log of a deleted endpoint can be read for a
    /// minute.
    getEndpointLog: Read get "/v1/endpoints/{id}/log" => endpoints::log {
        200: "The lines.",
        404: "The endpoint does not exist.",
        503: "The agent has not taken over its endpoints yet.",
    }

    /// The health of an endpoint.
    getEndpointHealth: Read get "/v1/endpoints/{id}/healthz" => endpoints::health {
        200: "Its health.",
        404: "The endpoint does not exist.",
        503: "The agent has not taken over its endpoints yet.",
    }

    /// Changes the labels of an endpoint. Its identity follows; until then, its previous policy is in force.
    patchEndpointLabels: Change patch "/v1/endpoints/{id}/labels" takes body => endpoints::change_labels {
        200: "The endpoint with its new labels.",
        404: "The endpoint does not exist.",
        503: "The endpoint is incomplete or being deleted, or the agent has not taken over its endpoints yet.",
    }

    /// Changes the settings of an endpoint, and regenerates it. Answers when the change is in force.
    patchEndpointConfig: Change patch "/v1/endpoints/{id}/config" takes body => endpoints::change_settings {
        200: "The endpoint with its new settings.",
        404: "The endpoint does not exist.",
        503: "The endpoint is incomplete or being deleted, or the agent has not taken over its endpoints yet.",
    }

    /// Whether endpoints can be created now.
    getEndpointReadiness: Read get "/v1/endpoints/readiness" => endpoints::readiness {
        200: "Endpoints can be created.",
        503: "Endpoints cannot be created, with the reason: the node has no pod CIDR, the policies of the Kubernetes cluster are not known yet, or the agent has not taken over its endpoints yet.",
    }

    /// The security identities that this node knows.
    getIdentities: Read get "/v1/identities" => server::identities {
        200: "All identities, sorted by number: the reserved ones, those of the cluster, and this node's own for CIDRs.",
    }

    /// One security identity.
    getIdentity: Read get "/v1/identities/{id}" => server::identity {
        200: "The identity.",
        404: "The identity does not exist.",
    }

    /// The addresses of this node's pod CIDRs that are in use, and their owners.
    getIpam: Read get "/v1/ipam" => endpoints::ipam {
        200: "The addresses, sorted.",
        503: "The node has no pod CIDR, or the agent has not taken over its endpoints yet.",
    }

    /// The policies as imported.
    getPolicies: Read get "/v1/policies" => policies::list {
        200: "The policies, sorted by name.",
        404: "The policy does not exist.",
        503: "The agent has not taken over its policies yet.",
    }

    /// Imports policies, all or none. A policy replaces an existing one of the same name. Answers when all affected
    /// endpoints enforce the change, after 10 s at the latest.
    importPolicies: Change post "/v1/policies" takes body => policies::import {
        200: "What has changed.",
        503: "The agent has not taken over its policies yet.",
    }

    /// Deletes policies; one of the parameters must be given. Answers when all affected endpoints enforce the change,
    /// after 10 s at the latest.
    deletePolicies: Change delete "/v1/policies" => policies::delete {
        200: "What has changed.",
        404: "The policy does not exist.",
        503: "The agent has not taken over its policies yet.",
    }

    /// Sets when policy is enforced, until the next request, also over restarts. Answers when all endpoints follow,
    /// after 10 s at the latest.
    setPolicyMode: Change patch "/v1/policies/mode" takes body => policies::set_mode {
        200: "The mode in force.",
        503: "The agent has not taken over its policies yet.",
    }

    /// Explains the policy verdict on a packet.
    tracePolicy: Read post "/v1/policies/trace" takes body => policies::trace {
        200: "The verdict, and the rules that lead to it.",
        404: "An end of the packet's path does not exist.",
        503: "The agent has not taken over its policies yet.",
    }

    /// The probes of this node's containers; none if this agent probes no containers.
    getProbes: Read get "/v1/probes" => probes::list {
        200: "All probes, sorted by pod, container and type. As lines: their changes too.",
        503: "Only as lines: this agent probes no containers, or too many clients watch them.",
    }

    /// The number of probes and pods, how many fail, and why pods are not probed.
    getProbeSummary: Read get "/v1/probes/summary" => probes::summary {
        200: "Counts and problems.",
    }

    /// The pods whose containers are probed.
    getPods: Read get "/v1/pods" => probes::pods {
        200: "All pods, sorted by name.",
    }

    /// Events of containers.
    getPodEvents: Read get "/v1/pods/events" => probes::events {
        200: "The last events, the oldest first. An event that happens again is counted, and becomes the newest.",
    }

    /// Why pods are not probed.
    getPodProblems: Read get "/v1/pods/problems" => probes::problems {
        200: "All problems.",
    }

    /// The services of this node; none if this agent serves none.
    getServices: Read get "/v1/services" => services::list {
        200: "All services, sorted by namespace and name.",
    }

    /// The number of services, conflicts between them, and why others are not served.
    getServiceSummary: Read get "/v1/services/summary" => services::summary {
        200: "Counts, conflicts and problems.",
    }

    /// What happens to a new flow to a service, and why, according to the maps of this node's programs.
    traceService: Read get "/v1/services/trace" => trace::trace {
        200: "What happens to it.",
        404: "There is no such source, service or frontend.",
        503: "This agent serves no services, or not by its programs; or its maps cannot be read.",
    }

    /// The settings in force, and where each comes from.
    getConfig: Read get "/v1/config" => server::config {
        200: "All settings.",
    }

    /// This document.
    getOpenapi: Read get "/v1/openapi.json" => server::openapi {
        200: "The document.",
    }
}

//! When policy is enforced, and what it always allows.

use clap::Args;
use health_model::policy::PolicyMode;

use super::containers::ApiAccess;
use super::form::{Common, Live};

/// Policy.
#[derive(Args, Clone, Debug, PartialEq, Eq)]
#[command(next_help_heading = "Policy")]
pub struct PolicySettings {
    /// When policy is enforced
    #[arg(
        long, value_enum, value_name = "MODE", default_value_t = PolicyMode::Default,
        add = Common, add = Live
    )]
    pub policy_mode: PolicyMode,
    /// Enforce the policies of a Kubernetes cluster: NetworkPolicy, and CiliumNetworkPolicy and
    /// CiliumClusterwideNetworkPolicy where the cluster has them; on by default with --registry kubernetes. Without a
    /// value, use the kubeconfig of --registry kubernetes, else the pod's service account, else $KUBECONFIG or
    /// ~/.kube/config
    #[arg(
        long, value_name = "KUBECONFIG", num_args = 0..=1, require_equals = true, default_missing_value = "default"
    )]
    pub policies_from_kubernetes: Option<ApiAccess>,
    /// Let this host reach its own endpoints unless a rule denies it
    #[arg(long, default_value_t = true, action = clap::ArgAction::Set)]
    pub policy_allow_localhost: bool,
    /// Let endpoints request addresses by DHCPv6, regardless of their policy
    #[arg(long)]
    pub policy_allow_dhcpv6: bool,
}

//! A container's configuration, with the names of k8s.io/cri-api, `pkg/apis/runtime/v1/api.proto`. The runtime reports
//! it as JSON in a container's details, and takes it as a protobuf message.

use std::collections::BTreeMap;

use serde::Deserialize;

/// Adds the derives that all of these messages share.
macro_rules! messages {
    ($($(#[$doc:meta])* $name:ident { $($(#[$field_attr:meta])* $field:ident: $type:ty,)* })*) => {
        $(
            $(#[$doc])*
            #[derive(Clone, PartialEq, prost::Message, Deserialize)]
            #[serde(default)]
            pub(super) struct $name {
                $($(#[$field_attr])* pub(super) $field: $type,)*
            }
        )*
    };
}

messages! {
    ContainerConfig {
        #[prost(message, optional, tag = "1")]
        metadata: Option<ContainerMetadata>,
        #[prost(message, optional, tag = "2")]
        image: Option<ImageSpec>,
        #[prost(string, repeated, tag = "3")]
        command: Vec<String>,
        #[prost(string, repeated, tag = "4")]
        args: Vec<String>,
        #[prost(string, tag = "5")]
        working_dir: String,
        #[prost(message, repeated, tag = "6")]
        envs: Vec<KeyValue>,
        #[prost(message, repeated, tag = "7")]
        mounts: Vec<Mount>,
        #[prost(message, repeated, tag = "8")]
        devices: Vec<Device>,
        #[prost(btree_map = "string, string", tag = "9")]
        labels: BTreeMap<String, String>,
        #[prost(btree_map = "string, string", tag = "10")]
        annotations: BTreeMap<String, String>,
        #[prost(string, tag = "11")]
        log_path: String,
        #[prost(bool, tag = "12")]
        stdin: bool,
        #[prost(bool, tag = "13")]
        stdin_once: bool,
        #[prost(bool, tag = "14")]
        tty: bool,
        #[prost(message, optional, tag = "15")]
        linux: Option<LinuxContainerConfig>,
        #[prost(message, repeated, tag = "17")]
        #[serde(rename = "CDI_devices")]
        cdi_devices: Vec<CdiDevice>,
    }
    ContainerMetadata {
        #[prost(string, tag = "1")]
        name: String,
        #[prost(uint32, tag = "2")]
        attempt: u32,
    }
    ImageSpec {
        #[prost(string, tag = "1")]
        image: String,
        #[prost(btree_map = "string, string", tag = "2")]
        annotations: BTreeMap<String, String>,
        #[prost(string, tag = "18")]
        user_specified_image: String,
        #[prost(string, tag = "19")]
        runtime_handler: String,
    }
    KeyValue {
        #[prost(string, tag = "1")]
        key: String,
        #[prost(string, tag = "2")]
        value: String,
    }
    Mount {
        #[prost(string, tag = "1")]
        container_path: String,
        #[prost(string, tag = "2")]
        host_path: String,
        #[prost(bool, tag = "3")]
        readonly: bool,
        #[prost(bool, tag = "4")]
        selinux_relabel: bool,
        #[prost(int32, tag = "5")]
        propagation: i32,
        #[prost(message, repeated, tag = "6")]
        #[serde(rename = "uidMappings")]
        uid_mappings: Vec<IdMapping>,
        #[prost(message, repeated, tag = "7")]
        #[serde(rename = "gidMappings")]
        gid_mappings: Vec<IdMapping>,
        #[prost(bool, tag = "8")]
        recursive_read_only: bool,
        #[prost(message, optional, tag = "9")]
        image: Option<ImageSpec>,
        #[prost(string, tag = "10")]
        image_sub_path: String,
    }
    IdMapping {
        #[prost(uint32, tag = "1")]
        host_id: u32,
        #[prost(uint32, tag = "2")]
        container_id: u32,
        #[prost(uint32, tag = "3")]
        length: u32,
    }
    Device {
        #[prost(string, tag = "1")]
        container_path: String,
        #[prost(string, tag = "2")]
        host_path: String,
        #[prost(string, tag = "3")]
        permissions: String,
    }
    CdiDevice {
        #[prost(string, tag = "1")]
        name: String,
    }
    LinuxContainerConfig {
        #[prost(message, optional, tag = "1")]
        resources: Option<LinuxContainerResources>,
        #[prost(message, optional, tag = "2")]
        security_context: Option<LinuxContainerSecurityContext>,
    }
    LinuxContainerResources {
        #[prost(int64, tag = "1")]
        cpu_period: i64,
        #[prost(int64, tag = "2")]
        cpu_quota: i64,
        #[prost(int64, tag = "3")]
        cpu_shares: i64,
        #[prost(int64, tag = "4")]
        memory_limit_in_bytes: i64,
        #[prost(int64, tag = "5")]
        oom_score_adj: i64,
        #[prost(string, tag = "6")]
        cpuset_cpus: String,
        #[prost(string, tag = "7")]
        cpuset_mems: String,
        #[prost(message, repeated, tag = "8")]
        hugepage_limits: Vec<HugepageLimit>,
        #[prost(btree_map = "string, string", tag = "9")]
        unified: BTreeMap<String, String>,
        #[prost(int64, tag = "10")]
        memory_swap_limit_in_bytes: i64,
    }
    HugepageLimit {
        #[prost(string, tag = "1")]
        page_size: String,
        #[prost(uint64, tag = "2")]
        limit: u64,
    }
    LinuxContainerSecurityContext {
        #[prost(message, optional, tag = "1")]
        capabilities: Option<Capability>,
        #[prost(bool, tag = "2")]
        privileged: bool,
        #[prost(message, optional, tag = "3")]
        namespace_options: Option<NamespaceOption>,
        #[prost(message, optional, tag = "4")]
        selinux_options: Option<SeLinuxOption>,
        #[prost(message, optional, tag = "5")]
        run_as_user: Option<Int64Value>,
        #[prost(string, tag = "6")]
        run_as_username: String,
        #[prost(bool, tag = "7")]
        readonly_rootfs: bool,
        #[prost(int64, repeated, tag = "8")]
        supplemental_groups: Vec<i64>,
        #[prost(string, tag = "9")]
        apparmor_profile: String,
        #[prost(string, tag = "10")]
        seccomp_profile_path: String,
        #[prost(bool, tag = "11")]
        no_new_privs: bool,
        #[prost(message, optional, tag = "12")]
        run_as_group: Option<Int64Value>,
        #[prost(string, repeated, tag = "13")]
        masked_paths: Vec<String>,
        #[prost(string, repeated, tag = "14")]
        readonly_paths: Vec<String>,
        #[prost(message, optional, tag = "15")]
        seccomp: Option<SecurityProfile>,
        #[prost(message, optional, tag = "16")]
        apparmor: Option<SecurityProfile>,
        #[prost(int32, tag = "17")]
        supplemental_groups_policy: i32,
    }
    Capability {
        #[prost(string, repeated, tag = "1")]
        add_capabilities: Vec<String>,
        #[prost(string, repeated, tag = "2")]
        drop_capabilities: Vec<String>,
        #[prost(string, repeated, tag = "3")]
        add_ambient_capabilities: Vec<String>,
    }
    NamespaceOption {
        #[prost(int32, tag = "1")]
        network: i32,
        #[prost(int32, tag = "2")]
        pid: i32,
        #[prost(int32, tag = "3")]
        ipc: i32,
        #[prost(string, tag = "4")]
        target_id: String,
        #[prost(message, optional, tag = "5")]
        userns_options: Option<UserNamespace>,
    }
    UserNamespace {
        #[prost(int32, tag = "1")]
        mode: i32,
        #[prost(message, repeated, tag = "2")]
        uids: Vec<IdMapping>,
        #[prost(message, repeated, tag = "3")]
        gids: Vec<IdMapping>,
    }
    SeLinuxOption {
        #[prost(string, tag = "1")]
        user: String,
        #[prost(string, tag = "2")]
        role: String,
        #[prost(string, tag = "3")]
        #[serde(rename = "type")]
        kind: String,
        #[prost(string, tag = "4")]
        level: String,
    }
    Int64Value {
        #[prost(int64, tag = "1")]
        value: i64,
    }
    SecurityProfile {
        #[prost(int32, tag = "1")]
        profile_type: i32,
        #[prost(string, tag = "2")]
        localhost_ref: String,
    }
    PodSandboxConfig {
        #[prost(message, optional, tag = "1")]
        metadata: Option<PodSandboxMetadata>,
        #[prost(string, tag = "2")]
        hostname: String,
        #[prost(string, tag = "3")]
        log_directory: String,
        #[prost(message, optional, tag = "4")]
        dns_config: Option<DnsConfig>,
        #[prost(message, repeated, tag = "5")]
        port_mappings: Vec<PortMapping>,
        #[prost(btree_map = "string, string", tag = "6")]
        labels: BTreeMap<String, String>,
        #[prost(btree_map = "string, string", tag = "7")]
        annotations: BTreeMap<String, String>,
        #[prost(message, optional, tag = "8")]
        linux: Option<LinuxPodSandboxConfig>,
    }
    PodSandboxMetadata {
        #[prost(string, tag = "1")]
        name: String,
        #[prost(string, tag = "2")]
        uid: String,
        #[prost(string, tag = "3")]
        namespace: String,
        #[prost(uint32, tag = "4")]
        attempt: u32,
    }
    DnsConfig {
        #[prost(string, repeated, tag = "1")]
        servers: Vec<String>,
        #[prost(string, repeated, tag = "2")]
        searches: Vec<String>,
        #[prost(string, repeated, tag = "3")]
        options: Vec<String>,
    }
    PortMapping {
        #[prost(int32, tag = "1")]
        protocol: i32,
        #[prost(int32, tag = "2")]
        container_port: i32,
        #[prost(int32, tag = "3")]
        host_port: i32,
        #[prost(string, tag = "4")]
        host_ip: String,
    }
    LinuxPodSandboxConfig {
        #[prost(string, tag = "1")]
        cgroup_parent: String,
        #[prost(message, optional, tag = "2")]
        security_context: Option<LinuxSandboxSecurityContext>,
        #[prost(btree_map = "string, string", tag = "3")]
        sysctls: BTreeMap<String, String>,
        #[prost(message, optional, tag = "4")]
        overhead: Option<LinuxContainerResources>,
        #[prost(message, optional, tag = "5")]
        resources: Option<LinuxContainerResources>,
    }
    LinuxSandboxSecurityContext {
        #[prost(message, optional, tag = "1")]
        namespace_options: Option<NamespaceOption>,
        #[prost(message, optional, tag = "2")]
        selinux_options: Option<SeLinuxOption>,
        #[prost(message, optional, tag = "3")]
        run_as_user: Option<Int64Value>,
        #[prost(bool, tag = "4")]
        readonly_rootfs: bool,
        #[prost(int64, repeated, tag = "5")]
        supplemental_groups: Vec<i64>,
        #[prost(bool, tag = "6")]
        privileged: bool,
        #[prost(string, tag = "7")]
        seccomp_profile_path: String,
        #[prost(message, optional, tag = "8")]
        run_as_group: Option<Int64Value>,
        #[prost(message, optional, tag = "9")]
        seccomp: Option<SecurityProfile>,
        #[prost(message, optional, tag = "10")]
        apparmor: Option<SecurityProfile>,
        #[prost(int32, tag = "11")]
        supplemental_groups_policy: i32,
    }
}

/// The details that the runtime reports about a container or pod (JSON).
#[derive(Deserialize)]
pub(super) struct Info<T> {
    /// PID of the first process; 0 if there is none.
    #[serde(default)]
    pub(super) pid: u32,
    pub(super) config: Option<T>,
}

impl<T: for<'de> Deserialize<'de>> Info<T> {
    /// The details under the `info` key.
    pub(super) fn read(info: &BTreeMap<String, String>) -> Result<Self, String> {
        let text = info.get("info").ok_or("it has no details")?;
        serde_json::from_str(text).map_err(|error| format!("invalid details: {error}"))
    }
}

# The first process of a node, on a machine of its own: what kubelets and container runtimes expect of a host.
# usage: bash node.sh groups|mounts NAME FOLDER
#
# `groups` puts the node into its own group of each hierarchy of control groups, `mounts` makes them the roots of what the
# node sees, and waits. Lists the groups in FOLDER/groups, and creates FOLDER/up when the node is complete.
set -eu
step=$1 name=$2 folder=$3

groups() {
    [ -d /sys/fs/cgroup/memory ] || {
        echo "the hierarchies of cgroup v1 are needed: boot with systemd.unified_cgroup_hierarchy=0" >&2
        exit 1
    }
    hostname "$name"
    mount --make-rprivate /
    : >"$folder/groups"
    groups=$(cat /proc/self/cgroup)
    # Machines share the control groups: no other cluster has this folder.
    group_name=$(basename "$(dirname "$folder")")-$name
    while IFS=: read -r _ controllers path; do
        case $controllers in
        "") hierarchy=unified ;;
        name=systemd) hierarchy=systemd ;;
        *) hierarchy=$controllers ;;
        esac
        parent=/sys/fs/cgroup/$hierarchy${path%/}
        group=$parent/$group_name
        mkdir -p "$group"
        # A group without processors and memory accepts no process.
        if [ "$controllers" = cpuset ]; then
            for file in cpuset.cpus cpuset.mems; do cat "$parent/$file" >"$group/$file"; done
        fi
        echo $$ >"$group/cgroup.procs"
        echo "$group" >>"$folder/groups"
    done <<<"$groups"
    exec unshare --cgroup --propagation unchanged bash "$0" mounts "$name" "$folder"
}

# What the kubelet sets for the whole kernel: it finds its values in files, and leaves the kernel alone.
stand_in() {
    echo "$2" >"/run/sysctl/$1"
    mount --bind "/run/sysctl/$1" "/proc/sys/${1//.//}"
}

mounts() {
    controllers="cpu cpuacct cpuset memory devices freezer blkio pids"
    for hierarchy in $controllers systemd unified; do umount "/sys/fs/cgroup/$hierarchy"; done
    umount /sys/fs/cgroup
    # Shows the devices of this network namespace.
    mount -t sysfs sysfs /sys
    mount -t tmpfs -o mode=755 cgroup /sys/fs/cgroup
    for controller in $controllers; do
        mkdir "/sys/fs/cgroup/$controller"
        mount -t cgroup -o "$controller" cgroup "/sys/fs/cgroup/$controller"
    done
    mkdir /sys/fs/cgroup/systemd /sys/fs/cgroup/unified
    mount -t cgroup -o none,name=systemd cgroup /sys/fs/cgroup/systemd
    mount -t cgroup2 cgroup2 /sys/fs/cgroup/unified
    mount -t bpf bpf /sys/fs/bpf
    mkdir -p /run/sysctl
    stand_in vm.overcommit_memory 1
    stand_in vm.panic_on_oom 0
    stand_in kernel.panic 10
    stand_in kernel.panic_on_oops 1
    stand_in kernel.keys.root_maxkeys 1000000
    stand_in kernel.keys.root_maxbytes 25000000
    # What the node writes is in its folder, and survives a reboot.
    for path in etc opt var; do
        mkdir -p "$folder/$path" "$folder/$path.work"
        mount -t overlay overlay -o "lowerdir=/$path,upperdir=$folder/$path,workdir=$folder/$path.work" "/$path"
    done
    # Empty at first, whatever this machine has there.
    for path in var/lib/kubelet var/lib/containerd var/lib/health-agent var/log etc/cni/net.d opt/cni/bin; do
        mkdir -p "$folder/own/$path" "/$path"
        mount --bind "$folder/own/$path" "/$path"
    done
    echo 1 >/proc/sys/net/ipv4/ip_forward
    echo 1 >/proc/sys/net/ipv6/conf/all/forwarding
    mount --make-rshared /
    touch "$folder/up"
    exec sleep infinity
}

"$step"

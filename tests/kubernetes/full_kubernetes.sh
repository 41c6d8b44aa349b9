#!/usr/bin/env bash
# Runs its arguments in new network, mount and process namespaces, which end with it; the cgroups are removed afterwards.
set -euo pipefail
[ "$(id -u)" = 0 ] || { echo "a real kubelet needs root: run this as root, or use make test-kubernetes" >&2; exit 2; }
export COVEY_CGROUP=/covey-test-$$
clean() { find /sys/fs/cgroup -depth -type d -path "/sys/fs/cgroup/*$COVEY_CGROUP*" -exec rmdir {} + 2>/dev/null || true; }
trap clean EXIT
unshare --net --mount --pid --fork --kill-child --mount-proc bash -euc '
    ip link set lo up
    mount --make-rshared /
    for directory in /run /var/log /var/lib/cni /etc/cni; do
        [ ! -d $directory ] || mount -t tmpfs none $directory
    done
    "$@"' full_kubernetes "$@"

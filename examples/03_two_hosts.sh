#!/bin/bash
# Two hosts, simulated by connected network namespaces, train together: sudo env PATH="$PATH" bash examples/03_two_hosts.sh
# Each runs the same command; the one that has the address of --master starts the scheduler. Needs root and iproute2's ip.
set -e
[ "$(id -u)" = 0 ] || { echo "$0 makes network namespaces, which needs root: sudo env PATH=\"\$PATH\" bash $0" >&2; exit 1; }
cd "$(dirname "$0")"
name=covey$$
logs=${LOGS:-covey_logs}
trap 'ip netns del $name-a 2>/dev/null; ip netns del $name-b 2>/dev/null' EXIT

ip netns add $name-a
ip netns add $name-b
ip -n $name-a link add cable type veth peer name cable netns $name-b
for host in a b; do
    ip -n $name-$host addr add 10.92.7.$([ $host = a ] && echo 1 || echo 2)/24 dev cable
    ip -n $name-$host link set cable up
    ip -n $name-$host link set lo up
done

export COVEY_SECRET=${COVEY_SECRET:-$(head -c 16 /dev/urandom | od -An -tx1 | tr -d ' \n')}   # both hosts need the same secret
for host in a b; do
    COVEY_HOST_ID=$host ip netns exec $name-$host covey run -n 4 --local 2 --master 10.92.7.1:8118 --no-live \
        --log-dir $logs/$host 01_digits.py &
    jobs[${#jobs[@]}]=$!
done
wait ${jobs[0]}
wait ${jobs[1]}

#!/bin/bash
# A federated cluster and its devices on this machine: bash examples/07_federated.sh
# Further arguments are options of covey federated up.
set -e
cd "$(dirname "$0")"
port=${PORT:-6668}
covey federated up --servers 2 --port $port --scheduler-port ${SCHEDULER_PORT:-6667} --manage-port ${MANAGE_PORT:-0} \
    --threshold 8 --iterations 5 --dir "${FOLDER:-.}" "$@" 07_federated.py &
cluster=$!
trap 'kill $cluster 2>/dev/null; wait $cluster' EXIT
python 07_federated.py http://127.0.0.1:$port,http://127.0.0.1:$((port + 1))

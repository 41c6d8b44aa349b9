#!/bin/bash
# Starts the scheduler and workers 0 to 3 on node 1, in the background: bash run_dynamic_cluster_1.sh <node_1 ip address>
# Both nodes together have 8 workers; with WORKERS=4 they have four, two on each.
# They train on MNIST if DATA_PATH is its directory or ./MNIST_Data exists, otherwise on the digits in ../data.
NODE_1_IP=${1:-${NODE_1_IP:?is not set: bash run_dynamic_cluster_1.sh <node_1 ip address>}}
EXEC_PATH=$(pwd)
if [ -z "${DATA_PATH}" ] && [ -d "${EXEC_PATH}/MNIST_Data" ]; then
    export DATA_PATH=${EXEC_PATH}/MNIST_Data/train/
fi

WORKERS=${WORKERS:-8}
rm -rf device
mkdir device
echo "start training"

# Start the first half of the Worker training processes in a loop
for((i=0;i<WORKERS/2;i++));
do
    export MS_WORKER_NUM=$WORKERS             # Set the total number of Worker processes in the cluster (including other node processes)
    export MS_SCHED_HOST=${NODE_1_IP}         # Set the Scheduler IP address to the Node 1 IP address
    export MS_SCHED_PORT=8118                 # Set the Scheduler port
    export MS_ROLE=MS_WORKER                  # Set the startup process to the MS_WORKER role
    export MS_NODE_ID=$i                      # Set process id, optional
    python ./net.py > device/worker_$i.log 2>&1 &     # Start training script
done

# Start 1 Scheduler process on node 1
export MS_WORKER_NUM=$WORKERS                 # Set the total number of Worker processes in the cluster (including other node processes)
export MS_SCHED_HOST=${NODE_1_IP}             # Set the Scheduler IP address to the Node 1 IP address
export MS_SCHED_PORT=8118                     # Set the Scheduler port
export MS_ROLE=MS_SCHED                       # Set the startup process to the MS_SCHED role
python ./net.py > device/scheduler.log 2>&1 &         # Start training script

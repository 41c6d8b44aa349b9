#!/bin/bash
# Starts 8 workers (WORKERS=4: four) and the scheduler on this machine, in the background: bash run_dynamic_cluster.sh
# They train on MNIST if DATA_PATH is its directory or ./MNIST_Data exists, otherwise on the digits in ../data.
EXEC_PATH=$(pwd)
if [ -z "${DATA_PATH}" ] && [ -d "${EXEC_PATH}/MNIST_Data" ]; then
    export DATA_PATH=${EXEC_PATH}/MNIST_Data/train/
fi

WORKERS=${WORKERS:-8}
rm -rf device
mkdir device
echo "start training"

# Start the Worker training processes in a loop
for((i=0;i<WORKERS;i++));
do
    export MS_WORKER_NUM=$WORKERS   # Set the number of Worker processes in the cluster
    export MS_SCHED_HOST=127.0.0.1  # Set the Scheduler IP address to the local loop address
    export MS_SCHED_PORT=8118       # Set Scheduler port
    export MS_ROLE=MS_WORKER        # Set the started process to the MS_WORKER role
    export MS_NODE_ID=$i            # Set process id, optional
    python ./net.py > device/worker_$i.log 2>&1 &     # Start training script
done

# Start 1 Scheduler process
export MS_WORKER_NUM=$WORKERS       # Set the number of Worker processes in the cluster
export MS_SCHED_HOST=127.0.0.1      # Set the Scheduler IP address to the local loop address
export MS_SCHED_PORT=8118           # Set Scheduler port
export MS_ROLE=MS_SCHED             # Set the started process to the MS_SCHED role
python ./net.py > device/scheduler.log 2>&1 &         # Start training script

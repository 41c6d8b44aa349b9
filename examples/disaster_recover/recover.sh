#!/bin/bash
# Restarts the scheduler (bash recover.sh) or a worker (bash recover.sh 3) that died in a cluster started by run.sh.
EXEC_PATH=$(pwd)
if [ -z "${DATA_PATH}" ] && [ -d "${EXEC_PATH}/MNIST_Data" ]; then
    export DATA_PATH=${EXEC_PATH}/MNIST_Data/train/
fi

export MS_ENABLE_RECOVERY=1                # Enable disaster recovery
export MS_RECOVERY_PATH=./recovery/        # Set the disaster recovery file save path

export MS_WORKER_NUM=${WORKERS:-8}  # Set the number of Worker processes in the cluster, as for run.sh
export MS_SCHED_HOST=127.0.0.1      # Set the Scheduler IP address to the local loop address
export MS_SCHED_PORT=8118           # Set the Scheduler Port

if [ -z "$1" ]; then
    # Start 1 Scheduler process
    export MS_ROLE=MS_SCHED             # Set the startup process to MS_SCHED role
    export MS_NODE_ID=sched             # Set this node Node ID to 'sched'
    python ./train.py >> device/scheduler.log 2>&1 &     # Start training scripts
else
    # Start 1 Worker process, with its former id
    export MS_ROLE=MS_WORKER            # Set the startup process to MS_WORKER role
    export MS_NODE_ID=$1                # Set the process id of the Worker that died
    python ./train.py >> device/worker_$1.log 2>&1 &     # Start training scripts
    echo $! > device/worker_$1.pid
fi

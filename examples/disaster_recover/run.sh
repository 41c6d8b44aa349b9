#!/bin/bash
# Starts 8 workers (WORKERS=3: three) and the scheduler on this machine, in the background, with disaster recovery: bash run.sh
# Kill any of them and restart it with recover.sh. A second run.sh resumes from the newest checkpoint in ./ckpt_of_rank.
# They train on MNIST if DATA_PATH is its directory or ./MNIST_Data exists, otherwise on the digits in ../data.
EXEC_PATH=$(pwd)
if [ -z "${DATA_PATH}" ] && [ -d "${EXEC_PATH}/MNIST_Data" ]; then
    export DATA_PATH=${EXEC_PATH}/MNIST_Data/train/
fi

WORKERS=${WORKERS:-8}
export MS_ENABLE_RECOVERY=1                # Enable disaster recovery
export MS_RECOVERY_PATH=./recovery/        # Set the disaster recovery file save path

rm -rf device
mkdir device
echo "start training"

# Loop start of the Worker training processes
for((i=0;i<WORKERS;i++));
do
    export MS_WORKER_NUM=$WORKERS   # Set the number of Worker processes in the cluster
    export MS_SCHED_HOST=127.0.0.1  # Set the Scheduler IP address to the local loop address
    export MS_SCHED_PORT=8118       # Set the Scheduler Port
    export MS_ROLE=MS_WORKER        # Set the startup process to MS_WORKER role
    export MS_NODE_ID=$i            # Set the process id, optional
    python ./train.py > device/worker_$i.log 2>&1 &     # Start training scripts
    echo $! > device/worker_$i.pid
done

# Start 1 Scheduler process
export MS_WORKER_NUM=$WORKERS       # Set the number of Worker processes in the cluster
export MS_SCHED_HOST=127.0.0.1      # Set the Scheduler IP address to the local loop address
export MS_SCHED_PORT=8118           # Set the Scheduler Port
export MS_ROLE=MS_SCHED             # Set the startup process to MS_SCHED role
python ./train.py > device/scheduler.log 2>&1 &     # Start training scripts

#!/bin/bash
# Process-level rescheduling as with TaskD: bash train_start.sh
# Then kill -9 any of the four workers, or manager.py, which you restart with
#   MINDX_TASK_ID=digits PYTHONPATH=$(covey compat) python manager.py
# On several hosts: set the same NNODES, MASTER_ADDR and MINDX_TASK_ID on all, and POD_IP and RANK (the host's number) on each.
GPUS_PER_NODE=${GPUS_PER_NODE:-4}
NNODES=${NNODES:-1}
export RANK=${RANK:-0} POD_IP=${POD_IP:-127.0.0.1} MASTER_ADDR=${MASTER_ADDR:-127.0.0.1} MASTER_PORT=${MASTER_PORT:-29500}
export MINDX_TASK_ID=${MINDX_TASK_ID:-digits}
export PYTHONPATH="$(covey compat)${PYTHONPATH:+:$PYTHONPATH}"     # a taskd package that forwards to covey

# TaskD's images have this line in torch's run.py. Here it is added to a copy, so that your torch is not changed.
TORCH="$(python -c 'import importlib.util as u; print(u.find_spec("torch").submodule_search_locations[0])')"
mkdir -p taskd_log
sed '/^import os/i import taskd.python.adaptor.patch' "$TORCH/distributed/run.py" > taskd_log/run.py

# TaskD's script preloads its library. covey has none, so these two lines have no effect and can stay.
TASKD_SO_PATH="$(pip show taskd 2>/dev/null | awk '/^Location: / {print $2"/taskd/python/cython_api/libs/libtaskd.so"}')"
export LD_PRELOAD=$TASKD_SO_PATH:$LD_PRELOAD
export TASKD_PROCESS_ENABLE="on"
if [[ "${RANK}" == 0 ]]; then
    export MASTER_ADDR=${POD_IP}
    python manager.py &           # Determined by the current path.
fi

DISTRIBUTED_ARGS="--nproc_per_node $GPUS_PER_NODE --nnodes $NNODES --node_rank $RANK --master_addr $MASTER_ADDR --master_port $MASTER_PORT --max_restarts 32767"
python taskd_log/run.py $DISTRIBUTED_ARGS train.py
code=$?
wait
exit $code

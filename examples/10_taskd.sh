#!/bin/bash
# A job built for TaskD, unchanged: bash examples/10_taskd.sh. Kill -9 a worker or the manager while it runs.
cd "$(dirname "$0")/process_rescheduling" && exec bash train_start.sh

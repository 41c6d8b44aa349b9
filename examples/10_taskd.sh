#!/bin/bash
# An unchanged job for TaskD: bash examples/10_taskd.sh. A worker or the manager may be killed with kill -9 while it runs.
cd "$(dirname "$0")/process_rescheduling" && exec bash train_start.sh

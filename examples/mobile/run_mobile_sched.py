"""Starts the scheduler in the background; its log is scheduler/scheduler.log."""

import argparse
import sys

from launch import SCHEDULING, launch, options, wait_for_log

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--device_target", default="CPU")
parser.add_argument("--server_mode", default="FEDERATED_LEARNING")
parser.add_argument("--worker_num", type=int, default=0)
parser.add_argument("--server_num", type=int, default=2)
parser.add_argument("--scheduler_ip", default="127.0.0.1")
parser.add_argument("--scheduler_port", type=int, default=8113)
parser.add_argument("--fl_server_port", type=int, default=6666)
parser.add_argument("--scheduler_manage_port", type=int, default=11202)
parser.add_argument("--config_file_path", default="")

started = launch("MS_SCHED", "scheduler", "scheduler.log", options(parser), node_id=20)
if not wait_for_log([started], SCHEDULING):
    sys.exit(f"the scheduler has not started yet: wait for '{SCHEDULING}' in {started[1]}")

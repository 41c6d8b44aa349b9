"""Starts servers in the background; their logs are server_PORT/server.log.

The scheduler assigns the ids of servers, so that they are distinct on several hosts and when servers are added. A server that
is restarted at the same host and port gets its former id. If MS_NODE_ID is set, it is the server's id.
"""

import argparse
import os
import sys

from launch import STARTED, launch, options, wait_for_log

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--device_target", default="CPU")
parser.add_argument("--server_mode", default="FEDERATED_LEARNING")
parser.add_argument("--worker_num", type=int, default=0)
parser.add_argument("--server_num", type=int, default=2)
parser.add_argument("--scheduler_ip", default="127.0.0.1")
parser.add_argument("--scheduler_port", type=int, default=8113)
parser.add_argument("--fl_server_port", type=int, default=6666)
parser.add_argument("--start_fl_job_threshold", type=int, default=1)
parser.add_argument("--start_fl_job_time_window", type=int, default=3000)
parser.add_argument("--update_model_ratio", type=float, default=1.0)
parser.add_argument("--update_model_time_window", type=int, default=3000)
parser.add_argument("--fl_name", default="Lenet")
parser.add_argument("--fl_iteration_num", type=int, default=25)
parser.add_argument("--client_epoch_num", type=int, default=20)
parser.add_argument("--client_batch_size", type=int, default=32)
parser.add_argument("--client_learning_rate", type=float, default=0.1)
parser.add_argument("--local_server_num", type=int, default=-1)
parser.add_argument("--config_file_path", default="")

values = options(parser)
local = values.pop("local_server_num")
local = values["server_num"] if local == -1 else local
if not 0 < local <= values["server_num"]:
    sys.exit(f"local_server_num={local} is invalid: expected 1 to server_num={values['server_num']}")
if local > 1 and os.environ.get("MS_NODE_ID"):
    sys.exit(f"MS_NODE_ID is the id of one server, but {local} are started: unset it, or start one at a time")

first = values.pop("fl_server_port")
started = []
for port in range(first, first + local):
    started.append(launch("MS_SERVER", f"server_{port}", "server.log", {**values, "fl_server_port": port}, index=port - first))
if wait_for_log(started, STARTED):
    print(STARTED)
else:  # the servers of other hosts may not have started
    print(f"other servers have not started yet: wait for '{STARTED}' in {', '.join(str(path) for _, path, _ in started)}")

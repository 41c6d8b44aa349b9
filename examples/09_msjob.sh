#!/bin/bash
# Example 02 as an MSJob on Kubernetes: IMAGE=my/image bash examples/09_msjob.sh; --dry-run prints the objects instead.
# The cluster needs the operator: covey operator install. More jobs are in config/samples.
set -e
covey submit "$(dirname "$0")/02_healing.py" -n 4 --image "${IMAGE:-covey:latest}" "$@"

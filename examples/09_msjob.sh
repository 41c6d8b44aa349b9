#!/bin/bash
# The digits as an MSJob on Kubernetes: IMAGE=my/image bash examples/09_msjob.sh; with --dry-run it prints what it would apply.
# The cluster needs the operator once: covey operator install. More jobs are in config/samples.
set -e
covey submit "$(dirname "$0")/02_healing.py" -n 4 --image "${IMAGE:-covey:latest}" "$@"

#!/bin/bash
# The federation of 07 where servers learn the sum of the updates and no single one: bash examples/08_secure_aggregation.sh
exec bash "$(dirname "$0")/07_federated.sh" --secure

#!/bin/bash
# Example 07 with secure aggregation: servers see only the sum of the updates: bash examples/08_secure_aggregation.sh
exec bash "$(dirname "$0")/07_federated.sh" --secure

#!/bin/bash
# Mutual TLS on every connection: bash examples/05_tls.sh
set -e
cd "$(dirname "$0")"
folder=${CERTIFICATES:-covey_certificates}
export COVEY_TLS_PASSWORD=${COVEY_TLS_PASSWORD:-only-an-example}
export COVEY_TLS_SERVER_PASSWORD=$COVEY_TLS_PASSWORD COVEY_TLS_CLIENT_PASSWORD=$COVEY_TLS_PASSWORD
test -f "$folder/config.json" || covey tls init "$folder" --name localhost --name 127.0.0.1
covey run -n 2 --tls "$folder/config.json" --log-dir "${LOGS:-covey_logs}" 01_digits.py

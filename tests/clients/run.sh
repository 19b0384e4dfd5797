#!/usr/bin/env bash
# Drives a folio binary with real clients: OpenAI's, Anthropic's and Ollama's Python SDKs and curl. Bounded in time.
#
#   tests/clients/run.sh target/release/folio [seconds of soak, default 30; 0: soak.sh by itself]
#
# Needs the packages of tests/clients/requirements.txt in the python3 on PATH. FOLIO_CLIENTS_ARGS holds further arguments of
# `folio serve`, such as a model folder; without them the built-in model is served.
set -euo pipefail
binary=$(realpath "${1:?the path of the folio binary}")
soak_seconds=${2:-30}
cd "$(dirname "$0")"
export FOLIO_BIN=$binary PYTHONDONTWRITEBYTECODE=1
timeout 900 python3 -u -m pytest -v -p no:cacheprovider --tb=short -o faulthandler_timeout=150 --ignore=frameworks --ignore=schema .
[ "$soak_seconds" = 0 ] || bash soak.sh "$binary" "$soak_seconds"

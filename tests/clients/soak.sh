#!/usr/bin/env bash
# Both soaks of soak.py: without tiers for so many seconds, with tiers for a quarter of that;
# either goes on until enough requests are completed. Whoever ends this script ends the soak and its server.
#
#   tests/clients/soak.sh target/release/folio SECONDS
set -euo pipefail
binary=$(realpath "${1:?the path of the folio binary}")
seconds=${2:?seconds of soak}
cd "$(dirname "$0")"
export FOLIO_BIN=$binary PYTHONDONTWRITEBYTECODE=1

running=
# `timeout` hands the signal on to all that it started.
trap '[ -z "$running" ] || kill "$running" 2>/dev/null || true' EXIT
trap 'exit 143' INT TERM

soak() {
  timeout $((seconds + 1500)) python3 -u soak.py "$@" &
  running=$!
  wait "$running"
  running=
}

soak --seconds "$seconds"
soak --seconds $((seconds / 4 + 10)) --seed 2 --tiers

#!/usr/bin/env bash
# The soaks of soak.py: without tiers for so many seconds, with memory and a disk for an eighth of that, with a Valkey and with a bucket for a
# sixteenth each; each goes on until enough requests are completed. Whoever ends this script ends the soak and its server.
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
soak --seconds $((seconds / 8 + 10)) --seed 2 --tiers host,disk
soak --seconds $((seconds / 16 + 5)) --seed 4 --requests 20 --completed 200 --tiers valkey
soak --seconds $((seconds / 16 + 5)) --seed 5 --requests 20 --completed 200 --tiers s3

#!/usr/bin/env bash
# Both soaks of soak.py: without tiers for so many seconds, with tiers for a quarter of that;
# either goes on until enough requests are completed.
#
#   tests/clients/soak.sh target/release/folio SECONDS
set -euo pipefail
binary=$(realpath "${1:?the path of the folio binary}")
seconds=${2:?seconds of soak}
cd "$(dirname "$0")"
export FOLIO_BIN=$binary PYTHONDONTWRITEBYTECODE=1
timeout $((seconds + 1500)) python3 -u soak.py --seconds "$seconds"
timeout $((seconds + 1500)) python3 -u soak.py --seconds $((seconds / 4 + 10)) --seed 2 --tiers

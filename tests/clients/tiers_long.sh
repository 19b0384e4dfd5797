#!/usr/bin/env bash
# What CI does of the tiers in short, for long: kills, random runs that a router follows, a soak, spoilt files. Results are kept.
#
#   tests/clients/tiers_long.sh target/release/folio RESULTS [seconds of soak, default 3600]
set -uo pipefail
binary=$(realpath "${1:?the path of the folio binary}")
results=$(realpath -m "${2:?a folder for the results}")
soak_seconds=${3:-3600}
cd "$(dirname "$0")"
mkdir -p "$results"
export FOLIO_BIN=$binary PYTHONDONTWRITEBYTECODE=1
failed=0
step() {
  local name=$1
  shift
  echo "== $name"
  { date -u; "$binary" --version; uname -srm; echo "$*"; "$@"; echo "ended with $?"; date -u; } >"$results/$name.txt" 2>&1
  tail -2 "$results/$name.txt" | head -1
  grep -q '^ended with 0$' "$results/$name.txt" || failed=1
}
tests=(python3 -u -m pytest -v -p no:cacheprovider --tb=short -o faulthandler_timeout=600)
step kills env FOLIO_KILLS="${FOLIO_KILLS:-100}" "${tests[@]}" test_disk_kv.py -k killed_at_any_time
step events env FOLIO_KV_EVENTS_REQUESTS="${FOLIO_KV_EVENTS_REQUESTS:-6000}" "${tests[@]}" test_kv_events.py -k "long_random or restart"
step soak python3 -u soak.py --seconds "$soak_seconds" --seed 3 --tiers host,disk
step noise env FOLIO_NOISE_ROUNDS="${FOLIO_NOISE_ROUNDS:-20000}" cargo test --locked -p folio-tiers --test noise
exit $failed

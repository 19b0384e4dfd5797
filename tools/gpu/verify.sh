#!/usr/bin/env bash
# Everything about the CUDA backend that only a GPU can tell, in about ten minutes: oracle tests of every kernel, the parity fixtures of
# every family, the bitwise suite, then rates as shares of what the same device was measured to do, beside PyTorch and transformers.
#
#   tools/gpu/pack.sh                      here or anywhere: builds target/gpu.tar.xz
#   tools/gpu/verify.sh [RESULTS]          where the GPU is: writes RESULTS (default target/gpu-results), prints a summary
#   tools/gpu/verify.sh RESULTS PART...    only these parts: tests engine serve peers cublaslt
#   python3 tools/gpu/report.py RESULTS    docs/performance-gpu.md
#
# Without a PART, one that would begin after seven and a half minutes is left out and named. Exits with 1 if anything failed or was left
# out; everything else is done all the same.
set -uo pipefail
cd "$(dirname "$0")/../.."
results=${1:-target/gpu-results}
parts=("${@:2}")
bin=target/gpu
mkdir -p "$results"
[ -e "$bin/folio" ] || [ ! -e target/gpu.tar.xz ] || tar -C target -xJf target/gpu.tar.xz
[ -x "$bin/folio" ] || { echo "$bin/folio is not there: run tools/gpu/pack.sh first"; exit 2; }

# Tests find their fixtures where they were built.
built=$(cat "$bin/built-in")
[ -e "$built/crates" ] || { mkdir -p "$(dirname "$built")" && ln -sfn "$PWD" "$built"; }
# NVRTC and cuBLASLt of the Python environment, unless the loader finds them.
library() { # stem
  python3 -c 'import glob, site, sys; print(next((f for d in site.getsitepackages() for f in sorted(glob.glob(d + "/nvidia/*/lib/" + sys.argv[1] + ".so.1*"))), ""))' "$1" 2>/dev/null
}
[ -n "${FOLIO_NVRTC:-}" ] || { found=$(library libnvrtc); [ -z "$found" ] || export FOLIO_NVRTC=$found; }
[ -n "${FOLIO_CUBLASLT:-}" ] || { found=$(library libcublasLt); [ -z "$found" ] || export FOLIO_CUBLASLT=$found; }
export FOLIO_TEST_DEVICE=${FOLIO_TEST_DEVICE:-cuda}
device=${FOLIO_VERIFY_DEVICE:-cuda}
nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.sm,clocks.mem,pcie.link.gen.max,pcie.link.width.max --format=csv >"$results/device.csv" 2>/dev/null

shape=${FOLIO_VERIFY_SHAPE:-tools/gpu/shapes/llama-3.1-8b}
failed=0
measure() { # name, flags
  local name=$1; shift
  timeout 100 "$bin/folio" bench engine "$shape" --device "$device" --max-model-len 8192 --json "$@" >"$results/$name.json" 2>"$results/$name.log" ||
    { echo "$name: no figures, see $results/$name.log"; failed=1; }
}

tests() {
  local test name filter start verdict
  for test in "$bin"/test-*; do
    name=$(basename "$test" | sed 's/^test-//')
    # Of the bitwise suite, what runs on a device.
    filter=; [ "$name" = bitwise ] && filter=device::
    start=$SECONDS
    if timeout 120 "$test" $filter >"$results/test-$name.log" 2>&1; then verdict=passed; else verdict=FAILED; failed=1; fi
    echo "$name: $verdict in $((SECONDS - start)) s: $(grep '^test result' "$results/test-$name.log" | tail -1)" | tee -a "$results/tests.txt"
  done
}
engine() {
  local type
  timeout 60 "$bin/folio" doctor --device "$device" --json >"$results/link.json" 2>"$results/link.log" || { echo "link: no figures, see $results/link.log"; failed=1; }
  for type in BF16 Fp8x128 Int4x128; do
    measure "engine-$type" --load-format "dummy:$type" --prefill 512,4096 --batch 1,8,64 --depth 1024 --decode 64 --repeat 3
  done
}
# 256 clients at once through the server, so that queue, scheduler and streams are part of it: 1,000 tokens in, and 100 out (as transformers'
# continuous batching beside it) or 1,000.
serve() {
  local server url out folder
  # With a word for every token: a model without a tokenizer has no text to stream, so no gaps between tokens could be seen.
  folder=$(mktemp -d) && cp "$shape/config.json" "$folder/"
  python3 - "$folder" <<'PYTHON'
import json, sys
words = {f"w{i}": i for i in range(json.load(open(sys.argv[1] + "/config.json"))["vocab_size"])}
json.dump({"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None, "pre_tokenizer": {"type": "WhitespaceSplit"},
           "post_processor": None, "decoder": None, "model": {"type": "WordLevel", "vocab": words, "unk_token": "w0"}}, open(sys.argv[1] + "/tokenizer.json", "w"))
PYTHON
  "$bin/folio" serve "$folder" --device "$device" --load-format dummy:BF16 --max-model-len 4096 --port 0 >"$results/serve.log" 2>&1 &
  server=$!
  for _ in $(seq 600); do
    url=$(grep -oE 'http://[0-9.]+:[0-9]+' "$results/serve.log" | head -1)
    if ! kill -0 $server 2>/dev/null || { [ -n "$url" ] && python3 -c 'import sys, urllib.request as u; u.urlopen(sys.argv[1] + "/health")' "$url" 2>/dev/null; }; then break; fi
    sleep 0.2
  done
  for out in 100 1000; do
    timeout 120 "$bin/folio" bench serve --url "$url" --json --warmup 0 --seed "$out" --requests "${FOLIO_VERIFY_REQUESTS:-256}" --concurrency 256 --input-len 1000 --output-len "$out" \
      --token-ids 1000..40000 --timeout 110 >"$results/serve-$out.json" 2>>"$results/serve.log" || { echo "serve-$out: no figures, see $results/serve.log"; failed=1; }
  done
  kill $server 2>/dev/null; wait $server 2>/dev/null
  rm -r "$folder"
}
peers() {
  timeout 120 python3 tools/gpu/peers.py "$shape" >"$results/peers.json" 2>"$results/peers.log" || { echo "peers: no figures, see $results/peers.log"; failed=1; }
}
# Which shapes the library was given is in the logs.
cublaslt() {
  local type
  for type in BF16 Fp8x128; do
    measure "cublaslt-$type" --gemm-backend cublaslt --load-format "dummy:$type" --prefill 512,4096 --batch 1,64 --depth 1024 --decode 64 --repeat 3
  done
}

begun=$SECONDS
for part in "${parts[@]:-all}"; do
  case $part in
    all)
      for each in tests engine serve peers cublaslt; do
        if [ $((SECONDS - begun)) -lt 450 ]; then $each; else
          echo "$each: left out for time: tools/gpu/verify.sh $results $each"; failed=1
        fi
      done ;;
    tests | engine | serve | peers | cublaslt) $part ;;
    *) echo "$part is no part: tests engine serve peers cublaslt"; exit 2 ;;
  esac
done
python3 tools/gpu/report.py "$results" --print
exit $failed

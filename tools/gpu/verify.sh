#!/usr/bin/env bash
# Everything about the CUDA backend that only a GPU can tell, in under nine minutes: oracle tests of every kernel, the parity fixtures of
# every family, the bitwise suite, then rates as shares of what the same device was measured to do, beside PyTorch and transformers.
#
#   tools/gpu/pack.sh                       here or anywhere: builds target/gpu.tar.xz
#   tools/gpu/verify.sh [RESULTS]           where the GPU is: writes RESULTS (default target/gpu-results), prints a summary
#   tools/gpu/verify.sh RESULTS cublaslt    then, in under four minutes more: the same rates with products by NVIDIA's library
#   python3 tools/gpu/report.py RESULTS     docs/performance-gpu.md
#
# Exits with 1 if a test failed; measurements are made all the same.
set -uo pipefail
cd "$(dirname "$0")/../.."
results=${1:-target/gpu-results}
part=${2:-own}
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
nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.sm,clocks.mem --format=csv >"$results/device.csv" 2>/dev/null

shape=tools/gpu/shapes/llama-3.1-8b
failed=0
measure() { # name, flags
  local name=$1; shift
  timeout 100 "$bin/folio" bench engine "$shape" --device "$device" --max-model-len 8192 --json "$@" >"$results/$name.json" 2>"$results/$name.log" ||
    { echo "$name: no figures, see $results/$name.log"; failed=1; }
}
if [ "$part" = cublaslt ]; then
  # Which shapes the library was given is in the logs.
  for type in BF16 Fp8x128; do
    measure "cublaslt-$type" --gemm-backend cublaslt --load-format "dummy:$type" --prefill 512,4096 --batch 1,64 --depth 1024 --decode 64 --repeat 3
  done
  python3 tools/gpu/report.py "$results" --print
  exit $failed
fi
for test in "$bin"/test-*; do
  name=$(basename "$test" | sed 's/^test-//')
  # Of the bitwise suite, what runs on a device.
  filter=; [ "$name" = bitwise ] && filter=device::
  start=$SECONDS
  if timeout 60 "$test" $filter >"$results/test-$name.log" 2>&1; then verdict=passed; else verdict=FAILED; failed=1; fi
  echo "$name: $verdict in $((SECONDS - start)) s: $(grep '^test result' "$results/test-$name.log" | tail -1)" | tee -a "$results/tests.txt"
done

for type in BF16 Fp8x128 Int4x128; do
  measure "engine-$type" --load-format "dummy:$type" --prefill 512,4096 --batch 1,8,64 --depth 1024 --decode 64 --repeat 3
done
measure throughput-BF16 --load-format dummy:BF16 --prefill 1000 --batch 256 --depth 1000 --decode 100 --repeat 1
timeout 120 python3 tools/gpu/peers.py "$shape" >"$results/peers.json" 2>"$results/peers.log" || echo "peers: no figures, see $results/peers.log"
python3 tools/gpu/report.py "$results" --print
exit $failed

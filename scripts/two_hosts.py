#!/usr/bin/env python3
"""Trains over two hosts that are network namespaces of this machine, joined by a veth pair: four ranks by Open MPI's mpirun.

    scripts/install_mpi.sh target/mpi
    cargo build --release --example gpt_train
    sudo scripts/two_hosts.py

- Training: `dp` across the hosts, `tp` inside each, in canonical numerics: the losses are those of threads, bit by bit.
- 100 ms of delay and 1% of lost packets, where the kernel has netem: the same losses.
- The disk of the second host is full, where its ranks write their logs: every process ends, and an error names the file.
- The link goes down: every rank ends with an error that names ranks that it lost, and no process is left. A rank that loses the rank that
  judges asks the next one, so the ranks of the second host may take twice the timeout.

Where network namespaces are not permitted, or there is no Open MPI, it says so and ends with code 0. Needs Python 3.11, Linux, root and
iproute2.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MODEL = "model.hidden_size=16 model.num_layers=2 model.seq_len=16 training.global_batch_size=8 metrics.sample_tokens=0 training.numerics=canonical"
TIMEOUT = 4  # seconds without progress
LAST = 20  # seconds in which processes that have failed end
SPACES = {f"10.77.0.{number}": f"mw{os.getpid()}{name}" for number, name in ((1, "a"), (2, "b"))}
NEAR, FAR = SPACES.values()


def skipped(why):
    print(f"skipped: {why}")
    sys.exit(0)


def ip(*words, check=True):
    return subprocess.run(["ip", *words], check=check, capture_output=True, text=True)


def join_hosts():
    """Two namespaces, each with an end of a veth pair as its network."""
    try:
        for space in SPACES.values():
            ip("netns", "add", space)
        ip("link", "add", "mwa", "netns", NEAR, "type", "veth", "peer", "name", "mwb", "netns", FAR)
        for end, (address, space) in zip(("mwa", "mwb"), SPACES.items()):
            ip("-n", space, "addr", "add", f"{address}/24", "dev", end)
            ip("-n", space, "link", "set", end, "up")
            ip("-n", space, "link", "set", "lo", "up")
    except (subprocess.CalledProcessError, FileNotFoundError) as error:
        skipped(f"network namespaces are not permitted here: {getattr(error, 'stderr', None) or error}")


def kill_all(spaces):
    """Kills the processes in the namespaces."""
    for pid in [pid for space in spaces for pid in ip("netns", "pids", space, check=False).stdout.split()]:
        subprocess.run(["kill", "-9", pid], check=False)


def part_hosts():
    kill_all(SPACES.values())
    for space in SPACES.values():
        ip("netns", "del", space, check=False)


def processes(name, spaces=SPACES.values()):
    """The processes of a program in the namespaces."""
    found = []
    for pid in [pid for space in spaces for pid in ip("netns", "pids", space).stdout.split()]:
        try:
            found += [pid] if os.path.basename(os.readlink(f"/proc/{pid}/exe")) == name else []
        except OSError:
            pass  # it has ended
    return found


def unpacked(name, packages):
    """Debian's packages and what they need, in a folder that has usr/."""
    folder = ROOT / "target" / name
    if not folder.exists():
        if not shutil.which("apt-get"):
            skipped(f"there is no apt-get to take {packages[0]} from")
        planned = subprocess.run(["apt-get", "install", "--simulate", "--no-install-recommends", *packages], capture_output=True, text=True)
        names = [line.split()[1] for line in planned.stdout.splitlines() if line.startswith("Inst ")]
        if planned.returncode or not names:
            skipped(f"apt-get does not have {packages[0]}: {planned.stderr.strip() or 'it is installed'}")
        folder.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as room:
            subprocess.run(["apt-get", "download", "-o", "APT::Sandbox::User=root", "--quiet=2", *names], cwd=room, check=True)
            for package in Path(room).glob("*.deb"):
                subprocess.run(["dpkg-deb", "--extract", package, f"{room}/files"], check=True)
            os.rename(f"{room}/files", folder)
    return folder


class Losses:
    """Runs of gpt_train, and the losses and gradient norms of their steps."""

    def __init__(self, programs, folder):
        self.folder, self.gpt_train = folder, (programs / "gpt_train").resolve()

    def program(self, name, *more):
        sets = [*MODEL.split(), *more]
        words = (word for one in sets for word in ("--set", one))
        return [self.gpt_train, "--mesh", "dp=2,tp=2", "--metrics", self.folder / name, *words]

    def of(self, name):
        """One pair for each step; steps that were trained twice must have the same."""
        path, steps = self.folder / name, {}
        lines = path.read_text().splitlines() if path.exists() else []
        for step in (json.loads(line) for line in lines if line.endswith("}")):
            if step["event"] == "step":
                pair = (step["loss"], step["grad_norm"])
                if steps.setdefault(step["step"], pair) != pair:
                    sys.exit(f"{name}: step {step['step']} has {steps[step['step']]} and {pair}")
        return [steps[step] for step in sorted(steps)]

    def by_threads(self, steps):
        subprocess.run(self.program("threads", f"training.steps={steps}"), check=True, stdout=subprocess.DEVNULL)
        return self.of("threads")


class Hosts:
    def __init__(self, args, folder):
        self.args, self.folder, self.losses = args, folder, Losses(args.programs, folder)
        self.agent, self.full = folder / "agent", folder / "full"
        variables = " ".join(f"{name}={value}" for name, value in self.variables().items())
        near, far = SPACES.items()
        self.agent.write_text(
            f'#!/bin/bash\nhost=$1; shift\n[[ $host == {near[0]} ]] && space={near[1]} || space={far[1]}\n'
            f"[[ -d {self.full} ]] && full='mount -t tmpfs -o size=4k full {self.full}; head -c 4096 /dev/zero > {self.full}/rest;'\n"
            f'exec ip netns exec $space unshare --uts --mount env {variables} bash -c "hostname $space; $full $*"\n'
        )
        self.agent.chmod(0o755)

    def variables(self):
        mpi = self.args.mpi.resolve()
        return {"OPAL_PREFIX": mpi, "LD_LIBRARY_PATH": mpi / "lib", "OMPI_ALLOW_RUN_AS_ROOT": 1, "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": 1, "TERM": "dumb"}

    def launch(self, name, *more):
        """The four ranks; nothing is waited for."""
        network = "10.77.0.0/24"
        options = ["--oversubscribe", "--bind-to", "none", "--prtemca", "plm_ssh_agent", self.agent, "--prtemca", "prte_if_include", network]
        options += ["--mca", "pml", "ob1", "--mca", "btl", "tcp,self", "--mca", "btl_tcp_if_include", network]
        options += ["--host", ",".join(f"{address}:2" for address in SPACES), "-n", "4"]
        line = [self.args.mpi.resolve() / "bin/mpirun", *options, *self.losses.program(name, "comm.kind=mpi", f"comm.timeout_seconds={TIMEOUT}", *more)]
        inside = ["ip", "netns", "exec", NEAR, "unshare", "--uts", "bash", "-c", f'hostname {NEAR}; exec "$@"', "bash", *line]
        variables = os.environ | {key: str(value) for key, value in self.variables().items()}
        return subprocess.Popen(inside, env=variables, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def trains(self, name):
        """The losses of three steps over both hosts."""
        ranks = self.launch(name, "training.steps=3")
        text, _ = ranks.communicate(timeout=300)
        if ranks.returncode or "4 processes on 2 hosts by " not in text:
            sys.exit(f"{name}: ended with {ranks.returncode}\n{text}")
        return self.losses.of(name)


def full_disk(hosts):
    hosts.full.mkdir()
    begun, ranks = time.monotonic(), hosts.launch("room", "training.steps=1000000", f"comm.log_dir={hosts.full}")
    try:
        text, _ = ranks.communicate(timeout=LAST + TIMEOUT)
    except subprocess.TimeoutExpired:
        left = processes("gpt_train")
        ranks.kill()
        sys.exit(f"a full disk: mpirun and processes {left} are left after {LAST + TIMEOUT} s\n{ranks.communicate()[0]}")
    if ranks.returncode == 0 or "No space left on device" not in text or str(hosts.full) not in text:
        sys.exit(f"a full disk: ended with {ranks.returncode}, and no error names the file\n{text}")
    shutil.rmtree(hosts.full)
    print(f"a full disk on one host: all ended after {time.monotonic() - begun:.1f} s")


def link_goes_down(hosts):
    logs = hosts.folder / "logs"
    ranks = hosts.launch("down", "training.steps=1000000", f"comm.log_dir={logs}")
    begun = time.monotonic()
    while len(hosts.losses.of("down")) < 5:
        if time.monotonic() - begun > 60 or ranks.poll() is not None:
            sys.exit(f"no step before the link went down\n{ranks.communicate()[0]}")
        time.sleep(0.05)
    ip("-n", NEAR, "link", "set", "mwa", "down")
    begun, ends = time.monotonic(), {}
    while time.monotonic() - begun < 2 * TIMEOUT + LAST and (len(ends) < 4 or processes("gpt_train")):
        for rank in range(4):
            failed = [line for line in (logs / f"rank-{rank}.log").read_text().splitlines() if " failed: " in line]
            if failed and rank not in ends:
                ends[rank] = (time.monotonic() - begun, failed[0])
        time.sleep(0.05)
    left = processes("gpt_train")
    ranks.kill()
    if left or len(ends) < 4:
        sys.exit(f"the link went down: processes {left} are left, and of four ranks {sorted(ends)} said why they ended")
    for rank, (seconds, line) in sorted(ends.items()):
        if "made no progress" not in line and "is lost" not in line:
            sys.exit(f"rank {rank} names no rank that it lost: {line}")
        print(f"the link went down: rank {rank} ended after {seconds:.1f} s")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mpi", type=Path, default=ROOT / "target/mpi/openmpi", help="folder of Open MPI 5")
    parser.add_argument("--programs", type=Path, default=ROOT / "target/release/examples", help="folder of gpt_train")
    args = parser.parse_args()
    if not (args.mpi / "bin/mpirun").exists():
        skipped(f"no Open MPI in {args.mpi}: scripts/install_mpi.sh installs it")
    with tempfile.TemporaryDirectory(prefix="meshwork-hosts-") as name:
        hosts = Hosts(args, Path(name))
        try:
            join_hosts()
            wanted = hosts.losses.by_threads(3)
            if hosts.trains("two") != wanted:
                sys.exit("other losses over two hosts")
            print("two hosts: the losses of threads")
            late = [["tc", "-n", space, "qdisc", "add", "dev", end, "root", "netem", "delay", "50ms", "loss", "1%"] for end, space in (("mwa", NEAR), ("mwb", FAR))]
            if all(subprocess.run(line, capture_output=True).returncode == 0 for line in late):
                if hosts.trains("late") != wanted:
                    sys.exit("other losses over a slow network")
                print("100 ms and 1% of lost packets: the losses of threads")
                for end, space in (("mwa", NEAR), ("mwb", FAR)):
                    subprocess.run(["tc", "-n", space, "qdisc", "del", "dev", end, "root"], check=True)
            else:
                print("skipped: the kernel has no netem, so no delay and no lost packets")
            full_disk(hosts)
            link_goes_down(hosts)
        finally:
            part_hosts()


if __name__ == "__main__":
    main()

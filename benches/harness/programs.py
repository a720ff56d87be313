"""Runs a program, ours or a peer's, and reads what it measured.

Programs write JSON lines to standard output; other lines are passed over. A step is `{"step", "step_ms" or "seconds"}`, a
collective `{"op", "bytes", "us"}` (with `"error"`, of what it gives), matrix products `{"product", "gflops"}` or
`{"operation", "tflops"}`, a share of something measured beside it `{"share", "value"}`.
"""

import json
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import venv
from dataclasses import dataclass, field
from pathlib import Path

from peers import lifetime

from .files import examples, random_tokens
from .machine import ROOT, read

PEERS = ROOT / "benches" / "peers"
REQUIREMENTS = ["torch==2.15.0", "numpy", "jax==0.10.2", "optax==0.2.8", "transformers==5.23.0", "peft==0.21.2"]
TIMEOUT_S = 1800

# Our programs: how cargo builds each.
OURS = {
    "gpt_train": ["build", "--release", "--example", "gpt_train"],
    "plan": ["build", "--release", "--example", "plan"],
    "collectives": ["bench", "--no-run", "-p", "meshwork-core", "--bench", "collectives"],
    "compress": ["bench", "--no-run", "-p", "meshwork-compress", "--bench", "compress"],
    "powersgd": ["bench", "--no-run", "-p", "meshwork-compress", "--bench", "powersgd"],
    "throttled": ["bench", "--no-run", "-p", "meshwork-engine", "--bench", "throttled"],
    "attention": ["bench", "--no-run", "-p", "meshwork-cpu", "--bench", "attention"],
    "context": ["bench", "--no-run", "-p", "meshwork-context-parallel", "--bench", "context"],
    "gemm": ["bench", "--no-run", "-p", "meshwork-cpu", "--bench", "gemm"],
}
ONE_PROCESS = {"train.py", "finetune.py", "products.py", "operations.py", "jax_gpt.py", "topk.py"}  # the peers that have all threads in one
NAMES = {*OURS, *ONE_PROCESS, "mpirun", "mesh.py", "collectives.py", "context.py", "powersgd.py"}
MODEL_KEYS = ["vocab_size", "num_layers", "hidden_size", "num_heads", "seq_len"]


class Failed(Exception):
    """A program that did not do what it should; says which and why."""


@dataclass
class Command:
    argv: list
    environment: dict = field(default_factory=dict)
    tokens: int = 0  # of a step
    warmup: int = 0  # steps that do not count
    is_job: bool = False  # of a launcher, which takes a signal for a fault

    def __str__(self):
        variables = [f"{name}={shlex.quote(shown(value))}" for name, value in self.environment.items()]
        return " ".join([*variables, shlex.join(shown(arg) for arg in self.argv)])


def shown(arg):
    """A path as anybody has it: from the repository's root, or else its last part alone. Also inside JSON."""
    path = Path(arg)
    if not path.is_absolute():
        return str(arg).replace(f"{ROOT}/", "")
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name


def step_flops(size):
    """Arithmetic of a training step: 6 a weight of a product and token, and attention in full, its masked half too."""
    hidden, layers, tokens = size["hidden_size"], size["num_layers"], size["batch"] * size["seq_len"]
    weights = 12 * layers * hidden**2 + size["vocab_size"] * hidden
    return tokens * (6 * weights + 12 * layers * hidden * size["seq_len"])


def is_peer(text):
    return text.split()[0].endswith(".py")


class Programs:
    """Makes commands; builds what they need when they first do. `python` runs the peers, None if there is none.

    `environment` is of every command, ours and the peers'.
    """

    def __init__(self, threads, python=None, folder=ROOT / "target" / "benches", environment=None):
        self.threads, self.python, self.folder, self.environment = threads, python, folder, environment or {}
        self.built = {}

    def command(self, text, size=None, environment=None, threads=None):
        """The command that `text` stands for, at `size`."""
        name, *args = shlex.split(text)
        size, cores = size or {}, threads or self.threads
        if name == "mpirun":
            return self.job(int(args[1]), shlex.join(args[2:]), size, cores)
        command = Command([], {}, size.get("batch", 0) * size.get("seq_len", 0), size.get("warmup", 0))
        steps = size.get("steps", 0) + command.warmup
        if is_peer(text):
            ranks = 1 if name in ONE_PROCESS else cores  # of a mesh, each has one thread
            threads = str(cores // ranks)
            command.environment = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, **(environment or {}), **self.environment}
            command.argv = [self.python, PEERS / name, *args]
            if size:
                work = {key: size[key] for key in [*MODEL_KEYS, "batch"]}
                command.argv += ["--work", json.dumps(work | {"steps": steps, "tokens": str(self.data(size))})]
            return command
        command.environment = {"MESHWORK_THREADS": str(cores), **self.environment}
        command.argv = [self.build(name), *(["--bench"] if OURS[name][0] == "bench" else []), *args]
        if size:
            sets = {f"model.{key}": size[key] for key in MODEL_KEYS} | {"training.global_batch_size": size["batch"]}
            command.argv += [word for key, value in sets.items() for word in ("--set", f"{key}={value}")]
            command.argv += ["--steps", str(steps), "--data", self.data(size), "--metrics", "/dev/stdout"]
        return command

    def data(self, size):
        """The file that both sides train on: random tokens, or the examples that the size names."""
        if "examples" in size:
            pairs = size["examples"] == "dpo"  # two answers share a row
            return examples(self.folder, size["examples"], size["seq_len"] // (2 if pairs else 1))
        return random_tokens(self.folder, size["vocab_size"])

    def job(self, processes, text, size, cores):
        """One of our programs as so many processes of Open MPI, `mpirun -n N gpt_train ..`, which share the cores."""
        mpi = ROOT / "target" / "mpi" / "openmpi"
        command = self.command(text, size, threads=max(cores // processes, 1))
        root = {"TERM": "dumb", "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        if cores == os.cpu_count():
            del command.environment["MESHWORK_THREADS"]  # then a rank that waits leaves its core to the other processes
        command.environment |= {"OPAL_PREFIX": str(mpi), "LD_LIBRARY_PATH": str(mpi / "lib"), **root}
        launch = [mpi / "bin" / "mpirun", "--oversubscribe", "--bind-to", "none", "-n", str(processes)]
        command.argv = [*launch, *command.argv, "--set", "metrics.sample_tokens=0"]
        command.is_job = True
        return command

    def build(self, name):
        """The path of one of our programs: of the folder MESHWORK_PROGRAM_FOLDER, for tests of the benchmarks, or built as a release."""
        if name not in self.built and (folder := os.environ.get("MESHWORK_PROGRAM_FOLDER")):
            self.built[name] = str(Path(folder) / name)
        if name not in self.built:
            cargo = ["cargo", *OURS[name], "--locked", "--message-format=json-render-diagnostics"]
            done = subprocess.run(cargo, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
            made = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
            paths = [unit["executable"] for unit in made if unit.get("executable") and unit["target"]["name"] == name]
            if done.returncode or not paths:
                raise Failed(f"{shlex.join(cargo)} did not build {name}")
            self.built[name] = paths[0]
        return self.built[name]


def measure(command):
    """Runs a command to its end: what it measured, by name.

    `tokens_per_s` is the median over the steps that count; `first_step_s` runs from before the process exists to the arrival
    of its first step's line; `peak_rss_mib` is the process's own (with what it waited for), and never below this script's;
    `others_busy` is how many cores other work had meanwhile.
    """
    environment = os.environ | command.environment
    steps, measured = [], {}
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as complaints:
        busy, begun = machine_seconds(), time.monotonic()
        child = subprocess.Popen(
            [str(arg) for arg in command.argv],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=complaints,
            start_new_session=True,
            preexec_fn=lifetime.bound,
        )
        timer = threading.Timer(TIMEOUT_S, kill, [child])
        timer.start()
        try:
            for line in child.stdout:
                if not line.startswith(b"{"):
                    continue
                event = json.loads(line)
                if "step_ms" in event or "seconds" in event and "step" in event:
                    if not steps:
                        measured["first_step_s"] = time.monotonic() - begun
                    steps.append(event["step_ms"] / 1e3 if "step_ms" in event else event["seconds"])
                elif "op" in event:
                    measured[f"{event['op']} {bytes_as_text(event['bytes'])}"] = event["us"]
                    measured |= {"error": event["error"]} if "error" in event else {}
                elif "product" in event:
                    measured[event["product"]] = event["gflops"]
                elif "operation" in event and "tflops" in event:
                    measured[event["operation"]] = 1e3 * event["tflops"]
                elif "share" in event:
                    measured[f"share: {event['share']}"] = event["value"]
                elif event.get("event") == "end" and not command.is_job:
                    # What is left is a sample of text. Not send_signal, which would reap a child that is gone already.
                    os.kill(child.pid, signal.SIGINT)
            _, status, usage = os.wait4(child.pid, 0)
            child.returncode = os.waitstatus_to_exitcode(status)
            others = machine_seconds() - busy - usage.ru_utime - usage.ru_stime
            measured["others_busy"] = max(others, 0) / (time.monotonic() - begun)
        except BaseException:
            kill(child)
            child.wait()
            raise
        finally:
            timer.cancel()
            child.stdout.close()
        complaints.seek(0)
        told = complaints.read()
        if child.returncode:
            raise Failed(f"{command}\nended with {child.returncode}: {told[-2000:]}")
    rows = re.search(r"([0-9.]+)% full", told)  # of packed rows, whose padding counts nothing
    full = float(rows[1]) / 100 if rows else 1
    if command.tokens:
        if len(steps) <= command.warmup:
            raise Failed(f"{command}\nreported {len(steps)} steps")
        measured["tokens_per_s"] = command.tokens * full / statistics.median(steps[command.warmup :])
    measured["peak_rss_mib"] = usage.ru_maxrss / 1024
    return measured


def machine_seconds():
    """Time that all cores have worked for anybody so far, what a host took away included; 0 where the system does not tell."""
    kinds = read("/proc/stat", "cpu 0 0 0 0 0 0 0 0").splitlines()[0].split()[1:9]
    user, nice, system, _idle, _waiting, irq, softirq, steal = (int(ticks) for ticks in kinds)
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def kill(child):
    """Ends a program and the processes that it started."""
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def bytes_as_text(count):
    return f"{count >> 20} MiB" if count >= 1 << 20 else f"{count >> 10} KiB"


def peer_python(folder=ROOT / "target" / "peer-venv"):
    """A Python that has PyTorch and JAX: that of MESHWORK_PEER_PYTHON, or one in a virtual environment made here.

    # Raises
    Failed, when there is none and none can be made.
    """
    asked = os.environ.get("MESHWORK_PEER_PYTHON")
    python = Path(asked) if asked else folder / "bin" / "python"
    if peers_of(python):
        return python
    if asked:
        raise Failed(f"{asked} lacks one of {' '.join(REQUIREMENTS)}")
    print(f"installing {' '.join(REQUIREMENTS)} into {folder}", file=sys.stderr)
    venv.create(folder, with_pip=True)
    done = subprocess.run([python, "-m", "pip", "install", "--quiet", *REQUIREMENTS], check=False)
    if done.returncode or not peers_of(python):
        raise Failed(f"could not install {' '.join(REQUIREMENTS)}")
    return python


def peers_of(python):
    """The peers of this Python and their versions; None if it lacks one."""
    try:
        script = "import jax, optax, torch; print(f'PyTorch {torch.__version__}, JAX {jax.__version__}')"
        return subprocess.run([python, "-c", script], capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None

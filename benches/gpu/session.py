"""Runs programs of a check: each within the time that its part has left, its lines read as they come."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

EMULATED = "cuda-emulated"
# A model whose step takes an instant, on the emulator too.
TINY = {"model.num_layers": 2, "model.hidden_size": 32, "model.seq_len": 16, "training.global_batch_size": 4}


class Skipped(Exception):
    """What cannot be checked here, and why."""


class Failed(Exception):
    """What did not hold."""


class Late(Failed):
    """A program that was ended because its part had no time left, and what it wrote until then."""

    def __init__(self, why, output):
        super().__init__(why)
        self.output = output


@dataclass
class Output:
    """What a program wrote, its exit code, and when each line of standard output came, in seconds from before its start."""

    lines: list = field(default_factory=list)
    times: list = field(default_factory=list)
    errors: str = ""
    code: int = 0
    seconds: float = 0.0

    @property
    def text(self):
        return "\n".join(self.lines)

    def json(self):
        """The lines that are JSON objects."""
        return [json.loads(line) for line in self.lines if line.startswith("{")]

    def reason(self):
        """The last words of standard error, for a table."""
        lines = [line.strip() for line in self.errors.splitlines() if line.strip()]
        # A traceback ends with its error; our programs begin with theirs.
        told = next((line for line in lines if line.startswith("error")), lines[-1] if lines else f"exit code {self.code}")
        return told.removeprefix("error: ")[:300]


@dataclass
class Session:
    """A check of one device: where its programs are, and how long a part may take."""

    root: Path
    programs: Path
    folder: Path
    device: str
    quick: bool
    python: str
    limit: float
    commands: list = field(default_factory=list)
    deadline: float = 0.0
    ended: dict = field(default_factory=dict)  # the last line of metrics of the last training run
    _there: str | None = None
    _libraries: str | None = None

    @property
    def emulated(self):
        return self.device.startswith(EMULATED)

    @property
    def peer_device(self):
        """Where PyTorch computes."""
        return "cpu" if self.emulated else "cuda"

    def program(self, name):
        """The path of one of our programs."""
        path = self.programs / name
        if not path.exists():
            raise Skipped(f"there is no {path}; scripts/gpu-pack.sh makes it")
        return path

    def start_part(self):
        self.deadline, self.commands = time.monotonic() + self.limit, []

    def known(self):
        """What a part found out that others need not find out again."""
        return self._there, self._libraries

    def know(self, known):
        self._there, self._libraries = known

    def end_all(self):
        """Ends the programs that a part left behind."""
        for running in self.folder.glob("running-*"):
            end_group(int(running.name.removeprefix("running-")))
            running.unlink()

    def left(self):
        return max(self.deadline - time.monotonic(), 0.1)

    def run(self, argv, environment=None, limit=None, until=None):
        """Runs a program to its end. `until`: after a line of which this is true it is asked to stop, as by Ctrl-C."""
        argv = [str(word) for word in argv]
        seconds = min(limit or self.left(), self.left())
        ours = {"XDG_CACHE_HOME": str(self.folder / "cache"), "LD_LIBRARY_PATH": self.libraries()}
        if not any(word.startswith(str(self.programs)) for word in argv):
            ours = {}  # a peer has libraries of its own
        output, begun = Output(), time.monotonic()
        late = threading.Event()
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
            child = subprocess.Popen(
                argv,
                env=os.environ | ours | (environment or {}),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                errors="replace",
                start_new_session=True,
            )

            def end():
                late.set()
                kill(child)

            running = self.folder / f"running-{child.pid}"
            running.touch()
            timer = threading.Timer(seconds, end)
            timer.start()
            try:
                for line in child.stdout:
                    output.lines.append(line.rstrip("\n"))
                    output.times.append(time.monotonic() - begun)
                    if until and until(line):
                        child.send_signal(signal.SIGINT)
                output.code = child.wait()
            finally:
                timer.cancel()
                kill(child)
                child.stdout.close()
                child.wait()
                running.unlink(missing_ok=True)
            errors.seek(0)
            output.errors = errors.read()
        output.seconds = time.monotonic() - begun
        shown = " ".join(shown_word(word, self) for word in argv)
        self.commands.append({"command": shown, "seconds": round(output.seconds, 2), "code": output.code})
        if late.is_set():
            raise Late(f"`{shown}` was ended after {seconds:.0f} s", output)
        return output

    def libraries(self):
        """Where our programs look for NVRTC and cuBLASLt: where the system says, in CUDA's toolkit, and among the wheels that PyTorch brings."""
        if self._libraries is None:
            wheels = [path for folder in self.wheels() for path in sorted(folder.glob("nvidia/*/lib"))]
            folders = [os.environ.get("LD_LIBRARY_PATH", ""), "/usr/local/cuda/lib64", *map(str, wheels)]
            self._libraries = ":".join(folder for folder in folders if folder)
        return self._libraries

    def wheels(self):
        """The folders of packages of the Python that has PyTorch."""
        script = "import site; print('\\n'.join([*site.getsitepackages(), site.getusersitepackages()]))"
        told = subprocess.run([self.python, "-c", script], capture_output=True, text=True, check=False)
        return [Path(line) for line in told.stdout.splitlines()]

    def there(self):
        """Skips the part if the device is not there: if a step of a tiny model is refused."""
        if self._there is None:
            try:
                self.train(TINY, 1)
                self._there = ""
            except Failed as failed:
                self._there = str(failed)
        if self._there:
            raise Skipped(self._there)

    def train(self, sets, steps, *words, device=None, environment=None, data=None):
        """Steps of `gpt_train`, as its lines of metrics say, and the seconds to the end of the first; `Failed` says what it refused."""
        argv = [self.program("gpt_train"), "--device", device or self.device, "--steps", steps, *words]
        argv += [word for key, value in sets.items() for word in ("--set", f"{key}={value}")]
        argv += ["--metrics", "/dev/stdout", *(["--data", data] if data else [])]
        # What would come after the end is a sample of text.
        output = self.run(argv, environment, until=lambda line: line.startswith('{"event":"end"'))
        events = output.json()
        taken = [event for event in events if event.get("event") == "step"]
        if output.code or len(taken) < steps:
            raise Failed(output.reason())
        self.ended = next((event for event in events if event.get("event") == "end"), {})
        first = next(at for line, at in zip(output.lines, output.times) if line.startswith('{"event":"step"'))
        return taken, first


def shown_word(word, session):
    """A word of a command as anybody has it: paths from the root of the pack."""
    for folder in (session.root, session.folder):
        word = word.replace(f"{folder}/", "")
    return shlex.quote(word)


def kill(child):
    """Ends a program and the processes that it started."""
    end_group(child.pid)


def end_group(leader):
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        pass

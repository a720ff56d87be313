"""Programs that are told to end when the one that started them ends in whatever way: a benchmark that is killed leaves none."""

import ctypes
import signal
import subprocess

PR_SET_PDEATHSIG = 1


def bound():
    """Binds this process, and a program that it becomes, to its parent: SIGTERM comes when that is gone. Only on Linux."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def run(argv, **more):
    """`subprocess.run` of a program that is bound to this process."""
    return subprocess.run(argv, preexec_fn=bound, **more)

"""What a measurement was made on, and the cores that it may use."""

import os
import platform
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def read(path, default=""):
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError:
        return default


def bind(threads):
    """Binds this process and its children to so many cores, no two of one physical core if there are enough; their ids.

    So both sides have the same cores, however many threads and processes they start. Where the system knows no binding
    (it is Linux's), nothing is bound and None returned.
    """
    if not hasattr(os, "sched_setaffinity"):
        return None
    siblings = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    allowed = sorted(os.sched_getaffinity(0))
    first = {read(siblings.format(cpu), str(cpu)): cpu for cpu in reversed(allowed)}  # of each physical core
    chosen = sorted(sorted(allowed, key=lambda cpu: (cpu not in first.values(), cpu))[:threads])
    os.sched_setaffinity(0, chosen)
    return chosen


def generation(cpuinfo):
    """The generation of an AMD processor, which clouds leave out of its name; of others nothing."""
    family, number = (int(found[1]) if (found := re.search(rf"^{key}\s*: (\d+)$", cpuinfo, re.MULTILINE)) else 0 for key in ("cpu family", "model"))
    zen4 = number in range(0x10, 0x20) or number in range(0x60, 0x80) or number in range(0xA0, 0xB0)
    zen = {0x17: 1 if number < 0x30 else 2, 0x19: 4 if zen4 else 3, 0x1A: 5}.get(family)
    return f" (Zen {zen})" if zen and "AuthenticAMD" in cpuinfo else ""


def hardware(cores, instructions=None):
    """Facts of this machine, `cores` being those in use, and `instructions` all vector instructions in use if the CPU has more."""
    cpuinfo = read("/proc/cpuinfo")
    model = re.search(r"^model name\s*: (.+)$", cpuinfo, re.MULTILINE)
    memory = re.search(r"^MemTotal:\s*(\d+) kB$", read("/proc/meminfo"), re.MULTILINE)
    huge = re.search(r"\[(\w+)\]", read("/sys/kernel/mm/transparent_hugepage/enabled"))
    return {
        "cpu": model.group(1).strip() + generation(cpuinfo) if model else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "cores_used": cores,
        "memory_gib": round(int(memory.group(1)) / 2**20, 1) if memory else None,
        "huge_pages": huge.group(1) if huge else None,
        "instructions": instructions,
        "bf16_products": instructions in (None, "avx512") and "avx512_bf16" in cpuinfo,  # instructions for them; without, an f32 product behind conversions
        "system": f"{platform.system()} {platform.release()}",
    }


def slug(facts):
    """The hardware, for the name of a file."""
    return re.sub(r"[^a-z0-9]+", "-", f"{facts['cpu']} {facts['cores']} cores".lower()).strip("-")


def commit():
    """The commit of the sources, `+` behind it if they were changed since; None outside a repository."""
    git = lambda *args: subprocess.run(["git", "-C", ROOT, *args], capture_output=True, text=True, check=False).stdout.strip()
    head = git("rev-parse", "--short", "HEAD")
    return head + ("+" if git("status", "--porcelain", "--untracked-files=no") else "") if head else None

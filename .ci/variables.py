#!/usr/bin/env python3
"""Holds the environment variables that the code reads against their table in docs/checked_by_tools.md.

A name that a second part of the tree reads has two meanings before long: one that is set for the one reaches the other.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = "docs/checked_by_tools.md"
# Quoted in Rust, asked for in Python and expanded in a shell; setting one for a command is none of these.
READ = {
    "rs": re.compile(r'(?<!\.env\()(?<!remove\()"(MESHWORK_[A-Z_]+)"'),
    "py": re.compile(r'environ(?:\.get\(|\[)"(MESHWORK_[A-Z_]+)"'),
    "sh": re.compile(r"\$\{?(MESHWORK_[A-Z_]+)"),
}


def readers():
    """The parts of the tree that read each variable: a crate, or a folder at the top."""
    found = {}
    for name in subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split():
        path = Path(name)
        language = path.suffix[1:] or ("sh" if path.parts[0] == ".ci" else "")
        if language in READ:
            part = "/".join(path.parts[: 2 if path.parts[0] == "crates" else 1])
            for variable in READ[language].findall((ROOT / path).read_text()):
                found.setdefault(variable, set()).add(part)
    return found


def documented():
    rows = re.findall(r"^\| (`MESHWORK_[^|]+) \| ([^|]+) \|", (ROOT / PAGE).read_text(), re.M)
    return {name: set(re.findall(r"`([^`]+)`", parts)) for names, parts in rows for name in re.findall(r"`([^`]+)`", names)}


def main():
    read, table = readers(), documented()
    said = lambda parts: ", ".join(sorted(parts)) or "nothing"
    wrong = [
        f"{name}: {said(read.get(name, ()))} reads it; the table in {PAGE} says {said(table.get(name, ()))}"
        for name in sorted(read.keys() | table.keys())
        if read.get(name) != table.get(name)
    ]
    if wrong:
        sys.exit("\n".join(wrong))
    print(f"{len(table)} environment variables have the one meaning that {PAGE} gives")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Whether each `cargo test` command in the documents names a test that exists.

A name that no test has any more runs no test and ends well, so a claim beside it would have nothing behind it. The last part
of each name must be a function or module of the crate's tests (`--test NAME`: of tests/NAME, `--lib`: of src).
"""

import re
import subprocess
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VALUED = {"-p", "--test", "--example", "--bin", "--features", "--bench"}


def commands():
    """Every command with the page that has it; `--test NAME test` goes on with the options of the command before it."""
    pages = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for page in pages.split():
        before = ""
        for command in re.findall(r"`([^`\n]+)`|^(cargo test .*)$", (ROOT / page).read_text(), re.M):
            command = "".join(command).partition(" #")[0]
            if command.startswith("cargo test"):
                before = command
                yield page, command
            elif command.startswith("--test ") and before:
                package = re.search(r"-p \S+", before)
                yield page, f"cargo test {package.group() if package else ''} {command}"


def parts(command):
    """The package, whether the library alone, the tests' program, and the names of a command."""
    words = iter(command.split()[2:])
    options, names = {}, []
    for word in words:
        if word in VALUED:
            options.setdefault(word, next(words, ""))
        elif word == "--lib":
            options[word] = True
        elif not word.startswith("-"):
            names.append(word)
    return options, names


@cache
def crate_of(package):
    return next(path.parent for path in manifests() if f'\nname = "{package}"\n' in "\n" + path.read_text())


@cache
def manifests():
    found = subprocess.run(["git", "ls-files", "*Cargo.toml"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [ROOT / path for path in found.split()]


@cache
def files(crate, options):
    """The sources of the tests that such a command runs, with their texts."""
    library, program = options
    below = crate / "src" if library else crate / "tests" / program if program else crate
    paths = [*below.rglob("*.rs")] or [below.with_suffix(".rs")]
    return [(path, path.read_text()) for path in paths if path.is_file() and "target" not in path.relative_to(crate).parts]


def exists(options, name):
    crate = crate_of(options.get("-p", "meshwork"))
    last = [part for part in name.split("::") if part][-1]
    declared = re.compile(rf"\bfn \w*{re.escape(last)}|\bmod \w*{re.escape(last)}\w* \{{")
    for path, text in files(crate, (options.get("--lib", False), options.get("--test", ""))):
        module = last in path.stem or last in path.parent.name
        if (module and "#[test]" in text) or declared.search(text):
            return True
    return False


def main():
    missing, count = [], 0
    for page, command in commands():
        options, names = parts(command)
        count += 1
        missing += [f"{page}: `{command}`: no test has {name} in its name" for name in names if not exists(options, name)]
    if missing:
        sys.exit("\n".join(missing))
    print(f"{count} commands of documents name tests that exist")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Holds the workspace against ARCHITECTURE.md: who imports whom, where unsafe code is, which files it speaks of.

Reads the drawing between `<!-- crate graph -->` and `<!-- end -->`. A line of it is a crate, dots, and what it imports:

    train ........... models data-parallel          one layer
      │                                             the next one is below
    models .......... core
      ├── nn ........ core                          crates of one layer, which never import each other
      └── pipeline .. nothing at all                nothing of ours, and nothing of anybody else

Checks: the drawing has every crate of the workspace and its imports to the letter (dev-dependencies left out); every arrow
goes to a lower layer; crates marked `nothing at all` have no dependency of any kind but dev and those behind a feature;
crates marked `dev only` are imported for tests alone, or behind a feature; every error's `Debug` is its text; every crate forbids unsafe code but those listed between `<!-- unsafe -->` and `<!-- end -->`, where
it stands in the files listed and in no other; every path in backticks exists, from the root or from `crates/`, and every
name_like_this occurs in some source.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CRATE = re.compile(r"^[\s│├└─]*([a-z][a-z0-9-]*) \.{2,} (.*?)\s*$")


def section(name):
    """The lines of ARCHITECTURE.md after `<!-- name -->`, up to `<!-- end -->`."""
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    found = re.search(rf"<!-- {name} -->\n(.*?)<!-- end -->", text, re.DOTALL)
    if not found:
        sys.exit(f"ARCHITECTURE.md has no section <!-- {name} --> .. <!-- end -->")
    return found.group(1).splitlines()


def short(package):
    return package.removeprefix("meshwork-")


def drawn():
    """Per crate: (layer counted from the top, what it imports, its mark)."""
    crates, layer = {}, 0
    for line in section("crate graph"):
        found = CRATE.match(line)
        if not found:
            continue
        name, words = found.groups()
        if "├" not in line:  # the last branch of a layer, or a crate that is a layer by itself, closes it
            this, layer = layer, layer + 1
        else:
            this = layer
        mark = next((mark for mark in ("nothing at all", "nothing of ours", "dev only") if mark in words), None)
        imports = set() if mark and mark.startswith("nothing") else set(words.partition("(")[0].split())
        crates[name] = (this, imports, mark)
    return crates


def built():
    """Per crate: (folder, what it imports of ours, of others, and which of ours behind a feature)."""
    command = ["cargo", "metadata", "--format-version", "1", "--no-deps", "--offline"]
    metadata = json.loads(subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout)
    ours = {package["name"] for package in metadata["packages"]}
    crates = {}
    for package in metadata["packages"]:
        sets = {"own": set(), "foreign": set(), "dev": set(), "featured": set()}
        for dependency in package["dependencies"]:
            name = dependency["name"]
            if dependency["optional"] and name not in ours:
                continue  # Behind a feature: whoever asks for nothing gets nothing.
            kind = "dev" if dependency["kind"] == "dev" else "own" if name in ours else "foreign"
            sets[kind].add(short(name))
            if dependency["optional"]:
                sets["featured"].add(short(name))
        folder = Path(package["manifest_path"]).parent
        crates[short(package["name"])] = (folder, sets["own"], sets["foreign"], sets["featured"])
    return crates


def graph_faults(drawing, workspace):
    for name in sorted(workspace.keys() - drawing.keys()):
        yield f"{name}: in the workspace, not in the drawing"
    for name in sorted(drawing.keys() - workspace.keys()):
        yield f"{name}: in the drawing, not in the workspace"
    for name in sorted(drawing.keys() & workspace.keys()):
        layer, imports, mark = drawing[name]
        _, own, foreign, featured = workspace[name]
        for other in sorted(own - imports):
            yield f"{name} imports {other}, and the drawing does not say so"
        for other in sorted(imports - own):
            yield f"{name} does not import {other}, and the drawing says so"
        for other in sorted(own & drawing.keys()):
            if drawing[other][2] == "dev only" and other not in featured:
                yield f"{name} imports {other}, which is for tests only"
            elif mark != "dev only" and drawing[other][0] <= layer:
                yield f"{name} imports {other}, which does not lie below it"
        if mark == "nothing at all" and foreign:
            yield f"{name} has dependencies: {', '.join(sorted(foreign))}"


def code(text):
    """Rust without line comments, so that prose may speak of unsafe code."""
    return re.sub(r"//.*", "", text)


def unsafe_faults(workspace):
    listed = set(re.findall(r"`([^`]+\.rs)`", "\n".join(section("unsafe"))))
    found = set()
    for name, (folder, *_) in workspace.items():
        parts = ["src", "tests", "benches", "examples"]
        files = [file for part in parts for file in sorted((folder / part).rglob("*.rs")) if "target" not in file.parts]
        unsafe = {str(file.relative_to(ROOT)) for file in files if re.search(r"\bunsafe\b", code(file.read_text("utf-8")))}
        found |= unsafe
        forbids = "#![forbid(unsafe_code)]" in (folder / "src/lib.rs").read_text(encoding="utf-8")
        allowed = any(str(folder.relative_to(ROOT)) + "/" in file for file in listed)
        if not forbids and not allowed:
            yield f"{name}: src/lib.rs lacks #![forbid(unsafe_code)]"
    for file in sorted(found - listed):
        yield f"{file}: unsafe code that ARCHITECTURE.md does not list"
    for file in sorted(listed - found):
        yield f"{file}: listed in ARCHITECTURE.md, and has no unsafe code"


def error_faults(workspace):
    """`fn main() -> Result<(), Box<dyn Error>>` prints `Debug`: that of an error is its text."""
    derived = re.compile(r"#\[derive\(([^)]*)\)\](?:\s*#\[[^\n]*\])*\s*pub (?:enum|struct) (\w+)")
    manual = re.compile(r"impl(?:<.*?>)? (?:std::error::)?Error for (\w+)")
    for name, (folder, *_) in workspace.items():
        for file in sorted((folder / "src").rglob("*.rs")):
            text = code(file.read_text(encoding="utf-8"))
            errors = set(manual.findall(text))
            for derives, what in derived.findall(text):
                traits = re.split(r"[,\s]+", derives)
                if "Debug" in traits and (what in errors or any(trait.endswith("Error") for trait in traits)):
                    yield f"{file.relative_to(ROOT)}: {what} derives Debug, and that of an error is its text: debug_as_display!"


def reference_faults(workspace):
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    sources = [file for folder, *_ in workspace.values() for file in (folder / "src").rglob("*.rs")]
    words = set(re.findall(r"\w+", "\n".join(file.read_text(encoding="utf-8") for file in sources)))
    for name in sorted(set(re.findall(r"`(?:[\w:]*::)?([a-z]+(?:_[a-z]+)+)`", text)) - words):
        yield f"ARCHITECTURE.md speaks of {name}, which no source does"
    for path in sorted(set(re.findall(r"`([\w.-]+/[\w./-]*)`", text))):
        if not (ROOT / path).exists() and not (ROOT / "crates" / path).exists():
            yield f"ARCHITECTURE.md speaks of {path}, which does not exist"


def main():
    drawing, workspace = drawn(), built()
    faults = [*graph_faults(drawing, workspace), *unsafe_faults(workspace), *error_faults(workspace), *reference_faults(workspace)]
    for fault in faults:
        print(f"crate graph: {fault}", file=sys.stderr)
    arrows = sum(len(own) for _, own, _, _ in workspace.values())
    if not faults:
        print(f"{len(workspace)} crates and {arrows} arrows, as drawn")
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Refuses files of a crate that import each other in a circle.

A file imports another one if it names an item that is defined there, in a `use` or in a path, through as many re-exports
as it takes. A `pub use` alone is no import: it hands a name on. Tests are left out.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ITEM = re.compile(
    r"^(?:pub(?:\([^)]*\))? )?(?:unsafe |async |const )*(?:struct|enum|trait|fn|const|static|type|union|macro_rules!) (?:mut )?(\w+)",
    re.MULTILINE,
)
USE = re.compile(r"^( *)((?:pub(?:\([^)]*\))? )?)use ([^;]+);", re.MULTILINE)
PATH = re.compile(r"(?<![\w:])(?!\d)\w+(?:::\w+)+")


def names(tree, before=()):
    """(path, name) of each leaf of a `use`: `a::{b, c as d}` gives (a, b) as b and (a, c) as d."""
    tree = tree.strip()
    if "{" not in tree:
        path, _, alias = tree.partition(" as ")
        parts = (*before, *path.strip().split("::"))
        if parts[-1] == "self":
            parts = parts[:-1]
        yield parts, alias.strip() or parts[-1]
        return
    head, _, rest = tree.partition("{")
    before = (*before, *[part for part in head.strip().split("::") if part])
    depth, leaf = 0, ""
    for char in rest[:rest.rindex("}")] + ",":
        if char == "," and depth == 0:
            if leaf.strip():
                yield from names(leaf, before)
            leaf = ""
            continue
        depth += (char == "{") - (char == "}")
        leaf += char


class Crate:
    """The modules of one crate: their files, what each defines, and what each brings into scope."""

    def __init__(self, folder, text_of):
        self.texts, self.items, self.uses, self.globs, self.handed = {}, {}, {}, {}, {}
        for path, text in text_of.items():
            parts = path.relative_to(folder).with_suffix("").parts
            module = tuple(part for part in parts if part not in ("lib", "main", "mod"))
            if "tests" in module or "bin" in module:
                continue
            text = re.split(r"^#\[cfg\(test\)\]\n(?:#\[.*\]\n)*mod \w+ \{", text, maxsplit=1, flags=re.MULTILINE)[0]
            text = re.sub(r"//.*|\"(?:\\.|[^\"\\])*\"", "", text)
            uses, globs, handed = {}, [], set()
            for _, public, tree in USE.findall(text):
                for parts, name in names(re.sub(r"\s+", " ", tree)):
                    if name == "*":
                        globs.append(parts[:-1])
                        continue
                    uses[name] = parts
                    if public:
                        handed.add(name)
            self.texts[module] = USE.sub("", text)
            self.items[module] = set(ITEM.findall(text))
            self.uses[module], self.globs[module], self.handed[module] = uses, globs, handed

    def home(self, module, path, seen=()):
        """The module that defines what `path` names in `module`; None if it is another crate's."""
        if (module, path) in seen:
            return None
        seen = (*seen, (module, path))
        head, *rest = path
        if head == "crate":
            return self.within((), rest, seen)
        if head == "self":
            return self.within(module, rest, seen)
        if head == "super":
            return self.within(module[:-1], rest, seen)
        return self.within(module, path, seen)

    def within(self, module, path, seen):
        if not path:
            return module
        head, *rest = path
        if head == "super":
            return self.within(module[:-1], rest, seen)
        if (*module, head) in self.texts:
            return self.within((*module, head), rest, seen)
        if head in self.items.get(module, ()):
            return module
        if head in self.uses.get(module, ()):
            target = self.uses[module][head]
            return self.home(module, (*target, *rest), seen) if target[0] != head else None
        for glob in self.globs.get(module, ()):
            if glob[0] not in ("crate", "self", "super") and (*module, glob[0]) not in self.texts:
                continue
            found = self.home(module, (*glob, *path), seen)
            if found is not None:
                return found
        return None

    def imports(self):
        """module -> {module: names}, of those that it needs."""
        edges = {}
        for module, text in self.texts.items():
            used = {(path[0], *path[1:]) for path in (tuple(found.split("::")) for found in PATH.findall(text))}
            for name, path in self.uses[module].items():
                if name not in self.handed[module] or re.search(rf"\b{name}\b", text):
                    used.add(path)
            for path in used:
                home = self.home(module, path)
                inside = home is not None and module[:len(home)] == home and home != ()
                if home is not None and home != module and not inside and (self.items[home] & set(path)):
                    edges.setdefault(module, {}).setdefault(home, set()).add(path[-1])
        return edges


def circles(edges):
    """The strongly connected sets of more than one module, by Tarjan's algorithm."""
    index, low, stack, found = {}, {}, [], []

    def visit(node):
        index[node] = low[node] = len(index)
        stack.append(node)
        for to in edges.get(node, ()):
            if to not in index:
                visit(to)
                low[node] = min(low[node], low[to])
            elif to in stack:
                low[node] = min(low[node], index[to])
        if low[node] == index[node]:
            at = stack.index(node)
            if len(stack) - at > 1:
                found.append(sorted(stack[at:]))
            del stack[at:]

    for node in sorted(edges):
        if node not in index:
            visit(node)
    return found


def main():
    sys.setrecursionlimit(10_000)
    listed = subprocess.run(["git", "ls-files", "*.rs"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    folders = {}
    for name in listed:
        found = re.match(r"((?:crates/[\w-]+|kernels)/src)/", name)
        if found and (ROOT / name).exists():
            folders.setdefault(ROOT / found.group(1), {})[ROOT / name] = (ROOT / name).read_text(encoding="utf-8")
    faults = 0
    for folder, text_of in sorted(folders.items()):
        edges = Crate(folder, text_of).imports()
        for circle in circles(edges):
            faults += 1
            print(f"{folder.parent.relative_to(ROOT)}: {len(circle)} files import each other in a circle:")
            for module in circle:
                for to in sorted(set(edges.get(module, ())) & set(circle)):
                    print(f"    {'/'.join(module) or 'lib'} -> {'/'.join(to) or 'lib'}: {', '.join(sorted(edges[module][to]))}")
    if faults:
        sys.exit(f"{faults} circles; move a definition to where it is used first, or to a file of its own")


if __name__ == "__main__":
    main()

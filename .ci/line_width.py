#!/usr/bin/env python3
"""Holds comments and prose to 120 columns, code to what rustfmt leaves, and long files to a reason.

    .ci/line_width.py          names each longer line
    .ci/line_width.py --mend   wraps the paragraphs that have one

A paragraph is lines of one comment, or of a Markdown file, without a blank line, a bullet, a heading, a row of a table or
a fence between them. Tables, fenced code, drawings and lines without a place to break keep their width. rustfmt holds code
to 120; strings and rows of macros, which it leaves alone, may have 160. A Rust file of more than 400 lines says why: `More than 400 lines: ..`.
"""

import re
import subprocess
import sys
from pathlib import Path

WIDTH, CODE, LONG = 120, 160, 400
ROOT = Path(__file__).resolve().parent.parent
COMMENTS = {
    ".rs": r"\s*//[/!]?(?= |$)", ".cu": r"\s*//(?= |$)", ".cuh": r"\s*//(?= |$)", ".h": r"\s*//(?= |$)", ".cpp": r"\s*//(?= |$)",
    ".py": r"\s*#(?= |$)", ".sh": r"\s*#(?= |$)", ".toml": r"\s*#(?= |$)", "": r"\s*#(?= |$)", ".md": r"",
}
# Written by a command, or records of what was measured.
LEFT_OUT = re.compile(r"^(benches/results/|docs/configuration\.md|kernels/(report|floors)\.md|.*/fixtures/|LICENSE|Cargo\.lock|docs/img/)")
# A row a line.
TABLES = re.compile(r"kernels/src/(families|floors)\.rs")
BULLET = re.compile(r" ?(?:[-*]|\d+\.) +")
# What stays on one line: inline code and links.
TOKEN = re.compile(r"(?:`[^`]*`|\[[^\]]*\]\([^)]*\)|\S)+")


def tracked():
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in listed.stdout.splitlines():
        path = ROOT / name
        if path.suffix in COMMENTS and not LEFT_OUT.match(name) and path.is_file() and not path.is_symlink():
            yield name, path


def drawn(text):
    """Whether columns of this line mean something."""
    return text.lstrip().startswith("|") or re.search(r"\S {3,}\S|[│├└─┌┐┘┬┴▏█]", text)


def paragraphs(lines, comment):
    """(first, last, prefix, indent of the first line, of the others) of each paragraph."""
    fence, block, previous = False, [], None

    def closed():
        if block:
            yield tuple(block)
        block.clear()

    for at, line in enumerate(lines):
        found = re.match(comment, line)
        prefix = found.group() if found else None
        text = line[len(prefix):] if found else ""
        body = text.strip()
        if body.startswith(("```", "~~~")):
            fence = not fence
            yield from closed()
            continue
        if prefix is None:
            fence = False
        bullet = BULLET.match(text)
        inside = len(text) - len(text.lstrip())
        breaks = prefix is None or fence or not body or body.startswith(("#", "|", "<", "[^")) or drawn(text)
        if breaks or bullet or prefix != previous or (block and block[0][4] != inside):
            yield from closed()
        if not breaks and (block or bullet or inside <= 1):
            if not block:
                hang = len(bullet.group()) if bullet else inside
                block.append((at, at, prefix, text[:hang], hang))
            else:
                first, _, _, lead, hang = block[0]
                block[0] = (first, at, prefix, lead, hang)
        previous = prefix
    yield from closed()


def wrapped(words, lead, hang):
    out, line = [], lead
    for word in words:
        gap = "" if line == lead or not line.strip() else " "
        if len(line) + len(gap) + len(word) > WIDTH and line.strip() and line != lead:
            out.append(line)
            line, gap = hang, ""
        line += gap + word
    return [*out, line]


def mend(lines, comment):
    """The lines, with each paragraph wrapped that has a line too long."""
    out, done = [], 0
    for ((first, last, prefix, lead, hang),) in paragraphs(lines, comment):
        if all(len(line) <= WIDTH for line in lines[first:last + 1]):
            continue
        words = TOKEN.findall(" ".join(line[len(prefix):].strip() for line in lines[first:last + 1])[len(lead.strip()):])
        out += lines[done:first] + wrapped(words, prefix + lead, prefix + " " * hang)
        done = last + 1
    return out + lines[done:]


def too_long(name, lines, comment):
    held = set()
    for ((first, last, prefix, lead, hang),) in paragraphs(lines, comment):
        for at in range(first, last + 1):
            if len(lines[at]) > WIDTH and len(TOKEN.findall(lines[at][len(prefix) + hang:])) > 1:
                held.add(at)
    if name.endswith(".rs") and not TABLES.match(name):
        held |= {at for at, line in enumerate(lines) if len(line) > CODE and not re.match(comment, line) and 'r#"' not in line}
    return sorted(held)


def main():
    faults = 0
    for name, path in tracked():
        try:
            lines = path.read_text(encoding="utf-8").split("\n")
        except UnicodeDecodeError:
            continue
        comment = COMMENTS[path.suffix]
        if "--mend" in sys.argv:
            mended = mend(lines, comment)
            if mended != lines:
                path.write_text("\n".join(mended), encoding="utf-8")
                lines = mended
        if name.endswith(".rs") and len(lines) > LONG + 1 and not any("More than 400 lines" in line for line in lines):
            faults += 1
            print(f"{name}: {len(lines) - 1} lines, and no reason for more than {LONG}; split it, or say why at its top")
        for at in too_long(name, lines, comment):
            faults += 1
            print(f"{name}:{at + 1}: {len(lines[at])} columns, more than {WIDTH if len(lines[at]) <= CODE else CODE}")
    if faults:
        sys.exit(f"{faults} faults; .ci/line_width.py --mend wraps comments and prose")


if __name__ == "__main__":
    main()

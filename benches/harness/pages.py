"""Pages of `docs/` that have what a benchmark writes."""

import sys


def write_between(page, command, shown):
    """Replaces what stands between the line that marks what `command` writes and the next end."""
    begin, end = f"<!-- {command} -->\n", "<!-- end -->"
    before, found, rest = page.read_text().partition(begin)
    _, ended, after = rest.partition(end)
    if not (found and ended):
        sys.exit(f"{page} has no lines {begin.strip()} and {end}")
    page.write_text(f"{before}{begin}{shown}\n{end}{after}")

"""The report of a check: one JSON file, and the same as a page of Markdown."""

import json

from harness.files import write_results

WORST = ["FAIL", "PASS", "SKIPPED"]  # the state of a part is the first of these that a row of its has

MOST = 3  # reasons that a part gives; its tables have all


def state(rows):
    """State and reason of a part, from those of its rows."""
    states = {row["state"] for row in rows if row.get("state")}
    told = next((word for word in WORST if word in states), "PASS")
    # Of a part that passes, what it left out.
    of = "FAIL" if told == "FAIL" else "SKIPPED"
    reasons = [f"{row['what']}: {row['why']}" for row in rows if row.get("why") and row.get("state") == of]
    reasons = list(dict.fromkeys(reasons))
    left_out = "left out: " if told == "PASS" and reasons else ""
    more = f"; and {len(reasons) - MOST} more" if len(reasons) > MOST else ""
    return told, left_out + "; ".join(reasons[:MOST]) + more


def cell(value):
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "**no**"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value).replace("|", "/").replace("\n", " ")


def table(rows):
    """Rows, dictionaries that may lack keys, as lines of Markdown."""
    columns = list(dict.fromkeys(key for row in rows for key in row if not key.startswith("_")))
    yield f"| {' | '.join(columns)} |"
    yield "|" + "---|" * len(columns)
    for row in rows:
        yield f"| {' | '.join(cell(row.get(column)) for column in columns)} |"


def markdown(results):
    machine = results["machine"]
    yield f"# {machine.get('gpu') or machine['device']}, {results['date']}"
    yield ""
    yield f"Written by `{results['command']}`. Sources: {results['commit'] or 'unknown'}."
    yield ""
    yield from table([{"fact": key, "value": value} for key, value in machine.items()])
    yield ""
    yield from ("| part | state | seconds | why |", "|---|---|---|---|")
    for name, part in results["parts"].items():
        mark = f"**{part['state']}**" if part["state"] == "FAIL" else part["state"]
        yield f"| {name} | {mark} | {part['seconds']:.0f} | {cell(part['why'])} |"
    for name, part in results["parts"].items():
        if not part["tables"] and not part["text"]:
            continue
        yield from ("", f"## {name}", "", part["about"])
        for title, rows in part["tables"].items():
            if rows:
                yield from ("", f"**{title}**", "")
                yield from table(rows)
        for text in part["text"]:
            yield from ("", "```text", text, "```")


def load(path):
    """What an earlier call on the same day and machine wrote; parts of it stay until they are run again."""
    path = path.with_name(path.name + ".json")
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"parts": {}}


def write(path, results):
    """Writes PATH.json and PATH.md, each at once or not at all."""
    write_results(path, results, markdown(results))

#!/usr/bin/env python3
"""Draws who holds which tokens around a ring of context parallelism, and which block is where when.

    benches/rings.py > docs/img/rings.svg

Needs nothing but Python 3.9. Four ranks in zigzag order: rank r has the chunks r and 7 - r of eight. A column is a step,
a cell the pairs of a chunk of queries (rows) and a chunk of keys (columns) that a rank computes in it.
"""

RANKS = 4
CHUNKS = 2 * RANKS
COLOURS = ["#56b4e9", "#009e73", "#e69f00", "#cc79a7"]
CELL, LEFT, TOP, GAP, WIDTH = 38, 150, 92, 46, 830


def held(rank):
    return [rank, CHUNKS - 1 - rank]


def text(x, y, words, more=""):
    return f'<text x="{x}" y="{y}" {more}>{words}</text>'


def square(x, y, owner, kind):
    fill = COLOURS[owner] if kind == "whole" else "#f4f4f4"
    outline = 'stroke="#555" stroke-width="0.7"'
    cell = f'<rect x="{x}" y="{y}" width="{CELL}" height="{CELL}" fill="{fill}" {outline}/>'
    if kind == "half":
        cell += f'<path d="M{x} {y}V{y + CELL}H{x + CELL}Z" fill="{COLOURS[owner]}" {outline}/>'
    return cell


def draw():
    step_width = 2 * CELL + GAP + 34
    row_height = 2 * CELL + GAP + 14
    height = TOP + RANKS * row_height + 26
    yield f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" font-family="Helvetica, Arial, sans-serif" font-size="12">'
    yield '<rect width="100%" height="100%" fill="#fff"/>'
    yield '<defs><marker id="tip" markerWidth="8" markerHeight="8" refX="6" refY="3" orient="auto"><path d="M0 0L6 3L0 6Z" fill="#333"/></marker></defs>'
    yield text(12, 24, '<tspan font-weight="bold">Ring attention over cp=4, zigzag</tspan> <tspan fill="#555">of eight chunks each rank holds an early and a late one</tspan>')
    yield text(12, 42, "Filled: pairs of queries and keys that are computed (triangles: up to the diagonal), by whose keys they are.", 'fill="#555"')
    for step in range(RANKS):
        x = LEFT + step * step_width
        yield text(x + CELL, TOP - 26, f"step {step}", 'text-anchor="middle" font-weight="bold"')
    for rank in range(RANKS):
        y = TOP + rank * row_height
        yield text(12, y + CELL - 4, f"rank {rank}", 'font-weight="bold"')
        yield text(12, y + CELL + 14, f"chunks {held(rank)[0]} and {held(rank)[1]}", 'fill="#555"')
        for step in range(RANKS):
            owner = (rank - step) % RANKS
            x = LEFT + step * step_width
            for column, keys in enumerate(held(owner)):
                yield text(x + column * CELL + CELL / 2, y - 6, f"k{keys}", f'text-anchor="middle" fill="{COLOURS[owner]}" font-weight="bold"')
                for row, queries in enumerate(held(rank)):
                    kind = "none" if keys > queries else "half" if keys == queries else "whole"
                    yield square(x + column * CELL, y + row * CELL, owner, kind)
            for row, queries in enumerate(held(rank)):
                yield text(x - 5, y + row * CELL + CELL / 2 + 4, f"q{queries}", 'text-anchor="end" fill="#333"')
            if step + 1 < RANKS:
                # To the next rank, for the next step; the last rank's goes to the first.
                start, middle = (x + 2 * CELL + 4, y + CELL), x + 2 * CELL + (step_width - 2 * CELL) / 2 - 8
                end_y = TOP + ((rank + 1) % RANKS) * row_height + CELL
                if rank + 1 < RANKS:
                    path = f"M{start[0]} {start[1]}C{middle} {start[1]} {middle - 8} {end_y} {x + step_width - 26} {end_y}"
                    yield f'<path d="{path}" fill="none" stroke="#333" marker-end="url(#tip)"/>'
                else:
                    yield f'<path d="M{start[0]} {start[1]}h22" fill="none" stroke="#333" marker-end="url(#tip)"/>'
                    yield text(start[0] + 2, start[1] + 16, "to rank 0", 'fill="#555" font-size="10"')
    yield text(12, height - 10, "Arrows: keys and values travel while attention computes. Backward, the sums of their gradients follow one step behind.", 'fill="#555"')
    yield "</svg>"


if __name__ == "__main__":
    print("\n".join(draw()))

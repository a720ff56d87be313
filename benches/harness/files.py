"""Files that the benchmarks write: results, and tokens to train on. Needs nothing but Python, so that scripts/gpu-pack.sh can take it along."""

import json
import random
import sys
from array import array

TOKENS = 1 << 18


def write_results(path, results, lines):
    """Writes `results` to PATH.json and `lines` to PATH.md, each at once or not at all."""
    texts = {".json": json.dumps(results, indent=1, ensure_ascii=False), ".md": "\n".join(lines)}
    path.parent.mkdir(parents=True, exist_ok=True)
    for suffix, text in texts.items():
        new = path.with_name(path.name + suffix + ".new")
        new.write_text(text + "\n", encoding="utf-8")
        new.replace(path.with_name(path.name + suffix))


def random_tokens(folder, vocab):
    """A file in `folder` of random tokens that both sides of a comparison train on: little-endian u16."""
    path = folder / f"tokens-{vocab}.bin"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        draw = random.Random(vocab)
        ids = array("H", (draw.randrange(vocab) for _ in range(TOKENS)))
        if sys.byteorder == "big":
            ids.byteswap()
        path.write_bytes(ids.tobytes())
    return path

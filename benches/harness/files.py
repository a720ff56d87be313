"""Files that the benchmarks write: results, and tokens to train on. Needs nothing but Python, so that scripts/gpu-pack.sh can take it along."""

import json
import math
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


def examples(folder, kind, longest):
    """A file in `folder` of 2,000 examples, or pairs where `kind` is "dpo", of at most `longest` bytes, a prompt with one answer: lengths
    are spread as those of public sets of instructions are, most of them far below the longest (log-normal, a median of a quarter of it)."""
    path = folder / f"{kind}-{longest}.jsonl"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        draw, letters = random.Random(longest), "etaoin shrdlu"
        text = lambda length: "".join(draw.choice(letters) for _ in range(length))
        lines = []
        for _ in range(2000):
            length = int(min(longest - 1, max(8, draw.lognormvariate(math.log(longest / 4), 0.7))))
            prompt, answer = length // 2, length - length // 2
            sides = ["chosen", "rejected"] if kind == "dpo" else ["completion"]
            lines.append(json.dumps({"prompt": text(prompt), **{side: text(answer) for side in sides}}))
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


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

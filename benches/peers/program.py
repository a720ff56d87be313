"""What every program of a peer shares: the work it is given, as one JSON argument, its data, and the JSON line of each step."""

import argparse
import json
from types import SimpleNamespace

import numpy as np


def arguments(**flags):
    """`--work JSON` and the given flags (name: default), and the work: the model's sizes, batch, steps, file of tokens."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", type=json.loads, required=True)
    for name, default in flags.items():
        kind = dict(action="store_true") if default is False else dict(type=type(default), default=default)
        parser.add_argument("--" + name.replace("_", "-"), **kind)
    args = parser.parse_args()
    return args, SimpleNamespace(**args.work)


class Batches:
    """Batches of a file of u16 tokens, from its start again at its end: arrays of i64."""

    def __init__(self, work):
        self.tokens = np.fromfile(work.tokens, np.uint16).astype(np.int64)
        self.shape = (work.batch, work.seq_len)
        self.count = len(self.tokens) // (work.batch * work.seq_len) - 1

    def get(self, step):
        size = self.shape[0] * self.shape[1]
        at = step % self.count * size
        return self.tokens[at : at + size].reshape(self.shape), self.tokens[at + 1 : at + size + 1].reshape(self.shape)


def report(step, seconds, loss):
    print(json.dumps({"step": step + 1, "seconds": seconds, "loss": loss}), flush=True)

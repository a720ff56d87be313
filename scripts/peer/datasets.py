"""Megatron-LM's own builder of datasets: `data_hash` is that of the tokens it was given, in each type that holds them; and the token cache of a text
is a dataset that Megatron reads.

    scripts/peer/datasets.py
"""

import json
import sys
import tempfile
import warnings
from pathlib import Path

import numpy as np
import torch

import program

warnings.simplefilter("ignore")
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder  # noqa: E402

SMALL = {"model.hidden_size": 16, "model.num_layers": 1, "model.num_heads": 2, "model.seq_len": 8, "training.global_batch_size": 2}
TEXT = "Megatron reads what meshwork has tokenised.\n" * 30_000  # long enough to be cached


def build(folder, name, dtype, documents):
    """A dataset, in which a document may have several sequences."""
    prefix = f"{folder}/{name}"
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for document in documents:
        for sequence in document:
            builder.add_item(torch.from_numpy(sequence))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")
    return prefix


def fnv1a(ids):
    value = 0xCBF29CE484222325
    for byte in ids.astype("<i4").tobytes():
        value = (value ^ byte) * 0x100000001B3 % 2**64
    return value


def start(folder, **settings):
    """The first line of the metrics."""
    metrics = f"{folder}/metrics.jsonl"
    flags = [word for key, value in (SMALL | settings).items() for word in ("--set", f"{key}={value}")]
    code, told = program.run(["--steps", "1", "--metrics", metrics, "--set", "metrics.sample_tokens=0", *flags])
    if code:
        return {"data_hash": told}
    return json.loads(Path(metrics).read_text().splitlines()[0])


def main():
    failed, draw = 0, np.random.default_rng(5)

    def check(name, right, told=""):
        nonlocal failed
        failed += not right
        print(f"ok: {name}" if right else f"FAILED: {name}: {told}", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        lengths = [[40], [7, 12], [1], [90, 3, 30], [64]]
        for dtype, vocab in [(np.uint16, 300), (np.uint16, 50257), (np.int32, 300), (np.int32, 70000)]:
            documents = [[draw.integers(0, vocab, length) for length in document] for document in lengths]
            ids = np.concatenate([sequence for document in documents for sequence in document])
            prefix = build(folder, f"{np.dtype(dtype)}-{vocab}", dtype, documents)
            for path in (prefix, f"{prefix}.bin", f"{prefix}.idx"):
                told = start(folder, **{"data.path": path, "model.vocab_size": vocab, "data.end_of_text": '"none"'})["data_hash"]
                check(f"{Path(path).name}, {vocab} ids", told in (f"{fnv1a(ids):016x}", str(fnv1a(ids))), told)

        Path(f"{folder}/text.txt").write_text(TEXT)
        cache = {"data.path": f"{folder}/text.txt", "data.cache_dir": f"{folder}/cache", "data.tokenizer": tokenizer(folder)}
        told = start(folder, **cache, **{"model.vocab_size": 300})["data_hash"]
        index = next(Path(f"{folder}/cache").rglob("*.idx"), None)
        dataset = IndexedDataset(str(index.with_suffix(""))) if index else []
        ids = np.concatenate([[], *(dataset[at] for at in range(len(dataset)))])
        check("the cache of a text", told in (f"{fnv1a(ids):016x}", str(fnv1a(ids))), (told, index))
    sys.exit(f"error: {failed} datasets" if failed else 0)


def tokenizer(folder):
    """A tokenizer of bytes, by which a text is cached."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({character: at for at, character in enumerate(alphabet)}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.save(f"{folder}/tokenizer.json")
    return f"{folder}/tokenizer.json"


if __name__ == "__main__":
    main()

"""Texts of folders that `transformers` writes, of each family: `generate` continues them token by token as `transformers` does, both with their
caches of keys and values, and on meshes.

    scripts/peer/generation.py
"""

import subprocess
import sys
import tempfile

import tokenizers
import torch

import program

PROMPT, COUNT, MESHES = [5, 9, 33, 2, 17, 40], 24, ["", "tp=2", "pp=2"]


def word_tokens(folder):
    """A tokenizer of the words t0, t1, ..."""
    words = {f"t{number}": number for number in range(program.VOCAB)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(f"{folder}/tokenizer.json")


def wanted(folder):
    """The likeliest tokens, one after the other."""
    model = program.load(folder)
    with torch.no_grad():
        ids = model.generate(torch.tensor([PROMPT]), max_new_tokens=COUNT, do_sample=False, use_cache=True, eos_token_id=None, pad_token_id=0)
    return ids[0, len(PROMPT) :].tolist()


def got(folder, mesh):
    """What `generate` writes behind the prompt."""
    words = ["--model", folder, "--prompt", " ".join(f"t{id}" for id in PROMPT), "--tokens", COUNT, "--temperature", 0]
    words += ["--mesh", mesh] if mesh else []
    done = subprocess.run([program.PROGRAM.with_name("generate"), *map(str, words)], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        sys.exit(f"error: generate ended with {done.returncode}: {done.stderr}")
    tokens = [int(word[1:]) for word in done.stdout.split()]
    return tokens[len(PROMPT) :]


def main():
    failed = 0
    with tempfile.TemporaryDirectory() as root:
        for kind in ["gpt2", *program.KINDS]:
            folder = f"{root}/{kind}"
            more = {"n_positions": 64} if kind == "gpt2" else {}
            program.make(program.config(kind, **more | {"eos_token_id": None}), folder)
            word_tokens(folder)
            tokens = wanted(folder)
            for mesh in MESHES:
                found = got(folder, mesh)
                right = found == tokens
                failed += not right
                print(f"ok: {kind} {mesh}" if right else f"FAILED: {kind} {mesh}: {found}, {tokens} in transformers", flush=True)
    sys.exit(f"error: {failed} texts" if failed else 0)


if __name__ == "__main__":
    main()

"""The operations of `cargo bench -p meshwork-cuda --bench ops`, of the same names and sizes, by PyTorch: a JSON line each.

    operations.py [--device cuda] [--small] [--attention BATCHxTOKENSxHEADSxFEATURES] [--window TOKENS] [WORD..]    # those whose name has every word

Attention is that of the fastest backend of scaled_dot_product_attention; with a window, by a mask or by flex_attention, and
counted as without one. An operation that fails is a line with the reason.
"""

import argparse
import functools
import json
import statistics
import time

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

parse = argparse.ArgumentParser()
parse.add_argument("words", nargs="*")
parse.add_argument("--device", default="cuda")
parse.add_argument("--small", action="store_true")
parse.add_argument("--attention", help="this shape instead of others")
parse.add_argument("--window", type=int, help="tokens that a query sees at most")
args = parse.parse_args()

CUDA = args.device != "cpu"
BATCHES, BATCH_S, BUDGET_S = 9, 0.01, 4.0
TOKENS, HIDDEN, VOCAB, ROWS, FLAT = (6, 16, 33, 6, 100) if args.small else (32_768, 2048, 50_304, 8192, 1 << 28)
ATTENTION = [(1, 6, 2, 8)] if args.small else [(32, 1024, 12, 64), (16, 1024, 16, 128), (4, 4096, 16, 128)]
if args.attention:
    ATTENTION = [tuple(map(int, args.attention.split("x")))]
PRODUCTS = [(6, 8, 16)] if args.small else [(8192, 8192, 8192), (32_768, 3072, 768), (16_384, 8192, 2048), (16_384, 2048, 8192)]
GROUPS, GROUPED = 8, (6, 8, 16) if args.small else (16_384, 8192, 2048)
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
# Beside them, where all pairs of tokens fit into memory.
BACKENDS += [SDPBackend.MATH] if max(seq for _, seq, *_ in ATTENTION) <= 4096 else []


def synchronize():
    if CUDA:
        torch.cuda.synchronize()


def seconds(call):
    """The median of some batches of calls, each waited for."""

    def batch(count):
        synchronize()
        start = time.perf_counter()
        for _ in range(count):
            call()
        synchronize()
        return max(time.perf_counter() - start, 1e-9)

    batch(1)
    if args.small:
        return batch(1)
    count = max(1, min(10_000, round(BATCH_S / batch(1) + 0.5)))
    begun, times = time.perf_counter(), []
    while len(times) < BATCHES and (not times or time.perf_counter() - begun < BUDGET_S):
        times.append(batch(count) / count)
    return statistics.median(times)


def numbers(*shape, dtype=torch.float32, grad=False):
    return (torch.rand(*shape, device=args.device) - 0.5).to(dtype).requires_grad_(grad)


def gradient(out, inputs, of):
    """Backward alone, of an output that stays."""
    return lambda: torch.autograd.grad(out, inputs, of, retain_graph=True)


def report(name, make, flops=0, size=0):
    """Times what `make` gives. `make` is called when its turn comes, and what it made is freed with it."""
    if not all(word in name for word in args.words):
        return
    try:
        took = seconds(make())
        told = {"ms": took * 1e3, "tflops": flops / took / 1e12, "gb_per_s": size / took / 1e9}
    except (RuntimeError, NotImplementedError) as error:
        told = {"error": str(error).splitlines()[0]}
    if CUDA:
        torch.cuda.empty_cache()
    print(json.dumps({"operation": name} | told), flush=True)


def copy():
    x, y = numbers(FLAT), torch.empty(FLAT, device=args.device)
    return lambda: y.copy_(x)


def product(m, n, k, turned, dtype):
    a, b = (numbers(*(shape[::-1] if turn else shape), dtype=dtype) for shape, turn in zip([(m, k), (k, n)], turned))
    a, b = (x.t() if turn else x for x, turn in zip([a, b], turned))
    return lambda: a @ b


def grouped(m, n, k, dtype):
    mm = getattr(F, "grouped_mm", None) or torch._grouped_mm
    # Groups of which each next one has more rows, as ours.
    ends = torch.tensor([m * group * (group + 3) // (GROUPS * (GROUPS + 3)) for group in range(1, GROUPS + 1)], dtype=torch.int32, device=args.device)
    x, w = numbers(m, k, dtype=dtype), numbers(GROUPS, n, k, dtype=dtype)
    return lambda: mm(x, w.transpose(1, 2), offs=ends)


def ways_of_attention(seq):
    """Attention of q, k and v in each way that PyTorch has."""
    seen = {"is_causal": True}
    if args.window:
        query, key = torch.arange(seq, device=args.device)[:, None], torch.arange(seq, device=args.device)
        seen = {"attn_mask": (key <= query) & (query - key < args.window)}

    def by(backend, q, k, v):
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, **seen)

    ways = [functools.partial(by, backend) for backend in BACKENDS]
    if args.window:
        within = lambda _batch, _head, q, kv: (kv <= q) & (q - kv < args.window)
        blocks = create_block_mask(within, None, None, seq, seq, device=args.device)
        ways.append(functools.partial(torch.compile(flex_attention), block_mask=blocks))
    return ways


def attention(shape, dtype, backward):
    batch, seq, heads, size = shape
    q, k, v = (numbers(batch, heads, seq, size, dtype=dtype, grad=backward) for _ in range(3))
    dout, best = torch.rand_like(q), None
    for way in ways_of_attention(seq):
        try:
            call = gradient(way(q, k, v), (q, k, v), dout) if backward else functools.partial(way, q, k, v)
            took = seconds(call)
        except (RuntimeError, NotImplementedError):
            continue  # a way that does not have this type, size or direction
        if best is None or took < best[0]:
            best = took, call
    if best is None:
        raise RuntimeError("no backend of scaled_dot_product_attention has it")
    return best[1]


def layer_norm(backward):
    x, gain, bias = numbers(TOKENS, HIDDEN, grad=backward), numbers(HIDDEN, grad=backward), numbers(HIDDEN, grad=backward)
    out = F.layer_norm(x, (HIDDEN,), gain, bias)
    return gradient(out, (x, gain, bias), torch.rand_like(x)) if backward else lambda: F.layer_norm(x, (HIDDEN,), gain, bias)


def rms_norm():
    x, gain = numbers(TOKENS, HIDDEN), numbers(HIDDEN)
    return lambda: F.rms_norm(x, (HIDDEN,), gain)


def gelu(backward):
    x, bias = numbers(TOKENS, 4 * HIDDEN, grad=backward), numbers(4 * HIDDEN)
    # Ours adds the bias in the same pass.
    out = F.gelu(x + bias, approximate="tanh")
    return gradient(out, (x,), torch.rand_like(x)) if backward else lambda: F.gelu(x + bias, approximate="tanh")


def residual():
    x, other, bias = numbers(TOKENS, HIDDEN), numbers(TOKENS, HIDDEN), numbers(HIDDEN)
    return lambda: x + bias + other


def dropout():
    x = numbers(TOKENS, HIDDEN)
    return lambda: F.dropout(x, 0.1)


def cast():
    x = numbers(TOKENS, HIDDEN)
    return lambda: x.bfloat16()


def ids(count):
    return (torch.arange(count, device=args.device) * 7919) % VOCAB


def lookup(backward):
    rows, table = ids(TOKENS), numbers(VOCAB, HIDDEN, grad=backward)
    out = F.embedding(rows, table)
    return gradient(out, (table,), torch.rand_like(out)) if backward else lambda: F.embedding(rows, table)


def cross_entropy(backward):
    logits, targets = numbers(ROWS, VOCAB, grad=backward), ids(ROWS)
    loss = F.cross_entropy(logits, targets)
    return gradient(loss, (logits,), torch.ones_like(loss)) if backward else lambda: F.cross_entropy(logits, targets)


def adamw():
    weight = numbers(FLAT, grad=True)
    weight.grad = torch.rand_like(weight)
    return torch.optim.AdamW([weight], lr=1e-6, fused=CUDA or None).step


def squares():
    x = numbers(FLAT)
    return lambda: torch.linalg.vector_norm(x)


def zero():
    x = torch.empty(FLAT, device=args.device)
    return x.zero_


torch.manual_seed(0)
report("copy", copy, size=8 * FLAT)
for name, dtype in DTYPES.items():
    for rows, columns, depth in PRODUCTS:
        # As a linear layer needs them: its output, the gradient of its input, that of its weight.
        for kind, (m, n, k), turned in [
            ("nt", (rows, columns, depth), (False, True)),
            ("nn", (rows, depth, columns), (False, False)),
            ("tn", (columns, depth, rows), (True, False)),
        ]:
            report(f"product {kind} {name} {m}x{n}x{k}", lambda: product(m, n, k, turned, dtype), 2 * m * n * k)
for name, dtype in DTYPES.items():
    m, n, k = GROUPED
    report(f"grouped {GROUPS} product nt {name} {m}x{n}x{k}", lambda: grouped(m, n, k, dtype), 2 * m * n * k)
    for shape in ATTENTION:
        batch, seq, heads, size = shape
        forward, words = 2 * batch * heads * size * seq * (seq + 1), f"{name} {'x'.join(map(str, shape))}"
        words += f", window {args.window}" * bool(args.window)
        report(f"attention {words}", lambda: attention(shape, dtype, False), forward)
        report(f"attention gradient {words}", lambda: attention(shape, dtype, True), 2.5 * forward)
ROW = f"{TOKENS}x{HIDDEN}"
for name, make, size in [
    (f"layer_norm {ROW}", lambda: layer_norm(False), 8 * TOKENS * HIDDEN),
    (f"layer_norm_grad {ROW}", lambda: layer_norm(True), 12 * TOKENS * HIDDEN),
    (f"rms_norm {ROW}", rms_norm, 8 * TOKENS * HIDDEN),
    (f"bias_gelu, four times as wide {ROW}", lambda: gelu(False), 32 * TOKENS * HIDDEN),
    (f"bias_gelu_grad, four times as wide {ROW}", lambda: gelu(True), 48 * TOKENS * HIDDEN),
    (f"bias_residual {ROW}", residual, 12 * TOKENS * HIDDEN),
    (f"dropout {ROW}", dropout, 8 * TOKENS * HIDDEN),
    (f"cast to bf16 {ROW}", cast, 6 * TOKENS * HIDDEN),
    (f"lookup {ROW}", lambda: lookup(False), 8 * TOKENS * HIDDEN),
    (f"lookup_grad {ROW}", lambda: lookup(True), 12 * TOKENS * HIDDEN),
    (f"cross entropy {ROWS}x{VOCAB}", lambda: cross_entropy(False), 4 * ROWS * VOCAB),
    (f"cross entropy gradient {ROWS}x{VOCAB}", lambda: cross_entropy(True), 8 * ROWS * VOCAB),
    (f"adamw {FLAT}", adamw, 28 * FLAT),
    (f"sum_of_squares {FLAT}", squares, 4 * FLAT),
    (f"zero {FLAT}", zero, 4 * FLAT),
]:
    report(name, make, size=size)

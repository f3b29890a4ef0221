"""Decode attention of equal and of unequal lengths on the GPU at hand, by every kernel that can be imported.

    python bench/gpu/heterogeneity.py                      # a quarter of an hour at most
    python bench/gpu/heterogeneity.py --seconds 1500 --heads 32 --kv-heads 8 --json unequal.json

Each pair of batches has the same number of sequences and the same sum of contexts; one has equal lengths, the other one
long sequence among short ones. The penalty is the ratio of their times. Kappa is fitted as in ``bench heterogeneity``,
``penalty = 1 + kappa · r · (1 - mean/longest)`` with ``r = longest · multiprocessors / (sum of contexts · KV heads)``,
to batches from 0.8 · 2 · multiprocessors / KV heads on. Kernels: FlashAttention with a KV cache, FlashInfer's paged
decode, and PyTorch's SDPA with a mask over padded KV, which reads what is padded and is there to compare with. Without
a GPU, or without PyTorch, one line says so.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

BATCHES = (8, 16, 32, 64, 128, 256, 512)
SHORTS = (200, 1_000, 4_000)
SKEWS = (4, 16, 50)
HEAD_SIZE = 128
PAGE = 16
WARM_UP, REPEATS = 3, 20
#: Share of the GPU's free memory that a batch's KV may take.
MEMORY_SHARE = 0.6

#: A kernel: lengths of the contexts to a function that runs it once.
Kernel = Callable[[list[int], int, int], Callable[[], Any]]


def main() -> int:
    """Measures until all batches are done or time is up, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=900.0, help="begin no measurement later (default %(default)s)")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--json", type=Path, help="write all measurements here")
    options = parser.parse_args()
    try:
        import torch
    except ImportError:
        print("skipped: PyTorch cannot be imported")
        return 0
    if not torch.cuda.is_available():
        print("skipped: there is no GPU")
        return 0
    rows = list(measured(options, time.monotonic() + options.seconds))
    report(rows, torch.cuda.get_device_properties(0))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    return 0


def measured(options: argparse.Namespace, until_s: float) -> Iterator[dict[str, Any]]:
    """A row for each kernel and pair of batches that fits into memory, as long as there is time."""
    kernels = available()
    print(f"kernels: {', '.join(kernels) or 'none can be imported'}")
    for sequences, short, skew in batches():
        lengths = unequal(sequences, short, skew)
        for name, kernel in kernels.items():
            if time.monotonic() >= until_s:
                print(f"time is up; from {sequences} x {short} tokens on nothing was measured", file=sys.stderr)
                return
            row = pair(name, kernel, lengths, options)
            if row is not None:
                yield row


def batches() -> Iterator[tuple[int, int, int]]:
    """Sequences, tokens of the short ones, and how many times as long the long one is; small ones first."""
    for sequences in BATCHES:
        for short in SHORTS:
            for skew in SKEWS:
                yield sequences, short, skew


def unequal(sequences: int, short: int, skew: int) -> list[int]:
    """One long sequence among short ones."""
    return [short * skew, *([short] * (sequences - 1))]


def pair(name: str, kernel: Kernel, lengths: list[int], options: argparse.Namespace) -> dict[str, Any] | None:
    """Times of the batch and of one with equal lengths and the same sum; None where the batch does not fit."""
    import torch

    mean = math.ceil(sum(lengths) / len(lengths))
    padded = len(lengths) * max(lengths) if name == "torch" else sum(lengths) + PAGE * len(lengths)
    needed = padded * 2 * options.kv_heads * HEAD_SIZE * 2
    if needed > MEMORY_SHARE * torch.cuda.mem_get_info()[0]:
        return None
    times = []
    for each in ([mean] * len(lengths), lengths):
        times.append(timed(kernel(each, options.heads, options.kv_heads)))
        torch.cuda.empty_cache()
    return {
        "kernel": name,
        "sequences": len(lengths),
        "longest": max(lengths),
        "shortest": min(lengths),
        "mean": sum(lengths) / len(lengths),
        "kv_heads": options.kv_heads,
        "equal_us": times[0],
        "unequal_us": times[1],
    }


def timed(run: Callable[[], Any]) -> float:
    """Median of its times on the GPU, us."""
    import torch

    for _ in range(WARM_UP):
        run()
    times = []
    for _ in range(REPEATS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return float(statistics.median(times))


def available() -> dict[str, Kernel]:
    """Kernels whose module can be imported, by name and version."""
    found: dict[str, Kernel] = {}
    for module, label, kernel in (
        ("flash_attn", "flash-attn", flash_attention),
        ("vllm.vllm_flash_attn", "vllm-flash-attn", vllm_flash_attention),
        ("flashinfer", "flashinfer", flashinfer_decode),
    ):
        try:
            imported = importlib.import_module(module)
        except (ImportError, OSError, RuntimeError, AttributeError) as error:  # or built for another GPU or CUDA
            print(f"  without {label}: {type(error).__name__}: {error}".splitlines()[0], file=sys.stderr)
        else:
            found[f"{label} {getattr(imported, '__version__', '')}".strip()] = kernel
    found["torch"] = torch_sdpa
    return found


def paged(lengths: list[int], kv_heads: int) -> tuple[Any, Any, Any, list[int]]:
    """KV pages, a table of pages by sequence, the contexts' lengths on the GPU, and pages of each sequence."""
    import torch

    pages = [math.ceil(length / PAGE) for length in lengths]
    kv = torch.randn(2, sum(pages), PAGE, kv_heads, HEAD_SIZE, device="cuda", dtype=torch.bfloat16)
    table = torch.zeros(len(lengths), max(pages), device="cuda", dtype=torch.int32)
    first = 0
    for index, count in enumerate(pages):
        table[index, :count] = torch.arange(first, first + count, device="cuda", dtype=torch.int32)
        first += count
    return kv, table, torch.tensor(lengths, device="cuda", dtype=torch.int32), pages


def flash_attention(lengths: list[int], heads: int, kv_heads: int) -> Callable[[], Any]:
    """The flash-attn package: one query token of each sequence on paged KV."""
    import torch
    from flash_attn import flash_attn_with_kvcache

    kv, table, seen, _ = paged(lengths, kv_heads)
    query = torch.randn(len(lengths), 1, heads, HEAD_SIZE, device="cuda", dtype=torch.bfloat16)
    return lambda: flash_attn_with_kvcache(query, kv[0], kv[1], cache_seqlens=seen, block_table=table, causal=True)


def vllm_flash_attention(lengths: list[int], heads: int, kv_heads: int) -> Callable[[], Any]:
    """FlashAttention as vLLM builds it, called as its backend does in a decode step."""
    import torch
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    kv, table, seen, _ = paged(lengths, kv_heads)
    count = len(lengths)
    query = torch.randn(count, heads, HEAD_SIZE, device="cuda", dtype=torch.bfloat16)
    starts = torch.arange(count + 1, device="cuda", dtype=torch.int32)
    return lambda: flash_attn_varlen_func(
        q=query,
        k=kv[0],
        v=kv[1],
        cu_seqlens_q=starts,
        max_seqlen_q=1,
        seqused_k=seen,
        max_seqlen_k=max(lengths),
        block_table=table,
        causal=True,
    )


def flashinfer_decode(lengths: list[int], heads: int, kv_heads: int) -> Callable[[], Any]:
    """FlashInfer's batched decode on paged KV; planning is not timed, as it is once per step and not per layer."""
    import flashinfer
    import torch

    kv, _, _, pages = paged(lengths, kv_heads)
    starts = torch.tensor([0, *pages], device="cuda", dtype=torch.int32).cumsum(0).to(torch.int32)
    last = torch.tensor([(length - 1) % PAGE + 1 for length in lengths], device="cuda", dtype=torch.int32)
    workspace = torch.empty(256 << 20, device="cuda", dtype=torch.uint8)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD")
    indices = torch.arange(sum(pages), device="cuda", dtype=torch.int32)
    wrapper.plan(
        starts, indices, last, heads, kv_heads, HEAD_SIZE, PAGE, q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16
    )
    query = torch.randn(len(lengths), heads, HEAD_SIZE, device="cuda", dtype=torch.bfloat16)
    return lambda: wrapper.run(query, (kv[0], kv[1]))


def torch_sdpa(lengths: list[int], heads: int, kv_heads: int) -> Callable[[], Any]:
    """PyTorch's scaled_dot_product_attention over KV padded to the longest, with a mask."""
    import torch

    longest = max(lengths)
    shape = (len(lengths), kv_heads, longest, HEAD_SIZE)
    key, value = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    query = torch.randn(len(lengths), heads, 1, HEAD_SIZE, device="cuda", dtype=torch.bfloat16)
    ends = torch.tensor(lengths, device="cuda")[:, None, None, None]
    mask = torch.arange(longest, device="cuda")[None, None, None, :] < ends
    attend = torch.nn.functional.scaled_dot_product_attention
    return lambda: attend(query, key, value, attn_mask=mask, enable_gqa=True)


def report(rows: list[dict[str, Any]], properties: Any) -> None:
    """Prints penalties and each kernel's kappa."""
    multiprocessors = properties.multi_processor_count
    print(f"{properties.name}, {multiprocessors} multiprocessors")
    print(f"{'kernel':<28}{'batch':>6}{'short':>8}{'long':>9}{'equal us':>10}{'unequal us':>12}{'penalty':>9}")
    for row in rows:
        print(
            f"{row['kernel']:<28}{row['sequences']:>6}{row['shortest']:>8,}{row['longest']:>9,}{row['equal_us']:>10.1f}"
            f"{row['unequal_us']:>12.1f}{row['unequal_us'] / row['equal_us']:>9.3f}"
        )
    for name in dict.fromkeys(row["kernel"] for row in rows):
        print(f"{name}: {kappa([row for row in rows if row['kernel'] == name], multiprocessors)}")


def kappa(rows: list[dict[str, Any]], multiprocessors: int) -> str:
    """The parameter with the least mean absolute error over the batches above the gate."""
    gate = 0.8 * 2 * multiprocessors / rows[0]["kv_heads"]
    pairs = [
        (row["unequal_us"] / row["equal_us"], excess(row, multiprocessors)) for row in rows if row["sequences"] >= gate
    ]
    if not pairs:
        return f"no batch of at least {math.ceil(gate)} sequences was measured"
    tried = [index / 1000 for index in range(2001)]
    errors = {k: statistics.fmean(abs((1 + k * r) / penalty - 1) for penalty, r in pairs) for k in tried}
    best = min(errors, key=lambda k: errors[k])
    return f"kappa {best:.3f}, mean absolute error {errors[best]:.1%} of {len(pairs)} batches (0: {errors[0.0]:.1%})"


def excess(row: dict[str, Any], multiprocessors: int) -> float:
    """``r · (1 - mean/longest)``."""
    ratio = row["longest"] * multiprocessors / (row["mean"] * row["sequences"] * row["kv_heads"])
    return float(ratio * (1 - row["mean"] / row["longest"]))


if __name__ == "__main__":
    sys.exit(main())

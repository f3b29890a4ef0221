"""Descriptors and transfer time of a request's KV: allocator and layout, three copiers, beside vLLM's NixlConnector.

A request of 500 to 16,000 tokens moves from another process into this one: KV of 16 layers, 2 heads of 64, bfloat16
(8 KiB per token), in blocks of 32 tokens, out of caches that have been in use (``block_lists``). Plan: making the
descriptors, in microseconds. Times are medians over the repeats of all seeds; each transfer is one step of unlimited
bytes. With ``--vllm`` two vLLM engines on CPU do the same through vLLM's own connector, in the same run; its times are
those of its own telemetry.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from millrace.contracts.kv import KvRank
from millrace.kvcopy.copier_port import Copier, Link
from millrace.kvcopy.memory import SharedRegion

from bench.transfers.quiet import quiet
from bench.transfers.shape import ARMS, BLOCK_TOKENS, REGION_BYTES, Moved, is_right, moved
from bench.transfers.source import copiers

LENGTHS = [500, 1000, 2000, 4000, 8000, 16000]
WARM = 1  # transfers of each kind before those that count
UNLIMITED = 1 << 40


class Figures(NamedTuple):
    """One arm, length and copier."""

    descriptors: float
    plan_us: float
    transfer_ms: float
    bytes: int


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(prog="python -m bench transfer", description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="*", default=LENGTHS)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--vllm", action="store_true", help="vLLM's NixlConnector too (two engines, a minute to start)")
    parser.add_argument("--port", type=int, default=15710, help="of its introductions, and the next one")
    parser.add_argument("--quiet-lock", type=Path, help="file to lock exclusively while times are taken")
    options = parser.parse_args()
    sequences = {
        (arm.name, tokens): [moved(arm, tokens, seed) for seed in range(options.seeds)]
        for arm in ARMS
        for tokens in options.tokens
    }
    with ExitStack() as stack:
        engines = stack.enter_context(_engines(options.port, options.tokens)) if options.vllm else None
        ends = stack.enter_context(_ends())
        with quiet(options.quiet_lock):
            print(f"load average {os.getloadavg()[0]:.2f}; {options.seeds} seeds, {options.repeats} repeats each")
            _print_own(sequences, ends, options.repeats)
            if engines is not None:
                _print_vllm(engines, options.tokens)
    return 0


class End(NamedTuple):
    """A copier of this process, connected."""

    copier: Copier
    link: Link
    view: np.ndarray


@contextmanager
def _ends() -> Iterator[list[End]]:
    """Every copier that can be used, connected to a source in another process."""
    with tempfile.TemporaryDirectory(prefix="millrace-bench-") as folder:
        words = [sys.executable, "-m", "bench.transfers.source", f"{folder}/source.sock"]
        source = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        region = SharedRegion(REGION_BYTES)
        region.view[:] = 0xFF  # every page is there
        own = copiers(region, Path(folder) / "own.sock")
        try:
            assert source.stdout is not None
            rank = msgspec.msgpack.decode(bytes.fromhex(source.stdout.readline()), type=KvRank)
            yield [End(copier, copier.connect(rank), region.view) for copier in own]
        finally:
            for copier in own:
                copier.close()
            source.communicate(timeout=30)


def _print_own(sequences: dict[tuple[str, int], list[Moved]], ends: list[End], repeats: int) -> None:
    kinds = [str(end.copier.kind) for end in ends]
    columns = [f"{kind + ' ms':>17}" for kind in kinds]
    print(f"{'':40} {'tokens':>6} {'MiB':>6} {'pieces':>8} {'plan us':>8}", *columns)
    for (name, tokens), cases in sequences.items():
        row = [_measure(cases, end, repeats) for end in ends]
        first = row[0]
        print(
            f"{name:40} {tokens:6} {first.bytes / 2**20:6.1f} {first.descriptors:8.1f} {first.plan_us:8.0f}",
            *[f"{figures.transfer_ms:17.2f}" for figures in row],
            flush=True,
        )


def _measure(cases: list[Moved], end: End, repeats: int) -> Figures:
    plan_us, transfer_ms, plans = [], [], []
    for case in cases:
        for turn in range(WARM + repeats):
            began = time.perf_counter()
            plan = case.plan()
            planned = time.perf_counter()
            transfer = end.link.begin(plan)
            while not transfer.advance(UNLIMITED):
                pass
            ended = time.perf_counter()
            if turn >= WARM:
                plan_us.append((planned - began) * 1e6)
                transfer_ms.append((ended - planned) * 1e3)
        if not is_right(end.view, plan):
            raise SystemExit(f"{end.copier.kind} brought wrong bytes: {case.arm.name}")
        plans.append(plan)
    return Figures(
        descriptors=statistics.mean(plan.descriptors for plan in plans),
        plan_us=statistics.median(plan_us),
        transfer_ms=statistics.median(transfer_ms),
        bytes=plans[0].bytes,
    )


@contextmanager
def _engines(port: int, lengths: list[int]) -> Iterator[subprocess.Popen[str]]:
    """The pair of vLLM, with every prompt computed and kept."""
    words = [sys.executable, "-m", "bench.transfers.nixl_connector", "decode", str(port), *map(str, lengths)]
    # A session of their own, so that both can be stopped: their NIXL threads poll all the time, and would take the
    # processor from what is measured before their turn.
    engines = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        _next(engines, "prefilled")
        os.killpg(engines.pid, signal.SIGSTOP)
        yield engines
    finally:
        with suppress(ProcessLookupError):
            os.killpg(engines.pid, signal.SIGCONT)
        engines.communicate(timeout=60)


def _print_vllm(engines: subprocess.Popen[str], lengths: list[int]) -> None:
    assert engines.stdin is not None
    os.killpg(engines.pid, signal.SIGCONT)
    print("measure", file=engines.stdin, flush=True)
    _next(engines, "figure ")  # the first one introduces them to each other
    print(
        f"{'vLLM NixlConnector':40} {'tokens':>6} {'MiB':>6} {'pieces':>8} {'':8} {'post ms':>17} {'done ms':>17} "
        f"{'until token ms':>17}"
    )
    for _ in lengths:
        figure = json.loads(_next(engines, "figure "))
        print(_vllm_row(figure), flush=True)


def _vllm_row(figure: dict[str, Any]) -> str:
    if not figure["transfers"]:
        return f"{'':40} {figure['tokens']:6} no transfer: {figure}"
    wrong = "" if figure["same_first_token"] else "  WRONG TOKEN"
    name = f"blocks of {BLOCK_TOKENS} tokens"
    return (
        f"{name:40} {figure['tokens']:6} {figure['bytes'] / 2**20:6.1f} {figure['pieces']:8} "
        f"{'':8} {figure['post_ms']:17.2f} {figure['done_ms']:17.2f} {figure['wall_ms']:17.2f}{wrong}"
    )


def _next(process: subprocess.Popen[str], begins: str) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(begins):
            return line.removeprefix(begins)
    raise SystemExit("vLLM's engines ended early")


if __name__ == "__main__":
    sys.exit(main())

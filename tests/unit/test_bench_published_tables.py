"""Kernel tables: what is read out of them, what is refused, and what they compile into."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from millrace.contracts.status import BatchComposition
from millrace.enginemodel.parameters import EngineParameters

from bench.published import tables, tables_aiconfigurator, tables_servingsim
from bench.published.kernel_table import KernelTableStepTime
from bench.published.surface import MeasuredCurve, Surface

LAYERS = 3
LINEAR = MeasuredCurve((1, 8, 64), (1000.0, 1200.0, 5000.0))
DECODE = Surface((1, 4), (MeasuredCurve((1, 100), (10.0, 60.0)), MeasuredCurve((1, 100), (12.0, 212.0))))
PREFILL = Surface((16, 64), (MeasuredCurve((0, 64), (5.0, 15.0)), MeasuredCurve((0, 64), (30.0, 90.0))))
TABLE = KernelTableStepTime(
    layers=LAYERS,
    linear=LINEAR,
    decode=DECODE,
    prefill=PREFILL,
    head=MeasuredCurve((1, 8), (100.0, 170.0)),
    host_fixed=50.0,
    host_per_sequence=2.0,
)
LIMITS = EngineParameters(max_sequences=8, token_budget=128, max_model_len=256, blocks_total=64)


def _ns(model: KernelTableStepTime, batch: BatchComposition) -> float:
    return model.cost(LIMITS).duration_fs(batch) / 1e6


@pytest.mark.parametrize(("size", "ns"), [(1, 1000), (8, 1200), (4.5, 1100), (0.5, 1000), (120, 8800)])
def test_a_profile_draws_straight_lines_and_goes_on_beyond_its_last_point(size: float, ns: float) -> None:
    assert LINEAR.at(size) == pytest.approx(ns)


@pytest.mark.parametrize("decodes", range(1, 9))
def test_decode_attention_lies_between_measured_batches_for_every_number_of_sequences(decodes: int) -> None:
    step = BatchComposition(decodes=decodes, context_tokens=decodes * 50)
    attention = LAYERS * DECODE.at(decodes, 50)
    rest = LAYERS * LINEAR.at(decodes) + 100 + 10 * (decodes - 1) + 2 * decodes + 50
    assert _ns(TABLE, step) == pytest.approx(attention + rest, rel=1e-6)


@pytest.mark.parametrize(("chunk", "before"), [(64, 0), (64, 64), (64, 32)])
def test_prompt_attention_is_that_of_the_chunk_and_what_was_before_it(chunk: int, before: int) -> None:
    step = BatchComposition(
        prefills=1,
        prefill_tokens=chunk,
        context_tokens=before + chunk,
        prefill_context_tokens=before + chunk,
        prefill_work=chunk * (before + chunk / 2),
    )
    expected = LAYERS * (LINEAR.at(chunk) + PREFILL.at(chunk, before)) + 100 + 2 + 50
    assert _ns(TABLE, step) == pytest.approx(expected, rel=1e-6)


def test_a_group_of_gpus_waits_for_two_all_reduces_in_each_layer() -> None:
    reduce = MeasuredCurve((0, 1000), (7.0, 1007.0))
    group = KernelTableStepTime(
        layers=LAYERS, linear=LINEAR, decode=DECODE, prefill=PREFILL, all_reduce=reduce, hidden_bytes=10
    )
    alone = KernelTableStepTime(layers=LAYERS, linear=LINEAR, decode=DECODE, prefill=PREFILL)
    step = BatchComposition(decodes=4, context_tokens=400)
    assert _ns(group, step) - _ns(alone, step) == pytest.approx(2 * LAYERS * (7 + 4 * 10))


def test_an_operator_faster_than_the_hardware_is_taken_for_not_measured(tmp_path: Path) -> None:
    hardware = tables.Hardware("slow", bytes_per_second=1e9, flops=1e12)
    file = tmp_path / "mlp.csv"
    _write_vidur(file, {16: 1.0, 32: 0.0001, 64: 3.0})  # a projection of 64 x 64 weights takes 0.016 ms at least
    linear = tables.vidur_linear(file, hardware)
    others = 8 * 0.5e6  # of one layer's other operators
    assert linear.at(32) - others == pytest.approx(1e6 + (3e6 - 1e6) / 3)


def test_a_matrix_product_between_measured_sizes_lies_between_their_times(tmp_path: Path) -> None:
    rows = [f"{m},{n},64,{m * n / 1e4}" for m in (1, 16) for n in (100, 300)]
    (tmp_path / "gpu_gemm.csv").write_text("\n".join(["m,n,k,latency", *rows]))
    product = tables_aiconfigurator.matrix_product(tables_aiconfigurator.Files(tmp_path, "gpu"), outputs=200, inputs=64)
    assert product.at(16) == pytest.approx(16 * 200 / 1e4 * 1e6)


def test_a_matrix_product_slower_than_one_of_more_tokens_is_left_out(tmp_path: Path) -> None:
    times = {1: 1.0, 16: 2.0, 64: 9.0, 128: 4.0}
    rows = [f"{m},{n},64,{ms}" for m, ms in times.items() for n in (100, 300)]
    (tmp_path / "gpu_gemm.csv").write_text("\n".join(["m,n,k,latency", *rows]))
    product = tables_aiconfigurator.matrix_product(tables_aiconfigurator.Files(tmp_path, "gpu"), outputs=100, inputs=64)
    assert 2e6 < product.at(64) < 4e6
    assert product.at(128) == pytest.approx(4e6)


def _write_vidur(file: Path, projection_ms: dict[int, float]) -> None:
    """A profile in which only ``attn_post_proj`` differs by tokens."""
    names = [f"time_stats.{name}.median" for name in tables.LAYER_OPERATORS]
    header = [
        "num_tokens", "num_tensor_parallel_workers", "n_embd", "n_expanded_embd", "n_head", "n_kv_head", *names
    ]  # fmt: skip
    lines = [",".join(header)]
    for tokens, ms in projection_ms.items():
        values = [ms if "attn_post_proj" in name else 0.5 for name in names]
        lines.append(",".join(str(value) for value in [tokens, 1, 64, 64, 1, 1, *values]))
    file.write_text("\n".join(lines))


def test_rows_with_a_prompt_chunk_and_decodes_say_what_both_at_once_cost_more(tmp_path: Path) -> None:
    """Apart 10 us and 20 us, at once 30 us + 5 us of each decode with 100 tokens + 10 ns of each pair; and one row that
    no GPU has memory for.
    """
    lines = ["prefill_chunk,kv_prefill,n_decode,kv_decode,time_us"]
    lines += [f"0,0,{n},{kv},10" for n in (1, 4) for kv in (100, 800)]
    lines += [f"{chunk},{before},0,0,20" for chunk in (16, 64) for before in (0, 64)]
    lines += [
        f"{chunk},{before},{n},{kv},{30 + 5 * n * kv / 100 + 0.01 * n * chunk}"
        for chunk in (16, 64)
        for before in (0, 64)
        for n in (1, 4)
        for kv in (100, 800)
    ]
    lines.append("64,64,4,100000,1000000")
    file = tmp_path / "attention.csv"
    file.write_text("\n".join(lines) + "\n")
    mixed, pair = tables_servingsim.mixed_attention(file, kv_tokens=10_000)
    assert pair == pytest.approx(10, rel=1e-6)
    assert [mixed.at(n, kv) for n, kv in ((1, 100), (4, 100), (4, 800))] == pytest.approx([5e3, 20e3, 160e3])


def test_a_step_with_prompt_and_decodes_has_what_both_at_once_cost_more() -> None:
    extra = Surface((1, 4), (MeasuredCurve((1, 100), (3.0, 9.0)), MeasuredCurve((1, 100), (5.0, 40.0))))
    table = msgspec.structs.replace(TABLE, mixed=extra, mixed_work=0.5, tail_token=2.0, tail_decodes=4)
    mixed = BatchComposition(
        decodes=4, prefills=1, prefill_tokens=64, context_tokens=464, prefill_context_tokens=64, prefill_work=2048.0
    )
    alone = BatchComposition(decodes=4, context_tokens=400)
    assert _ns(table, mixed) - _ns(TABLE, mixed) == pytest.approx(LAYERS * (40 + 0.5 * 4 * 64), rel=1e-6)
    assert _ns(table, alone) == _ns(TABLE, alone)
    unequal = msgspec.structs.replace(alone, longest_context=160)
    assert _ns(table, unequal) - _ns(TABLE, alone) == pytest.approx(LAYERS * 2 * 60)

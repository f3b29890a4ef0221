"""The fit of a kernel's penalty for unequal lengths, without a GPU."""

from __future__ import annotations

from papers.cascadeinfer.bench.gpu_heterogeneity import excess, kappa, unequal

MULTIPROCESSORS, KV_HEADS = 132, 8


def row(sequences: int, short: int, skew: int, truth: float) -> dict[str, float]:
    lengths = unequal(sequences, short, skew)
    made = {
        "sequences": sequences,
        "longest": max(lengths),
        "mean": sum(lengths) / sequences,
        "kv_heads": KV_HEADS,
        "equal_us": 100.0,
    }
    return made | {"unequal_us": 100.0 * (1 + truth * excess(made, MULTIPROCESSORS))}


def test_the_kappa_of_a_kernel_is_found_above_the_gate() -> None:
    rows = [row(count, 1_000, skew, 0.2 if count >= 27 else 0.0) for count in (8, 64, 512) for skew in (4, 50)]
    assert kappa(rows, MULTIPROCESSORS).startswith("kappa 0.200, mean absolute error 0.0% of 4 batches")


def test_a_kernel_that_splits_has_none() -> None:
    rows = [row(count, 1_000, 50, 0.0) for count in (64, 512)]
    assert kappa(rows, MULTIPROCESSORS).startswith("kappa 0.000")


def test_only_small_batches_say_nothing() -> None:
    assert kappa([row(8, 1_000, 50, 0.0)], MULTIPROCESSORS) == "no batch of at least 27 sequences was measured"


def test_the_papers_panel_has_the_ratio_that_it_is_known_for() -> None:
    panel = row(512, 1_000, 50, 0.76)
    assert 2.0 < panel["unequal_us"] / panel["equal_us"] < 2.15

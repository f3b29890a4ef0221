"""The cost of unequal lengths in one decode batch: the law in the public data, and what it says of the paper's figure.

    python -m bench heterogeneity
    python bench/gpu/heterogeneity.py      # the measurement itself, on a GPU

Source of the comparison: CascadeInfer, figure 2: 512 sequences of 1,000 tokens with one of 50,000, and of 200 with one
of 10,000.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from bench.engine.fit_published import data_folder
from papers.cascadeinfer.bench import step_time_skew

#: The paper's two panels: sequences, tokens of each but one, tokens of that one. An H100 has 132 multiprocessors, and
#: the paper's model 8 KV heads.
PANELS = ((512, 1_000, 50_000), (512, 200, 10_000))
PER_HEAD = 132 / 8
KAPPAS = (0.0, 0.15, 0.2, 0.76)
#: The penalty that the paper's figure shows at most.
PAPER_MOST = 2.1


def main() -> int:
    """Prints the fit, then predictions."""
    parser = argparse.ArgumentParser(prog="python -m bench heterogeneity", description=__doc__)
    parser.add_argument("--data", type=Path, default=data_folder(), help="folder of measurements")
    data = parser.parse_args().data
    if not data.is_dir():
        print(f"not fitted: there is no folder {data} (MILLRACE_DATA) with the measurements")
    else:
        step_time_skew.report(data)
    print("penalty = 1 + kappa · r · (1 - mean/longest), r = longest · multiprocessors / (sum of contexts · KV heads)")
    for count, short, longest in PANELS:
        told = ", ".join(f"{kappa:g}: {penalty(kappa, count, short, longest):.2f}" for kappa in KAPPAS)
        needed = (PAPER_MOST - 1) / (penalty(1.0, count, short, longest) - 1)
        print(
            f"H100, {count - 1} x {short:,} tokens and one of {longest:,}: penalty at kappa {told}; the paper's most, "
            f"{PAPER_MOST:g}, needs {needed:.2f}"
        )
    return 0


def penalty(kappa: float, count: int, short: int, longest: int) -> float:
    """Of a batch with one long sequence."""
    total = (count - 1) * short + longest
    return 1 + kappa * longest * PER_HEAD / total * (1 - total / count / longest)

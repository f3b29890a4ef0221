"""Error of equation 1 of CascadeInfer for normalised latency on real vLLM on one core, by length bucket.

Closed loops of one bucket and one batch size each; coefficients fitted on one seed's rounds and judged on another's.
Beside it the global mean latency of the fitted rounds, which is the paper's baseline. In processor time of the engine.
Aim: at most 9 percent (paper 8.9), the baseline at least 50 (paper 64).

Source: CascadeInfer, sections 4.1 and 6.5, figure 13.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from millrace.profiling.process import ProcessProfile

from papers.cascadeinfer.quality import QualityEffort, QualityProfile, run_quality

ROOT = Path(__file__).resolve().parents[3]
SHAPES = ("nano", "micro", "mini")


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shapes", nargs="*", default=list(SHAPES), metavar="SHAPE", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch-max", type=int, default=16)
    parser.add_argument("--output-tokens-max", type=int, default=64)
    arguments = parser.parse_args()
    effort = QualityEffort(output_tokens_max=arguments.output_tokens_max, batch_max=arguments.batch_max)
    print(f"seed {arguments.seed}, batches up to {effort.batch_max}, outputs up to {effort.output_tokens_max} tokens")
    for shape in arguments.shapes:
        report(shape, measure(shape, effort, arguments.seed))
    return 0


def measure(shape: str, effort: QualityEffort, seed: int) -> QualityProfile:
    """Profile of a model that ships."""
    config = {"name": "bench", "model": shape, "model_path": str(ROOT / "models" / f"millrace-{shape}")}
    engine = ProcessProfile([sys.executable, "-m", "services.worker.profile", json.dumps(config)])
    try:
        return run_quality(engine, effort, seed=seed)
    finally:
        engine.close()


def report(shape: str, found: QualityProfile) -> None:
    """A table by bucket."""
    d = found.coefficients
    print(f"\n{shape}: D0 {d.d0:.3e}  D1 {d.d1:.3e}  D2 {d.d2:.3e}  D3 {d.d3:.3e}  D4 {d.d4:.3e}  s per output token")
    print(f"{'tokens':<14}{'sequences':>10}{'equation 1':>12}{'bias':>8}{'global mean':>13}")
    for bucket in found.buckets:
        told = f"{bucket.length_min}-{2 * bucket.length_min}"
        figures = f"{bucket.error:>12.1%}{bucket.bias:>+8.1%}{bucket.static_error:>13.1%}"
        print(f"{told:<14}{bucket.sequences:>10}{figures}")
    print(f"{'all':<14}{len(found.judged):>10}{found.error:>12.1%}{'':>8}{found.static_error:>13.1%}", flush=True)


if __name__ == "__main__":
    sys.exit(main())

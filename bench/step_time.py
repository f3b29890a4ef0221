"""Step-time models on what they were not fitted on: H100 and H200 runs, 300 requests on an RTX 4090, vLLM on a CPU.

Aims: 8 % mean absolute error on step time, 10 % on mean end-to-end latency.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from bench import step_time_rtx4090, step_time_silicon
from bench.engine.fit_published import data_folder

PARTS = {"silicon": step_time_silicon.report, "rtx4090": step_time_rtx4090.report}


def main() -> int:
    """Prints one part after the other."""
    parser = argparse.ArgumentParser(prog="python -m bench step_time", description=__doc__)
    parser.add_argument("--parts", nargs="*", choices=[*PARTS, "cpu"], default=[*PARTS, "cpu"])
    parser.add_argument("--data", type=Path, default=data_folder(), help="folder of measurements")
    parser.add_argument("--shapes", nargs="*", default=["nano", "micro", "mini"], help="models of the part cpu")
    parser.add_argument("--seed", type=int, default=1, help="of the part cpu's loads; those that were fitted on have 0")
    options = parser.parse_args()
    for part in options.parts:
        print(f"\n{part}\n")
        if part == "cpu":
            from bench import step_time_cpu  # needs vLLM

            step_time_cpu.report(options.shapes, options.seed)
        elif options.data.is_dir():
            PARTS[part](options.data)
        else:
            print(f"not checked: there is no folder {options.data} (MILLRACE_DATA) with the measurements")
    return 0

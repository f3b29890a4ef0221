"""Profiles real vLLM with random weights of a shape: for sizes of model that do not ship, such as load-100m.

``python -m bench.engine.fit_step_time --shape load-100m --output cpu-100m.toml`` is ``millrace profile`` on a folder
that is made for it. Random weights cost what trained ones cost.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from millrace.cli.__main__ import main as millrace

from bench.engine.in_process import SHAPES, llama_config

ENGINE_ARGS = {"load_format": "dummy", "skip_tokenizer_init": True}


def main() -> int:
    """Makes the folder, and calls the verb with all further words."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="mini")
    parser.add_argument("--output", required=True)
    options, further = parser.parse_known_args()
    with tempfile.TemporaryDirectory(prefix="millrace-shape-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(llama_config(options.shape)))
        name = f"Llama shape {options.shape}, random weights"
        words = ["--output", options.output, "--name", name, "--engine-args", json.dumps(ENGINE_ARGS), *further]
        return millrace(["profile", folder, *words])


if __name__ == "__main__":
    raise SystemExit(main())

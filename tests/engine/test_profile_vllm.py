"""`millrace profile` on real vLLM: a small profile of the smallest model that ships."""

import json
from pathlib import Path

from millrace.cli.__main__ import main
from millrace.enginemodel.coefficients import load_step_time

ROOT = Path(__file__).resolve().parents[2]


def test_a_profile_of_real_vllm_gives_a_file_that_a_forecast_can_use(tmp_path: Path) -> None:
    output = tmp_path / "nano.toml"
    words = ["--max-num-seqs", "4", "--output-tokens", "6", "--prompt-tokens", "512", "--max-model-len", "512"]

    assert main(["profile", str(ROOT / "models" / "millrace-nano"), "--output", str(output), *words]) == 0

    model = load_step_time(str(output))
    assert model.fixed > 100_000  # a step of real vLLM takes more than a tenth of a millisecond
    assert "vllm" in model.provenance.source
    content = json.loads(output.with_suffix(".json").read_text())
    assert {step["held_out"] for step in content["steps"]} == {True, False}

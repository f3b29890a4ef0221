"""Scenarios of benches: a file under examples/scenarios or of a paper, and settings laid over it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from simulator.scenarios.reading import read_scenario
from simulator.scenarios.spec import ScenarioSpec, TraceRows

ROOT = Path(__file__).parents[2]
SCENARIOS = ROOT / "examples" / "scenarios"

#: Lengths that ship, for those traces that are not there.
SHIPPED = {
    "sharegpt": "sharegpt",
    "mooncake": "mooncake-conversation",
    "servegen": "servegen-deepseek-r1",
    "azure": "azure-conversation",
}

#: How fresh what policies see is: nearer to asking every engine at each decision than the defaults are.
FRESH = ("intervals.status_ms=100", "intervals.summary_ms=50")


def data_folder() -> Path:
    """Return the folder of the traces."""
    return Path(os.environ.get("MILLRACE_DATA", "../shared/data"))


def scenario(file: str, settings: Sequence[str]) -> ScenarioSpec:
    """A scenario with settings; lengths that ship stand in for a trace that is not there.

    Args:
        file: Name of an example, or of a paper for its testbed.
    """
    testbed = ROOT / "papers" / file / "testbed.toml"
    spec = read_scenario(testbed if testbed.exists() else SCENARIOS / f"{file}.toml", settings)
    source = spec.workload.lengths
    if not isinstance(source, TraceRows) or (data_folder() / source.path).exists():
        return spec
    name = "azure-code" if "code" in source.path else SHIPPED[source.format]
    bounds = [f"workload.lengths.{key}={getattr(source, key)}" for key in ("prompt_max", "output_max", "total_max")]
    total = spec.cluster.groups[0].engine.max_model_len - 1
    bounds = [bound for bound in bounds if not bound.endswith("=0")] or [f"workload.lengths.total_max={total}"]
    replaced = msgspec.to_builtins(spec)
    replaced["workload"]["lengths"] = {"kind": "fitted", "name": name}
    for bound in bounds:
        key, _, value = bound.rpartition(".")[2].partition("=")
        replaced["workload"]["lengths"][key] = int(value)
    return msgspec.convert(replaced, ScenarioSpec)


def stand_in(spec: ScenarioSpec) -> str:
    """Return a note where lengths are not the trace's; empty where they are."""
    if isinstance(spec.workload.lengths, TraceRows):
        return ""
    return (
        f"NOTE: no trace under MILLRACE_DATA ({data_folder()}); lengths drawn from the fitted distribution that ships"
    )

"""Block's testbed as scenarios: a file under examples/scenarios, and settings laid over it."""

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

#: Least predicted end-to-end time, nothing else; Millrace's default lets waiting weigh more ("forecast waiting").
BLOCKS_RULE = (
    "dispatch.policy=forecast",
    "dispatch.parameters.ttft_weight=0",
    "dispatch.parameters.others_weight=0",
)

#: How each policy is called in the tables, and what it is in a scenario. The noise is that of bench.block.noise.
POLICIES: dict[str, tuple[str, ...]] = {
    "random": ("dispatch.policy=random",),
    "round robin": ("dispatch.policy=round_robin",),
    "min QPM": ("dispatch.policy=fewest_requests_per_minute",),
    "INFaaS++ (text)": ("dispatch.policy=infaas", "dispatch.parameters.memory=used"),
    "INFaaS++ (code)": ("dispatch.policy=infaas", "dispatch.parameters.memory=free"),
    "Llumnix- (text)": ("dispatch.policy=llumnix", "dispatch.parameters.memory=used"),
    "Llumnix- (code)": ("dispatch.policy=llumnix", "dispatch.parameters.memory=free"),
    "shortest queue": ("dispatch.policy=join_shortest_queue",),
    "forecast": (*BLOCKS_RULE, "dispatch.parameters.candidates=0"),
    "forecast blind": (*BLOCKS_RULE, "dispatch.parameters.candidates=0", "cluster.predictor.prefixes=false"),
    "forecast waiting": ("dispatch.policy=forecast", "dispatch.parameters.candidates=0"),
    "forecast + others": (
        *BLOCKS_RULE,
        "dispatch.parameters.candidates=0",
        "dispatch.parameters.others_weight=0.3",
        "dispatch.parameters.others_summed=always",
    ),
    "forecast ttft": (
        "dispatch.policy=forecast",
        "dispatch.parameters.candidates=0",
        "dispatch.parameters.metric=ttft",
    ),
    "forecast d=8": (*BLOCKS_RULE, "dispatch.parameters.candidates=8"),
    "forecast d=4": (*BLOCKS_RULE, "dispatch.parameters.candidates=4"),
    "forecast d=2": (*BLOCKS_RULE, "dispatch.parameters.candidates=2"),
}

#: How fresh what policies see is: nearer to Block, which asks every engine at each decision, than the defaults are.
FRESH = ("intervals.status_ms=100", "intervals.summary_ms=50")

#: With predicted lengths, as Block* is.
PREDICTED = "forecast*"


def data_folder() -> Path:
    """Return the folder of the traces."""
    return Path(os.environ.get("MILLRACE_DATA", "../shared/data"))


def policy_settings(name: str, sigma: float) -> tuple[str, ...]:
    """The settings of a policy by its name in the tables; ``forecast*`` is ``forecast`` with predicted lengths."""
    starred = name.startswith(PREDICTED)
    settings = POLICIES[name.replace(PREDICTED, "forecast") if starred else name]
    return (*settings, "prediction.kind=noisy", f"prediction.sigma={sigma}") if starred else settings


def scenario(file: str, settings: Sequence[str]) -> ScenarioSpec:
    """A scenario with settings; lengths that ship stand in for a trace that is not there.

    Args:
        file: Name of an example, or the path below the root of one of a paper.
    """
    spec = read_scenario((ROOT if "/" in file else SCENARIOS) / f"{file}.toml", settings)
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

"""The policies that are compared, as settings of a scenario."""

from __future__ import annotations

from papers import PAPERS

#: Least predicted end-to-end time, nothing else; Millrace's default lets waiting weigh more ("forecast waiting").
BLOCKS_RULE = (
    "dispatch.policy=forecast",
    "dispatch.parameters.ttft_weight=0",
    "dispatch.parameters.others_weight=0",
)

#: How each policy is called in the tables, and what it is in a scenario. The noise is that of papers.block.bench.noise.
POLICIES: dict[str, tuple[str, ...]] = {
    "random": ("dispatch.policy=random",),
    "round robin": ("dispatch.policy=round_robin",),
    "min QPM": (f"dispatch.policy={PAPERS}/block/fewest_requests_per_minute.py",),
    "INFaaS++ (text)": (f"dispatch.policy={PAPERS}/block/infaas.py", "dispatch.parameters.memory=used"),
    "INFaaS++ (code)": (f"dispatch.policy={PAPERS}/block/infaas.py", "dispatch.parameters.memory=free"),
    "Llumnix- (text)": (f"dispatch.policy={PAPERS}/block/llumnix.py", "dispatch.parameters.memory=used"),
    "Llumnix- (code)": (f"dispatch.policy={PAPERS}/block/llumnix.py", "dispatch.parameters.memory=free"),
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

#: With predicted lengths, as Block* is.
PREDICTED = "forecast*"


def policy_settings(name: str, sigma: float) -> tuple[str, ...]:
    """The settings of a policy by its name in the tables; ``forecast*`` is ``forecast`` with predicted lengths."""
    starred = name.startswith(PREDICTED)
    settings = POLICIES[name.replace(PREDICTED, "forecast") if starred else name]
    return (*settings, "prediction.kind=noisy", f"prediction.sigma={sigma}") if starred else settings

"""The budget of vLLM's scheduler as the engine adapter sets it, and the engines that keep theirs."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from services.worker.vllm_engine.step_limit import StepLimit


def scheduler(*, chunked: bool = True, speculative: object = None, **attributes: Any) -> Any:
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(enable_chunked_prefill=chunked),
        vllm_config=SimpleNamespace(speculative_config=speculative),
        **attributes,
    )


def test_a_bound_is_set_and_the_engines_own_budget_comes_back() -> None:
    known = scheduler(max_num_scheduled_tokens=8192)
    limit, found = StepLimit(known), []
    for tokens in (512, 9_000, 300, 0):
        limit.set(tokens)
        found.append((known.max_num_scheduled_tokens, limit.tokens))
    assert found == [(512, 512), (8192, 0), (300, 300), (8192, 0)]


@pytest.mark.parametrize(
    ("known", "why"),
    [
        (scheduler(), "has no max_num_scheduled_tokens"),
        (scheduler(chunked=False, max_num_scheduled_tokens=8192), "chunked prefill is off"),
        (scheduler(speculative=object(), max_num_scheduled_tokens=8192), "decodes speculatively"),
    ],
)
def test_an_engine_that_cannot_keeps_its_budget_and_says_so_once(
    known: Any, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    before, limit = getattr(known, "max_num_scheduled_tokens", None), StepLimit(known)
    with caplog.at_level(logging.WARNING):
        limit.set(512)
        limit.set(300)
    assert (getattr(known, "max_num_scheduled_tokens", None), limit.tokens) == (before, 0)
    assert len([record for record in caplog.records if why in record.getMessage()]) == 1

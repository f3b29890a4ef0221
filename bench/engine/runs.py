"""The runs that are recorded on real vLLM: each puts one rule of the scheduler, or several at once, to the test."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec
from millrace.contracts.kv import KvGroup, KvNeed
from millrace.enginemodel.parameters import EngineParameters

Prompt = list[tuple[int, int]]


class PlannedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request to come.

    Attributes:
        prompt: Parts (seed, length); see tests.testbed.schedule_recording.
        at_step: Engine steps (calls) before it is added.
        cancel_at_step: Engine steps before it is cancelled; None for not at all.
        stop_ids: How many token ids end it: 0 to run to ``max_tokens``.
    """

    prompt: Prompt
    max_tokens: int
    at_step: int = 0
    cancel_at_step: int | None = None
    stop_ids: int = 0


class PlannedRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run to record. ``model``: fields of config.json beside those of the repository's smallest model."""

    name: str
    about: str
    parameters: EngineParameters
    requests: list[PlannedRequest]
    model: dict[str, Any] = {}


PLAIN = EngineParameters(
    max_model_len=512, block_size=32, blocks_total=400, max_sequences=16, token_budget=512, prefix_caching=True
)


def plan(name: str, about: str, requests: list[PlannedRequest], **changes: object) -> PlannedRun:
    """A run that differs from the plain parameters in these."""
    return PlannedRun(name=name, about=about, parameters=msgspec.structs.replace(PLAIN, **changes), requests=requests)


def crowd(
    seed: int, count: int, *, prompt: tuple[int, int], output: tuple[int, int], within: int = 0
) -> list[PlannedRequest]:
    """Requests of random lengths in these ranges that arrive within so many steps."""
    rng = random.Random(seed)
    return [
        PlannedRequest(
            prompt=[(1000 * seed + index, rng.randint(*prompt))],
            max_tokens=rng.randint(*output),
            at_step=rng.randint(0, within),
        )
        for index in range(count)
    ]


def changed(
    requests: list[PlannedRequest], change: Callable[[int, PlannedRequest], dict[str, object]]
) -> list[PlannedRequest]:
    """The same requests, each with the fields that ``change(index, request)`` gives."""
    return [msgspec.structs.replace(request, **change(index, request)) for index, request in enumerate(requests)]


#: Granite 4's: one of three layers is of full attention, and a state is smaller than a block of it.
MAMBA = {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "model_type": "granitemoehybrid",
    "layer_types": ["mamba", "mamba", "attention"],
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "shared_intermediate_size": 64,
    "num_key_value_heads": 4,
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_expand": 1,
    "mamba_d_conv": 4,
    "mamba_chunk_size": 64,
}


def planned_runs() -> list[PlannedRun]:
    """All runs."""
    return [*_budget_runs(), *_block_runs(), *_prefix_runs(), *_async_runs(), *_group_runs()]


def _group_runs() -> list[PlannedRun]:
    full = KvGroup(need=KvNeed.ALL, block_tokens=32, block_bytes=0)
    window = KvGroup(need=KvNeed.WINDOW, block_tokens=32, block_bytes=0, window=64)
    state = KvGroup(need=KvNeed.STATE, block_tokens=512, block_bytes=0)
    parameters = msgspec.structs.replace(
        PLAIN, groups=(full, window, window), prefix_caching=False, blocks_total=60, token_budget=96
    )
    model = {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 32,
        "sliding_window": window.window,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    }
    return [
        PlannedRun(
            name="windows",
            about="Two groups of a sliding window and one of full attention: windows leave blocks, too few for all",
            parameters=parameters,
            requests=crowd(31, 14, prompt=(20, 300), output=(20, 180), within=20),
            model=model,
        ),
        PlannedRun(
            name="states",
            about="Two groups of Mamba 2 and one of full attention: a state takes one block, too few for all",
            parameters=msgspec.structs.replace(parameters, groups=(full, state, state), blocks_total=40),
            requests=crowd(32, 14, prompt=(20, 300), output=(20, 180), within=20),
            model=MAMBA,
        ),
    ]


def _budget_runs() -> list[PlannedRun]:
    short = crowd(1, 12, prompt=(1, 60), output=(1, 40), within=10)
    long = crowd(2, 8, prompt=(150, 400), output=(5, 40), within=12)
    return [
        plan("together", "Twelve short prompts at once", crowd(3, 12, prompt=(1, 60), output=(1, 40))),
        plan("staggered", "Short prompts that arrive one by one", short),
        plan("budget-small", "A budget below one prompt: chunks over many steps", long, token_budget=64),
        plan(
            "budget-tight",
            "A budget that decodes alone nearly use up",
            crowd(4, 20, prompt=(1, 30), output=(10, 40)),
            token_budget=16,
        ),
        plan(
            "few-places",
            "More requests than places in the batch",
            crowd(5, 14, prompt=(10, 80), output=(3, 30)),
            max_sequences=3,
        ),
        plan("one-place", "One at a time", crowd(6, 5, prompt=(1, 90), output=(1, 12)), max_sequences=1),
        plan(
            "long-prefill",
            "Chunks capped while others wait or run, not for one alone",
            [*long, PlannedRequest(prompt=[(77, 400)], max_tokens=5, at_step=80)],
            long_prefill_token_threshold=48,
        ),
        plan(
            "unchunked",
            "Chunked prefill off: a prompt waits until the budget holds all of it",
            long,
            chunked_prefill=False,
        ),
        plan(
            "to-the-limit",
            "Prompts so long that max_model_len ends the output",
            crowd(7, 6, prompt=(470, 508), output=(60, 60), within=4),
        ),
        plan(
            "natural-ends",
            "Sampled outputs that end by stop tokens at unforeseen lengths",
            changed(
                crowd(8, 14, prompt=(5, 80), output=(80, 80), within=15), lambda index, _: {"stop_ids": 20 + 5 * index}
            ),
        ),
    ]


def _block_runs() -> list[PlannedRun]:
    heavy = crowd(11, 12, prompt=(20, 120), output=(60, 160), within=6)
    return [
        plan("preemption", "Far too few blocks: recompute preemption again and again", heavy, blocks_total=20),
        plan("preemption-uncached", "The same without prefix caching", heavy, blocks_total=20, prefix_caching=False),
        plan(
            "preemption-small-budget",
            "Preemption with recompute in small chunks",
            heavy,
            blocks_total=24,
            token_budget=48,
        ),
        plan(
            "preemption-long-prompts",
            "Long prompts against few blocks",
            crowd(12, 8, prompt=(200, 420), output=(40, 90), within=5),
            blocks_total=18,
        ),
        plan("watermark", "A tenth of the blocks kept free at admission", heavy, blocks_total=30, watermark=0.1),
        plan(
            "first-chunk-only",
            "Admission looks at the first chunk only",
            crowd(13, 8, prompt=(200, 420), output=(20, 60)),
            blocks_total=26,
            token_budget=96,
            reserve_full_prompt=False,
        ),
        plan(
            "cancels",
            "Running, preempted and waiting ones are cancelled",
            changed(
                heavy, lambda index, request: {"cancel_at_step": request.at_step + 7 * index if index % 2 else None}
            ),
            blocks_total=20,
        ),
        plan(
            "churn",
            "Many short ones through a small pool: the order of free blocks",
            crowd(14, 40, prompt=(1, 100), output=(1, 25), within=60),
            blocks_total=24,
            max_sequences=8,
        ),
        plan("block-64", "Blocks of 64 tokens", heavy, blocks_total=16, block_size=64),
    ]


def _prefix_runs() -> list[PlannedRun]:
    rng = random.Random(21)
    shared = [
        PlannedRequest(
            prompt=[(500 + index % 3, 130), (600 + index, rng.randint(1, 60))],
            max_tokens=rng.randint(2, 40),
            at_step=index * 3,
        )
        for index in range(16)
    ]
    whole = [PlannedRequest(prompt=[(700, 128)], max_tokens=6, at_step=2 * index) for index in range(6)]
    turns = [PlannedRequest(prompt=[(800, 40 * turn + 40)], max_tokens=8, at_step=12 * turn) for turn in range(6)]
    return [
        plan("shared-prefixes", "Three prefixes shared by sixteen prompts", shared),
        plan("shared-prefixes-few-blocks", "The same where the cache is reused all the time", shared, blocks_total=18),
        plan(
            "shared-prefixes-at-once",
            "Equal prefixes in one step: blocks of equal content",
            changed(shared, lambda *_: {"at_step": 0}),
        ),
        plan(
            "whole-prompt-cached",
            "A prompt of full blocks that is cached entirely: its last block is computed again",
            whole,
        ),
        plan("growing-prompts", "Each prompt extends the one before", turns, blocks_total=24),
        plan(
            "shared-and-preempted",
            "Preempted sequences find their own blocks again",
            changed(shared, lambda *_: {"max_tokens": 90}),
            blocks_total=24,
        ),
        plan(
            "everything",
            "Shared prefixes, cancels, stops, few blocks and a small budget",
            _everything(),
            blocks_total=24,
            token_budget=96,
            long_prefill_token_threshold=64,
        ),
    ]


def _everything() -> list[PlannedRequest]:
    rng = random.Random(41)
    return [
        PlannedRequest(
            prompt=[(900 + index % 4, rng.choice([32, 64, 100, 160])), (950 + index, rng.randint(1, 80))],
            max_tokens=rng.randint(1, 90),
            at_step=rng.randint(0, 60),
            cancel_at_step=rng.randint(10, 90) if index % 5 == 0 else None,
            stop_ids=10 if index % 3 == 0 else 0,
        )
        for index in range(30)
    ]


def _async_runs() -> list[PlannedRun]:
    heavy = crowd(51, 12, prompt=(20, 120), output=(60, 160), within=6)
    stops = changed(
        crowd(52, 14, prompt=(5, 80), output=(80, 80), within=15), lambda index, _: {"stop_ids": 20 + 5 * index}
    )
    return [
        plan(
            "async",
            "Async scheduling: a step is scheduled before the last one's tokens are known",
            crowd(53, 12, prompt=(1, 90), output=(1, 40), within=10),
            async_scheduling=True,
        ),
        plan(
            "async-natural-ends",
            "Async scheduling with ends that are known one step late",
            stops,
            async_scheduling=True,
        ),
        plan(
            "async-preemption",
            "Async scheduling, preemption of what is under way",
            heavy,
            async_scheduling=True,
            blocks_total=20,
        ),
        plan(
            "async-everything",
            "Async scheduling with all the rest",
            _everything(),
            async_scheduling=True,
            blocks_total=24,
            token_budget=96,
        ),
        plan(
            "async-long-prompts",
            "Async scheduling at max_model_len, with prompts in chunks",
            crowd(55, 8, prompt=(400, 500), output=(40, 90), within=10),
            async_scheduling=True,
            token_budget=128,
        ),
    ]

"""Constraints on a real engine: tried in a process of their own, remembered, and metered while they match."""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from millrace.actor.engine import SequenceAdded
from millrace.contracts.ingress import FinishReason
from millrace.contracts.worker import Sampling, StructuredOutput
from tokenizers.pre_tokenizers import ByteLevel

from services.worker.vllm_engine import grammar_check
from tests.engine.bench_engine import BenchEngine

PROMPT = list(range(40, 60))


def pattern(text: str) -> StructuredOutput:
    return StructuredOutput(json_schema=json.dumps({"type": "string", "pattern": text}))


@pytest.mark.parametrize(
    ("constraint", "sentence"),
    [
        (pattern("(a{1,9999}){1,9999}"), " s to compile"),
        (pattern("^(?=a)b$"), "Lookahead assertion is not supported and is ignored in regex"),
        (StructuredOutput(json_schema='{"type":"number","multipleOf":0.5}'), "not supported"),
        (StructuredOutput(regex="(" * 9_000 + "a" + ")" * 9_000), "Nest layer exceeded"),
        (StructuredOutput(grammar="root ::= root"), "allows no output"),
        (StructuredOutput(grammar='root ::= ("a"'), ""),
        (StructuredOutput(regex="(ab"), ""),
        (StructuredOutput(json_schema='{"$ref": "https://example.com/schema.json"}'), ""),
        (StructuredOutput(json_schema='{"$ref": "#/$defs/nothing"}'), ""),
    ],
    ids=["pattern", "lookahead", "multipleOf", "nested", "endless", "half a grammar", "half a regex", "far", "nowhere"],
)
def test_what_cannot_be_compiled_in_time_whole_and_alive_is_refused_before_the_engine_has_it(
    engine: BenchEngine, constraint: StructuredOutput, sentence: str
) -> None:
    for attempt in range(2):
        name = engine.add(PROMPT, Sampling(max_tokens=5, structured=constraint))
        assert sentence in engine.rejection(name), attempt
    assert not engine.failures
    assert engine.run(PROMPT, Sampling(max_tokens=3, ignore_eos=True)).finish is FinishReason.LENGTH


def fill_memory() -> None:
    filled = bytearray(64 << 30)  # at once: a busy machine takes seconds for many pieces
    assert not filled


class Compiler:
    """A manager of constraints whose compiler does something else."""

    def __init__(self, does: Callable[[], object]) -> None:
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(is_diffusion=False),
            structured_outputs_config=SimpleNamespace(backend="xgrammar"),
        )
        self.tokenizer = object()
        self.backend = SimpleNamespace(allocate_token_bitmask=np.ones)
        self._does = does

    def grammar_init(self, request: Any) -> None:
        self._does()
        request.structured_output_request.grammar = SimpleNamespace(fill_bitmask=lambda bitmask, row: None)


@pytest.mark.parametrize(
    ("does", "sentence", "lasting"),
    [
        (lambda: time.sleep(60), "took more than 4.0 s to compile", False),
        (fill_memory, "MemoryError", True),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "crashes its compiler", True),
    ],
    ids=["sleeps", "memory", "crash"],
)
def test_a_trial_is_given_up_whatever_the_compiler_does(
    does: Callable[[], object], sentence: str, *, lasting: bool
) -> None:
    manager: Any = Compiler(does)
    verdict = verdict_of(manager)
    assert sentence in verdict.refusal
    assert verdict.lasting == lasting


def verdict_of(manager: Any) -> grammar_check.TrialVerdict:
    question = msgspec.msgpack.encode(StructuredOutput(regex="a"))
    trials, answer = grammar_check._tried(grammar_check._Trials(manager), manager, question)
    trials._end()
    return msgspec.msgpack.decode(answer, type=grammar_check.TrialVerdict)


def test_a_trial_that_was_forked_at_a_bad_moment_is_made_again(tmp_path: Path) -> None:
    def first_time_never() -> None:
        if not (once := tmp_path / "once").exists():
            once.touch()
            time.sleep(60)

    manager: Any = Compiler(first_time_never)
    assert not verdict_of(manager).refusal


def test_a_sequence_that_is_cancelled_on_trial_is_not_added(engine: BenchEngine) -> None:
    name = engine.add(PROMPT, Sampling(max_tokens=5, structured=StructuredOutput(regex="[a-c]{5}")))
    engine.cancel(name)
    assert engine.run(PROMPT, Sampling(max_tokens=9, structured=StructuredOutput(regex="[a-c]{5}"))).finish
    assert name not in {event.sequence for event in engine.events if isinstance(event, SequenceAdded)}


@pytest.mark.parametrize(
    "constraint",
    [StructuredOutput(regex="(a*)*b"), StructuredOutput(grammar='root ::= root root root | root root | "a"')],
    ids=["regex", "grammar"],
)
def test_a_grammar_that_gets_slow_to_match_ends_its_own_sequence(
    engine: BenchEngine, constraint: StructuredOutput
) -> None:
    wanted = sorted(ByteLevel.alphabet()).index("a")
    slow = engine.add(PROMPT, Sampling(max_tokens=900, logit_bias={wanted: 100.0}, structured=constraint))
    beside = engine.run(PROMPT, Sampling(max_tokens=200, ignore_eos=True))
    assert len(beside.tokens) == 200
    engine.until(lambda: slow in engine.decoded and engine.decoded[slow].finish is not None)
    assert engine.decoded[slow].finish is FinishReason.ERROR
    assert set(engine.decoded[slow].tokens) == {wanted}
    assert not engine.failures

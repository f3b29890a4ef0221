"""What a call must give, whatever happens on the way: the run without faults, one sequence at a time.

A modelled engine's tokens are a function of prompt, seed and position, so one engine that nothing disturbs says what
every client must see, to the character.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from millrace.actor.engine import EngineSequence
from millrace.contracts.ingress import FinishReason
from millrace.contracts.worker import Sampling
from millrace.enginemodel.engine import ModelledEngine
from services.ingress.calls import Call
from services.ingress.text import TextStream, Vocabulary


class ExpectedChoice(msgspec.Struct, frozen=True):
    """One choice as it must end.

    Attributes:
        tokens: Output tokens that count for usage.
        finish_reason: ``stop`` or ``length``.
    """

    text: str
    tokens: int
    finish_reason: str


class Oracle:
    """Knows the outcome of every call. ``build`` makes an engine like those of the cluster."""

    def __init__(self, build: Callable[[], ModelledEngine], vocabulary: Vocabulary) -> None:
        self._build = build
        self._vocabulary = vocabulary

    def choices(self, call: Call) -> list[ExpectedChoice]:
        """All choices of a call, by index."""
        return [self._choice(call, index) for index in range(len(call.prompts) * call.n)]

    def _choice(self, call: Call, index: int) -> ExpectedChoice:
        seed = call.sampling.seed
        sampling = call.sampling
        if seed is not None:
            sampling = msgspec.structs.replace(sampling, seed=seed + index % call.n)
        tokens, finish = self._decode(call.prompts[index // call.n], sampling)
        stream = TextStream(
            self._vocabulary, call.stop, call.include_stop, call.skip_special_tokens, sampling.min_tokens
        )
        text = stream.push(tokens, True, finish is FinishReason.STOP)
        if text.stop_match is not None:
            return ExpectedChoice(text.text, text.tokens_used, "stop")
        return ExpectedChoice(text.text, len(tokens), "stop" if finish is FinishReason.STOP else "length")

    def _decode(self, prompt: list[int], sampling: Sampling) -> tuple[list[int], FinishReason]:
        engine = self._build()
        refusal = engine.add(EngineSequence(sequence="only", prompt_token_ids=prompt, sampling=sampling))
        assert refusal is None, refusal
        tokens: list[int] = []
        now_ns = 0
        while (duration_ns := engine.begin_step(now_ns)) is not None:
            now_ns += duration_ns
            for output in engine.complete_step(now_ns, with_snapshot=False).outputs:
                tokens += output.token_ids
                if output.finish is not None:
                    return tokens, output.finish
        raise AssertionError("the engine stopped before the sequence did")

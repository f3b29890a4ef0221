"""Expected result of a call, whatever happens on the way: the run without faults, one sequence at a time.

A modelled engine's tokens follow from the KV before them and the seed. So one engine that nothing disturbs yields what
every client must see, to the character. Sequences that are sampled without a seed differ from engine to engine. Two
things are certain of them: their length, and that each token follows from all those that the client saw before it, as
one of the engines would have continued.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
from millrace.actor.engine import EngineSequence
from millrace.contracts.ingress import FinishReason
from millrace.contracts.worker import Sampling
from millrace.enginemodel.engine import ModelledEngine
from millrace.enginemodel.tokens import Vocabulary as EngineVocabulary
from millrace.enginemodel.tokens import kv_digest, next_token

from services.ingress.calls.messages import Call
from services.ingress.tokens.detokenizer import TextStream, TokenizerVocabulary

#: A run of decode steps may take this long: longer than any sequence.
RUN_NS = 1 << 60


class ExpectedChoice(msgspec.Struct, frozen=True):
    """One choice as it must end.

    Attributes:
        tokens: Output tokens that count for usage.
        finish_reason: ``stop`` or ``length``.
    """

    text: str
    tokens: int
    finish_reason: str


class History:
    """Judges a choice that is sampled without a seed: a token that was put behind others than its engine saw follows
    from nothing.
    """

    def __init__(self, prompt: list[int], noises: Sequence[int], words: EngineVocabulary, ids: dict[str, int]) -> None:
        """Args: noises: of all engines that there were, a live view. ids: token of each character."""
        self._digest = kv_digest(prompt)
        self._noises, self._table, self._ids = noises, words.table(), ids

    def take(self, text: str) -> str:
        """The client saw more. Returns the first characters that follow from nothing; empty where all do."""
        for index, character in enumerate(text):
            token = self._ids[character]
            if not any(next_token(self._digest, noise, self._table) == token for noise in self._noises):
                return text[index:]
            self._digest = kv_digest([token], self._digest)
        return ""


class Oracle:
    """Knows the outcome of every call. ``build`` makes an engine like those of the cluster, that tells a sequence's
    tokens with its end: it decodes in runs of steps, in a tenth of the time.

    Attributes:
        noises: Of all engines of the cluster so far.
    """

    def __init__(
        self, build: Callable[[], ModelledEngine], vocabulary: TokenizerVocabulary, words: EngineVocabulary
    ) -> None:
        """Args: words: of the engines; each of them is one character."""
        self.noises: list[int] = []
        self._build = build
        self._vocabulary = vocabulary
        self._words = words
        self._ids = {vocabulary.piece_text(token): token for token in words.table()}

    def histories(self, call: Call) -> list[History]:
        """For each choice of a call that is sampled without a seed; none for other calls, whose text is known."""
        sampling = call.sampling
        if sampling.seed is not None or sampling.temperature == 0:
            return []
        count = len(call.prompts) * call.n
        return [History(call.prompts[index // call.n], self.noises, self._words, self._ids) for index in range(count)]

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
        while (duration_ns := engine.begin_step(now_ns, RUN_NS)) is not None:
            now_ns += duration_ns
            for output in engine.complete_step(now_ns, with_snapshot=False).outputs:
                tokens += output.token_ids
                if output.finish is not None:
                    return tokens, output.finish
        raise AssertionError("the engine stopped before the sequence did")

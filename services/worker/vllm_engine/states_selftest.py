"""An engine's test of its hidden states at its start: greedy requests must sample what their states say.

Three requests run together, one with a prompt of several chunks, so that rows are left out and batches change. The
runner compares each row it reads with the token that is sampled (``hidden_states.HeadReader.compare``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from millrace.actor.engine import EngineEvent, EngineFailed, EngineSequence, EngineStepped, SequenceRejected
from millrace.contracts.worker import Sampling

from services.worker.vllm_engine.kv_selftest import PATIENCE_S, Tested
from services.worker.vllm_engine.length_head_reader import STATES

#: Output tokens of each request.
TOKENS = 12
#: Token ids below this are special in the tokenizers that there are.
_FIRST_ID = 6
_SHORT, _MEDIUM = 5, 33


class StatesTest:
    """One run of the requests. Hears everything that the engine says meanwhile.

    Args:
        piece: Tokens of a prompt that one step computes at most.
    """

    def __init__(self, engine: Tested, *, vocabulary: int, max_model_len: int, piece: int) -> None:
        self._engine = engine
        longest = max(1, max_model_len - TOKENS - 1)
        lengths = (min(_SHORT, longest), min(_MEDIUM, longest), min(piece + 7, longest))
        known = max(1, vocabulary - _FIRST_ID)
        self._prompts = [[_FIRST_ID + (at * 31 + length) % known for at in range(length)] for length in lengths]
        self._left: set[str] = set()
        self._failed = ""
        self._over = asyncio.Event()

    def hear(self, event: EngineEvent) -> None:
        match event:
            case EngineStepped(outputs=outputs):
                self._left -= {output.sequence for output in outputs if output.finish is not None}
            case SequenceRejected(sequence=sequence, detail=detail) if sequence in self._left:
                self._failed = detail
                self._left.clear()
            case EngineFailed(detail=detail):
                self._failed = detail
                self._left.clear()
        if not self._left:
            self._over.set()

    async def run(self) -> str:
        """Decodes them to their ends; why that was not possible, or nothing."""
        sampling = Sampling(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
        names = [f"states-self-test.{index}" for index in range(len(self._prompts))]
        self._left = set(names)
        for name, prompt in zip(names, self._prompts, strict=True):
            self._engine.add(EngineSequence(sequence=name, prompt_token_ids=prompt, sampling=sampling))
        try:
            await asyncio.wait_for(self._over.wait(), PATIENCE_S)
        except TimeoutError:
            self._engine.cancel(names)
            return "the self-test of hidden states did not end"
        return self._failed


#: Who hears what an engine says.
Listener = Callable[[EngineEvent], None]


async def read_states(engine: Tested, llm: Any, listen: Callable[[Listener], Listener]) -> str:
    """Begins to read hidden states, where that is wanted; why it will not, or nothing.

    Args:
        listen: Sets who hears the engine, and gives who did before.
    """
    if STATES not in llm.vllm_config.additional_config:
        return ""
    core, model, scheduling = llm.engine_core, llm.vllm_config.model_config, llm.vllm_config.scheduler_config
    if refusal := await core.call_utility_async("millrace_states_begin"):
        return str(refusal)
    test = StatesTest(
        engine,
        vocabulary=model.get_vocab_size(),
        max_model_len=model.max_model_len,
        piece=scheduling.long_prefill_token_threshold or scheduling.max_num_batched_tokens,
    )
    before = listen(test.hear)
    try:
        failure = await test.run()
    finally:
        listen(before)
    return str(await core.call_utility_async("millrace_states_prove", failure))

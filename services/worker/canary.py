"""Asks an engine one prompt at its start: an instance that says something else than it should never serves."""

from __future__ import annotations

import asyncio
from pathlib import Path

from millrace.actor.engine import Engine, EngineEvent, EngineSequence, EngineStepped, SequenceRejected
from millrace.actor.errors import EngineStartFailed
from millrace.contracts.worker import Sampling

from services.worker.config import CanaryConfig

#: How long the answer may take, seconds.
PATIENCE_S = 120.0

_SEQUENCE = "canary.0"


class Canary:
    """One question. Hears everything that the engine says meanwhile."""

    def __init__(self, config: CanaryConfig, model_path: str) -> None:
        from tokenizers import Tokenizer

        self._config = config
        self._tokenizer = Tokenizer.from_file(str(Path(model_path) / "tokenizer.json"))
        self._tokens: list[int] = []
        self._failed = ""
        self._over = asyncio.Event()

    def hear(self, event: EngineEvent) -> None:
        match event:
            case EngineStepped(outputs=outputs):
                for output in outputs:
                    self._tokens += output.token_ids
                    if output.finish is not None:
                        self._over.set()
            case SequenceRejected(detail=detail):
                self._failed = detail
                self._over.set()

    async def ask(self, engine: Engine) -> None:
        """Decodes the answer greedily, as far as the expected text goes.

        Raises:
            EngineStartFailed: it is another one, or there is none.
        """
        expected = self._config.text
        length = len(self._tokenizer.encode(expected, add_special_tokens=False).ids)
        sampling = Sampling(max_tokens=max(1, length), temperature=0.0, ignore_eos=True)
        prompt = self._tokenizer.encode(self._config.prompt).ids
        engine.add(EngineSequence(sequence=_SEQUENCE, prompt_token_ids=prompt, sampling=sampling))
        try:
            await asyncio.wait_for(self._over.wait(), PATIENCE_S)
        except TimeoutError:
            raise EngineStartFailed(f"canary: no answer in {PATIENCE_S:g} s") from None
        said = self._tokenizer.decode(self._tokens)
        if self._failed or not said.startswith(expected):
            raise EngineStartFailed(f"canary: {self._failed or f'the engine says {said!r}, not {expected!r}'}")

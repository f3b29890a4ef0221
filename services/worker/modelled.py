"""A modelled engine in wall-clock time: the Engine port without vLLM.

One timer per step and engine; dozens of engines share one process.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from struct import pack, unpack

import msgspec
from millrace.actor.clock import unix_ns
from millrace.actor.engine import EngineEvent, EngineSequence, EngineStepped, KvCommand
from millrace.actor.errors import EngineStartFailed
from millrace.contracts.bounds import Natural, Wait
from millrace.contracts.ingress import FinishReason
from millrace.contracts.kv import KvEndpoint
from millrace.contracts.scheduler import scheduler_fields
from millrace.contracts.status import EngineDescription
from millrace.contracts.worker import Pooled
from millrace.enginemodel.coefficients import load_step_time
from millrace.enginemodel.engine import ModelledEngine
from millrace.enginemodel.network import TOKEN_BYTES, ConstantNetwork, modelled_endpoint
from millrace.enginemodel.pacing import PacedEngine
from millrace.enginemodel.parameters import EngineParameters
from millrace.enginemodel.tokens import OutputLengths, Vocabulary

from services.worker.config import WorkerConfig

MODEL_VERSION = "1"


#: Speed at which KV of other engines comes here, and the time before the first byte of each read.
WIRE_BYTES_PER_S, WIRE_LATENCY_NS = 12.5e9, 100_000


class ModelledConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A modelled engine.

    Attributes:
        coefficients: Step-time coefficients: a set that ships (libs/millrace/enginemodel/coefficients), or a file.
        speed: How much faster than modelled time passes; 0 for steps that take no time but their own computing.
        lengths: Spread of natural output lengths.
        tokenizer: Folder with tokenizer.json and tokenizer_config.json, for printable output; empty for the worker's
            ``model_path``, and where that is empty too, for ids as in ASCII.
        snapshot_interval_ns: Least time between two snapshots while it runs; 0 for one with every step.
    """

    coefficients: str = "cpu-8m"
    speed: Wait = 1.0
    lengths: OutputLengths = OutputLengths()
    tokenizer: str = ""
    snapshot_interval_ns: Natural = 0


def modelled_parameters(config: WorkerConfig) -> EngineParameters:
    """Scheduler limits of a modelled engine: the same keys as vLLM's.

    Raises:
        ValueError: no engine could run with them.
    """
    plain = EngineParameters()
    length, block_size = config.max_model_len or plain.max_model_len, config.block_size or plain.block_size
    return EngineParameters(
        max_model_len=length,
        max_sequences=config.max_num_seqs or plain.max_sequences,
        token_budget=config.max_num_batched_tokens or plain.token_budget,
        block_size=block_size,
        blocks_total=config.kv_blocks or max(plain.blocks_total, -(-length // block_size)),
        prefix_caching=config.enable_prefix_caching is not False,
        async_scheduling=bool(config.async_scheduling),
    )


class ModelledLiveEngine:
    """Implements the Engine port. Use from one event loop thread."""

    def __init__(
        self,
        config: ModelledConfig,
        parameters: EngineParameters | None = None,
        *,
        model: str = "modelled",
        model_path: str = "",
        moves: bool = True,
    ) -> None:
        """Args:
        parameters: Scheduler limits; the engine model's defaults for None.
        model_path: Folder of the model whose tokenizer is used where the configuration names none.
        moves: Whether it gives and takes KV.
        """
        self._config = config
        self._parameters = parameters or EngineParameters()
        self._moves = moves
        self._tokenizer = config.tokenizer or model_path
        self._pooling: dict[str, list[int]] = {}
        self._model = model
        self._paced: PacedEngine | None = None

    async def start(self, listener: Callable[[EngineEvent], None]) -> EngineDescription:
        """Builds the engine. Raises EngineStartFailed where the configuration is wrong."""
        assert self._paced is None, "start() is called once"
        config = self._config
        try:
            step_time = load_step_time(config.coefficients)
            vocabulary = read_vocabulary(self._tokenizer) if self._tokenizer else Vocabulary()
        except (ValueError, KeyError, OSError, msgspec.DecodeError) as error:
            raise EngineStartFailed(f"{type(error).__name__}: {error}") from error
        clock = LoopClock()
        kv = self._endpoint() if self._moves else None
        self._paced = PacedEngine(
            ModelledEngine(self._parameters, step_time, vocabulary=vocabulary, lengths=config.lengths, kv=kv),
            clock,
            lambda event: listener(self._with_pooled(event)),
            speed=config.speed,
            snapshot_interval_ns=config.snapshot_interval_ns,
        )
        self._paced.connect(ConstantNetwork(clock, bytes_per_s=WIRE_BYTES_PER_S, latency_ns=WIRE_LATENCY_NS))
        return self._info(kv)

    def _endpoint(self) -> KvEndpoint:
        return modelled_endpoint(
            self._parameters,
            key=secrets.token_hex(8),
            model=self._model,
            token_bytes=TOKEN_BYTES,
        )

    def _info(self, kv: KvEndpoint | None) -> EngineDescription:
        return EngineDescription(
            engine="modelled",
            engine_version=MODEL_VERSION,
            model=self._model,
            step_time=self._config.coefficients,
            kv=kv,
            kv_refusal="" if kv is not None else "migration is off",
            **scheduler_fields(self._parameters),
        )

    def add(self, sequence: EngineSequence) -> None:
        """Adds a sequence; the answer comes with the loop's next turn."""
        if sequence.sampling.pooling is not None:
            self._pooling[sequence.sequence] = sequence.prompt_token_ids
        self._running().add(sequence)

    def _with_pooled(self, event: EngineEvent) -> EngineEvent:
        """The event with a vector for each prompt whose pooled output was asked for: eight numbers, equal for equal
        prompts, in place of the one token that the engine model decodes.
        """
        if not self._pooling or not isinstance(event, EngineStepped):
            return event
        outputs = [
            output
            if (prompt := self._pooling.pop(output.sequence, None)) is None or not output.token_ids
            else msgspec.structs.replace(output, pooled=[_vector(prompt)], finish=FinishReason.STOP)
            for output in event.outputs
        ]
        return msgspec.structs.replace(event, outputs=outputs)

    def cancel(self, sequences: list[str]) -> None:
        for sequence in sequences:
            self._pooling.pop(sequence, None)
        self._running().cancel(sequences)

    def move(self, command: KvCommand) -> None:
        self._running().move(command)

    def load_adapter(self, name: str, path: str) -> None:
        raise NotImplementedError("its information says that it takes no adapters")

    def limit_step(self, tokens: int) -> None:
        self._running().limit_step(tokens)

    async def stop(self) -> None:
        if self._paced is not None:
            self._paced.stop()

    def fail(self, detail: str) -> None:
        """Lets the engine die, for drills: EngineFailed is its last word."""
        self._running().fail(detail)

    def _running(self) -> PacedEngine:
        assert self._paced is not None, "start() first"
        return self._paced


def _vector(prompt: list[int]) -> bytes:
    digest = blake2b(msgspec.msgpack.encode(prompt), digest_size=16).digest()
    values = [half / 32_768 for half in unpack("<8h", digest)]
    return msgspec.msgpack.encode(Pooled([len(values)], pack(f"<{len(values)}f", *values)))


class LoopClock:
    """The running event loop's clock as unix ns, fixed against the system's clock once, so that it never goes back."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._offset_ns = unix_ns() - int(self._loop.time() * 1e9)

    def now_ns(self) -> int:
        return int(self._loop.time() * 1e9) + self._offset_ns

    def at(self, time_ns: int, callback: Callable[[], None]) -> None:
        if time_ns == 0:
            self._loop.call_soon(callback)
        else:
            self._loop.call_at((time_ns - self._offset_ns) / 1e9, callback)


def read_vocabulary(folder: str) -> Vocabulary:
    """Ids for printable text out of a Hugging Face tokenizer's files.

    Raises:
        ValueError: the files lack what is needed. OSError: they cannot be read.
    """
    path = Path(folder)
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    config = json.loads((path / "tokenizer_config.json").read_text())
    ids: dict[str, int] = dict(tokenizer["model"]["vocab"])
    ids.update((token["content"], token["id"]) for token in tokenizer.get("added_tokens", []))
    eos = config.get("eos_token")
    eos = eos["content"] if isinstance(eos, dict) else eos
    letters = tuple(ids[letter] for letter in "etaoinshrdlucmfwypvbgkjqxz" if letter in ids)
    spaces = tuple(ids[space] for space in ("Ġ", " ", "▁") if space in ids)[:1]
    if eos not in ids or not letters or not spaces:
        raise ValueError(f"{path}: the tokenizer names no eos_token, or has no tokens for single letters and the space")
    return Vocabulary(size=max(ids.values()) + 1, eos_token_id=ids[eos], letters=letters, spaces=spaces)

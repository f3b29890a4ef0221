"""Rig for tests of ingress's HTTP side: a model folder, a core that answers by itself, a served port."""

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from struct import pack
from types import MappingProxyType
from typing import Any

import msgspec
import pytest
import uvloop
from millrace.actor.effects import RecordSpan
from millrace.actor.store_link import StoreAway
from millrace.actor.stored_values import KeyConflict
from millrace.cluster.model_parsers import ModelParsers
from millrace.contracts.codec import decode, encode
from millrace.contracts.message import Body
from millrace.contracts.worker import Pooled
from millrace.http.client_connection import ConnectionLimits
from millrace.http.server import HttpServer
from prometheus_client import CollectorRegistry
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from services.ingress.adapters import AdapterDone
from services.ingress.api.models import ModelRegistry, ServedModel, Serving
from services.ingress.api.tokenizer import ModelTokenizer
from services.ingress.calls.messages import (
    AcceptCall,
    Call,
    CallAbandoned,
    CallSubmitted,
    ChoiceDelta,
    CompleteCall,
    DeliverDeltas,
    DeltaLogprob,
    FailCall,
    RefusalKind,
    RefuseCall,
    Usage,
)
from services.ingress.http.adapters import AdapterOrders
from services.ingress.http.app import App
from services.ingress.http.keys import ApiKeyStore
from services.ingress.http.metrics import HttpMetrics
from services.ingress.http.open_calls import OpenCalls, Tracer
from services.ingress.http.responses import Responses
from services.ingress.parsing.messages import ParsedModel
from services.ingress.parsing.process import ParserProcess

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TOOL_TEMPLATE = (
    "{% if tools %}<|system|>{% for t in tools %}{{ t | tojson }}{% endfor %} answer in <tool_call> tags<|end|>"
    "{% endif %}" + TEMPLATE
)
MAX_MODEL_LEN = 2048


@pytest.fixture(scope="module")
def event_loop_policy() -> uvloop.EventLoopPolicy:
    """The loop that ingress really runs on."""
    return uvloop.EventLoopPolicy()


def write_model_folder(folder: Path, template: str = TEMPLATE, max_model_len: int = MAX_MODEL_LEN) -> Path:
    """A byte-level tokenizer without merges, with a chat template, as a Hugging Face folder."""
    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<|end|>", "<|user|>", "<|assistant|>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, "eos_token": "<|end|>"}))
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": max_model_len}))
    return folder


class MemoryValues:
    """The store of responses, without a server; ``away``: it does not answer."""

    def __init__(self) -> None:
        self.kept: dict[tuple[str, str], tuple[Body | None, int]] = {}
        self.away = False
        self._revision = 0

    async def get(self, bucket: str, key: str) -> tuple[Body | None, int]:
        await self._answer()
        return self.kept.get((bucket, key), (None, 0))

    async def put(self, bucket: str, key: str, value: Body, expected: int | None = None) -> int:
        await self._answer()
        found, revision = self.kept.get((bucket, key), (None, 0))
        if expected is not None and revision != expected and (expected or found):
            raise KeyConflict(key)
        self._revision += 1
        self.kept[bucket, key] = (decode(encode(value)), self._revision)
        return self._revision

    async def delete(self, bucket: str, key: str) -> None:
        await self._answer()
        self._revision += 1
        self.kept[bucket, key] = (None, self._revision)  # a marker, as the server leaves it

    async def _answer(self) -> None:
        await asyncio.sleep(0)
        if self.away:
            raise StoreAway


class FakeCore:
    """Answers each call with ``w0 w1 ...``, one word per token and delivery, until max_tokens; keeps what it was told.

    Attributes:
        pace_s: Time between deliveries.
        refuse: Refuses every call so.
        waits: Takes no call.
        fail_after: Fails a call after so many tokens.
        words: What token i says.
        finish: Finish reason of every choice.
        tokens_max: Tokens after which it ends whatever was asked.
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.abandoned: list[CallAbandoned] = []
        self.pace_s = 0.0
        self.waits = False
        self.refuse: tuple[RefusalKind, str, float] | None = None
        self.fail_after: int | None = None
        self.words: Callable[[Call, int], str] = lambda call, i: f"w{i} "
        self.finish = "length"
        self.tokens_max = 1 << 20
        self.handlers: dict[type, Callable[[Any], None]] = {}
        self._running: dict[str, asyncio.Task[None]] = {}

    def say(self, text: str, finish: str = "length") -> int:
        """Answer with a text, a character per token; return its tokens."""
        self.words = lambda call, i: text[i] if i < len(text) else ""
        self.finish = finish
        return len(text)

    def deliver(self, body: CallSubmitted | CallAbandoned, traceparent: str) -> None:
        if isinstance(body, CallAbandoned):
            self.abandoned.append(body)
            self._running.pop(body.request).cancel()
            return
        self.calls.append(body.call)
        if self.waits:
            return
        if self.refuse is not None:
            kind, detail, retry = self.refuse
            self._do(RefuseCall(request=body.call.request, kind=kind, detail=detail, retry_after_s=retry))
            return
        self._running[body.call.request] = asyncio.get_running_loop().create_task(self._run(body.call))

    async def _run(self, call: Call) -> None:
        self._do(AcceptCall(request=call.request))
        choices = len(call.prompts) * call.n
        prompt_tokens = sum(map(len, call.prompts))
        tokens = min(call.sampling.max_tokens, self.tokens_max)
        if call.begun:
            said = "".join(self.words(call, i) for i in range(len(call.begun)))
            begun = ChoiceDelta(0, said, len(call.begun), token_ids=call.begun)
            self._do(DeliverDeltas(request=call.request, deltas=[begun], usage=Usage(prompt_tokens, len(call.begun))))
        for i in range(len(call.begun), tokens):
            await asyncio.sleep(self.pace_s)
            if i == self.fail_after:
                self._do(FailCall(request=call.request, kind=RefusalKind.CONTINUATION_FAILED, detail="no instance"))
                return
            last = i + 1 == tokens
            deltas = [self._delta(call, c, i, last) for c in range(choices)]
            self._do(DeliverDeltas(request=call.request, deltas=deltas, usage=Usage(prompt_tokens, (i + 1) * choices)))
        self._do(CompleteCall(request=call.request, usage=Usage(prompt_tokens, tokens * choices)))

    def _delta(self, call: Call, choice: int, i: int, last: bool) -> ChoiceDelta:
        if call.sampling.pooling is not None:
            return ChoiceDelta(
                choice, "", 1, self.finish, pooled=msgspec.msgpack.encode(Pooled([2], pack("<2f", 3, 4)))
            )
        word = self.words(call, i)
        logprobs = None
        if call.sampling.logprobs is not None:
            top = [(word, -0.5, word.encode())][: call.sampling.logprobs]
            logprobs = [DeltaLogprob(word, -0.5, word.encode(), top)]
        ids = [i] if call.tell_tokens else None
        return ChoiceDelta(choice, word, 1, self.finish if last else "", None, logprobs, ids)

    def _do(self, effect: Any) -> None:
        self.handlers[type(effect)](effect)


class Rig:
    """One served HTTP side over a FakeCore."""

    def __init__(self, core: FakeCore) -> None:
        self.core = core
        self.port = 0
        self.url = ""
        self.bugs: list[BaseException] = []
        self.spans: list[RecordSpan] = []
        self.instances = {"tiny": 1, "tools": 1}
        self.models: ModelRegistry
        self.calls: OpenCalls


LIMITS = ConnectionLimits(
    body_bytes_max=4_000_000, buffer_bytes_max=1_000_000, slow_reader_s=10.0, read_s=10.0, idle_s=60.0
)


@asynccontextmanager
async def served(
    folder: Path,
    *,
    keys: ApiKeyStore | None = None,
    limits: ConnectionLimits = LIMITS,
    core: FakeCore | None = None,
    cascades: Mapping[str, Sequence[str]] = MappingProxyType({}),
    parsers: Mapping[str, ModelParsers] = MappingProxyType({}),
    max_model_len: int = MAX_MODEL_LEN,
    values: MemoryValues | None = None,
    stored: bool = True,
    owner: str = "ingress-0.1",
    lost_s: float = 0.2,
) -> AsyncIterator[Rig]:
    """Serves models ``tiny`` and ``tools``, and cascades of them, on a free port of the loopback."""
    core = core or FakeCore()
    rig = Rig(core)
    served_models = {
        name: ServedModel(
            name=name,
            tokenizer=ModelTokenizer.load(write_model_folder(folder / name, template, max_model_len)),
            max_model_len=max_model_len,
            parsers=parsers.get(name, ModelParsers()),
        )
        for name, template in (("tiny", TEMPLATE), ("tools", TOOL_TEMPLATE))
    }
    registry_of_models = ModelRegistry(
        served_models, lambda name: Serving(rig.instances.get(name, 0)), lambda: cascades
    )
    metrics = HttpMetrics(CollectorRegistry())
    parsed = [ParsedModel(name, str(folder / name), each.reasoning, each.tool_calls) for name, each in parsers.items()]
    process = ParserProcess(parsed, lambda event, **fields: None)
    calls = OpenCalls(
        deliver=core.deliver,
        models=registry_of_models,
        metrics=metrics,
        tracer=Tracer(random.Random(7), 0.0),
        now_s=time.time,
        on_bug=lambda error, path: rig.bugs.append(error),
        on_span=rig.spans.append,
        keep_alive_s=5.0,
        parsers=process if parsers else None,
    )
    orders = AdapterOrders(deliver=core.deliver, models=registry_of_models, calls=calls)
    core.handlers = {**calls.handlers(), AdapterDone: orders.done}
    responses = Responses(
        calls=calls, models=registry_of_models, owner=owner, now_s=time.time, stored=stored, lost_s=lost_s
    )
    responses.values = values
    rig.models, rig.calls = registry_of_models, calls
    app = App(
        models=registry_of_models,
        calls=calls,
        responses=responses,
        adapters=orders,
        keys=keys,
        metrics=metrics,
        origins=["https://chat.example"],
    )
    server = HttpServer(app.handle, app.refused, limits=limits, connections_max=1000)
    metrics.connections = lambda: server.connections
    rig.port = await server.start("127.0.0.1", 0, reuse_port=False)
    rig.url = f"http://127.0.0.1:{rig.port}"
    running = asyncio.get_running_loop().create_task(process.run()) if parsers else None
    try:
        yield rig
    finally:
        if running is not None:
            running.cancel()
            await asyncio.wait([running])
        await server.stop(0.2)

"""An ingress process without sockets: what it publishes reaches engines here that answer at once."""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from pathlib import Path
from typing import Any, cast

import msgspec
from millrace.actor.config import TelemetryConfig
from millrace.actor.headers import write_headers
from millrace.actor.nats_parser import Taker
from millrace.actor.runtime_nats import NatsRuntime
from millrace.cluster.spec import TelemetrySpec
from millrace.contracts.codec import decode, encode
from millrace.contracts.ingress import FinishReason, TokenChunk, TokensGenerated
from millrace.contracts.local import KeyChanged
from millrace.contracts.message import Body, Message
from millrace.contracts.plan import Plan, Stage
from millrace.contracts.status import (
    BatchComposition,
    InstanceRecord,
    InstanceSummary,
    SequenceState,
    SequenceStatus,
    StatusSnapshot,
)
from millrace.contracts.subjects import Subjects, covers
from millrace.contracts.worker import SequenceAccepted, SubmitSequence
from millrace.hosting.companion import Companion
from millrace.http.client_connection import HttpConnection
from millrace.telemetry import open_telemetry

from bench.hot_path_clock import RequestClock
from deployment.ingress import predictor, tagger
from models.training.tokenizer import write_tokenizer
from services.ingress.__main__ import IngressProcess
from services.ingress.config import DispatchConfig, IngressConfig, ModelConfig
from services.ingress.parsing.messages import Answer, OutputRead, ParserOpened
from services.predictor.config import PredictorConfig
from services.tagger.config import TaggerConfig

MODEL = "m"
PROMPT = "List five animals and say which of them is the largest."
#: Requests between two snapshots of one instance: 2,000 requests a second, and one snapshot in 20 ms.
SNAPSHOT_EVERY = 40
#: Time between two requests on the rig's clock.
REQUEST_EVERY_NS = 600_000
#: Requests of one turn of the event loop.
REQUESTS_PER_TURN = 8
#: Sequences that each snapshot shows as running.
RUNNING = 8

TURNS: Any = [{"role": "user", "content": PROMPT}]
#: Path, body, and how many output tokens are asked for, by API.
API: dict[str, tuple[str, dict[str, Any], str]] = {
    "chat": ("/v1/chat/completions", {"messages": TURNS, "ignore_eos": True}, "max_tokens"),
    "responses": ("/v1/responses", {"input": TURNS, "ignore_eos": True, "store": False}, "max_output_tokens"),
    "messages": ("/v1/messages", {"messages": TURNS}, "max_tokens"),
}


class SilentTransport:
    """Takes a response and forgets it."""

    def __init__(self) -> None:
        self.responses = 0

    def write(self, data: bytes) -> None:
        self.responses += data.startswith(b"HTTP/1.1 200")

    def set_write_buffer_limits(self, high: int) -> None:
        """No limit."""

    def get_write_buffer_size(self) -> int:
        return 0


class SilentWatches:
    """Watches that the rig feeds itself."""

    def add(self, *_: Any) -> object:
        """Something that stands for the watch."""
        return self

    def close(self) -> None:
        """Nothing is open."""


class EchoParser:
    """Stands for the parser process's socket: of each question it says that all is text."""

    def __init__(self, process: Any) -> None:
        self._process = process
        self._answers: deque[bytes] = deque()
        self._opened = self._framed(ParserOpened(""))
        self._read = self._framed(OutputRead("", [("a", "", [])]))
        process._transport, process._ready = self, True

    def write(self, data: bytes) -> None:
        if (kind := data[6:16]) != b"CloseParse":
            self._answers.append(self._opened if kind == b"OpenParser" else self._read)

    def pump(self) -> bool:
        """Deliver what waits; whether there was anything."""
        told = bool(self._answers)
        while self._answers:
            self._process.data_received(self._answers.popleft())
        return told

    @staticmethod
    def _framed(answer: Answer) -> bytes:
        body = msgspec.msgpack.encode(answer)
        return len(body).to_bytes(4, "little") + body


class Engines:
    """Accept every sequence and answer with all its tokens in so many steps, once so many others have come since.

    Attributes:
        taken_ns: CPU time that went into them.
    """

    def __init__(self, names: list[str], now_ns: int, *, steps: int, held: int) -> None:
        self.names = names
        self._of_a_sequence = steps
        self._held_max = held
        self._held: deque[list[tuple[str, bytes, bytes]]] = deque()
        self.taken_ns = 0
        self.steps = 0
        self._incarnation = now_ns
        self._answers: deque[tuple[str, bytes, bytes]] = deque()
        self._takers: list[tuple[str, Taker]] = []
        self._routes: dict[str, list[Taker]] = {}

    def subscribe(self, subject: str, queue_group: str, taker: Taker) -> int:
        """As the client's ``subscribe_now``."""
        self._takers.append((subject, taker))
        self._routes.clear()
        return len(self._takers)

    def publish(self, subject: str, reply: str, headers: bytes, payload: bytes) -> bool:
        """As the client's ``publish_now``: submissions are answered, the rest is heard by nobody."""
        if subject.endswith(".submit"):
            begun = time.thread_time_ns()
            body = decode(payload)
            assert isinstance(body, SubmitSequence)
            self._answer(subject.split(".")[3], body, reply)
            self.taken_ns += time.thread_time_ns() - begun
        return True

    def _answer(self, instance: str, asked: SubmitSequence, reply: str) -> None:
        tokens = [97 + n % 26 for n in range(asked.sampling.max_tokens)]
        size = -(-len(tokens) // self._of_a_sequence)
        self._answers.append(_told(reply, SequenceAccepted(sequence=asked.sequence, epoch=asked.epoch), instance))
        output = []
        for begin in range(0, len(tokens), size):
            self.steps += 1
            finish = FinishReason.LENGTH if begin + size >= len(tokens) else None
            chunk = TokenChunk(asked.sequence, asked.epoch, begin, tokens[begin : begin + size], finish)
            told = TokensGenerated(instance=instance, incarnation=self._incarnation, step=self.steps, chunks=[chunk])
            output.append(_told(Subjects("local").tokens(asked.ingress), told, instance))
        self._held.append(output)
        while len(self._held) > self._held_max:
            self._answers += self._held.popleft()

    def tell(self, instance: str, now_ns: int) -> None:
        """A snapshot and a summary."""
        begun = time.thread_time_ns()
        subjects = Subjects("local")
        summary = f"{subjects.prefix}.summary.{MODEL}.{instance}"
        self._answers.append(_told(subjects.status(MODEL, instance), self._snapshot(instance, now_ns), instance))
        self._answers.append(_told(summary, self._summary(instance, now_ns), instance))
        self.taken_ns += time.thread_time_ns() - begun

    def pump(self) -> None:
        """Deliver what waits."""
        while self._answers:
            subject, headers, payload = self._answers.popleft()
            for taker in self._takers_of(subject):
                taker(subject, "", payload, headers)

    def _takers_of(self, subject: str) -> list[Taker]:
        if subject.startswith("_INBOX."):
            return [taker for pattern, taker in self._takers if pattern[:-1] == subject[: len(pattern) - 1]]
        if subject not in self._routes:
            self._routes[subject] = [taker for pattern, taker in self._takers if covers(pattern, subject)]
        return self._routes[subject]

    def record(self, instance: str) -> InstanceRecord:
        """Its registration."""
        return InstanceRecord(
            instance=instance,
            incarnation=self._incarnation,
            model=MODEL,
            engine="modelled",
            engine_version="1",
            max_model_len=4096,
            max_sequences=256,
            token_budget=8192,
            block_size=16,
            blocks_total=20_000,
            step_time="cpu-8m",
            host="bench",
        )

    def _snapshot(self, instance: str, now_ns: int) -> StatusSnapshot:
        self.steps += 1
        running = [
            SequenceStatus(f"x{n}.0", SequenceState.RUNNING, 32, 40, 8, 64, 3, now_ns, 16) for n in range(RUNNING)
        ]
        return StatusSnapshot(
            instance=instance,
            incarnation=self._incarnation,
            model=MODEL,
            step=self.steps,
            at_ns=now_ns,
            running=running,
            waiting=[],
            blocks_free=19_000,
            blocks_total=20_000,
            preemptions=0,
            step_duration_ns=2_000_000,
            batch=BatchComposition(decodes=RUNNING, context_tokens=RUNNING * 40, longest_context=40),
        )

    def _summary(self, instance: str, now_ns: int) -> InstanceSummary:
        return InstanceSummary(
            instance=instance,
            incarnation=self._incarnation,
            model=MODEL,
            at_ns=now_ns,
            running=RUNNING,
            waiting=0,
            running_tokens=320,
            waiting_prefill_tokens=0,
            blocks_free=19_000,
            blocks_total=20_000,
            block_size=16,
            preemptions=0,
            output_tokens_total=self.steps,
        )


def _told(subject: str, body: Body, sender: str) -> tuple[str, bytes, bytes]:
    return subject, write_headers(body.type_name(), sender, "", ""), encode(body)


def _traced_as_shipped(folder: Path) -> TelemetryConfig:
    shipped = TelemetrySpec()
    return TelemetryConfig(
        trace_dir=str(folder / "traces"),
        log_file=str(folder / "log"),
        trace_sample=shipped.trace_sample,
        trace_first_per_s=shipped.trace_first_per_s,
    )


class HotPathRig:
    """One ingress with its hosted actors, and engines, all on one clock. Forecasts per second have no bound: it
    would leave a placement 2.4 of 8 candidates at this rate.

    Attributes:
        clock: Goes on by ``REQUEST_EVERY_NS`` with each request; the event loop has to go by it (``run_by``).
    """

    def __init__(
        self, folder: Path, clock: RequestClock, *, instances: int, policy: str, steps: int, parsed: bool, opened: int
    ) -> None:
        """Args: opened: Requests that are open at a time, each on a connection of its own."""
        self.clock = clock
        write_tokenizer(folder / "model")
        (folder / "model" / "config.json").write_bytes(msgspec.json.encode({"max_position_embeddings": 4096}))
        self.config = IngressConfig(
            models=[
                ModelConfig(name=MODEL, path=str(folder / "model"), reasoning_parser="qwen3" if parsed else "none")
            ],
            dispatch=DispatchConfig(policy=policy, parameters={"forecasts_per_s": 0} if policy == "forecast" else {}),
            telemetry=_traced_as_shipped(folder),
        )
        self._telemetry = open_telemetry("ingress", "ingress-0", self.config.telemetry)
        self._process = IngressProcess(self.config, self._telemetry)
        self._runtime = NatsRuntime(
            bus=self.config.bus,
            name="ingress-0",
            telemetry=self._telemetry,
            registry=self._telemetry.registry,
            local=True,
        )
        runtime = cast("Any", self._runtime)
        runtime.now_ns = self.clock.now_ns
        cast("Any", self._process)._calls._now_s = self.clock.now_s
        self._engines = Engines(
            [f"i{n:02}" for n in range(instances)], self.clock.now_ns(), steps=steps, held=opened - 1
        )
        self._parser = EchoParser(cast("Any", self._process)._parsers) if parsed else None
        self._transport = SilentTransport()
        self._connections: list[HttpConnection] = []
        self._opened = opened
        self._served = 0

    @property
    def engines_ns(self) -> int:
        """CPU time of the engines, which are no part of the figure."""
        return self._engines.taken_ns

    async def start(self) -> None:
        """Starts the actors and shows them the instances."""
        runtime, process, engines = self._runtime, self._process, self._engines
        client = cast("Any", runtime._connection.client)  # the socket's place
        client.publish_now, client.subscribe_now = engines.publish, engines.subscribe
        runtime._connection.connected = True
        runtime._carrier.watches = cast("Any", SilentWatches())
        engines.subscribe(runtime._carrier.inbox.prefix + "*", "", runtime._carrier.inbox.take)
        hosted = [predictor(PredictorConfig()), tagger(TaggerConfig())]
        for companion in hosted:
            self._join(companion)
        process.attach(runtime)
        for cell in runtime._cells:
            cell.start(runtime.now_ns(), runtime.now_ns, runtime._carrier.carry_out)
            self._introduce(cell)
        self._connections = [HttpConnection(process.server()) for _ in range(self._opened)]
        for connection in self._connections:
            connection.connection_made(cast("Any", self._transport))

    def _join(self, companion: Companion) -> None:
        companion.join(self._runtime, self._telemetry)

    def _introduce(self, cell: Any) -> None:
        """Registrations and the plan, to actors that watch them."""
        names = self._engines.names
        stage = Stage(name="s0", length_min=0, length_max=None, instances=names)
        plan = Plan(model=MODEL, epoch=1, stages=[stage], coordinator="c")
        for name in names if cell.watches else []:
            told = KeyChanged(bucket="instance", key=name, value=self._engines.record(name), revision=1)
            self._runtime.deliver(cell, Message(told))
        if cell.name == "ingress-0":
            self._runtime.deliver(cell, Message(KeyChanged(bucket="plan", key=MODEL, value=plan, revision=1)))
        for name in names:
            self._engines.tell(name, self._runtime.now_ns())
        self._engines.pump()

    async def serve(self, requests: int, *, api: str, tokens: int, stream: bool) -> None:
        """So many requests; as many end, after the first ones."""
        path, body, length = API[api]
        content = json.dumps(body | {"model": MODEL, length: tokens, "stream": stream}).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: bench\r\ncontent-length: {len(content)}\r\n"
        whole = head.encode() + b"content-type: application/json\r\n\r\n" + content
        self._engines.taken_ns, self._transport.responses = 0, 0
        engines = self._engines
        for _ in range(requests):
            self._served += 1
            self._tell_in_turn()
            self.clock.advance(REQUEST_EVERY_NS)
            self._connections[self._served % self._opened].data_received(whole)
            engines.pump()
            while self._parser is not None and self._parser.pump():
                engines.pump()
            if self._served % REQUESTS_PER_TURN == 0:
                await asyncio.sleep(0)

    def _tell_in_turn(self) -> None:
        """Snapshots that are due after the requests served so far."""
        engines, names = self._engines, self._engines.names
        before, due = ((served * len(names)) // SNAPSHOT_EVERY for served in (self._served - 1, self._served))
        for count in range(before, due):
            engines.tell(names[count % len(names)], self._runtime.now_ns())

    def check(self, requests: int) -> None:
        """Refuses a figure of something that did not work."""
        assert self._transport.responses == requests, f"{self._transport.responses} of {requests} were served"

    def close(self) -> None:
        """Ends timers and files."""
        for cell in self._runtime._cells:
            self._runtime._carrier.end_timers(cell)
        self._telemetry.close()

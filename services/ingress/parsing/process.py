"""Ingress's side of the parser process and of the image process: each one for all its models, started again when it
dies or hangs.

Answers come in the order of the questions. Each call keeps what it sent until it ends; a new process gets it again, and
answers that were told before are dropped. A call over whose questions two processes died or hung is not asked about
again: it is refused, or its output is text from there on.
"""

from __future__ import annotations

import asyncio
import re
import socket
import subprocess
import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from services.ingress.calls.messages import CallPart, ChoiceDelta
from services.ingress.parsing.messages import (
    Answer,
    CloseParser,
    ExpandImages,
    ImagesExpanded,
    OpenParser,
    OutputRead,
    ParsedModel,
    ParserOpened,
    ParsersReady,
    ReadOutput,
    framed,
)

#: Longest time for one answer. A delta takes 50 us, a whole output of 100,000 tokens a second.
ANSWER_S = 5.0
#: The same for a prompt's images, each of which is decoded, cut and scaled.
IMAGES_S = 30.0
#: Longest time for a start: imports, and tokenizers of all models.
START_S = 60.0
#: Interval at which both are looked at, and shortest time between two starts.
LOOK_S = 0.5
#: Processes that one question of a call may cost.
LOSSES_MAX = 2
#: Tokens of reasoning that are told before the process reads them.
HELD_MAX = 64
#: Pause after a start that failed; new calls are refused meanwhile.
PAUSE_S = 30.0

PARSERS, IMAGES = "services.ingress.parsing.host", "services.ingress.parsing.images"
_decode = msgspec.msgpack.Decoder(Answer).decode


class Asker(ABC):
    """The questions about one call, and what becomes of their answers."""

    def __init__(self, process: ParserProcess, call: str) -> None:
        self._process = process
        self.call = call
        self.sent: list[bytes] = []
        self.answered = self.dropped = 0
        self.losses = 0

    def take(self, answer: Answer) -> None:
        """The next answer; those that were told before the process was lost come again."""
        if self.dropped < self.answered:
            self.dropped += 1
            return
        self.answered += 1
        self.dropped += 1
        self.losses = 0
        self._tell(answer)

    @abstractmethod
    def give_up(self) -> None:
        """The process died or hung over this call."""

    @abstractmethod
    def _tell(self, answer: Answer) -> None: ...


class ImageQuestion(Asker):
    """Asks once for a prompt with its images' tokens. ``told`` gets the answer; None where the process was lost."""

    def __init__(
        self, process: ParserProcess, question: ExpandImages, told: Callable[[ImagesExpanded | None], None]
    ) -> None:
        super().__init__(process, question.call)
        self._told = told
        process.ask(self, question)

    def give_up(self) -> None:
        self._told(None)

    def _tell(self, answer: Answer) -> None:
        assert isinstance(answer, ImagesExpanded)
        self._process.forget(self)
        self._told(answer)


class ProcessReader(Asker):
    """Reader of one call's output by the parser process; an ``OutputReader``."""

    def __init__(
        self, process: ParserProcess, question: OpenParser, opened: Callable[[ParserOpened | None], None]
    ) -> None:
        """Args:
        opened: Told once what the parser asks of the engine, or why it takes no such call; None where the process was
            lost over it.
        """
        super().__init__(process, question.call)
        self._opened: Callable[[ParserOpened | None], None] | None = opened
        self._waiting: deque[tuple[list[ChoiceDelta], Callable[[list[ChoiceDelta], int | None], None]]] = deque()
        self.named = self.hidden = False
        self._called: set[int] = set()
        self.given_up = False
        self._plain, self._thinks = re.compile(""), False
        self._held: tuple[int, str, list[int], bool] = (0, "", [], False)
        process.ask(self, question)

    @property
    def busy(self) -> bool:
        return bool(self._waiting)

    def read(self, deltas: list[ChoiceDelta], told: Callable[[list[ChoiceDelta], int | None], None]) -> None:
        if self.given_up:
            told(deltas, None)
            return
        outputs = [(d.index, d.text, d.token_ids or [], bool(d.finish_reason)) for d in deltas]
        (_, text, ids, ends), (_, before, earlier, _) = outputs[0], self._held
        told_now = self._thinks and len(deltas) == 1 and len(earlier) < HELD_MAX and not ends
        if told_now and self._plain.fullmatch(text):
            self._held = (0, before + text, earlier + ids, False)
            told([self._parsed(deltas[0], ("", text, []))], 0)
            return
        self._waiting.append((deltas, told))
        self._process.ask(self, ReadOutput(self.call, [self._held, *outputs] if before else outputs))
        self._held, self._thinks = (0, "", [], False), False

    def close(self) -> None:
        self._waiting.clear()
        self._process.forget(self)

    def _tell(self, answer: Answer) -> None:
        if isinstance(answer, ParserOpened):
            self._plain = re.compile(answer.plain)
            self._open(answer)
        elif isinstance(answer, OutputRead) and self._waiting:
            deltas, told = self._waiting.popleft()
            reasoning = None if answer.reasoning_tokens < 0 else answer.reasoning_tokens
            parts, text = answer.parts[-len(deltas) :], deltas[0].text
            self._thinks = bool(text and self._plain.fullmatch(text)) and parts[0][1] == text and not self._waiting
            told([self._parsed(*each) for each in zip(deltas, parts, strict=True)], reasoning)

    def give_up(self) -> None:
        """Tell what was asked as text."""
        self.given_up = True
        self.sent.clear()
        self._open(None)
        while self._waiting:
            deltas, told = self._waiting.popleft()
            told(deltas, None)

    def _open(self, answer: ParserOpened | None) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            opened(answer)

    def _parsed(self, delta: ChoiceDelta, parts: tuple[str, str, list[tuple[int, str, str, str]]]) -> ChoiceDelta:
        text, reasoning, calls = parts
        if calls:
            self._called.add(delta.index)
        called = delta.index in self._called and not self.named
        return msgspec.structs.replace(
            delta,
            text=text,
            reasoning=reasoning,
            calls=[CallPart(*call) for call in calls],
            finish_reason="tool_calls" if called and delta.finish_reason == "stop" else delta.finish_reason,
            logprobs=None if self.hidden else delta.logprobs,
        )


class ParserProcess(asyncio.Protocol):
    """The process, its open calls, and the answers that are due. All on one event loop."""

    def __init__(
        self,
        models: Sequence[ParsedModel],
        log: Callable[..., None],
        *,
        host: str = PARSERS,
        answer_s: float = ANSWER_S,
        lazy: bool = False,
    ) -> None:
        """Args:
        log: Told of events by name and fields.
        host: Module that runs in it.
        answer_s: Longest time for one answer.
        lazy: It is first started when somebody asks.
        """
        self._lazy = lazy
        self._host, self._answer_s = host, answer_s
        self._models = msgspec.json.encode(models).decode()
        self._log = log
        self._readers: dict[str, Asker] = {}
        self._due: deque[Asker] = deque()
        self._child: subprocess.Popen[bytes] | None = None
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._ready = self._stopped = False
        self._since = self._pause_s = 0.0
        self.faults: dict[str, str] = {}

    def __len__(self) -> int:
        """Calls that are open."""
        return len(self._readers)

    async def run(self) -> None:
        """Keep a process running until cancelled."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                if self._transport is None and (self._readers or not self._lazy):
                    await asyncio.sleep(self._pause_s)
                    await self._start()
                await asyncio.sleep(LOOK_S)
                longest = self._answer_s if self._ready else START_S
                waits = self._transport is not None and (self._due or not self._ready)
                if waits and loop.time() - self._since > longest:
                    self._lost("hangs")
        finally:
            self._stopped = True
            self._end()

    def ask(self, reader: Asker, question: OpenParser | ReadOutput | ExpandImages) -> None:
        """Send a question, now or once there is a process."""
        if not isinstance(question, ReadOutput):
            if self._pause_s and self._transport is None:
                asyncio.get_running_loop().call_soon(reader.give_up)
                return
            self._readers[reader.call] = reader
        elif reader.call not in self._readers:  # closed meanwhile, as by who was just told
            return
        frame = framed(question)
        reader.sent.append(frame)
        if self._ready:
            self._send(reader, frame)

    def forget(self, reader: Asker) -> None:
        if self._readers.pop(reader.call, None) is not None and self._ready and self._transport is not None:
            self._transport.write(framed(CloseParser(reader.call)))

    def connection_lost(self, exc: Exception | None) -> None:
        if self._transport is not None and not self._stopped:
            self._lost("died")

    def data_received(self, data: bytes) -> None:
        received = self._received
        received += data
        begin = 0
        while len(received) - begin >= 4:
            end = begin + 4 + int.from_bytes(received[begin : begin + 4], "little")
            if len(received) < end:
                break
            self._take(_decode(memoryview(received)[begin + 4 : end]))
            begin = end
        del received[:begin]

    def _take(self, answer: Answer) -> None:
        self._since = asyncio.get_running_loop().time()
        if isinstance(answer, ParsersReady):
            self._ready, self._pause_s = True, 0.0
            self.faults = answer.faults
            for model, fault in answer.faults.items():
                self._log("parsers_unusable", model=model, fault=fault)
            for reader in list(self._readers.values()):
                for frame in reader.sent:
                    self._send(reader, frame)
            return
        if isinstance(answer, OutputRead) and answer.fault:
            self._log("parser_failed", request=answer.call, fault=answer.fault)
        self._due.popleft().take(answer)

    def _send(self, reader: Asker, frame: bytes) -> None:
        assert self._transport is not None
        if not self._due:
            self._since = asyncio.get_running_loop().time()
        self._due.append(reader)
        self._transport.write(frame)

    async def _start(self) -> None:
        ours, theirs = socket.socketpair()
        loop = asyncio.get_running_loop()
        self._since = loop.time()
        self._child = subprocess.Popen(  # noqa: ASYNC220 - as asyncio's own would, but for a watcher that ends with the loop
            [sys.executable, "-m", self._host, str(theirs.fileno()), self._models],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        self._transport, _ = await loop.create_unix_connection(lambda: self, sock=ours)

    def _lost(self, how: str) -> None:
        """The process is of no use any more: its calls go on in the next one, but for the one that it was lost over."""
        culprits = list[Asker]()
        if not self._ready:
            self._pause_s, culprits = PAUSE_S, list(self._readers.values())
        elif self._due:
            self._due[0].losses += 1
            culprits = [self._due[0]] if self._due[0].losses >= LOSSES_MAX else []
        self._log("parsers_lost", how=how, requests=[reader.call for reader in culprits])
        self._end()
        for reader in culprits:
            self.forget(reader)
            reader.give_up()
        for reader in self._readers.values():
            reader.dropped = 0

    def _end(self) -> None:
        transport, self._transport, self._ready = self._transport, None, False
        self._due.clear()
        self._received.clear()
        if transport is not None:
            transport.abort()
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            self._child = None

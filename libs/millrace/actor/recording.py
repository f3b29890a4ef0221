"""Recordings: one actor's inbox with the effects it returned, or frames that tap took from the bus.

A file is a sequence of length-prefixed MessagePack frames (4 bytes big endian, then the frame); the first is the
header. A file that ends inside a frame (the process was killed) reads as if it ended before it.

| frame | fields |
|---|---|
| Header | what made the file: actor, kind (module of the actor's class, or ``tap``), seed, config JSON, commit |
| Started | effects of ``Actor.start`` |
| Handled | one message (envelope and encoded body) and the effects it led to |
| Tapped | subject, raw header block and payload of one message on the bus |
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from millrace.actor.actor import Actor
from millrace.actor.effects import Effect
from millrace.actor.private_files import open_private
from millrace.contracts.message import Body, Message

#: A frame larger than this is a damaged file, bytes.
FRAME_BYTES_MAX = 64 * 1024 * 1024


class Header(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """First frame. ``kind`` is the module of the actor's class, or ``tap``."""

    kind: str
    actor: str = ""
    seed: int = 0
    config: str = ""
    commit: str = ""
    version: int = 1


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """Inputs for building the same actor again: simulator/recorded_actor.py calls ``build`` of its service with them.

    Attributes:
        config: JSON without secrets.
        seed: Usually the incarnation.
    """

    config: str = ""
    seed: int = 0


class Started(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Start of the actor; ``effects`` are encoded one by one."""

    at_ns: int
    effects: list[msgspec.Raw]


class Handled(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One message and what came of it."""

    at_ns: int
    body: msgspec.Raw
    subject: str = ""
    sender: str = ""
    reply_to: str = ""
    traceparent: str = ""
    effects: list[msgspec.Raw] = []


class Tapped(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One message as it was seen on the bus. ``headers`` is the raw block."""

    at_ns: int
    subject: str
    payload: bytes
    headers: bytes = b""
    reply_to: str = ""


Frame = Header | Started | Handled | Tapped

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Frame] = msgspec.msgpack.Decoder(Frame)


def _raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(_encoder.encode(value))


class RecordingWriter:
    """Appends frames. The file is flushed with each frame, so a killed process leaves all but the last one."""

    def __init__(self, path: str | Path, header: Header) -> None:
        self._file: BinaryIO = open_private(path, "wb")  # held until close()
        self._write(header)

    def started(self, at_ns: int, effects: list[Effect]) -> None:
        self._write(Started(at_ns=at_ns, effects=[_raw(effect) for effect in effects]))

    def handled(self, at_ns: int, message: Message, effects: list[Effect]) -> None:
        self._write(
            Handled(
                at_ns=at_ns,
                body=_raw(message.body),
                subject=message.subject,
                sender=message.sender,
                reply_to=message.reply_to,
                traceparent=message.traceparent,
                effects=[_raw(effect) for effect in effects],
            )
        )

    def tapped(self, frame: Tapped) -> None:
        self._write(frame)

    def close(self) -> None:
        self._file.close()

    def _write(self, frame: Frame) -> None:
        payload = _encoder.encode(frame)
        self._file.write(len(payload).to_bytes(4, "big") + payload)
        self._file.flush()


def open_recording(
    path: str, *, actor: str, kind: str, seed: int = 0, config: str = "", commit: str = ""
) -> RecordingWriter:
    """A new recording of one actor."""
    return RecordingWriter(path, Header(actor=actor, kind=kind, seed=seed, config=config, commit=commit))


class RecordingReader:
    """Reads a recording from its start; iterate it for the frames after the header.

    Raises:
        ValueError: the file does not start with a header.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        first = next(self._frames(), None)
        if not isinstance(first, Header):
            raise ValueError(f"{path} is no recording")
        self.header = first

    def __iter__(self) -> Iterator[Frame]:
        frames = self._frames()
        next(frames)
        return frames

    def _frames(self) -> Iterator[Frame]:
        with self._path.open("rb") as file:
            while len(prefix := file.read(4)) == 4:
                size = int.from_bytes(prefix, "big")
                payload = file.read(size) if size <= FRAME_BYTES_MAX else b""
                if len(payload) < size or not payload:
                    return
                try:
                    yield _decoder.decode(payload)
                except msgspec.DecodeError as error:
                    raise ValueError(f"{self._path} is no recording: {error}") from None


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """Difference between an effect of the replayed actor and that of the recorded one.

    Attributes:
        frame: Number of the frame, 1 for the start.
        index: Position among the effects of that message.
        recorded: The effect as plain values; None where the actor returned more than was recorded.
        replayed: None where it returned less.
    """

    frame: int
    at_ns: int
    message: str
    index: int
    recorded: Any
    replayed: Any


def replay(reader: RecordingReader, actor: Actor) -> Iterator[Difference]:
    """Feeds a recorded inbox to an actor built with the same configuration and seed; yields each difference."""
    decoder = BodyDecoder()
    for number, frame in enumerate(reader, start=1):
        if isinstance(frame, Started):
            yield from _compare(number, frame.at_ns, "start", frame.effects, actor.start(frame.at_ns))
        elif isinstance(frame, Handled):
            message = decoder.message(frame)
            effects = actor.handle(message, frame.at_ns)
            yield from _compare(number, frame.at_ns, type(message.body).__name__, frame.effects, effects)


def _compare(
    number: int, at_ns: int, message: str, recorded: list[msgspec.Raw], effects: list[Effect]
) -> Iterator[Difference]:
    replayed = [_encoder.encode(effect) for effect in effects]
    for index in range(max(len(recorded), len(replayed))):
        was = bytes(recorded[index]) if index < len(recorded) else None
        now = replayed[index] if index < len(replayed) else None
        if was != now:
            plain = [None if value is None else msgspec.msgpack.decode(value) for value in (was, now)]
            yield Difference(
                frame=number, at_ns=at_ns, message=message, index=index, recorded=plain[0], replayed=plain[1]
            )


class BodyDecoder:
    """Turns recorded bodies back into Structs: wire types, local types, and those of the service that is loaded.

    All subclasses of Body that are imported are known; whoever replays imports the actor first, and with it its types.
    """

    def __init__(self) -> None:
        self._types = {kind.type_name(): kind for kind in _descendants(Body)}

    def message(self, frame: Handled) -> Message:
        """The message as the actor saw it."""
        body = self._revive(msgspec.msgpack.decode(frame.body))
        return Message(body, frame.subject, frame.sender, frame.reply_to, frame.traceparent)

    def _revive(self, plain: Any) -> Any:
        """A Body from plain values, and those nested in fields of no declared type (answers, stored values)."""
        if not isinstance(plain, dict) or plain.get("type") not in self._types:
            return plain
        kind = self._types[plain["type"]]
        body = msgspec.convert(plain, kind)
        nested: dict[str, Any] = {}
        for name in ("body", "value"):
            if isinstance(getattr(body, name, None), dict):
                nested[name] = self._revive(getattr(body, name))
        answers = getattr(body, "answers", None)
        if isinstance(answers, list):
            nested["answers"] = [(sender, self._revive(answer)) for sender, answer in answers]
        return msgspec.structs.replace(body, **nested) if nested else body


def _descendants(kind: type[Body]) -> Iterator[type[Body]]:
    for child in kind.__subclasses__():
        yield child
        yield from _descendants(child)

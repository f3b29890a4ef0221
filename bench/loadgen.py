"""A load generator for the OpenAI API: one thread, epoll, raw keep-alive sockets, as little parsing as possible.

It must cost less CPU than what it measures: about 15 µs per short request and 2 µs per received piece of a stream.
``closed``: every connection sends its next request as soon as the last one is answered. ``open``: requests begin at
times drawn from a Poisson process, and latency counts from the drawn time: a server that falls behind cannot hide it.

``python -m bench.loadgen --help``; prints one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import select
import socket
import sys
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import msgspec

_LENGTH = re.compile(rb"content-length: (\d+)", re.IGNORECASE)
#: What stands in an event that carries text, of chat and of completions.
_TEXT_MARKS = (b'"content":"', b'"reasoning":"', b'"text":"')


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """Load to send.

    Attributes:
        rate: Requests per second of an open load; 0 for a closed one.
        seconds: Measured time, after ``warm_s``.
        body: JSON body; with ``stream`` in it responses are read as event streams.
    """

    port: int
    path: str = "/v1/chat/completions"
    body: dict[str, Any]
    connections: int = 16
    rate: float = 0.0
    seconds: float = 5.0
    warm_s: float = 1.0
    seed: int = 1


class Figures(msgspec.Struct, kw_only=True):
    """Results of a load. Times are seconds; only requests that began and ended in the measured time count.

    Attributes:
        events: Events with text.
    """

    requests: int = 0
    errors: int = 0
    events: int = 0
    latency_s: list[float] = []
    ttft_s: list[float] = []


class _Connection:
    __slots__ = ("begun_s", "buffer", "first_s", "head_seen", "left", "sock", "streaming")

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.buffer = b""
        self.left = -1
        self.begun_s = 0.0
        self.first_s = 0.0
        self.head_seen = False
        self.streaming = False


class Generator:
    """Sends one load."""

    def __init__(self, load: Load) -> None:
        self._load = load
        body = json.dumps(load.body).encode()
        head = f"POST {load.path} HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n".encode()
        self._request = head + b"content-length: %d\r\n\r\n" % len(body) + body
        self._poll = select.epoll()
        self._connections: dict[int, _Connection] = {}
        self._idle: deque[_Connection] = deque()
        self._due: deque[float] = deque()
        self.figures = Figures()
        self._from_s = self._until_s = 0.0

    def run(self) -> Figures:
        """Sends it, and waits at most two seconds for the last answers."""
        load = self._load
        begun = time.perf_counter()
        self._from_s = begun + load.warm_s
        self._until_s = self._from_s + load.seconds
        for _ in range(load.connections):
            connection = self._dial()
            if load.rate:
                self._idle.append(connection)
            else:
                self._begin(connection, time.perf_counter())
        arrivals = self._arrivals(begun) if load.rate else iter(())
        upcoming = next(arrivals, None)
        while (now := time.perf_counter()) < self._until_s:
            while upcoming is not None and upcoming <= now:
                self._due.append(upcoming)
                upcoming = next(arrivals, None)
            while self._due and self._idle:
                self._begin(self._idle.popleft(), self._due.popleft())
            wait = 0.1 if upcoming is None else max(0.0, min(0.1, upcoming - now))
            self._turn(wait)
        for connection in self._connections.values():
            connection.sock.close()
        return self.figures

    def _arrivals(self, begun_s: float) -> Iterator[float]:
        rng = random.Random(self._load.seed)
        at = begun_s
        while at < self._until_s:
            at += rng.expovariate(self._load.rate)
            yield at

    def _dial(self) -> _Connection:
        sock = socket.create_connection(("127.0.0.1", self._load.port), timeout=5)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setblocking(False)
        connection = _Connection(sock)
        self._connections[sock.fileno()] = connection
        self._poll.register(sock.fileno(), select.EPOLLIN)
        return connection

    def _begin(self, connection: _Connection, begun_s: float) -> None:
        connection.buffer = b""
        connection.left = -1
        connection.head_seen = connection.streaming = False
        connection.begun_s = begun_s
        connection.first_s = 0.0
        connection.sock.send(self._request)

    def _turn(self, wait_s: float) -> None:
        for number, _ in self._poll.poll(wait_s, 256):
            connection = self._connections[number]
            try:
                data = connection.sock.recv(262_144)
            except BlockingIOError:
                continue
            except OSError:
                data = b""
            if not data:
                self._broken(connection, number)
                continue
            self._take(connection, data)

    def _take(self, connection: _Connection, data: bytes) -> None:
        if not connection.head_seen:
            data = connection.buffer + data
            end = data.find(b"\r\n\r\n")
            if end < 0:
                connection.buffer = data
                return
            connection.head_seen = True
            length = _LENGTH.search(data, 0, end)
            connection.streaming = length is None
            if data[9:12] != b"200":
                self.figures.errors += 1
            if length is not None:
                connection.left = int(length.group(1)) - (len(data) - end - 4)
                connection.buffer = data
                if connection.left <= 0:
                    self._end(connection, time.perf_counter())
                return
            connection.buffer = b""
            data = data[end + 4 :]
            if not data:
                return
        elif not connection.streaming:
            connection.left -= len(data)
            connection.buffer += data
            if connection.left <= 0:
                self._end(connection, time.perf_counter())
            return
        self._stream(connection, data)

    def _stream(self, connection: _Connection, data: bytes) -> None:
        now = time.perf_counter()
        # Chat's first event carries an empty content; it is no text.
        texts = sum(data.count(mark) for mark in _TEXT_MARKS) - data.count(b'"content":""')
        if texts:
            connection.first_s = connection.first_s or now
            if now >= self._from_s:
                self.figures.events += texts
        connection.buffer = (connection.buffer + data[-5:])[-5:]
        if connection.buffer == b"0\r\n\r\n":
            self._end(connection, now)

    def _end(self, connection: _Connection, now: float) -> None:
        figures = self.figures
        if connection.begun_s >= self._from_s and now <= self._until_s:
            figures.requests += 1
            figures.latency_s.append(now - connection.begun_s)
            if connection.first_s:
                figures.ttft_s.append(connection.first_s - connection.begun_s)
        if self._load.rate:
            self._idle.append(connection)
        elif now < self._until_s:
            self._begin(connection, now)

    def _broken(self, connection: _Connection, number: int) -> None:
        self.figures.errors += 1
        self._poll.unregister(number)
        del self._connections[number]
        connection.sock.close()
        fresh = self._dial()
        if self._load.rate:
            self._idle.append(fresh)
        else:
            self._begin(fresh, time.perf_counter())


def summary(figures: Figures) -> dict[str, Any]:
    """Counts, and quantiles in milliseconds."""
    out: dict[str, Any] = {"requests": figures.requests, "events": figures.events, "errors": figures.errors}
    for name, values in (("latency", sorted(figures.latency_s)), ("ttft", sorted(figures.ttft_s))):
        for label, share in (("p50", 0.5), ("p99", 0.99)):
            out[f"{name}_ms_{label}"] = round(values[int(share * len(values))] * 1e3, 3) if values else None
    return out


def main() -> int:
    """Runs one load from the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.loadgen", description=__doc__)
    parser.add_argument("load", help="JSON of a Load")
    load = msgspec.json.decode(parser.parse_args().load, type=Load)
    print(json.dumps(summary(Generator(load).run())))
    return 0


if __name__ == "__main__":
    sys.exit(main())

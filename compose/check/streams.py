"""Streamed requests as a client sees them, several at once."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from compose.check.calls import Failed, wait

#: Long enough that a container dies in the middle on a fast machine, and ends within a minute on a slow one.
TOKENS = 900
#: Where a stream must outlive several runs of the command line: seven seconds on a fast machine.
MANY_TOKENS = 3000
PROMPTS = (
    "Count from 100 to 480.",
    "Count down from 400 to 20.",
    "Write the numbers from 7 to 350.",
    "Count from 1 to 99 in words.",
)
#: No worker has any of their blocks in its cache before they are first asked.
FRESH_PROMPTS = (
    "Count from 1000 to 1900.",
    "Count down from 5000 to 4200.",
    "Write the even numbers from 60 to 2000.",
    "Count from 300 to 900 in steps of 3.",
)
#: Four minutes were seen for MANY_TOKENS where twenty processes shared two cores.
STREAM_SECONDS_MAX = 600


class Api(NamedTuple):
    """URL of the API, a key for it, and a key that may ask once a minute."""

    url: str
    key: str
    limited_key: str


class Stream(threading.Thread):
    """One greedy request of so many tokens.

    Attributes:
        request: Its id, as the API tells it.
        pieces: Text as it came.
        error: Why it ended badly; empty if it did not.
        gap_s: Longest time between two pieces.
        usage: What the last event said.
    """

    def __init__(self, api: Api, prompt: str, tokens: int) -> None:
        super().__init__(daemon=True)
        self.request = ""
        self.pieces: list[str] = []
        self.error = ""
        self.gap_s = 0.0
        self.usage: dict[str, Any] = {}
        self._api = api
        self._prompt = prompt
        self._tokens = tokens

    @property
    def text(self) -> str:
        """Everything so far."""
        return "".join(self.pieces)

    def run(self) -> None:
        """Reads to the end."""
        try:
            last = time.monotonic()
            for event in self._events():
                self.request = event["id"]
                for choice in event["choices"]:
                    if choice["delta"].get("content"):
                        self.gap_s = max(self.gap_s, time.monotonic() - last) if self.pieces else 0.0
                        last = time.monotonic()
                        self.pieces.append(choice["delta"]["content"])
                self.usage = event.get("usage") or self.usage
        except (OSError, ValueError, KeyError, Failed) as error:
            self.error = f"{type(error).__name__}: {error}"

    def _events(self) -> Iterator[dict[str, Any]]:
        body = {
            "model": "millrace-mini",
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0,
            "ignore_eos": True,
            "max_tokens": self._tokens,
            "messages": [{"role": "user", "content": self._prompt}],
        }
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self._api.key}"}
        request = urllib.request.Request(f"{self._api.url}/v1/chat/completions", json.dumps(body).encode(), headers)
        done = False
        with urllib.request.urlopen(request, timeout=60) as answer:
            for line in answer:
                if line.strip() == b"data: [DONE]":
                    done = True
                elif line.startswith(b"data: "):
                    event: dict[str, Any] = json.loads(line[6:])
                    if "error" in event:
                        raise Failed(str(event["error"]))
                    yield event
        if not done:
            raise Failed("the stream broke off")


class Streams:
    """All prompts at once."""

    def __init__(self, api: Api, tokens: int = TOKENS, prompts: Sequence[str] = PROMPTS) -> None:
        self._tokens = tokens
        self._streams = [Stream(api, prompt, tokens) for prompt in prompts]
        for stream in self._streams:
            stream.start()

    def wait_until_all_speak(self) -> None:
        """Returns when every stream is under way; what happens then happens in the middle of all of them.

        Raises:
            Failed: one has ended already or does not begin.
        """
        wait("streams to begin", 60, lambda: all(len(s.pieces) >= 10 or not s.is_alive() for s in self._streams))
        if ended := [s for s in self._streams if not s.is_alive()]:
            raise Failed(f"a stream ended before anything was broken: {ended[0].error or ended[0].usage}")

    def texts(self) -> list[str]:
        """The texts, when all have ended.

        Raises:
            Failed: one ended with an error, too late, or with another number of tokens than asked for.
        """
        deadline = time.monotonic() + STREAM_SECONDS_MAX
        for stream in self._streams:
            stream.join(max(0.0, deadline - time.monotonic()))
            if stream.is_alive() or stream.error:
                raise Failed(f"a stream failed after {len(stream.pieces)} pieces: {stream.error or 'too slow'}")
            if stream.usage.get("completion_tokens") != self._tokens:
                raise Failed(f"{self._tokens} tokens were asked for, usage says {stream.usage}")
        return [stream.text for stream in self._streams]

    @property
    def requests(self) -> list[str]:
        """Ids of those that have begun."""
        return [stream.request for stream in self._streams]

    @property
    def gap_s(self) -> float:
        """Longest pause that any client saw."""
        return max(stream.gap_s for stream in self._streams)


def status_of(url: str, body: bytes | None = None, *, key: str = "") -> int:
    """HTTP status of an answer; 0 for none."""
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=30) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def ready(api: Api) -> bool:
    """Whether requests are taken."""
    return status_of(f"{api.url}/ready") == 200


def try_refusals(api: Api) -> None:
    """Asks for what must be refused.

    Raises:
        Failed: it was not, or not with the right status.
    """
    url = f"{api.url}/v1/completions"
    good = json.dumps({"model": "millrace-mini", "prompt": "Count", "max_tokens": 1}).encode()
    found = [status_of(url, good), status_of(url, good, key="nobody"), status_of(url, b"{}", key=api.key)]
    found += [status_of(url, good, key=api.limited_key) for _ in range(2)]
    if found != [401, 401, 400, 200, 429]:
        raise Failed(f"no key, a wrong key, no model, within a key's limit, beyond it: {found}")

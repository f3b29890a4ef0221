"""Hand-overs at a stage's boundary on two real engines: differing tokens, failed requests, leaked blocks.

Two vLLM engines with a context of 8,192 tokens, stages cut at 1,024 for good, brokers that trade. Greedy and seeded
streams of a random float32 model begin below the cut and end above it. Each stream's text, finish reason and token
count are compared with the same request's while the broker is stopped, when nothing is handed over; at the end every
block must be free. ``--minutes`` ends a call in time; with ``--state FILE`` the next one goes on and the figure is the
sum. Streams that end without a hand-over are counted by the last word of the brokers about them, and by how long they
ran past the cut.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import httpx
from millrace.contracts.broker import (
    AskForMove,
    BoundaryMoved,
    DealEnded,
    DealQueued,
    DealRefused,
    DealStarted,
    NoBid,
    OfferDeal,
)
from millrace.contracts.codec import decode
from millrace.contracts.migration import MigrationFinished
from millrace.contracts.observers import DecisionMade
from nats.aio.msg import Msg

from papers import PAPERS
from tests.testbed.migration_operator import Operator
from tests.testbed.timed_streams import TimedStream, client, play, prompt_ids
from tests.testbed.up_cluster import UpRig

#: Takes the part so far of a call that may be cut off.
Keep = Callable[[dict[str, Any]], None]

#: Requests that repeat.
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0.9, "seed": 7},
    {"temperature": 0, "frequency_penalty": 0.4, "presence_penalty": 0.2},
    {"temperature": 0.7, "seed": 3, "top_p": 0.9, "min_p": 0.02},
)

#: Without its broker an instance hands nothing on at a boundary.
SILENT_S = 2.0

CLUSTER = """
[[models]]
name = "m"
path = "{model}"

[[models.groups]]
count = 2
engine = "{engine}"
{processes}

[[models.stages]]
name = "s0"
length_max = {cut}

[[models.stages]]
name = "s1"
length_min = {cut}

[policies.trading]
name = "{papers}/cascadeinfer/trading.py"

[services]
brokers = true

[settings.broker.fences]
hysteresis = 1.0
payback_factor = 0

[settings.broker.refinement]
sequences_min = 1000000000

[telemetry]
trace_first_per_s = 0
trace_sample = 0.0
"""


class HandOvers:
    """One call's streams, and the migrations that their cluster published."""

    def __init__(self, rig: UpRig, http: httpx.AsyncClient, options: argparse.Namespace, keep: Keep) -> None:
        self._rig, self._http, self._options, self._keep = rig, http, options, keep
        self._began = time.monotonic()
        self._expected: dict[int, tuple[str, str, int]] = {}
        self.outcomes: Counter[str] = Counter()
        self.ways: Counter[str] = Counter()
        self.stayed: Counter[str] = Counter()
        self._last_words: dict[str, str] = {}
        self._placed: dict[str, str] = {}
        self._boundary = options.cut
        self._ended: list[tuple[int, str, list[float]]] = []
        self.counts: Counter[str] = Counter()

    async def hear(self, message: Msg) -> None:
        """Count a migration that has ended."""
        body = decode(message.data)
        if isinstance(body, MigrationFinished):
            refusal = f" ({body.refusal})" if body.refusal else ""
            self.outcomes[f"{body.outcome}{refusal}"] += 1
            if body.outcome == "moved":
                self.ways[f"{body.source} to {body.target}"] += 1

    async def hear_trades(self, message: Msg) -> None:
        """Note the last word about a sequence, and where it began."""
        body = decode(message.data)
        if isinstance(body, DecisionMade) and body.kind == "dispatch":
            side = "past" if body.prompt_tokens >= self._boundary else "below"
            self._placed |= dict.fromkeys(body.sequences, f"{body.chosen} {side} the boundary")
        elif isinstance(body, BoundaryMoved):
            self._boundary = body.length
            self.counts["lowest boundary"] = min(self.counts["lowest boundary"] or body.length, body.length)
        elif isinstance(body, AskForMove | OfferDeal | DealStarted):
            self._last_words[body.sequence] = type(body).__name__
        elif isinstance(body, NoBid | DealRefused):
            self._last_words[body.sequence] = f"{type(body).__name__} {body.reason}"
        elif isinstance(body, DealQueued):
            self._last_words[body.sequence] = f"DealQueued {'granted' if body.granted else 'waiting'}"
        elif isinstance(body, DealEnded):
            self._last_words[body.sequence] = f"DealEnded {body.outcome} {body.refusal or ''}".strip()

    def count_stays(self) -> None:
        """Count the streams that were not handed over: the last word, and the time from the cut to their end."""
        for number, sequence, times in self._ended:
            last = self._last_words.get(sequence, f"never asked, placed at {self._placed.get(sequence, 'nowhere')}")
            if last != "DealEnded moved" and times:
                below = (self._options.cut - self._prompt_tokens(number)) / self._options.tokens
                past_s = times[-1] - times[round(below * (len(times) - 1))]
                self.stayed.update({last: 1, "all": 1, "ms past the cut": round(1e3 * past_s)})

    def _prompt_tokens(self, number: int) -> int:
        below = Random(f"{self._options.seed}/{number}").randrange(20, 60)
        return int(self._options.cut) - below

    async def _play(self, number: int) -> TimedStream:
        rng = Random(f"{self._options.seed}/{number}")
        prompt = prompt_ids(rng, self._options.cut - rng.randrange(20, 60))
        fields = {"prompt": prompt, "max_tokens": self._options.tokens, "ignore_eos": True}
        return await play(self._http, self._rig, TimedStream(), **fields, **KINDS[number % len(KINDS)])

    async def learn(self) -> None:
        """Record what each request says while nothing is handed over."""
        numbers = range(self._options.prompts)
        for begin in range(0, len(numbers), self._options.streams):
            few = numbers[begin : begin + self._options.streams]
            for number, stream in zip(few, await asyncio.gather(*map(self._play, few)), strict=True):
                assert not stream.error, stream.error
                self._expected[number] = (stream.text, stream.finish, stream.tokens)
        assert not self.outcomes, f"without its broker nothing is handed over: {self.outcomes}"

    async def run(self, wanted: int, until: float) -> None:
        """Streams until enough was handed over, or the time is up."""
        self._began = time.monotonic()
        await asyncio.gather(*(self._stream(index, wanted, until) for index in range(self._options.streams)))

    async def _stream(self, index: int, wanted: int, until: float) -> None:
        rng = Random(f"{self._options.seed}/{index}/{until}")
        while self.outcomes["moved"] < wanted and time.monotonic() < until:
            number = rng.randrange(self._options.prompts)
            stream = await self._play(number)
            self.counts["streams"] += 1
            self.counts["failed"] += bool(stream.error)
            self._ended.append((number, stream.sequence, stream.times))
            if (stream.text, stream.finish, stream.tokens) != self._expected[number]:
                self.counts["differing"] += 1
                sys.stderr.write(f"differs: {number} {stream.sequence} {stream.error}\n")
            self.counts["seconds"] = round(time.monotonic() - self._began)
            self._keep(self.part)

    @property
    def part(self) -> dict[str, Any]:
        """This call's part so far."""
        return {"counts": self.counts, "outcomes": self.outcomes, "ways": self.ways, "stayed": self.stayed}


async def measure(rig: UpRig, options: argparse.Namespace, wanted: int, until: float, keep: Keep) -> None:
    """One call's part, kept after each stream."""
    (broker,) = rig.pids("broker-0.json")
    async with client() as http, Operator(rig) as operator:
        await operator.know(2)
        found = HandOvers(rig, http, options, keep)
        await operator.subscribe(operator.subjects.migrations(), found.hear)
        for family in ("ask", "bid", "deal", "decision", "boundary"):
            await operator.subscribe(f"{operator.subjects.prefix}.{family}.>", found.hear_trades)
        os.kill(broker, signal.SIGSTOP)
        try:
            await asyncio.sleep(SILENT_S)
            await found.learn()
        finally:
            os.kill(broker, signal.SIGCONT)
        await asyncio.sleep(SILENT_S)
        await found.run(wanted, until)
        await asyncio.sleep(3)  # leases and reservations have run out
        snapshots = operator.snapshots.values()
        found.counts["leaked"] = sum(each.blocks_total - each.blocks_free for each in snapshots)
        found.counts["looked for leaks"] = 1
        found.count_stays()
        keep(found.part)


def summed(parts: list[dict[str, Any]]) -> dict[str, Counter[str]]:
    """All calls together."""
    total: dict[str, Counter[str]] = {name: Counter() for name in ("counts", "outcomes", "ways", "stayed")}
    for part in parts:
        for name, counter in total.items():
            counter.update(part.get(name, {}))
    return total


def report(parts: list[dict[str, Any]], options: argparse.Namespace) -> bool:
    """Prints the sum; returns whether nothing differed, failed or leaked."""
    total = summed(parts)
    counts, moved = total["counts"], total["outcomes"]["moved"]
    rate = moved / max(1, counts["seconds"])
    print(f"cut at {options.cut} of 8,192 tokens, {options.streams} streams at a time, seed {options.seed}")
    print(f"{moved} hand-overs in {counts['seconds']} s of {len(parts)} calls: {rate:.1f}/s")
    print(f"migrations {dict(sorted(total['outcomes'].items()))}; {dict(sorted(total['ways'].items()))}")
    print(f"{counts['streams']} streams: {counts['differing']} differ, {counts['failed']} failed")
    stayed = total["stayed"]
    if stayed["all"]:
        words = {name: count for name, count in sorted(stayed.items()) if name not in ("all", "ms past the cut")}
        past_ms = stayed["ms past the cut"] / stayed["all"]
        print(
            f"{stayed['all']} ended without a hand-over, {past_ms:.0f} ms past the cut on average; last word: {words}"
        )
    if counts["lowest boundary"]:
        print(f"the refined boundary was at {counts['lowest boundary']} at the lowest (sum over calls)")
    looked = counts["looked for leaks"]
    print(f"blocks not free at the end of {looked} calls: {counts['leaked']}", flush=True)
    return not (counts["differing"] or counts["failed"] or counts["leaked"])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--handovers", type=int, default=500)
    parser.add_argument("--minutes", type=float, default=8.0, help="the call ends then, start of the cluster included")
    parser.add_argument("--state", type=Path, help="JSON lines of the calls so far")
    parser.add_argument("--engine", choices=["vllm", "modelled"], default="vllm", help="modelled: to try the rig")
    parser.add_argument("--cut", type=int, default=1_024)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> int:
    """Builds the model, starts the cluster, runs."""
    from tests.testbed.tiny_llama import build

    options = _options()
    until = time.monotonic() + 60 * options.minutes - 15  # to look for leaks, and to stop
    parts = [json.loads(line) for line in options.state.read_text().splitlines()] if _exists(options.state) else []
    wanted, before = options.handovers - summed(parts)["outcomes"]["moved"], list(parts)

    def keep(part: dict[str, Any]) -> None:
        parts[:] = [*before, part]
        if options.state is not None:
            options.state.write_text("".join(json.dumps(each) + "\n" for each in parts))

    if wanted > 0:
        with tempfile.TemporaryDirectory() as folder:
            model = build(Path(folder) / "model", max_model_len=8_192)
            processes = "processes = 2" if options.engine == "modelled" else ""
            text = CLUSTER.format(
                model=model, engine=options.engine, processes=processes, cut=options.cut, papers=PAPERS
            )
            (Path(folder) / "cluster.toml").write_text(text)
            words = ["--cluster", str(Path(folder) / "cluster.toml")]
            rig = UpRig.of_words(Path(folder) / "cluster", words, "m")
            rig.start()
            try:
                asyncio.run(measure(rig, options, wanted, until, keep))
            finally:
                rig.stop()
    return 0 if report(parts, options) else 1


def _exists(path: Path | None) -> bool:
    return path is not None and path.exists()

"""Handled messages a second: two actors throw messages at each other, in virtual time and over NATS.

In the simulation everything runs on one core. Over NATS the two actors are two processes, with the server between them
as a third one: the figure is what both handle together, with the CPU time that each takes per handled message.

``--profile sim`` or ``--profile nats`` prints where the time goes instead.
"""

from __future__ import annotations

import argparse
import cProfile
import multiprocessing
import pstats
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from millrace.actor.config import BusConfig
from millrace.actor.effects import Effect, Publish, StartTimer, Stop, Subscribe
from millrace.actor.loop import run_to_end
from millrace.actor.ports import NullTelemetry
from millrace.actor.runtime_nats import NatsRuntime
from millrace.contracts.ingress import TokenChunk, TokensGenerated
from millrace.contracts.local import TimerFired
from millrace.contracts.message import Body, Message
from millrace.contracts.tagger import LengthTag
from millrace.sim.runtime_sim import SECOND, Simulation
from prometheus_client import CollectorRegistry

SMALL = LengthTag(request="r-0123456789abcdef", mean=128.0, p50=100.0, p90=300.0, source="history")
STEP = TokensGenerated(
    instance="w-0",
    incarnation=1_700_000_000_000_000_000,
    step=1,
    chunks=[TokenChunk(f"r-0123456789abcdef{number:02}.0", 0, 57, [1234]) for number in range(64)],
)
BODIES: dict[str, Body] = {"small (95 B)": SMALL, "64 tokens (2.3 kB)": STEP}


class Player:
    """Sends every message back; one of the two serves ``balls`` messages."""

    def __init__(self, name: str, other: str, *, balls: int, body: Body, seconds: float = 0.0) -> None:
        self.name = name
        self.handled = 0
        self.trips_ns: list[int] = []
        self._back: list[Effect] = [Publish(subject=f"mr.bench.{other}", body=body)]
        self._balls = balls
        self._seconds = seconds
        self._sent_ns = 0

    def start(self, now_ns: int) -> list[Effect]:
        effects: list[Effect] = [Subscribe(subject=f"mr.bench.{self.name}")]
        if self._balls:
            effects.append(StartTimer(name="serve", at_ns=now_ns + SECOND // 2))
        return effects

    def handle(self, message: Message, now_ns: int) -> list[Effect]:
        body = message.body
        if isinstance(body, TimerFired):
            if body.name == "end":
                return [Stop()]
            return self._serve(now_ns)
        self.handled += 1
        if self._balls == 1:
            self.trips_ns.append(now_ns - self._sent_ns)
            self._sent_ns = now_ns
        if self._seconds and self.handled == 1:
            return [*self._back, StartTimer(name="end", at_ns=now_ns + int(self._seconds * SECOND))]
        return self._back

    def _serve(self, now_ns: int) -> list[Effect]:
        """Until the other process is there the balls are lost, and served again."""
        if self.handled:
            return []
        self._sent_ns = now_ns
        return [*self._back * self._balls, StartTimer(name="serve", at_ns=now_ns + SECOND // 2)]

    def snapshot(self) -> dict[str, Any]:
        return {"handled": self.handled}

    def check_invariants(self) -> None:
        """A bench checks nothing."""


def _again(player: Player, incarnation: int) -> Player:
    """A factory of the one player, whatever the incarnation."""
    return player


def simulate(*, verify: bool, pairs: int, handled: int) -> float:
    """Handled messages a second in virtual time."""
    simulation = Simulation(1, verify=verify, invariants_every=0)
    for pair in range(pairs):
        for name, other in ((f"a{pair}", f"b{pair}"), (f"b{pair}", f"a{pair}")):
            balls = 1 if name.startswith("a") else 0
            player = Player(name, other, balls=balls, body=SMALL)
            simulation.add(partial(_again, player), node=name, accepts=(LengthTag,))
    began = time.process_time()
    while simulation.handled < handled:
        simulation.run_for(SECOND // (2 * pairs))
    return simulation.handled / (time.process_time() - began)


def _play(url: str, name: str, other: str, options: dict[str, Any], results: Any) -> None:
    """One process of the NATS figure."""

    async def main() -> None:
        bus = BusConfig(cluster="bench", servers=[url])
        runtime = NatsRuntime(bus=bus, name=name, telemetry=NullTelemetry(), registry=CollectorRegistry())
        await runtime.connect()
        player = Player(name, other, **options)
        runtime.add(player, accepts=(LengthTag, TokensGenerated))
        cpu = time.process_time()
        await runtime.run()
        trips = sorted(player.trips_ns)
        results.put((player.handled, time.process_time() - cpu, trips[:: max(1, len(trips) // 1000)]))

    profile = options.pop("profile", False)
    if profile:
        profiler = cProfile.Profile()
        profiler.runcall(run_to_end, main())
        pstats.Stats(profiler).sort_stats("tottime").print_stats(18)
    else:
        run_to_end(main())


def over_nats(
    url: str, *, balls: int, body: Body, seconds: float, profile: bool = False
) -> tuple[float, float, list[int]]:
    """Handled messages a second, CPU seconds of one process per handled message, sorted round trips in ns."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = []
    for name, other, serves in (("b", "a", 0), ("a", "b", balls)):
        options = {"balls": serves, "body": body, "seconds": seconds, "profile": profile and bool(serves)}
        processes.append(context.Process(target=_play, args=(url, name, other, options, results)))
    for process in processes:
        process.start()
    ended = [results.get(timeout=seconds + 30) for _ in processes]
    for process in processes:
        process.join(timeout=10)
    handled = sum(count for count, _cpu, _trips in ended)
    trips = sorted(trip for _count, _cpu, some in ended for trip in some)
    return handled / seconds, sum(cpu for _count, cpu, _trips in ended) / handled, trips


def _print_simulation(repeats: int) -> None:
    print(f"{'simulation, one core':<34}{'handled/s':>12}   median of {repeats}")
    for title, verify, pairs in (
        ("2 actors, bodies by reference", False, 1),
        ("2 actors, encoded and decoded", True, 1),
        ("2,000 actors, by reference", False, 1000),
    ):
        rates = [simulate(verify=verify, pairs=pairs, handled=300_000) for _ in range(repeats)]
        print(f"  {title:<32}{statistics.median(rates):>12,.0f}")


def _print_nats(url: str, seconds: float) -> None:
    print(
        f"\n{'NATS, two processes and server':<34}{'handled/s':>12}{'CPU us/message':>16}{'round trip p50/p99 ms':>24}"
    )
    for what, body in BODIES.items():
        for balls in (1, 64):
            rate, cpu, trips = over_nats(url, balls=balls, body=body, seconds=seconds)
            trip = ""
            if trips:
                trip = f"{trips[len(trips) // 2] / 1e6:.3f} / {trips[len(trips) * 99 // 100] / 1e6:.3f}"
            print(f"  {f'{what}, {balls} in flight':<32}{rate:>12,.0f}{cpu * 1e6:>16.1f}{trip:>24}")


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="bench actors", description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each NATS measurement")
    parser.add_argument("--profile", choices=["sim", "nats"])
    options = parser.parse_args()
    if options.profile == "sim":
        profiler = cProfile.Profile()
        profiler.runcall(simulate, verify=False, pairs=1, handled=200_000)
        pstats.Stats(profiler).sort_stats("tottime").print_stats(15)
        return
    from tests.testbed.nats_process import NatsProcess

    server = NatsProcess(Path(tempfile.mkdtemp(prefix="millrace-bench-")))
    server.start()
    try:
        if options.profile == "nats":
            over_nats(server.url, balls=64, body=SMALL, seconds=options.seconds, profile=True)
        else:
            _print_simulation(options.repeats)
            _print_nats(server.url, options.seconds)
    finally:
        server.close()


if __name__ == "__main__":
    main()

"""Simulated cluster of modelled engines with others that decode, and requests whose tokens' times are watched."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from millrace.enginemodel.coefficients import load_step_time
from millrace.sim.runtime_sim import MILLISECOND, SECOND
from millrace.workloads.shape import Arrival, RequestShape

from services.ingress.calls.messages import DeliverDeltas
from simulator.scenarios.cluster import ScenarioCluster
from simulator.scenarios.counting_clients import CountingClients
from simulator.scenarios.load import call_of, request_name
from simulator.scenarios.reading import scenario_of
from simulator.scenarios.spec import MODEL

K = 1024
ENGINE = {
    "max_model_len": 160 * K,
    "blocks_total": 50_000,
    "max_sequences": 256,
    "token_budget": 8192,
    "prefix_caching": False,
}
#: Of the others: context when they begin, tokens. They do not end.
OTHERS_PROMPT = 2000
ENDLESS = 100_000
#: The longest that anything here may take, virtual seconds.
LIMIT_S = 120


class TimedClients(CountingClients):
    """Clients that note when each request's tokens came, unix ns of virtual time."""

    def __init__(self) -> None:
        super().__init__()
        self.times: dict[str, list[int]] = {}

    def handlers(self, process: Any) -> Any:
        """Also notes deliveries."""

        def note(effect: DeliverDeltas) -> None:
            self.times.setdefault(effect.request, []).append(process.simulation.now_ns)

        return {**super().handlers(process), DeliverDeltas: note}


class WatchedCluster:
    """One ingress and some engines in virtual time."""

    def __init__(self, scenario: Mapping[str, Any]) -> None:
        """``scenario``: As a scenario's file has it."""
        self._lengths: list[int] = []
        self.clients = TimedClients()
        self.cluster = ScenarioCluster(
            scenario_of(dict(scenario)),
            step_times=load_step_time,
            truth=lambda request, _model: self._lengths[int(request[1:])],
            clients=self.clients,
        )
        self.cluster.simulation.run(self.cluster.begin_ns)

    def begin(self, others: int) -> list[str]:
        """So many requests that decode without end."""
        names = [self.submit(OTHERS_PROMPT, ENDLESS) for _ in range(others)]
        for name in names:
            self.until(name, 2)
        return names

    def submit(self, prompt: int, output: int) -> str:
        """Sends a request. Returns its name."""
        number = len(self._lengths)
        self._lengths.append(output)
        arrival = Arrival(0, RequestShape(prompt, output))
        call = call_of(number, arrival, model=MODEL, max_model_len=ENGINE["max_model_len"], output_limit=0)
        process = self.cluster.ingresses[0].process
        assert process is not None
        self.clients.submit(process, msgspec.structs.replace(call, stream=True))
        return request_name(number)

    def times(self, request: str) -> list[int]:
        """Times at which the request's tokens came, ns."""
        return self.clients.times.get(request, [])

    def until(self, request: str, tokens: int) -> None:
        """Runs until it has so many deliveries."""
        simulation = self.cluster.simulation
        limit_ns = simulation.now_ns + LIMIT_S * SECOND
        while len(self.times(request)) < tokens:
            assert simulation.now_ns < limit_ns, f"{request} stands still: {self.clients.details}"
            simulation.run_for(MILLISECOND)

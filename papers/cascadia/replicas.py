"""Latency of one replica as a function of its arrival rate, by simulation with the engine model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from random import Random

import msgspec
import numpy as np
from millrace.cascade.chain import NS, PERCENTILE
from millrace.cascade.sample import Integers
from millrace.enginemodel.forecast.question import ReplicaRequest
from millrace.enginemodel.forecast.replica import replica_runs
from millrace.enginemodel.parameters import EngineParameters
from millrace.enginemodel.step_cost import StepCost

#: Requests of one run. The 95th percentile then rests on 15 requests above it.
RUN_REQUESTS = 300

#: Rates simulated, as shares of the throughput with all requests waiting at once.
RATE_SHARES = (0.05, 0.2, 0.4, 0.55, 0.7, 0.8, 0.9, 0.97)

#: Runs of one curve at once: the compiled engine model runs without Python's lock.
THREADS = 2


class ReplicaShape(msgspec.Struct, frozen=True, kw_only=True):
    """One way to run a model on some GPUs.

    Pipeline parallelism is modelled as ``pipeline`` lanes: each lane runs its own batches at the speed of the
    tensor-parallel engine plus the hops between stages, and has its share of the KV memory. No published measurement
    of pipelined engines backs this form.

    Attributes:
        tensor: GPUs that share each layer.
        pipeline: Stages.
        cost: Of a step of one lane, hops included.
        parameters: Of one lane; its blocks are the lane's share.
    """

    tensor: int
    cost: StepCost
    parameters: EngineParameters
    pipeline: int = 1

    @property
    def gpus(self) -> int:
        return self.tensor * self.pipeline

    @property
    def name(self) -> str:
        """For example ``tp4`` or ``tp4pp2``."""
        return f"tp{self.tensor}" + (f"pp{self.pipeline}" if self.pipeline > 1 else "")


@dataclass(frozen=True, eq=False)
class TierWorkload:
    """Requests of one tier: prompt and output lengths, (n,) each, in order of arrival."""

    prompt_tokens: Integers
    output_tokens: Integers

    @property
    def count(self) -> int:
        """Requests; 0 for a tier that nobody reaches."""
        return len(self.prompt_tokens)


@dataclass(frozen=True, eq=False)
class RateCurve:
    """p95 latency of one replica, seconds, at some rates, requests/s; both rise."""

    rates: tuple[float, ...]
    latencies_s: tuple[float, ...]

    def highest_rate(self, latency_s: float) -> float:
        """Highest rate at which the latency is kept; 0 where not even the lowest rate keeps it."""
        if latency_s < self.latencies_s[0]:
            return 0.0
        return float(np.interp(latency_s, self.latencies_s, self.rates))


@dataclass
class ReplicaModel:
    """Rate curves of shapes under workloads, each simulated once.

    Attributes:
        seed: Of arrivals; the same draws are used at every rate.
        runs: Simulations so far.
    """

    seed: int = 0
    requests: int = RUN_REQUESTS
    runs: int = 0
    _curves: dict[tuple[bytes, int], tuple[ReplicaShape, RateCurve | None]] = field(default_factory=dict)

    def curve(self, workload: TierWorkload, shape: ReplicaShape, key: bytes) -> RateCurve | None:
        """The rate curve; None where a request does not fit in the shape's memory or context.

        Args:
            key: Names the workload.
        """
        name = (key, id(shape))  # hashing a shape goes through all its step costs
        if name not in self._curves:
            self._curves[name] = (shape, self._simulate(workload, shape))
        return self._curves[name][1]

    def _simulate(self, workload: TierWorkload, shape: ReplicaShape) -> RateCurve | None:
        longest = int((workload.prompt_tokens + workload.output_tokens).max())
        if longest > shape.parameters.max_model_len:
            return None
        rng = Random(f"{self.seed}/replica")
        order = [rng.randrange(workload.count) for _ in range(self.requests)]
        lengths = [(int(workload.prompt_tokens[index]), int(workload.output_tokens[index])) for index in order]
        gaps = [rng.expovariate(1.0) for _ in lengths]
        ends_of = shape_runs(shape)

        def p95_s(rate: float) -> float:
            arrivals = _arrivals(gaps, rate)
            rows = [(at, *length) for at, length in zip(arrivals, lengths, strict=True)]
            return float(np.percentile(np.subtract(ends_of(rows), arrivals), PERCENTILE)) / NS

        throughput = len(lengths) / (max(ends_of([(0, *length) for length in lengths])) / NS)
        rates = [share * throughput for share in RATE_SHARES]
        self.runs += shape.pipeline * (1 + len(rates))
        with ThreadPoolExecutor(THREADS) as pool:
            latencies = list(pool.map(p95_s, rates))
        return RateCurve(tuple(rates), tuple(np.maximum.accumulate(latencies).tolist()))


def shape_runs(shape: ReplicaShape) -> Callable[[Sequence[tuple[int, int, int]]], list[int]]:
    """Runs of one replica: from (arrival ns, prompt tokens, output tokens) in order of arrival to the requests' ends,
    ns. The lanes of a pipeline take turns.
    """
    run = replica_runs(shape.cost, shape.parameters)

    def ends(rows: Sequence[tuple[int, int, int]]) -> list[int]:
        found = [0] * len(rows)
        for lane in range(shape.pipeline):
            found[lane :: shape.pipeline] = [end for _, end in run([(*row, 0) for row in rows[lane :: shape.pipeline]])]
        return found

    return ends


def serve(requests: Sequence[ReplicaRequest], shape: ReplicaShape) -> list[int]:
    """End of each request on one replica, ns."""
    return shape_runs(shape)([(each.at_ns, each.prompt_tokens, each.output_tokens) for each in requests])


def _arrivals(gaps: Sequence[float], rate: float) -> list[int]:
    at, arrivals = 0.0, []
    for gap in gaps:
        at += gap / rate
        arrivals.append(int(at * NS))
    return arrivals

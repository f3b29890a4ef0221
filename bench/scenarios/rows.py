"""One run's figures as a row, and a file of rows: runs that are in it are not made again."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec
from millrace.contracts.migration import MigrationOutcome

from simulator.scenarios.observer import EngineSample
from simulator.scenarios.running import ScenarioOutcome
from simulator.scenarios.spec import ScenarioSpec
from simulator.scenarios.statistics import summarise

#: Block's bound in its provisioning experiment, seconds.
SLOW_S = 70.0


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Figures kept of one run. Times in seconds, rates per second, errors as shares of the measured value.

    Attributes:
        label: What sets the run apart, but for rate and seed.
        rate: As asked for.
        key: Of the scenario, see ``key_of``.
        slow: Requests whose end-to-end time is above SLOW_S.
        instance_s: Sum over instances of the time from their first to their last word while requests were open.
        instances: How many there were at most.
        e2e_error, e2e_bias, ttft_error: Of the forecasts at placement; None without.
        goodput: Share of all requests that completed within the scenario's SLO.
        prefix_error: Cached tokens that forecasts had wrong, as a share of the prompt tokens; None without.
        moved, frozen_p50: Migrations that ended well, and how long a sequence stood still for one; None without.
        further: What the job measures beside these, by name.
    """

    label: str
    rate: float
    seed: int
    key: str
    served: int
    lost: int
    ttft_mean: float
    ttft_p50: float
    ttft_p99: float
    e2e_mean: float
    e2e_p50: float
    e2e_p99: float
    tpot_p50: float
    throughput: float
    preemptions: int
    prefix_share: float
    imbalance: float
    fallbacks: int
    slow: int
    instance_s: float
    instances: int
    e2e_error: float | None
    e2e_bias: float | None
    ttft_error: float | None
    trace_hash: str
    wall_s: float
    goodput: float | None = None
    tpot_mean: float | None = None
    tpot_p99: float | None = None
    moved: int = 0
    frozen_p50: float | None = None
    prefix_error: float | None = None
    further: dict[str, float] = {}


Measure = Callable[[ScenarioOutcome], dict[str, float]]


def no_figures(outcome: ScenarioOutcome) -> dict[str, float]:
    """Measure of a job whose rows are complete without one."""
    return {}


def row_of(label: str, rate: float, outcome: ScenarioOutcome, measure: Measure = no_figures) -> Row:
    """The row of a run."""
    summary = summarise(outcome)
    predicted = summary.e2e_error.count > 0
    done = [record for record in outcome.finished if record.outcome == "completed"]
    last_ns = max((record.arrival_ns + record.e2e_ns for record in done), default=0)
    spans = _spans(outcome.samples, last_ns)
    return Row(
        label=label,
        rate=rate,
        seed=summary.seed,
        key=key_of(outcome.spec),
        served=summary.served,
        lost=summary.lost,
        ttft_mean=summary.ttft_s.mean,
        ttft_p50=summary.ttft_s.p50,
        ttft_p99=summary.ttft_s.p99,
        e2e_mean=summary.e2e_s.mean,
        e2e_p50=summary.e2e_s.p50,
        e2e_p99=summary.e2e_s.p99,
        tpot_p50=summary.tpot_s.p50,
        throughput=summary.requests_per_s,
        preemptions=summary.preemptions,
        prefix_share=summary.prefix_share,
        imbalance=summary.imbalance,
        fallbacks=summary.fallbacks,
        slow=sum(record.e2e_ns > SLOW_S * 1e9 for record in done),
        instance_s=sum(spans.values()),
        instances=len(spans),
        e2e_error=summary.e2e_error.absolute if predicted else None,
        e2e_bias=summary.e2e_error.bias if predicted else None,
        ttft_error=summary.ttft_error.absolute if predicted else None,
        trace_hash=summary.trace_hash,
        wall_s=outcome.wall_s,
        goodput=summary.goodput,
        tpot_mean=summary.tpot_s.mean,
        tpot_p99=summary.tpot_s.p99,
        moved=summary.migrations.get(MigrationOutcome.MOVED, 0),
        frozen_p50=summary.frozen_s.p50 if summary.migrations else None,
        prefix_error=summary.prefix_error,
        further=measure(outcome),
    )


def key_of(spec: ScenarioSpec) -> str:
    """Equal for equal scenarios, seed included; the code that runs them is not in it."""
    plain = msgspec.structs.replace(spec, name="")
    return hashlib.sha256(msgspec.json.encode(plain)).hexdigest()[:16]


class Store:
    """Rows by key, in a file of JSON lines if there is one. Owned by one process."""

    def __init__(self, path: Path | None) -> None:
        """Reads what is there. Raises msgspec.DecodeError where that is something else."""
        self._path = path
        self._rows: dict[str, Row] = {}
        if path is not None and path.exists():
            for line in path.read_bytes().splitlines():
                row = msgspec.json.decode(line, type=Row)
                self._rows[row.key] = row

    def get(self, spec: ScenarioSpec) -> Row | None:
        """The row of a scenario that ran before."""
        return self._rows.get(key_of(spec))

    def put(self, row: Row) -> None:
        """Keeps a row, on disk at once."""
        self._rows[row.key] = row
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("ab") as file:
                file.write(msgspec.json.encode(row) + b"\n")


def select(rows: Iterable[Row], label: str, rate: float | None = None) -> list[Row]:
    """Those of one label, and one rate if that is given."""
    return [row for row in rows if row.label == label and (rate is None or row.rate == rate)]


def _spans(samples: Sequence[EngineSample], until_ns: int) -> dict[str, float]:
    """Seconds from the first to the last sample of each instance, up to a time."""
    times: dict[str, tuple[int, int]] = {}
    for sample in samples:
        if sample.at_ns <= until_ns:
            first, last = times.get(sample.instance, (sample.at_ns, sample.at_ns))
            times[sample.instance] = (min(first, sample.at_ns), max(last, sample.at_ns))
    return {name: (last - first) / 1e9 for name, (first, last) in times.items()}

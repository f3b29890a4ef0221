"""Record of a run: enough to make its figures and to replay it in simulation. One file per policy, load and round."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
from millrace.contracts.codec import decode, encode
from millrace.contracts.observers import DecisionMade, RequestFinished
from millrace.contracts.status import InstanceRecord, StatusSnapshot

from bench.live.plan import Load
from bench.live.play import Played


class _Played(msgspec.Struct, frozen=True, kw_only=True):
    """One policy on one load.

    Attributes:
        round: Which repetition with which seed, from 0.
        capacity_per_s: Requests per second of this load's lengths that the cluster was measured to serve.
        machine: Processor time that others took while it ran, and the load average, in words.
        began_ns: Unix ns of the first arrival's time 0.
    """

    policy: str
    load: Load
    round: int
    capacity_per_s: float
    machine: str
    began_ns: int
    played: list[Played]


class Recording(_Played, frozen=True, kw_only=True):
    """It with what the bus carried."""

    instances: list[InstanceRecord]
    decisions: list[DecisionMade]
    outcomes: list[RequestFinished]
    snapshots: list[StatusSnapshot]


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """One completed request. Times in s; nan where there is none. Predictions count from the placement.

    Attributes:
        arrival_s: From the first arrival of the run.
        placing_s: From arrival to placement.
    """

    request: str
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    ttft_s: float
    e2e_s: float
    placing_s: float
    instance: str
    predicted_tokens: float = math.nan
    predicted_ttft_s: float = math.nan
    predicted_e2e_s: float = math.nan

    @property
    def tpot_s(self) -> float:
        """Mean time per output token after the first; nan where there is only one."""
        return (self.e2e_s - self.ttft_s) / (self.output_tokens - 1) if self.output_tokens > 1 else math.nan


def figures(recording: Recording) -> list[Figures]:
    """Of every request that completed, in order of arrival."""
    done = sorted((o for o in recording.outcomes if o.outcome == "completed"), key=lambda o: o.arrival_ns)
    first_ns = min((o.arrival_ns for o in recording.outcomes), default=0)
    return [_figures(outcome, first_ns) for outcome in done]


def _figures(outcome: RequestFinished, first_ns: int) -> Figures:
    return Figures(
        request=outcome.request,
        arrival_s=(outcome.arrival_ns - first_ns) / 1e9,
        prompt_tokens=outcome.prompt_tokens,
        output_tokens=sum(outcome.output_tokens),
        ttft_s=_seconds(outcome.ttft_ns),
        e2e_s=outcome.e2e_ns / 1e9,
        placing_s=(outcome.placed_ns - outcome.arrival_ns) / 1e9,
        instance=outcome.instances[-1] if outcome.instances else "",
        predicted_tokens=_or_nan(outcome.predicted_output_tokens),
        predicted_ttft_s=_seconds(outcome.predicted_ttft_ns),
        predicted_e2e_s=_seconds(outcome.predicted_e2e_ns),
    )


def _seconds(value_ns: int | None) -> float:
    return _or_nan(value_ns) / 1e9


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else float(value)


class _File(_Played, frozen=True, kw_only=True):
    """As it lies on disk: messages in their wire form, which their tags tell apart."""

    messages: list[bytes]


def write(recording: Recording, folder: Path) -> Path:
    """Writes one recording; its name says which it is."""
    folder.mkdir(parents=True, exist_ok=True)
    shared = {name: getattr(recording, name) for name in _Played.__struct_fields__}
    bodies = (*recording.instances, *recording.decisions, *recording.outcomes, *recording.snapshots)
    path = folder / f"{recording.load.kind}-{recording.round}-{recording.policy}.run"
    path.write_bytes(msgspec.msgpack.encode(_File(**shared, messages=[encode(body) for body in bodies])))
    return path


def read(path: Path) -> Recording:
    """Reads one.

    Raises:
        ValueError: it is no recording; the message names the file.
    """
    try:
        file = msgspec.msgpack.decode(path.read_bytes(), type=_File)
    except (OSError, msgspec.DecodeError) as error:
        raise ValueError(f"{path}: {error}") from None
    bodies = [decode(message) for message in file.messages]
    shared = {name: getattr(file, name) for name in _Played.__struct_fields__}
    return Recording(
        **shared,
        instances=[body for body in bodies if isinstance(body, InstanceRecord)],
        decisions=[body for body in bodies if isinstance(body, DecisionMade)],
        outcomes=[body for body in bodies if isinstance(body, RequestFinished)],
        snapshots=[body for body in bodies if isinstance(body, StatusSnapshot)],
    )


def read_all(folder: Path) -> list[Recording]:
    """Every recording of a folder, by name of file.

    Raises:
        ValueError: there is none, or one cannot be read.
    """
    paths = sorted(folder.glob("*.run"))
    if not paths:
        raise ValueError(f"{folder}: holds no recording (*.run); `python -m bench live_policies --keep {folder}` makes")
    return [read(path) for path in paths]

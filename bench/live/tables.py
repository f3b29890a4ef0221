"""A campaign's figures as text."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from millrace.contracts.status import InstanceRecord

from bench.live.recording import Figures, Recording, figures
from bench.live.statistics import FIGURES, Errors, e2e_errors, length_errors, spread, ttft_errors

_MS = 1000.0


def by_policy(recordings: Sequence[Recording]) -> dict[str, list[Recording]]:
    """Recordings of one kind of load, together by policy, in the order in which policies first came."""
    found: dict[str, list[Recording]] = {}
    for recording in recordings:
        found.setdefault(recording.policy, []).append(recording)
    return found


def kinds(recordings: Sequence[Recording]) -> dict[str, list[Recording]]:
    """Recordings by kind of load."""
    ordered = sorted(recordings, key=lambda recording: recording.load.kind)
    return {kind: list(group) for kind, group in groupby(ordered, key=lambda recording: recording.load.kind)}


def campaign_table(recordings: Sequence[Recording]) -> str:
    """Everything that was measured live."""
    return "\n\n".join(_kind_table(kind, group) for kind, group in kinds(recordings).items())


def _kind_table(kind: str, group: Sequence[Recording]) -> str:
    loads = [recording.load for recording in group]
    rates = ", ".join(sorted({f"{load.rate_per_s:.1f}" for load in loads}))
    shares = sorted({f"{recording.load.rate_per_s / recording.capacity_per_s:.0%}" for recording in group})
    lines = [
        f"{kind} lengths, {_engines(group)}: arrivals {rates}/s (gamma, cv {loads[0].cv:g}), "
        f"{', '.join(shares)} of the capacity measured",
        _head(),
    ]
    policies = by_policy(group)
    lines += [_row(policy, every(runs)) for policy, runs in policies.items()]
    for policy, runs in policies.items():
        lines += _forecasts(policy, runs)
    lines += [f"  while {recording.policy} ran: {recording.machine}" for recording in group]
    lost = sum(bool(each.error) for recording in group for each in recording.played)
    late = max((each.late_s for recording in group for each in recording.played), default=0.0)
    lines.append(f"failed requests {lost}; the client sent at most {late * _MS:.0f} ms late")
    return "\n".join(lines)


def _engines(group: Sequence[Recording]) -> str:
    records = group[0].instances
    names = sorted({f"{record.engine} {record.engine_version} as {record.step_time or '?'}" for record in records})
    seeds = sorted({recording.load.seed for recording in group})
    return f"{len(records)} x {', '.join(names)}{_limits(records)}, seeds {', '.join(map(str, seeds))}"


def _limits(records: Sequence[InstanceRecord]) -> str:
    """Describe the limits of unequal engines; empty for equal ones."""
    told = [f"{record.max_sequences} sequences and {record.blocks_total} blocks" for record in records]
    return f" ({', '.join(told)})" if len(set(told)) > 1 else ""


def every(runs: Sequence[Recording]) -> list[Figures]:
    """Requests of all rounds."""
    return [figure for run in runs for figure in figures(run)]


def _head() -> str:
    columns = "".join(f"{name + ' mean':>17}{name + ' p99':>17}" for name in FIGURES)
    return f"  {'ms, ± 95 %':<20}{'n':>5}{columns}{'tokens':>8}"


def _row(policy: str, done: Sequence[Figures]) -> str:
    cells = ""
    for of in FIGURES.values():
        told = spread(map(of, done))
        cells += f"{told.mean * _MS:>10.1f} ± {told.mean_half * _MS:<4.1f}"
        cells += f"{told.p99 * _MS:>10.0f} ± {told.p99_half * _MS:<4.0f}"
    tokens = sum(figure.output_tokens for figure in done) / max(1, len(done))
    return f"  {policy:<20}{len(done):>5}{cells}{tokens:>8.1f}"


def _forecasts(policy: str, runs: Sequence[Recording]) -> list[str]:
    done = every(runs)
    told = e2e_errors(done)
    if not told.count:
        return []
    lines = [
        f"  {policy}: predicted against measured, from the placement on",
        _error("end to end", told),
        _error("TTFT", ttft_errors(done)),
    ]
    if runs[0].load.kind == "tagged":
        lines.append(_error("output length", length_errors(done)))
    by_instance = {name: [f for f in done if f.instance == name] for name in sorted({f.instance for f in done})}
    lines += [_error(f"end to end, {name}", e2e_errors(part)) for name, part in by_instance.items()]
    fallbacks = sum(bool(decision.fallback) for run in runs for decision in run.decisions)
    return [*lines, f"    {fallbacks} decisions by the fallback"]


def _error(name: str, told: Errors) -> str:
    return (
        f"    {name:<22} mean |error| {told.mean:6.1%}, median {told.median:6.1%}, "
        f"sum of |errors| {told.absolute_sums:6.1%} of the time, sums {told.sums:.3f} (n {told.count})"
    )

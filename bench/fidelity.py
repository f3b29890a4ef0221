"""A recorded run of real engines behind Millrace, replayed in simulation: latencies side by side, and policies' order.

Runs the stated load of ``python -m bench live_policies``, or reads what that kept (``--recordings FOLDER``). Step times
and message times are fitted to every other slice of two seconds, latencies are compared on requests of the others.
Each two policies are compared on the requests that both served: both worlds must tell them apart, and alike.
``--unequal`` runs two engines that differ much, on which policies do too. ``--hold-out`` fits step and message times of
each policy to the runs of the others alone, and compares all of its requests.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from bench.live.halves import fitted_on
from bench.live.pairs import Key, keyed, pair_lines, pairs
from bench.live.recording import Figures, Recording, figures, read_all, write
from bench.live.replay import EngineFit, fits, replay, scenario
from bench.live.statistics import FIGURES, Errors, Spread, e2e_errors, ordered, spread
from bench.live.tables import by_policy
from bench.live.transit import Transit, transit
from bench.live_policies import add_options, run

_MS = 1000.0


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """One policy in both worlds, the half of its requests that was not fitted.

    Attributes:
        live, simulated: By name of figure, s.
        live_requests, simulated_requests: What these are made of.
        simulated_error: Of the simulated predictors' own forecasts; the count is 0 where nobody was asked.
    """

    policy: str
    count: int
    live: dict[str, Spread]
    simulated: dict[str, Spread]
    live_requests: dict[Key, Figures]
    simulated_requests: dict[Key, Figures]
    live_error: Errors
    simulated_error: Errors


def main() -> int:
    """Runs or reads, replays, prints."""
    parser = argparse.ArgumentParser(prog="python -m bench fidelity", description=__doc__)
    add_options(parser)
    parser.add_argument("--recordings", type=Path, help="replay these instead of running")
    parser.add_argument("--keep", type=Path, help="keep the recordings here")
    parser.add_argument("--hold-out", action="store_true", help="each policy by times fitted to the others' runs alone")
    parser.set_defaults(kinds="stated")
    options = parser.parse_args()
    try:
        recordings = read_all(options.recordings) if options.recordings else run(options)
        for recording in recordings if options.keep else ():
            write(recording, options.keep)
        chosen = [
            recording for recording in recordings if recording.load.kind in (options.kinds or "stated").split(",")
        ]
        for kind in sorted({recording.load.kind for recording in chosen}):
            runs = [recording for recording in chosen if recording.load.kind == kind]
            if options.hold_out:
                print("\n".join(held_out_lines(kind, runs)))
            else:
                _report(kind, runs)
    except ValueError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    return 0


def _report(kind: str, recordings: Sequence[Recording]) -> None:
    fitted, way = fits(recordings), transit(recordings)
    print(f"{kind} lengths; fitted to every other slice of two seconds, held against the others:")
    print("\n".join(_fit_line(each) for each in fitted.values()))
    print(
        f"  a message takes {2 * way.hop_least:.0f} us at least, {2 * way.hop_mean:.0f} us on average; to a worker "
        f"{way.there:.0f}, from it into a batch {way.into:.0f}, from a step's end to ingress {way.back:.0f}"
    )
    compared = []
    for policy, runs in by_policy(recordings).items():
        compared.append(compare(policy, runs, [fitted] * len(runs), way))
    print("\n".join([_head(), *(line for each in compared for line in _rows(each))]))
    print("pairs on the same requests: first minus second in ms [95 % interval]; told apart where 0 lies outside")
    for name in FIGURES:
        print("\n".join(_orders(name, compared)))


def held_out_lines(kind: str, recordings: Sequence[Recording]) -> list[str]:
    """Latencies of each policy by step and message times of the other policies' runs.

    Raises:
        ValueError: there is one policy only.
    """
    by_name = by_policy(recordings)
    if len(by_name) < 2:
        raise ValueError("--hold-out needs runs of two policies at least")
    lines = [
        f"{kind} lengths; each policy by step and message times fitted to the others' runs, all requests:",
        _head(),
    ]
    for policy, runs in by_name.items():
        others = [each for name, rest in by_name.items() if name != policy for each in rest]
        lines += _rows(compare(policy, runs, [fits(others)] * len(runs), transit(others), whole=True))
    return lines


def compare(
    policy: str, runs: Sequence[Recording], fits: Sequence[dict[str, EngineFit]], way: Transit, *, whole: bool = False
) -> Compared:
    """A policy's runs in both worlds.

    Args:
        fits: Step times of each run.
        whole: All requests, not the half whose slices were not fitted.
    """
    real: dict[Key, Figures] = {}
    modelled: dict[Key, Figures] = {}
    for recording, fitted in zip(runs, fits, strict=True):
        with tempfile.TemporaryDirectory() as folder:
            spec = scenario(recording, fitted=fitted, way=way, folder=Path(folder))
            again = replay(spec, Path(folder), fitted=fitted)
        done = figures(recording)
        real |= keyed(recording, done if whole else _compared(recording, done), simulated=False)
        modelled |= keyed(recording, again if whole else _compared(recording, again), simulated=True)
    live, simulated = list(real.values()), list(modelled.values())
    return Compared(
        policy=policy,
        count=len(simulated),
        live={name: spread(map(of, live)) for name, of in FIGURES.items()},
        simulated={name: spread(map(of, simulated)) for name, of in FIGURES.items()},
        live_requests=real,
        simulated_requests=modelled,
        live_error=e2e_errors(live),
        simulated_error=e2e_errors(simulated),
    )


def _compared(recording: Recording, done: Sequence[Figures]) -> list[Figures]:
    """Those whose time was not fitted."""
    first_ns = min(outcome.arrival_ns for outcome in recording.outcomes)
    # The trace has tenths of microseconds: a microsecond more keeps both worlds on the same side of a slice's end.
    return [f for f in done if not fitted_on(recording, first_ns + round(f.arrival_s * 1e6) * 1000)]


def _fit_line(fitted: EngineFit) -> str:
    model = fitted.model
    return (
        f"  {fitted.instance}: step = {model.fixed / 1e6:.2f} ms + {model.per_decode / 1e3:.0f} us a decode + "
        f"{model.per_prefill_token / 1e3:.0f} us a prompt token + {model.per_context_token:.0f} ns a token of context "
        f"+ {model.per_prompted_step / 1e6:.2f} ms with a prompt, {fitted.slowdown:+.0%} beside a neighbour "
        f"({fitted.windows} windows; the other half: sums {fitted.sums:.3f}, mean |error| {fitted.error:.1%})"
    )


def _head() -> str:
    columns = "".join(f"{name + ' mean':>24}{name + ' p99':>24}" for name in FIGURES)
    return f"  {'ms: live, simulated':<20}{'n':>5}{columns}"


def _rows(each: Compared) -> list[str]:
    cells = ""
    for name in FIGURES:
        for part in ("mean", "p99"):
            real, modelled = getattr(each.live[name], part), getattr(each.simulated[name], part)
            cells += f"{real * _MS:>9.1f}{modelled * _MS:>8.1f}{modelled / real - 1:>+7.0%}"
    lines = [f"  {each.policy:<20}{each.count:>5}{cells}"]
    if each.live_error.count and each.simulated_error.count:
        lines.append(
            f"    forecasts of e2e: mean |error| live {each.live_error.mean:.1%}, "
            f"simulated {each.simulated_error.mean:.1%}"
        )
    return lines


def _orders(name: str, compared: Sequence[Compared]) -> list[str]:
    """Whole orders, and each pair of policies."""
    live = {each.policy: each.live_requests for each in compared}
    simulated = {each.policy: each.simulated_requests for each in compared}
    lines = []
    for part, told in pairs(live, simulated, name).items():
        lines += pair_lines(name, part, told)
        for world, spreads in (("live", [e.live for e in compared]), ("simulated", [e.simulated for e in compared])):
            values = {e.policy: getattr(s[name], part) for e, s in zip(compared, spreads, strict=True)}
            if not any(math.isnan(value) for value in values.values()):
                lines.append(f"    {world}: {' < '.join(ordered(values))}")
    return lines

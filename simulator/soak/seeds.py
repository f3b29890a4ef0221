"""Many seeds of the cluster simulation: ``millrace sim --seeds 500``.

Prints one line per failing seed and a summary; exit code 1 where a seed failed. One seed again, with its faults and
outcomes: ``--first 17 --seeds 1 --verbose``.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec
from millrace.policies.dispatch import DISPATCH_POLICIES
from millrace.sim.failure import SimulationFailed

from simulator.soak.cascading import CascadeSoakRun
from simulator.soak.migration_load import migration_for
from simulator.soak.roles import RolesSoakRun, roles_shape
from simulator.soak.run import SoakReport, SoakRun
from simulator.soak.shape import MigrationShape, SoakShape
from simulator.soak.trading import trading_shape

#: Predictors of a cluster whose policy asks them: two, so that one can die while the other answers.
PREDICTORS = 2

#: Default dispatch policy.
POLICY = SoakShape().policy


def shape_for(policy: str, migration: MigrationShape | None = None) -> SoakShape:
    """The cluster of a soak with this dispatch policy."""
    asks = DISPATCH_POLICIES.load(policy).ask is not None
    return SoakShape(policy=policy, predictors=PREDICTORS if asks else 0, migration=migration)


class SoakChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Kind of a soak, and its settings: the options of the command line.

    Attributes:
        migrations, trading, balance, roles, cascades, switches: The kind; none of them for requests that stay.
        trading_policy: Empty for one that the seed draws.
        wrong_estimates: Engines tell rests that are wrong.
        slow: Engines are slow and sequences long; None for what the seed draws.
    """

    policy: str = POLICY
    migrations: bool = False
    trading: bool = False
    balance: bool = False
    roles: bool = False
    cascades: bool = False
    switches: bool = False
    trading_policy: str = ""
    wrong_estimates: bool = False
    slow: bool | None = None

    def run_of(self, seed: int) -> SoakRun:
        estimates: dict[str, Any] = {"policy": self.trading_policy, "wrong_estimates": self.wrong_estimates}
        if self.cascades:
            return CascadeSoakRun(seed)
        if self.switches:
            from simulator.soak.switching import SwitchingRun  # brings scipy, which no other soak needs

            return SwitchingRun(seed)
        if self.roles:
            return RolesSoakRun(seed, shape=roles_shape(seed, **estimates))
        if self.balance:
            return SoakRun(seed, shape=trading_shape(seed, balance=True))
        if self.trading:
            shape = trading_shape(seed, slow=self.slow, **estimates)
            return SoakRun(seed, shape=msgspec.structs.replace(shape, policy=self.policy))
        return SoakRun(seed, shape=shape_for(self.policy, migration_for(seed) if self.migrations else None))


def run_seed(seed: int, choice: SoakChoice | None = None) -> SoakReport | str:
    """The report of a seed, or why it failed."""
    try:
        return (choice or SoakChoice()).run_of(seed).run()
    except StopIteration as error:  # would end the seeds that follow without a word
        raise RuntimeError(f"seed {seed} drew from something empty") from error
    except SimulationFailed as failure:
        text = str(failure)
        return text if text.startswith(f"seed {seed}") else f"seed {seed}: {text}"  # what fails at the start names none


def replay_command(seed: int, choice: SoakChoice) -> str:
    """The command that runs a seed again."""
    words = [f"millrace sim --first {seed} --seeds 1 --verbose"]
    for name, value in msgspec.structs.asdict(choice).items():
        flag = f"--{name.replace('_', '-')}"
        words += [flag] if value is True else [f"{flag} {value}"] if isinstance(value, str) and value else []
    return " ".join(words)


def _run(work: tuple[int, SoakChoice]) -> tuple[int, SoakReport | str]:
    seed, choice = work
    return seed, run_seed(seed, choice)


def _results(options: argparse.Namespace) -> Iterator[tuple[int, SoakReport | str]]:
    given = {name: value for name, value in vars(options).items() if name in SoakChoice.__struct_fields__}
    work = [(seed, SoakChoice(**given)) for seed in range(options.first, options.first + options.seeds)]
    if options.jobs == 1:
        yield from map(_run, work)
        return
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        yield from pool.imap(_run, work)


def add_arguments(parser: argparse.ArgumentParser, *, seeds: int = 500) -> None:
    """The options of a soak."""
    add = parser.add_argument_group("seeds and processes").add_argument
    add("--seeds", type=int, default=seeds, metavar="N", help=f"how many (default: {seeds}; of a scenario 1)")
    add("--jobs", type=int, default=1, metavar="N", help="processes (default: 1; of a scenario all cores)")
    add = parser.add_argument_group("random load and faults, without --scenario").add_argument
    add("--first", type=int, default=0, metavar="N", help="the first seed (default: 0)")
    add(
        "--policy",
        choices=DISPATCH_POLICIES.names,
        default=POLICY,
        metavar="NAME",
        help=f"dispatch policy (default: {POLICY}): %(choices)s",
    )
    add("--migrations", action="store_true", help="move sequences all the time")
    add("--trading", action="store_true", help="let brokers trade; the plan changes every two seconds")
    add(
        "--trading-policy",
        default="",
        metavar="NAME",
        help="use this trading policy (a name, a file, or eager), not a random one",
    )
    add("--balance", action="store_true", help="place requests at random and let brokers trade for balance")
    add("--wrong-estimates", action="store_true", help="let engines report wrong remaining lengths, or none")
    add("--cascades", action="store_true", help="run a cascade whose plan changes all the time")
    add("--roles", action="store_true", help="flip roles, start and stop instances, let brokers trade")
    add("--switches", action="store_true", help="switch policies as the autopilot would, all the time")
    add("--verbose", action="store_true", help="print what each seed did")


#: Counts of reports that are summed.
COUNTS = ("outcomes", "deals", "roles", "migrations", "replicas", "switches")


def run(options: argparse.Namespace) -> int:
    """Runs the seeds; returns the exit code."""
    say = sys.stdout.write
    began = time.monotonic()
    failed: list[int] = []
    counts = {name: Counter[str]() for name in COUNTS}
    handled = ignored = 0
    for seed, result in _results(options):
        if isinstance(result, str):
            failed.append(seed)
            say(f"FAILED {result}\n")
            continue
        handled += result.handled
        ignored += result.estimates_ignored
        for name in COUNTS:
            counts[name].update(getattr(result, name))
        if options.verbose:
            say(f"seed {seed} {result.trace_hash:016x} {result.outcomes} {result.faults}\n")
    say(f"{options.seeds} seeds in {time.monotonic() - began:.0f} s, {handled:,} messages\n")
    if ignored:
        say(f"estimates ignored {ignored:,}\n")
    for name in COUNTS:
        if counts[name]:
            say(f"{name} {dict(sorted(counts[name].items()))}\n")
    say(f"failed: {failed or 'none'}\n")
    return 1 if failed else 0

"""Many seeds of the cluster simulation: ``python -m simulator.soak --seeds 500``.

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


class TradingChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Trading settings of a soak's brokers.

    Attributes:
        policy: Trading policy; empty for one that the seed draws.
        slow: Engines are slow and sequences long; None for what the seed draws.
        wrong_estimates: Engines tell rests that are wrong.
        flips: Roles flip, and instances come and go, in place of plans that change.
        balance: One stage whose loads differ: most moves are for balance.
    """

    policy: str = ""
    slow: bool | None = None
    wrong_estimates: bool = False
    flips: bool = False
    balance: bool = False


#: A policy that the seed draws, and estimates that are right or missing.
DRAWN = TradingChoice()


def run_seed(
    seed: int,
    policy: str = POLICY,
    *,
    migrations: bool = False,
    trading: bool = False,
    choice: TradingChoice = DRAWN,
    cascades: bool = False,
) -> SoakReport | str:
    """The report of a seed, or why it failed. ``choice``: of ``trading``, and of flips."""
    try:
        if cascades:
            return CascadeSoakRun(seed).run()
        if choice.flips:
            shape = roles_shape(seed, policy=choice.policy, wrong_estimates=choice.wrong_estimates)
            return RolesSoakRun(seed, shape=shape).run()
        if choice.balance:
            return SoakRun(seed, shape=trading_shape(seed, balance=True)).run()
        if trading:
            shape = trading_shape(seed, policy=choice.policy, slow=choice.slow, wrong_estimates=choice.wrong_estimates)
            return SoakRun(seed, shape=msgspec.structs.replace(shape, policy=policy)).run()
        return SoakRun(seed, shape=shape_for(policy, migration_for(seed) if migrations else None)).run()
    except SimulationFailed as failure:
        text = str(failure)
        return text if text.startswith(f"seed {seed}") else f"seed {seed}: {text}"  # what fails at the start names none


def replay_command(
    seed: int,
    policy: str = POLICY,
    *,
    migrations: bool = False,
    trading: bool = False,
    choice: TradingChoice = DRAWN,
    cascades: bool = False,
) -> str:
    """The command that runs a seed again as ``run_seed`` runs it with the same arguments."""
    words = [f"python -m simulator.soak --first {seed} --seeds 1 --verbose --policy {policy}"]
    words += ["--migrations"] * migrations + ["--trading"] * trading
    words += ["--cascades"] * cascades
    words += [f"--trading-policy {choice.policy}"] * bool(choice.policy)
    words += ["--wrong-estimates"] * choice.wrong_estimates
    return " ".join([*words, *["--balance"] * choice.balance])


def _run(work: tuple[int, argparse.Namespace]) -> tuple[int, SoakReport | str]:
    seed, options = work
    choice = TradingChoice(
        policy=options.trading_policy,
        wrong_estimates=options.wrong_estimates,
        flips=options.roles,
        balance=options.balance,
    )
    kinds = {"migrations": options.migrations, "trading": options.trading}
    return seed, run_seed(seed, options.policy, choice=choice, cascades=options.cascades, **kinds)


def _results(seeds: range, options: argparse.Namespace) -> Iterator[tuple[int, SoakReport | str]]:
    jobs = options.jobs
    work = [(seed, options) for seed in seeds]
    if jobs == 1:
        yield from map(_run, work)
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
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
    add("--verbose", action="store_true", help="print what each seed did")


def run(options: argparse.Namespace) -> int:
    """Runs the seeds; returns the exit code."""
    say = sys.stdout.write
    began = time.monotonic()
    failed: list[int] = []
    outcomes: dict[str, int] = {}
    handled = 0
    migrations: Counter[str] = Counter()
    replicas: Counter[str] = Counter()
    deals: Counter[str] = Counter()
    roles: Counter[str] = Counter()
    ignored = 0
    for seed, result in _results(range(options.first, options.first + options.seeds), options):
        if isinstance(result, str):
            failed.append(seed)
            say(f"FAILED {result}\n")
            continue
        handled += result.handled
        for outcome, count in result.outcomes.items():
            outcomes[outcome] = outcomes.get(outcome, 0) + count
        migrations.update(result.migrations)
        replicas.update(result.replicas)
        deals.update(result.deals)
        roles.update(result.roles)
        ignored += result.estimates_ignored
        if options.verbose:
            say(f"seed {seed} {result.trace_hash:016x} {result.outcomes} {result.faults}\n")
    wall_s = time.monotonic() - began
    say(f"{options.seeds} seeds in {wall_s:.0f} s, {handled:,} messages, outcomes {dict(sorted(outcomes.items()))}\n")
    if deals:
        say(f"deals {dict(sorted(deals.items()))}\n")
    if roles:
        say(f"roles {dict(sorted(roles.items()))}\n")
    if ignored:
        say(f"estimates ignored {ignored:,}\n")
    if migrations:
        say(f"migrations {dict(sorted(migrations.items()))}\n")
    if replicas:
        say(f"replicas {dict(sorted(replicas.items()))}\n")
    say(f"failed: {failed if failed else 'none'}\n")
    return 1 if failed else 0

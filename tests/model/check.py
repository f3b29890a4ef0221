"""Checks the models of moves with spin: every run of every configuration, and that each can fail.

.venv/bin/python tests/model/check.py [--mutants | --no-mutants] [--wide] [NAME ...]

Each configuration is a search of all states with a bounded number of faults. Each mutation takes one rule of the design
away and must break a property. One line each; the status is 1 where something came out otherwise than it must.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).resolve().parent
HANDSHAKE, AUCTION = FOLDER / "handshake.pml", FOLDER / "auction.pml"

#: Name -> what may happen, on top of timers that fire whenever they like and any order of messages.
CONFIGURATIONS = {
    "order": ["N=3"],
    "loss": ["LOSS=2"],
    "doubles": ["DUP=1"],
    "preemption": ["PREEMPT=1", "LOSS=1"],
    "source worker dies": ["CRASH_A", "LOSS=1"],
    "target worker dies and restarts": ["CRASH_B", "RESTART", "LOSS=1"],
    "source migrator dies": ["CRASH_S", "LOSS=1"],
    "target migrator dies and restarts": ["CRASH_T", "RESTART", "LOSS=1"],
    "a living source taken for dead": ["MISJUDGE=1", "LOSS=1"],
    "client goes": ["CANCELS", "LOSS=1"],
}

#: Minutes instead of seconds, each.
WIDE = {"lost, doubled": ["LOSS=1", "DUP=1"], "preempted, taken for dead, lost": ["PREEMPT=1", "MISJUDGE=1", "LOSS=1"]}

#: The rule that is taken away -> with which faults that must break a property.
MUTATIONS = {
    "M_NO_ALLOTMENT": ["MISJUDGE=1"],
    "M_BASE_IS_FIRST": ["LOSS=2"],
    "M_TOLD_EARLY": [],
    "M_CACHED_EARLY": ["PREEMPT=1"],
    "M_LATE_READ": ["PREEMPT=1"],
    "M_READ_AGAIN": ["PREEMPT=1", "DUP=1", "DOUBLED_KIND=READ"],
    "M_LEASE_AGAIN": ["PREEMPT=1", "DUP=1", "DOUBLED_KIND=LEASE"],
    "M_LAPSED_LEASE": ["PREEMPT=1"],
    "M_CANCEL_UNPINS": ["MISJUDGE=1"],
    "M_NO_THAW": ["CRASH_S"],
    "M_EARLY_THAW": ["PREEMPT=1"],
    "M_UNKNOWN_IS_NO": ["CRASH_T", "RESTART", "DUP=1", "PREEMPT=1", "DOUBLED_KIND=COMMIT"],
}

#: The same for the auction.
AUCTIONS = {
    "bids expire, answers in any order": [],
    "asks, bids and awards are lost": ["LOSS=1"],
    "awards are doubled": ["DUP=1", "DOUBLED_KIND=AWARD"],
}
AUCTION_MUTATIONS = {
    "M_BID_UNCOUNTED": [],
    "M_NO_EXPIRY": ["LOSS=1"],
    "M_STALE_AWARD": [],
    "M_AWARD_TWICE": ["DUP=1"],
    "M_ANY_ANSWER": [],
}

TOOLS = ("spin", "gcc")
#: All states are kept, without partial-order reduction: every step touches what others see. Optimising takes gcc longer
#: (its functions are very long) than it saves.
COMPILE = ["gcc", "-O0", "-DSAFETY", "-DNOREDUCE", "-DVECTORSZ=2048", "-w", "-o", "pan", "pan.c"]
DEPTH_MAX = 1_000_000
MEMORY_BYTES_MAX = 2_000_000_000
#: Processor time of one search.
SECONDS_MAX = 600


class Found(NamedTuple):
    """Result of a search: the property that was violated, or empty; and processor time."""

    errors: int
    states: int
    violated: str
    processor_s: float


def search(model: Path, flags: list[str]) -> Found:
    """Visits all states of the model with these definitions, or those up to the first error."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["spin", "-a", *(f"-D{flag}" for flag in flags), model], cwd=folder, check=True, text=True)
        subprocess.run(COMPILE, cwd=folder, check=True)
        limit = f"ulimit -v {MEMORY_BYTES_MAX // 1024} -t {SECONDS_MAX}; exec ./pan -m{DEPTH_MAX} -w22"
        with (Path(folder) / "told").open("w+") as output:
            process = subprocess.Popen(["bash", "-c", limit], cwd=folder, stdout=output, stderr=subprocess.STDOUT)
            _pid, _status, usage = os.wait4(process.pid, 0)
            output.seek(0)
            told = output.read()
    processor_s = usage.ru_utime + usage.ru_stime
    errors, states = re.search(r"errors: (\d+)", told), re.search(r"(\d+) states, stored", told)
    if errors is None or states is None or ("Search not completed" in told and errors.group(1) == "0"):
        return Found(1, 0, f"the search ended early: {told.strip()[-300:]}", processor_s)
    violated = re.search(r"pan:1: (.*?) \(at depth", told)
    return Found(int(errors.group(1)), int(states.group(1)), violated.group(1) if violated else "", processor_s)


def judge(model: Path, name: str, flags: list[str], *, must_fail: bool) -> bool:
    """Searches and prints a line; whether it came out as it must."""
    errors, states, violated, processor_s = search(model, flags)
    right = bool(errors and states) if must_fail else errors == 0
    verdict = ("breaks, as it must" if must_fail else "holds") if right else "FAILED"
    print(
        f"{verdict:<19} {name:<36} {states:>9,} states {processor_s:6.1f} s  {' '.join(flags)}"
        + (f"\n{'':<20}{violated}" if violated and (must_fail or not right) else ""),
        flush=True,
    )
    return right


def main() -> int:
    """Runs what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="only these configurations or mutations")
    parser.add_argument("--mutants", action="store_true", help="only the mutations")
    parser.add_argument("--no-mutants", action="store_true", help="only the configurations")
    parser.add_argument("--wide", action="store_true", help="larger configurations as well, minutes each")
    options = parser.parse_args()
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        print(f"check:model: {' and '.join(missing)} not found: apt-get install spin gcc (brew install spin on macOS)")
        return 1
    runs: list[tuple[Path, str, list[str], bool]] = []
    for model, configurations, mutations in (
        (AUCTION, AUCTIONS, AUCTION_MUTATIONS),
        (HANDSHAKE, CONFIGURATIONS | (WIDE if options.wide else {}), MUTATIONS),
    ):
        runs += [] if options.mutants else [(model, n, f, False) for n, f in configurations.items()]
        runs += [] if options.no_mutants else [(model, n, [n, *f], True) for n, f in mutations.items()]
    runs = [run for run in runs if not options.names or run[1] in options.names]
    with ThreadPoolExecutor(max(1, min(2, os.cpu_count() or 1))) as pool:  # a gigabyte each at most
        right = list(pool.map(lambda run: judge(run[0], run[1], run[2], must_fail=run[3]), runs))
    print(f"check:model: {'passed' if right and all(right) else 'FAILED'} ({sum(right)} of {len(right)})")
    return 0 if right and all(right) else 1


if __name__ == "__main__":
    sys.exit(main())

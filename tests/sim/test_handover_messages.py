"""One hand-over with two candidates, message by message: what crosses the bus from the ask to MigrationFinished.

    .venv/bin/python -m pytest -s tests/sim/test_handover_messages.py

prints them, as `millrace tap` would, and the files that one has to read to follow them: those with functions that run
from the ask to the end and never run in the same cluster without roles, the actors that handle the messages, and the
modules that declare them. What stands behind the engine's port is not among them, nor is the simulation.
"""

import sys
from pathlib import Path
from types import CodeType
from typing import Any

from millrace.actor.effects import Effect, Publish, Reply, Request
from millrace.cli.message_summaries import summary
from millrace.contracts.broker import AskForMove, MoveBid
from millrace.contracts.message import Body, Message
from millrace.contracts.migration import MigrationFinished, MigrationOutcome, MoveSequence, SequenceMoved
from millrace.contracts.worker import SequenceAccepted, SubmitSequence
from millrace.sim.checkers import Checker
from millrace.sim.process import SimProcess

from simulator.scenarios.reading import scenario_of
from simulator.scenarios.running import run_scenario
from tests.sim.test_scenario_migrations import SPLIT, step_times

#: From the ask to MigrationFinished, at most, where two instances may take the sequence.
MESSAGES_MAX = 20

FRONT, BACK = SPLIT["cluster"]["groups"]
LENGTHS = {"kind": "log_normal", "prompt_mean": 900, "output_mean": 200, "prompt_max": 900, "output_max": 200}
#: One instance computes prompts, two decode; one request.
HANDOVER: dict[str, Any] = SPLIT | {
    "cluster": {"groups": [FRONT | {"instances": 1}, BACK | {"instances": 2}]},
    "workload": SPLIT["workload"] | {"count": 1, "lengths": LENGTHS},
}

#: What a broker tells its own migrator does not leave their process.
INSIDE = (MoveSequence,)

#: All messages of these modules are about moves, and these of others.
MODULES = ("millrace.contracts.leases", "millrace.contracts.migration")
OTHERS = (AskForMove, MoveBid, SequenceMoved, SubmitSequence, SequenceAccepted)

ROOT = Path(__file__).resolve().parents[2]
#: The simulation, the engine in it, and what prints messages here.
HARNESS = (
    "simulator",
    "tests",
    *(f"libs/millrace/{part}" for part in ("sim", "enginemodel", "kvcache/pool.py", "cli")),
)


class HandoverLog(Checker):
    """Notes every message about the first sequence that leaves an instance, with its sender, and the code behind it.

    Attributes:
        running: Functions that ran so far, from the message on that has made a broker ask.
        ran: Those up to MigrationFinished.
        files: Those of the actors that send the messages and of the modules that declare them.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.kinds: list[type[Body]] = []
        self.running: set[CodeType] = set()
        self.ran: set[CodeType] = set()
        self.files: set[str | None] = set()
        self.finished: MigrationFinished | None = None

    def on_handled(self, process: SimProcess, message: Message, effects: list[Effect]) -> None:
        for effect in effects:
            if self.finished is not None or not isinstance(effect, Publish | Request | Reply):
                continue
            body = effect.body
            begun = self.kinds or isinstance(body, AskForMove)
            if not begun or not (isinstance(body, OTHERS) or type(body).__module__ in MODULES):
                continue
            self.kinds.append(type(body))
            self.files |= {sys.modules[kind.__module__].__file__ for kind in (type(body), type(process.actor))}
            where = effect.to if isinstance(effect, Reply) else effect.subject
            shown = "answer" if isinstance(effect, Reply) else where.split(".", 2)[-1]
            self.lines.append(f"{process.name:12} {shown:36} {type(body).__name__:18} {summary(body)}")
            if isinstance(body, MigrationFinished) and isinstance(effect, Publish):
                self.finished, self.ran = body, self.running.copy()
        if not self.kinds:
            self.running.clear()

    def files_to_read(self, common: set[CodeType]) -> list[str]:
        """Files of the path, apart from ``common`` functions."""
        found = self.files | {code.co_filename for code in self.ran - common}
        ours = [str(Path(file).relative_to(ROOT)) for file in found if file and Path(file).is_relative_to(ROOT)]
        return sorted(file for file in ours if not file.startswith(HARNESS))


def functions_run(cluster: dict[str, Any], checkers: list[Checker], found: set[CodeType]) -> set[CodeType]:
    """Runs the cluster and notes every function that runs, while it runs, in ``found``."""
    sys.setprofile(lambda frame, event, argument: found.add(frame.f_code))
    try:
        run_scenario(scenario_of(cluster), step_times=step_times, checkers=checkers)
    finally:
        sys.setprofile(None)
    return found


def test_a_hand_over_takes_few_messages() -> None:
    log = HandoverLog()
    functions_run(HANDOVER, [log], log.running)
    crossing = [kind for kind in log.kinds if kind not in INSIDE]
    files = log.files_to_read(functions_run(HANDOVER | {"migration": {"on": True}}, [], set()))
    print(*["", *log.lines, f"{len(crossing)} messages cross the bus", *files, f"{len(files)} files to read"], sep="\n")
    assert (log.finished.source, log.finished.outcome) == ("front-0", MigrationOutcome.MOVED)
    assert len(crossing) <= MESSAGES_MAX

"""One hand-over with two candidates, message by message: what crosses the bus from the ask to MigrationFinished.

    .venv/bin/python -m pytest -s tests/sim/test_handover_messages.py

prints them, as `millrace tap` would.
"""

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


class HandoverLog(Checker):
    """Notes every message about the first sequence that leaves an instance, with its sender."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.kinds: list[type[Body]] = []
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
            where = effect.to if isinstance(effect, Reply) else effect.subject
            shown = "answer" if isinstance(effect, Reply) else where.split(".", 2)[-1]
            self.lines.append(f"{process.name:12} {shown:36} {type(body).__name__:18} {summary(body)}")
            if isinstance(body, MigrationFinished) and isinstance(effect, Publish):
                self.finished = body


def test_a_hand_over_takes_few_messages() -> None:
    log = HandoverLog()
    run_scenario(scenario_of(HANDOVER), step_times=step_times, checkers=[log])
    crossing = [kind for kind in log.kinds if kind not in INSIDE]
    print(*["", *log.lines, f"{len(crossing)} messages cross the bus"], sep="\n")
    assert (log.finished.source, log.finished.outcome) == ("front-0", MigrationOutcome.MOVED)
    assert len(crossing) <= MESSAGES_MAX

"""Questions about one migration that wait for the engine, one at a time; and the migrations that are over."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass

from millrace.actor.effects import Effect
from millrace.contracts.kv import KvRefusal
from millrace.contracts.leases import FreezeSequence, KvRefused, LeaseKv, PrepareMigration, PullKv
from millrace.contracts.message import Body

from services.worker.context import answer
from services.worker.state import WAITERS_MAX

Question = LeaseKv | FreezeSequence | PrepareMigration | PullKv

#: Different questions of one migration that may wait: its migrator asks one after the other.
WAITING_MAX = 4
#: Migrations that are remembered after their end: at 100 a second those of the last 40 seconds, and a message that
#: is older than that has long been given up.
ENDED_MAX = 4_096


@dataclass(slots=True)
class PendingQuestion:
    """One question and who wants its answer."""

    body: Question
    at_ns: int
    reply_to: list[str]


class Questions:
    """In order of arrival; the first one is with the engine. A repeated question joins the one that waits."""

    def __init__(self) -> None:
        self._asked: deque[PendingQuestion] = deque()

    @property
    def first(self) -> PendingQuestion | None:
        """Question that the engine is asked now; None where there is none."""
        return self._asked[0] if self._asked else None

    def asks(self, kind: type[Question]) -> bool:
        """Whether the engine is asked such a one now."""
        return bool(self._asked) and isinstance(self._asked[0].body, kind)

    def put(self, body: Question, reply_to: str, now_ns: int) -> bool:
        """Notes a question. Returns whether the engine is to be asked now."""
        for asked in self._asked:
            if is_repeat(asked.body, body):
                if reply_to and len(asked.reply_to) < WAITERS_MAX:
                    asked.reply_to.append(reply_to)
                return False
        if len(self._asked) >= WAITING_MAX:
            return False  # its asker has given up long ago; this one will, too
        self._asked.append(PendingQuestion(body, now_ns, [reply_to] if reply_to else []))
        return len(self._asked) == 1

    def answer(self, sequence: str, body: Body, traceparent: str = "") -> list[Effect]:
        """Answers the first question to everybody who asked it."""
        asked = self._asked.popleft()
        return [effect for reply_to in asked.reply_to for effect in answer(reply_to, sequence, body, traceparent)]

    def refuse_all(self, sequence: str, refused: KvRefused) -> list[Effect]:
        """Answers all that wait."""
        effects: list[Effect] = []
        while self._asked:
            effects += self.answer(sequence, refused)
        return effects


def is_repeat(earlier: Question, later: Question) -> bool:
    """Whether a question asks for the same step of its migration again."""
    if isinstance(earlier, PullKv) and isinstance(later, PullKv):
        return (earlier.from_block, earlier.blocks) == (later.from_block, later.blocks)
    if isinstance(earlier, PrepareMigration) or isinstance(later, PrepareMigration):
        return type(earlier) is type(later)
    return type(earlier) is type(later) and earlier.from_block == later.from_block


class Ended:
    """Migrations that are over here, so that nothing late brings one back to life; the oldest are forgotten."""

    def __init__(self) -> None:
        self._ended: OrderedDict[str, None] = OrderedDict()

    def __contains__(self, migration: str) -> bool:
        return migration in self._ended

    def put(self, migration: str) -> None:
        """Notes an end."""
        self._ended[migration] = None
        if len(self._ended) > ENDED_MAX:
            self._ended.popitem(last=False)


def refused(migration: str, reason: KvRefusal, detail: str = "") -> KvRefused:
    """A worker's no."""
    return KvRefused(migration=migration, reason=reason, detail=detail)

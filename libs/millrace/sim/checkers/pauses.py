"""A sequence that moves shows its client one slow token, and how slow: bounded by what is configured.

    quiet cluster, copy or live   messages + a step at each end + the last blocks at their share of the wire
      the same, blocks too slow   messages + a step at each end + the freeze, + the steps that compute what did not come
    harm, or no KV arrived        the worker's longest freeze + a lease + the times after which ingress gives up on a
                                  worker and goes on elsewhere
    at any time, in an engine     no freeze is longer than the longest that its worker gives

Pauses are counted from the moment at which the source stands still (its last token is out then) to the first token that
ingress takes after it, from whoever. A sequence that an engine preempts meanwhile waits for blocks, not for its move,
and one whose KV did not arrive waits for a place in the batch as every new one does: such pauses are left to the line
of harm.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from millrace.actor.effects import Effect, Reply, Request
from millrace.actor.engine import SequenceAdded
from millrace.contracts.leases import FreezeSequence, SequenceFrozen
from millrace.contracts.message import Message
from millrace.contracts.worker import SubmitSequence
from millrace.sim.checkers import Checker
from millrace.sim.process import SimProcess

if TYPE_CHECKING:
    from millrace.sim.runtime_sim import Simulation

#: From the source's last token to the target's first: frozen, commit, submission, tokens; and what ingress asks the
#: target where the word that it moved was lost, with its answer.
MESSAGES = 6
#: A jitter is exponential: one in e^20 is longer than this many of its means.
JITTERS = 20


class PauseBounds(msgspec.Struct, frozen=True, kw_only=True):
    """Quantities from which the bounds on pauses follow. Nanoseconds, unless named otherwise.

    Attributes:
        message: One message at the longest, over both links.
        step: The longest step of an engine.
        recompute: The steps that compute a whole sequence beside others that are computed.
        latency: Before the first byte of a read.
        bytes_per_s: What a read gets of the wire at the least.
        freeze_max: The longest freeze that a worker gives.
        harm: A pause in a cluster that is harmed.
    """

    message: int
    step: int
    recompute: int
    latency: int
    bytes_per_s: float
    block_bytes: int
    freeze_max: int
    harm: int

    def quiet(self, *, blocks: int, freeze: int) -> int:
        """Longest pause, where nothing is harmed, of a sequence that stands still with so many blocks to bring."""
        fixed = MESSAGES * self.message + 2 * self.step
        tail = self.latency + round(blocks * self.block_bytes / self.bytes_per_s * 1e9)
        return fixed + (tail if tail < freeze // 2 else freeze + self.recompute)


class Pause:
    """A sequence that stood still.

    Attributes:
        tokens: Of its output when it did.
        recomputes: Whether its KV stays behind, or did not arrive in time.
        preemptions: Of all engines when it did.
    """

    __slots__ = ("began_ns", "blocks", "freeze_ns", "migration", "preemptions", "recomputes", "sequence", "tokens")

    def __init__(self, body: SequenceFrozen, *, began_ns: int, freeze_ns: int, preemptions: int) -> None:
        self.migration = body.migration
        self.sequence = body.sequence
        self.tokens = len(body.output_token_ids)
        self.blocks = len(body.blocks)
        self.began_ns = began_ns
        self.freeze_ns = freeze_ns
        self.preemptions = preemptions
        self.recomputes = False


class BoundedPauses(Checker):
    """Judges each freeze of each sequence.

    Attributes:
        quiet: How many pauses were held against the tight bound.
        harmed: How many against the wide one.
        longest_ns: Of the quiet ones.
        disturbed: Whether anything was harmed so far.
    """

    def __init__(
        self,
        bounds: PauseBounds,
        *,
        ingresses: Callable[[], dict[str, Any]],
        engines: Callable[[], dict[str, Any]],
        disturbed: Callable[[], bool],
    ) -> None:
        """Args:
        ingresses: States of those that live, by name.
        engines: Modelled engines of the workers that live, by name.
        """
        self.quiet = self.harmed = self.longest_ns = 0
        self._bounds, self._ingresses, self._engines, self.disturbed = bounds, ingresses, engines, disturbed
        self._freezes: dict[str, int] = {}  # asked for, ns, by migration
        self._open: dict[str, Pause] = {}  # by migration
        self._still: dict[tuple[int, str], int] = {}  # since when: (engine, migration that froze a sequence)

    def on_handled(self, process: SimProcess, message: Message, effects: list[Effect]) -> None:
        if isinstance(message.body, FreezeSequence):
            self._freezes.setdefault(message.body.migration, message.body.freeze_ms * 1_000_000)
        elif isinstance(message.body, SequenceAdded) and not message.body.kv_tokens:
            for waits in self._open.values():
                waits.recomputes |= waits.sequence == message.body.sequence
        for effect in effects:
            if isinstance(effect, Reply) and isinstance(effect.body, SequenceFrozen):
                self._stands_still(effect.body, process.now_ns)
            elif isinstance(effect, Request) and isinstance(effect.body, SubmitSequence):
                pause = self._open.get(effect.body.migration)
                if pause is not None and effect.body.handover is None:
                    pause.recomputes = True
        if self._open:
            state = self._ingresses().get(process.name)
            if state is not None:
                self._look(state, process.now_ns)

    def _stands_still(self, body: SequenceFrozen, now_ns: int) -> None:
        freeze_max = self._bounds.freeze_max
        freeze_ns = min(self._freezes.get(body.migration, freeze_max), freeze_max)
        if body.migration not in self._open:
            self._open[body.migration] = Pause(
                body, began_ns=now_ns, freeze_ns=freeze_ns, preemptions=self._preemptions()
            )

    def _preemptions(self) -> int:
        return sum(engine.scheduler.preemptions for engine in self._engines().values())

    def _look(self, state: Any, now_ns: int) -> None:
        """An ingress handled something: it may be what ends a pause."""
        for pause in list(self._open.values()):
            sequence = state.sequences.get(pause.sequence)
            if sequence is not None and len(sequence.log) > pause.tokens:
                self._close(pause)
                self._judge(pause, now_ns)

    def _close(self, pause: Pause) -> None:
        del self._open[pause.migration]
        self._freezes.pop(pause.migration, None)

    def _judge(self, pause: Pause, now_ns: int) -> None:
        took_ns, bounds = now_ns - pause.began_ns, self._bounds
        if self.disturbed() or pause.recomputes:
            self.harmed += 1
            bound_ns = bounds.harm
        elif self._preemptions() != pause.preemptions:
            return
        else:
            self.quiet += 1
            self.longest_ns = max(self.longest_ns, took_ns)
            bound_ns = bounds.quiet(blocks=pause.blocks, freeze=pause.freeze_ns)
        what = f"{pause.sequence} paused for {took_ns / 1e6:.1f} ms, at most {bound_ns / 1e6:.1f} ms"
        assert took_ns <= bound_ns, f"{what}, in {pause.migration} with {pause.blocks} blocks to bring"

    # Now and then

    def on_interval(self, simulation: Simulation) -> None:
        """Check pauses of sequences that never go on, which are never judged above, and sequences that stay frozen."""
        now_ns, here = simulation.now_ns, self._ingresses().values()
        for pause in list(self._open.values()):
            if not any(pause.sequence in state.sequences for state in here):
                self._close(pause)  # it has ended, or its ingress has
            elif now_ns - pause.began_ns > self._bounds.harm:
                self._judge(pause, now_ns)
        self._check_frozen(now_ns)

    def _check_frozen(self, now_ns: int) -> None:
        still: dict[tuple[int, str], int] = {}
        limit_ns = self._bounds.freeze_max + self._bounds.step
        for name, engine in self._engines().items():
            for sequence in engine.scheduler.frozen:
                key = (id(engine), engine.moves.leases.holder(sequence))
                still[key] = since_ns = self._still.get(key, now_ns)
                held = f"{sequence.sequence} stands still in {name} for {(now_ns - since_ns) / 1e6:.0f} ms"
                assert now_ns - since_ns <= limit_ns, f"{held}, at most {limit_ns / 1e6:.0f} ms"
        self._still = still

"""Windows of load at an instance, and what its requests felt in the next one: rows for a regression of scores."""

from __future__ import annotations

from collections import defaultdict, deque

import msgspec
from millrace.actor.effects import Effect, Publish
from millrace.contracts.message import Message
from millrace.contracts.observers import RequestFinished
from millrace.contracts.status import InstanceSummary
from millrace.policies.stages.instance import InstanceModel
from millrace.sim.checkers import Checker
from millrace.sim.process import SimProcess

from papers.flowkv.indicators import Indicators, InstanceLimits, LoadSample, indicators_of, sample_of

#: Length of a window, as the coordinator's.
WINDOW_NS = 5_000_000_000

#: Samples of one window that are kept: one every 50 ms.
SAMPLES_MAX = 100


class FeltWindow(msgspec.Struct, frozen=True, kw_only=True):
    """One instance at one moment.

    Attributes:
        at_ns: End of the window, unix ns.
        indicators: Over the window before.
        ttft_s: Mean of the requests placed here in the window after it; None without any.
        tpot_s: Mean time between two tokens of those that decoded here then; None where nobody did.
    """

    instance: str
    at_ns: int
    indicators: Indicators
    ttft_s: float | None
    tpot_s: float | None


class LoadRecorder(Checker):
    """Records summaries and outcomes of one run."""

    def __init__(self) -> None:
        self._samples: dict[str, deque[LoadSample]] = defaultdict(deque)
        self._placed: dict[str, list[tuple[int, float]]] = defaultdict(list)

    def on_handled(self, process: SimProcess, message: Message, effects: list[Effect]) -> None:
        """Keep what instances and ingresses tell."""
        for effect in effects:
            body = effect.body if isinstance(effect, Publish) else None
            if isinstance(body, InstanceSummary) and (sample := sample_of(body)) is not None:
                self._samples[body.instance].append(sample)
            elif isinstance(body, RequestFinished) and body.instances and body.ttft_ns is not None:
                self._placed[body.instances[0]].append((body.placed_ns, body.ttft_ns / 1e9))

    def windows(self, limits: InstanceLimits, model: InstanceModel) -> list[FeltWindow]:
        """One per instance and window, in order of time; those at the ends of the run are left out."""
        found = []
        for name, samples in sorted(self._samples.items()):
            first_ns, last_ns = samples[0].at_ns, samples[-1].at_ns
            for at_ns in range(first_ns + WINDOW_NS, last_ns - WINDOW_NS, WINDOW_NS):
                before = _between(samples, at_ns - WINDOW_NS, at_ns)
                after = _between(samples, at_ns, at_ns + WINDOW_NS)
                if len(before) < 2 or len(after) < 2:
                    continue
                felt = [ttft for placed, ttft in self._placed[name] if at_ns <= placed < at_ns + WINDOW_NS]
                found.append(
                    FeltWindow(
                        instance=name,
                        at_ns=at_ns,
                        indicators=indicators_of(before, limits, model),
                        ttft_s=sum(felt) / len(felt) if felt else None,
                        tpot_s=_tpot_s(after),
                    )
                )
        return found


def _between(samples: deque[LoadSample], begin_ns: int, end_ns: int) -> list[LoadSample]:
    found = [sample for sample in samples if begin_ns <= sample.at_ns < end_ns]
    step = max(1, len(found) // SAMPLES_MAX)
    return found[::step]


def _tpot_s(samples: list[LoadSample]) -> float | None:
    """Sequences in decode over tokens decoded per second: what one of them waits for its next token, on average."""
    queues = [sample.load.decode for sample in samples]
    present = sum(q.running + q.waiting + q.preempted for q in queues) / len(queues)
    decoded = samples[-1].load.totals.decodes - samples[0].load.totals.decodes
    span_s = (samples[-1].at_ns - samples[0].at_ns) / 1e9
    return present * span_s / decoded if decoded > 0 and present > 0 else None

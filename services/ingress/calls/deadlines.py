"""End of calls that were not done in time."""

from __future__ import annotations

from services.ingress.calls.completion import refuse_or_fail
from services.ingress.calls.messages import RefusalKind
from services.ingress.state import IngressState
from services.ingress.times import SECOND_NS

#: Later than any deadline.
NO_DEADLINE_NS = 1 << 63


def end_late_calls(state: IngressState) -> None:
    """End calls past their deadlines, and note the next deadline: a scan per tick would cost more than the rest."""
    for call in [c for c in state.calls.values() if c.deadline_ns <= state.now_ns]:
        waited_s = (state.now_ns - call.arrival_ns) / SECOND_NS
        detail = f"The request was not done within its time limit of {waited_s:.0f} s."
        refuse_or_fail(state, call, RefusalKind.TIMEOUT, detail)
    state.deadline_ns = min((c.deadline_ns for c in state.calls.values()), default=NO_DEADLINE_NS)

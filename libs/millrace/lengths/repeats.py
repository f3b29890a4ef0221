"""Real lengths of prompts that came before. Bounded."""

from __future__ import annotations

from collections import OrderedDict

from millrace.contracts.tagger import TagRequest
from millrace.lengths.baselines import of_lengths
from millrace.lengths.estimate import LengthEstimate

#: Prompts kept; the one asked longest ago goes first. Some 400 bytes an entry.
ENTRIES_MAX = 16_384
#: Lengths kept of one prompt whose length is drawn by chance.
LENGTHS_MAX = 16
#: So many lengths of a prompt say more than a model does, where chance plays.
LENGTHS_WANTED = 4


class KnownLengths:
    """Known output lengths of one prompt.

    Attributes:
        ended: Lengths that ended by themselves.
        bound: The largest ``max_tokens`` at which it was cut; 0 where it never was.
    """

    __slots__ = ("bound", "ended")

    def __init__(self) -> None:
        self.ended: list[int] = []
        self.bound = 0


class RepeatCache:
    """Answers for prompts whose real length is known.

    With temperature 0 or a seed the same call has the same length, so one is enough; else several are wanted.
    """

    def __init__(self, entries_max: int = ENTRIES_MAX) -> None:
        self._entries_max = entries_max
        self._known: OrderedDict[str, KnownLengths] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def answer(self, request: TagRequest) -> LengthEstimate | None:
        """Return an estimate from earlier calls; None if they do not suffice."""
        known = self._known.get(request.repeat_key) if request.repeat_key else None
        if known is None:
            return None
        self._known.move_to_end(request.repeat_key)
        if is_exact(request):
            return _exact(known, request.max_tokens)
        if len(known.ended) < LENGTHS_WANTED or known.bound:
            return None  # lengths that were cut would pull every figure down
        return of_lengths(sorted(known.ended))

    def learn(self, repeat_key: str, length: int, *, cut: bool) -> None:
        """Takes one outcome.

        Args:
            cut: ``max_tokens`` ended it: the real length is at least ``length``.
        """
        if not repeat_key:
            return
        known = self._known.get(repeat_key)
        if known is None:
            if len(self._known) >= self._entries_max:
                self._known.popitem(last=False)
            known = self._known[repeat_key] = KnownLengths()
        if cut:
            known.bound = max(known.bound, length)
        else:
            known.ended = [*known.ended[-LENGTHS_MAX + 1 :], length]


def is_exact(request: TagRequest) -> bool:
    """Whether the same call has the same length each time."""
    return request.temperature == 0 or request.seeded


def _exact(known: KnownLengths, max_tokens: int) -> LengthEstimate | None:
    if known.ended:
        length = float(known.ended[-1])
    elif 0 < max_tokens <= known.bound:
        length = float(max_tokens)
    else:
        return None
    return LengthEstimate(length, length, length)

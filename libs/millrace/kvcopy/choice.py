"""Choice of the copier for two engines: those that both ends offer and the path between them allows, best first, and
the reasons against the others.

Mapped memory, where both lie in it on one host, costs less than NIXL. A forced order replaces this one.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from millrace.contracts.kv import CopierKind, KvEndpoint

BEST_FIRST = (CopierKind.SHARED_MEMORY, CopierKind.NIXL, CopierKind.MODELLED)


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """The answer, and what an operator is shown of it.

    Attributes:
        kinds: What may be used, best first; empty where the two engines cannot exchange KV.
        refused: Why not, of each other kind.
    """

    kinds: list[CopierKind]
    refused: dict[CopierKind, str]

    @property
    def text(self) -> str:
        """One line for status and logs."""
        chosen = self.kinds[0] if self.kinds else "no copier"
        reasons = [f"{kind}: {why}" for kind, why in self.refused.items()]
        return f"{chosen} ({'; '.join(reasons)})" if reasons else str(chosen)


def choose(own: KvEndpoint, peer: KvEndpoint, *, forced: Sequence[CopierKind] = ()) -> Choice:
    """Choose what may carry KV from ``peer`` to ``own``: only kinds of ``forced``, in its order, if it is not empty."""
    order = [*dict.fromkeys(forced)] or [*BEST_FIRST]
    reasons = {kind: _why_not(kind, own, peer) for kind in BEST_FIRST}
    kinds = [kind for kind in order if not reasons[kind]]
    refused = {kind: why or "not among the forced ones" for kind, why in reasons.items() if kind not in kinds}
    return Choice(kinds=kinds, refused=refused)


def _why_not(kind: CopierKind, own: KvEndpoint, peer: KvEndpoint) -> str:
    if kind not in own.copiers:
        return "not available here"
    if kind not in peer.copiers:
        return "not offered by the peer"
    if kind is not CopierKind.SHARED_MEMORY:
        return ""
    if not (own.machine and own.machine == peer.machine):
        return "the peer is on another machine" if own.machine and peer.machine else "the machine is not known"
    if any(rank.device >= 0 for rank in (*own.ranks, *peer.ranks)):
        return "it reads host memory, and the KV lies on a GPU"
    return ""

"""Known lengths of a scenario: a tagger that knows the truth, or the truth with noise."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from millrace.actor.effects import Effect, Reply, Subscribe
from millrace.contracts.message import Message
from millrace.contracts.subjects import Subjects
from millrace.contracts.tagger import LengthTag, TagRequest
from millrace.sim.stand_in import StandIn

ACCEPTS = (TagRequest,)

#: Output length of a request by its id and model, tokens; None if unknown.
Expected = Callable[[str, str], float | None]

#: Bounds of the noise.
NOISE_MIN, NOISE_MAX = 0.1, 5.0


class KnowingTagger(StandIn):
    """Answers TagRequest with the true length times a normal number around 1, cut to the bounds above."""

    def __init__(self, *, name: str, cluster: str, truth: Expected, sigma: float, rng: Random) -> None:
        """Args: truth: None where it says that it does not know. sigma: of the normal number; 0 for the truth."""
        self.name = name
        self._subjects = Subjects(cluster)
        self._truth = truth
        self._sigma = sigma
        self._rng = rng

    def start(self, now_ns: int) -> list[Effect]:
        return [Subscribe(subject=f"{self._subjects.prefix}.tag.*", queue_group="tagger")]

    def handle(self, message: Message, now_ns: int) -> list[Effect]:
        body = message.body
        if not isinstance(body, TagRequest) or not message.reply_to:
            return []
        mean = self._truth(body.request, body.model)
        if self._sigma and mean is not None:
            mean *= min(NOISE_MAX, max(NOISE_MIN, self._rng.gauss(1.0, self._sigma)))
        return [Reply(to=message.reply_to, body=LengthTag(request=body.request, mean=mean, source="known"))]

"""The soak of cascades: three models behind one name, plans that are swapped, and an erratic judge.

Each model reads a token of its own before the prompt, so its text tells it from the others'. The fitted judges make
some attempts hopeless early; what the engines say of their tokens varies with the sequence.
"""

from __future__ import annotations

from typing import Any

import msgspec
from millrace.actor.actor import Actor
from millrace.actor.deps import ActorDeps
from millrace.contracts.catalog import Role
from millrace.enginemodel.tokens import OutputLengths
from millrace.judging.calibration import IsotonicCurve
from millrace.judging.confidence import ConfidenceModel
from millrace.judging.evidence import ConfidenceFeature

from services.coordinator.build import ACCEPTS as COORDINATOR_ACCEPTS
from services.coordinator.build import build as build_coordinator
from services.coordinator.cascade_config import CoordinatedCascade, CoordinatedTier
from services.coordinator.config import CoordinatorConfig
from services.ingress.calls.messages import Call, CascadeOptions
from services.ingress.config import CascadeConfig, IngressConfig, TierConfig
from services.ingress.tokens.detokenizer import TextModel
from simulator import services
from simulator.services import SimInstance, SimService
from simulator.soak import erratic_judge, restless_cascade
from simulator.soak.cascade_clients import CascadeClients
from simulator.soak.cascade_watch import CascadeWatch
from simulator.soak.cluster import SoakCluster
from simulator.soak.erratic_judge import ErraticConfig
from simulator.soak.restless_cascade import SwapConfig
from simulator.soak.run import SoakRun
from simulator.soak.shape import SoakShape
from simulator.vocabulary import EOS

CASCADE = "auto"
#: In rising order of cost.
MODELS = ("small", "middle", "large")
#: Of the soak's workers, by index.
MODEL_OF = ("small", "middle", "large", "small", "large")
#: Outputs of about 12 tokens: with tokens of probability 0.5 to 0.95 their sum is around -4.
LENGTHS = OutputLengths(mean=12, sigma=0.9, length_max=200)
#: By the sum for ``small``, so that its attempts may be rejected early, and by the mean for ``middle``.
JUDGES = {
    "small": (ConfidenceFeature.SUM, IsotonicCurve((-20.0, -8.0, -1.0), (0.0, 0.4, 1.0))),
    "middle": (ConfidenceFeature.MEAN, IsotonicCurve((-0.6, -0.1), (0.0, 1.0))),
}


def cascade_shape() -> SoakShape:
    """The cluster of a soak of cascades."""
    return SoakShape(workers=len(MODEL_OF), lengths=LENGTHS)


class CascadeSoakCluster(SoakCluster):
    """Workers of three models, a person who swaps the cascade's plan, and a judge."""

    def models(self) -> tuple[str, ...]:
        return MODELS

    def _choose_services(self) -> None:
        super()._choose_services()
        self.clients = CascadeClients(self._oracle)
        models = {model: TextModel(self._text.vocabulary, frozenset({EOS}), _judge(model)) for model in MODELS}
        self.services[Role.INGRESS] = services.ingress(models, self.clients.handlers)
        self.services[Role.COORDINATOR] = SimService(COORDINATOR_ACCEPTS, _build_coordinator)
        self.services[Role.JUDGE] = SimService(erratic_judge.ACCEPTS, erratic_judge.build)

    def _add_actors(self) -> None:
        super()._add_actors()
        self.add(Role.COORDINATOR, SwapConfig(name="swapper", cascade=CASCADE, models=MODELS))
        self.add(Role.JUDGE, ErraticConfig(name="judge-0", cascade=CASCADE))

    def _instance(self, name: str) -> SimInstance:
        return msgspec.structs.replace(super()._instance(name), model=MODEL_OF[int(name[1:])])

    def _coordinator(self, name: str) -> CoordinatorConfig:
        cascade = CoordinatedCascade(name=CASCADE, tiers=[CoordinatedTier(model=model) for model in MODELS])
        return msgspec.structs.replace(super()._coordinator(name), cascades=[cascade])

    def _ingress(self, name: str) -> IngressConfig:
        tiers = [TierConfig(model=model) for model in MODELS]
        cascade = CascadeConfig(name=CASCADE, tiers=tiers, tier_wait_s=1.0, judge_pause_s=1.0)
        return msgspec.structs.replace(super()._ingress(name), cascades=[cascade])


class CascadeSoakRun(SoakRun):
    """Runs one seed with calls of the cascade, and a few of its members."""

    def __init__(self, seed: int, *, faults: bool = True, rate: float = 0.0) -> None:
        super().__init__(seed, shape=cascade_shape(), faults=faults, rate=rate, cluster=CascadeSoakCluster)
        self.watch = CascadeWatch()
        self._sim.check_with(self.watch)

    def _draw_call(self) -> Call:
        call, rng = super()._draw_call(), self._rng
        members = [_member(call, model) for model in MODELS]
        if rng.random() < 0.15:
            member = rng.choice(members)
            return msgspec.structs.replace(call, model=member.model, prompts=member.prompts)
        options = CascadeOptions(
            quality=rng.choice((None, None, None, 50.0, 100.0)),
            max_tier=rng.choice((None, None, None, 1, 2)),
            entry_tier=rng.choice((None, None, None, 1)),
            stream="early_commit" if rng.random() < 0.2 else None,
        )
        return msgspec.structs.replace(
            call, model=CASCADE, prompts=members[0].prompts, members=members, cascade=options
        )

    def _check_outcomes(self) -> None:
        super()._check_outcomes()
        self.watch.check_against(self.cluster.clients.exchanges)

    def _published_of_refused(self) -> tuple[str | None, ...]:
        # An instance had accepted an attempt, so there is an outcome; nothing had reached the client.
        return (None, "failed")


def _member(call: Call, model: str) -> Call:
    mark = ord(model[0])
    return msgspec.structs.replace(call, model=model, prompts=[[mark, *prompt] for prompt in call.prompts])


def _judge(model: str) -> ConfidenceModel | None:
    if model not in JUDGES:
        return None
    feature, curve = JUDGES[model]
    return ConfidenceModel(model=model, feature=feature, curve=curve, answers=100, area=0.9, error=0.03)


def _build_coordinator(config: Any, deps: ActorDeps) -> Actor:
    if isinstance(config, SwapConfig):
        return restless_cascade.build(config, deps)
    return build_coordinator(config, deps)

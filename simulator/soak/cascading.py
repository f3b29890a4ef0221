"""The soak of cascades: three models behind one name, thresholds and engines that are swapped, and an erratic judge.

Its workers are processes of one simulated host with as many devices as run at first, and a spare of each model.

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
from millrace.sim.links import LinkModel
from millrace.sim.process import SimActor
from millrace.sim.runtime_sim import MILLISECOND

from services.coordinator.actor import ACCEPTS as COORDINATOR_ACCEPTS
from services.coordinator.build import build as build_coordinator
from services.coordinator.cascade_config import CoordinatedCascade, CoordinatedTier
from services.coordinator.config import CoordinatorConfig
from services.ingress.calls.messages import Call, CascadeOptions, MemberCall
from services.ingress.config import CascadeConfig, IngressConfig, TierConfig
from services.ingress.tokens.detokenizer import TextModel
from simulator import services
from simulator.cluster import CLUSTER
from simulator.host import HostShape, SimulatedHost
from simulator.services import SimInstance, SimService
from simulator.soak import erratic_judge, restless_cascade
from simulator.soak.cascade_clients import CascadeClients
from simulator.soak.cascade_watch import CascadeWatch, MoveWatch
from simulator.soak.cluster import SoakCluster
from simulator.soak.erratic_judge import ErraticConfig
from simulator.soak.restless_cascade import SwapConfig
from simulator.soak.run import SoakRun
from simulator.soak.shape import SoakShape
from simulator.vocabulary import EOS

CASCADE = "auto"
#: In rising order of cost.
MODELS = ("small", "middle", "large")
#: Of the soak's workers, by index; the last three are not started at first, and more than DEVICES never run.
MODEL_OF = ("small", "middle", "large", "small", "large", "small", "middle", "large")
DEVICES = 5
#: Outputs of about 12 tokens: with tokens of probability 0.5 to 0.95 their sum is around -4.
COLD_START_NS = 1_000 * MILLISECOND
LENGTHS = OutputLengths(mean=12, sigma=0.9, length_max=200)
#: By the sum for ``small``, so that its attempts may be rejected early, and by the mean for ``middle``.
JUDGES = {
    "small": (ConfidenceFeature.SUM, IsotonicCurve((-20.0, -8.0, -1.0), (0.0, 0.4, 1.0))),
    "middle": (ConfidenceFeature.MEAN, IsotonicCurve((-0.6, -0.1), (0.0, 1.0))),
}


def cascade_shape(workers: int = DEVICES) -> SoakShape:
    """The cluster of a soak of cascades. ``workers``: that run at first."""
    return SoakShape(workers=workers, lengths=LENGTHS)


class CascadeSoakCluster(SoakCluster):
    """Workers of three models on one host, a person who swaps the cascade's plan, and a judge.

    Attributes:
        host: Starts, stops and restarts the workers.
        devices: What its supervisor counts with. Tests override it.
        model_of: Of the workers, by index.
        at_first: Workers that run at first, as many as there are devices; the others are spares.
        judging: Model that judges; empty for none.
    """

    restarted_elsewhere = frozenset({Role.WORKER})
    devices = DEVICES
    model_of: tuple[str, ...] = MODEL_OF
    at_first = DEVICES
    judging = ""

    def __init__(self, seed: int, shape: SoakShape, *, link: LinkModel | None = None, verify: bool = True) -> None:
        super().__init__(seed, shape, link=link, verify=verify)
        names = [f"w{index}" for index in range(len(self.model_of))]
        self.host = SimulatedHost(
            self.simulation,
            HostShape(
                cluster=CLUSTER,
                model="",
                kinds={name: (model, "") for name, model in zip(names, self.model_of, strict=True)},
                devices=self.devices,
                running=tuple(names[: self.at_first]),
                spares=tuple(names[self.at_first :]),
                cold_start_ns=COLD_START_NS,
            ),
            workers={actor.name: actor for actor in self.workers},
            add_worker=lambda name: self.add(Role.WORKER, self._instance(name)),
        )

    def models(self) -> tuple[str, ...]:
        """Models of the instances that are to run now."""
        present = {self.model_of[int(actor.name[1:])] for actor in self.present_workers()}
        return tuple(sorted(present - {self.judging}))

    def devices_taken(self) -> int:
        """Workers that hold a device."""
        return len(self.host.up())

    def present_workers(self) -> list[SimActor]:
        """Workers that run or are being restarted, and not those that a move has ended."""
        children = self.host.supervisor.actor.snapshot()
        return [actor for actor in self.workers if actor.name in children]

    def _choose_services(self) -> None:
        super()._choose_services()
        self.clients = CascadeClients(self._oracle)
        served = self._members()
        models = {model: TextModel(self._text.vocabulary, frozenset({EOS}), _judge(model)) for model in served}
        self.services[Role.INGRESS] = services.ingress(models, self.clients.handlers)
        self.services[Role.COORDINATOR] = SimService(COORDINATOR_ACCEPTS, _build_coordinator)
        self.services[Role.JUDGE] = SimService(erratic_judge.ACCEPTS, erratic_judge.build)

    def _add_actors(self) -> None:
        super()._add_actors()
        most = tuple(self.model_of.count(model) for model in self._members())
        swapping = SwapConfig(
            name="swapper",
            cascade=CASCADE,
            models=MODELS,
            judging=self.judging,
            instances_max=most,
            devices=self.at_first,
        )
        self.add(Role.COORDINATOR, swapping)
        self.add(Role.JUDGE, ErraticConfig(name="judge-0", cascade=CASCADE))

    def _instance(self, name: str) -> SimInstance:
        return msgspec.structs.replace(super()._instance(name), model=self.model_of[int(name[1:])])

    def _members(self) -> tuple[str, ...]:
        """Models of the tiers, and the judging one."""
        return (*MODELS, self.judging) if self.judging else MODELS

    def _coordinator(self, name: str) -> CoordinatorConfig:
        tiers = [CoordinatedTier(model=model) for model in MODELS]
        judge = CoordinatedTier(model=self.judging) if self.judging else None
        kind = "llm" if self.judging else "confidence"
        cascade = CoordinatedCascade(
            name=CASCADE, tiers=tiers, judge=kind, judge_tier=judge, moves=True, drain_s=0.5, move_limit_s=12.0
        )
        return msgspec.structs.replace(super()._coordinator(name), cascades=[cascade])

    def _ingress(self, name: str) -> IngressConfig:
        tiers = [TierConfig(model=model) for model in MODELS]
        cascade = CascadeConfig(
            name=CASCADE, tiers=tiers, judge_model=self.judging, tier_wait_s=1.0, judge_pause_s=1.0,
            shadow_share=0.3, shadow_wait_s=2.0,
        )  # fmt: skip
        return msgspec.structs.replace(super()._ingress(name), cascades=[cascade])


class JudgedSoakCluster(CascadeSoakCluster):
    """The same with a fourth model, which judges answers, on a device of its own at first."""

    devices = at_first = DEVICES + 1
    model_of = (*MODEL_OF[:DEVICES], "verdict", *MODEL_OF[DEVICES:], "verdict")
    judging = "verdict"


class CascadeSoakRun(SoakRun):
    """Runs one seed with calls of the cascade, and a few of its members.

    Attributes:
        cluster_type: Tests override it.
    """

    cluster_type: type[CascadeSoakCluster] = CascadeSoakCluster

    def __init__(self, seed: int, *, faults: bool = True, rate: float = 0.0) -> None:
        shape = cascade_shape(self.cluster_type.at_first)
        super().__init__(seed, shape=shape, faults=faults, rate=rate, cluster=self.cluster_type)
        assert isinstance(self.cluster, CascadeSoakCluster)
        self.watch = CascadeWatch(judging=self.cluster.judging)
        self.moves = MoveWatch(self.cluster, self.cluster.at_first)
        for checker in (self.watch, self.moves):
            self._sim.check_with(checker)

    def _draw_call(self) -> Call:
        call, rng = super()._draw_call(), self._rng
        members = [_member(call, model) for model in MODELS]
        if rng.random() < 0.15:
            # A tier that a move has emptied answers no request by its own name.
            present = self.cluster.models()
            member = rng.choice([member for member in members if member.model in present] or members)
            return msgspec.structs.replace(call, model=member.model, prompts=member.prompts)
        options = CascadeOptions(
            quality=rng.choice((None, None, None, 50.0, 100.0)),
            max_tier=rng.choice((None, None, None, 1, 2)),
            entry_tier=rng.choice((None, None, None, 1)),
            early_commit=rng.random() < 0.2,
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


class JudgedSoakRun(CascadeSoakRun):
    """Runs one seed with a judging model of the cluster, which is asked as a child call of each request."""

    cluster_type = JudgedSoakCluster


def _member(call: Call, model: str) -> MemberCall:
    mark = ord(model[0])
    return MemberCall(model=model, prompts=[[mark, *prompt] for prompt in call.prompts], sampling=call.sampling)


def _judge(model: str) -> ConfidenceModel | None:
    if model not in JUDGES:
        return None
    feature, curve = JUDGES[model]
    return ConfidenceModel(model=model, feature=feature, curve=curve, answers=100, area=0.9, error=0.03)


def _build_coordinator(config: Any, deps: ActorDeps) -> Actor:
    if isinstance(config, SwapConfig):
        return restless_cascade.build(config, deps)
    return build_coordinator(config, deps)

"""Builds the actor of a recording again, with the service's own ``build``."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import msgspec
from millrace.actor.actor import Actor
from millrace.actor.deps import ActorDeps, actor_rng
from millrace.actor.recording import Header
from millrace.cli.errors import CliError

#: Builds an actor from its recorded configuration (JSON) and incarnation.
Rebuild = Callable[[str, int], Actor]

#: The recording names the module of the actor's class.
_KIND = re.compile(r"services\.([a-z_]+)(\.[a-z_]+)*")


def build_actor(header: Header) -> Actor:
    """The actor of a recording, as it was when the recording began.

    Raises:
        CliError: the recording is of no actor that can be built, or today's service does not take its configuration.
    """
    if header.kind == "tap":
        raise CliError("this is a recording of the bus, not of an actor; `millrace tap --read FILE` prints it")
    match = _KIND.fullmatch(header.kind)
    if match is None:
        raise CliError(f"the recorded actor is of {header.kind!r}, which is no service")
    rebuild = REBUILD.get(match[1])
    if rebuild is None:
        raise CliError(f"{header.kind} cannot be replayed: recordings are of {', '.join(sorted(REBUILD))}")
    if not header.config:
        raise CliError(f"the recording of {header.actor} says nothing about how the actor was configured")
    try:
        return rebuild(header.config, header.seed)
    except ValueError as error:  # msgspec's errors are ValueErrors
        raise CliError(f"today's {header.kind} does not take the recorded configuration: {error}") from None


def _deps(name: str, incarnation: int) -> ActorDeps:
    return ActorDeps(incarnation=incarnation, rng=actor_rng(name, incarnation))


def _coordinator(config: str, incarnation: int) -> Actor:
    from services.coordinator.build import build
    from services.coordinator.config import CoordinatorConfig

    known = msgspec.json.decode(config, type=CoordinatorConfig)
    return build(known, _deps(known.name, incarnation))


def _ingress(config: str, incarnation: int) -> Actor:
    """The model folders must still be where they were."""
    from services.ingress.api.tokenizer import ModelTokenizer
    from services.ingress.build import IngressDeps, build
    from services.ingress.config import IngressConfig
    from services.ingress.tokens.detokenizer import TextModel

    known = msgspec.json.decode(config, type=IngressConfig)
    tokenizers = {model.name: ModelTokenizer.load(model.path) for model in known.models}
    models = {name: TextModel(each.vocabulary, each.eos_token_ids) for name, each in tokenizers.items()}
    return build(known, IngressDeps(**vars(_deps(known.name, incarnation)), models=models))


def _migrator(config: str, incarnation: int) -> Actor:
    from services.migrator.build import build
    from services.migrator.config import MigratorConfig

    known = msgspec.json.decode(config, type=MigratorConfig)
    return build(known, _deps(known.name, incarnation))


def _broker(config: str, incarnation: int) -> Actor:
    """Step-time files must still be where they were."""
    from millrace.enginemodel.registered import load_step_times

    from services.broker.build import BrokerDeps, build
    from services.broker.config import BrokerConfig

    known = msgspec.json.decode(config, type=BrokerConfig)
    step_times, _ = load_step_times(known.step_times)
    return build(known, BrokerDeps(**vars(_deps(known.name, incarnation)), step_times=step_times))


def _judge(config: str, incarnation: int) -> Actor:
    from services.judge.build import build
    from services.judge.config import JudgeConfig

    known = msgspec.json.decode(config, type=JudgeConfig)
    return build(known, _deps(known.name, incarnation))


def _predictor(config: str, incarnation: int) -> Actor:
    """Step-time files must still be where they were."""
    from millrace.enginemodel.registered import load_step_times

    from services.predictor.build import PredictorDeps, build
    from services.predictor.config import PredictorConfig

    known = msgspec.json.decode(config, type=PredictorConfig)
    step_times, _unreadable = load_step_times(known.step_times)
    return build(known, PredictorDeps(**vars(_deps(known.name, incarnation)), step_times=step_times))


def _tagger(config: str, incarnation: int) -> Actor:
    from services.tagger.build import build
    from services.tagger.config import TaggerConfig

    known = msgspec.json.decode(config, type=TaggerConfig)
    return build(known, _deps(known.name, incarnation))


def _worker(config: str, incarnation: int) -> Actor:
    """Rebuild a worker. The recorded inbox holds what the engine said after its start."""
    from services.worker.build import WorkerOrigin, build

    known = msgspec.json.decode(config, type=WorkerOrigin)
    return build(known, _deps(known.identity.instance, incarnation))


#: Every service that records, by its name. A process imports only the one that it replays.
REBUILD: Mapping[str, Rebuild] = {
    "broker": _broker,
    "coordinator": _coordinator,
    "ingress": _ingress,
    "judge": _judge,
    "migrator": _migrator,
    "predictor": _predictor,
    "tagger": _tagger,
    "worker": _worker,
}

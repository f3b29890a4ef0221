"""Builds the actor of a recording again, for `millrace replay`. The model folders must still be where they were."""

from __future__ import annotations

import random

import msgspec

from services.ingress.actor import IngressActor
from services.ingress.api.tokenizer import ModelTokenizer
from services.ingress.config import IngressConfig, policy_of
from services.ingress.metrics import IngressMetrics
from services.ingress.tokens.detokenizer import TextModel


def core_rng(name: str, incarnation: int) -> random.Random:
    """The core's source of ids: the first draw of its process's."""
    return random.Random(random.Random(f"{name}/{incarnation}").getrandbits(64))


def replay_actor(config: str, seed: int) -> IngressActor:
    """The actor as it was when the recording began; ``seed`` is its incarnation."""
    known = msgspec.json.decode(config, type=IngressConfig)
    tokenizers = {model.name: ModelTokenizer.load(model.path) for model in known.models}
    return IngressActor(
        config=known,
        incarnation=seed,
        models={name: TextModel(each.vocabulary, each.eos_token_ids) for name, each in tokenizers.items()},
        metrics=IngressMetrics(),
        rng=core_rng(known.name, seed),
        policy=policy_of(known.dispatch),
    )

"""Plan of requests and their times: one sequence that every policy gets alike. Pure; randomness from the seed."""

from __future__ import annotations

import math
from random import Random
from typing import Literal

import msgspec
from millrace.workloads.arrivals import Gamma

from models.training.tasks import TASKS, held_out, make

#: ``stated``: each request names its length (``ignore_eos`` and ``max_tokens``). ``tagged``: the model ends when it
#: likes, at temperature 1 with a seed of its own, and the tagger has to guess.
Kind = Literal["stated", "tagged"]

#: Bound of an output that the model ends itself, tokens.
TAGGED_MAX = 512

#: Standard deviation of the logarithm of the long outputs' lengths.
LONG_SIGMA = 0.15

#: Prompts are drawn until one is held out from training; one in eight is.
DRAWS_MAX = 1_000


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """A sequence of requests.

    Attributes:
        count: Requests.
        rate_per_s: Mean arrivals per second.
        cv: Standard deviation of the pauses over their mean; 1 is Poisson.
        output_mean, output_sigma, output_max: Log-normal lengths of stated outputs, tokens.
        long_share, long_mean: This share of them are of another kind, log-normal too, around ``long_mean`` tokens with
            LONG_SIGMA; 0 for none.
    """

    kind: Kind
    count: int
    rate_per_s: float
    cv: float = 1.5
    output_mean: float = 80.0
    output_sigma: float = 0.9
    output_max: int = 512
    long_share: float = 0.0
    long_mean: float = 0.0
    seed: int = 0


class Planned(msgspec.Struct, frozen=True, kw_only=True):
    """One request. ``at_s``: from the beginning; ``max_tokens``: its output's length where it is stated."""

    at_s: float
    prompt: str
    max_tokens: int
    stated: bool
    seed: int

    def body(self, model: str) -> bytes:
        """As a chat completion."""
        fields = {
            "model": model,
            "messages": [{"role": "user", "content": self.prompt}],
            "max_tokens": self.max_tokens,
            "temperature": 1.0,
            "seed": self.seed,
            "stream": True,
            **({"ignore_eos": True} if self.stated else {}),
        }
        return msgspec.json.encode(fields)


def planned(load: Load) -> list[Planned]:
    """The requests of a load, in order of time."""
    rng = Random(f"{load.seed}/{load.kind}")
    times = Gamma(rate_per_s=load.rate_per_s, cv=load.cv).times_ns(Random(f"{load.seed}/{load.kind}/arrivals"))
    stated = load.kind == "stated"
    return [
        Planned(
            at_s=next(times) / 1e9,
            prompt=_prompt(rng),
            max_tokens=_length(rng, load) if stated else TAGGED_MAX,
            stated=stated,
            seed=rng.randrange(1 << 31),
        )
        for _ in range(load.count)
    ]


def _prompt(rng: Random) -> str:
    """One that no model was trained on."""
    for _ in range(DRAWS_MAX):
        prompt = make(rng.choice(TASKS), rng).prompt
        if held_out(prompt):
            return prompt
    raise AssertionError("no prompt is held out")


def _length(rng: Random, load: Load) -> int:
    mean, sigma = load.output_mean, load.output_sigma
    if load.long_share and rng.random() < load.long_share:
        mean, sigma = load.long_mean, LONG_SIGMA
    mu = math.log(mean) - sigma**2 / 2
    return max(2, min(load.output_max, round(math.exp(mu + sigma * rng.gauss(0.0, 1.0)))))

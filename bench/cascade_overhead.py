"""CPU time that a cascade adds to ingress's core per attempt, against plain calls of the same models.

A request of a cascade makes one, two or three attempts of ``--tokens`` tokens each. The same attempts as plain calls,
one after another, with and without the log-probabilities that a cascade needs, stand beside it. CPU time of the
thread, the least of some repeats; no bus, no HTTP, no codec. Aim: at most 150 us an attempt.
"""

from __future__ import annotations

import argparse
import cProfile
import math
import pstats
import time
from collections.abc import Callable
from functools import partial
from random import Random

from millrace.actor.effects import Effect, Request
from millrace.contracts.ingress import FinishReason, TokenChunk, TokenLogprobs, TokensGenerated
from millrace.contracts.local import KeyChanged, Replied, TimerFired
from millrace.contracts.message import Message
from millrace.contracts.plan import Plan, Stage
from millrace.contracts.status import InstanceRecord, InstanceSummary
from millrace.contracts.tagger import LengthTag, TagRequest
from millrace.contracts.worker import Sampling, SequenceAccepted, SubmitSequence
from millrace.judging.calibration import IsotonicCurve
from millrace.judging.confidence import ConfidenceModel
from millrace.judging.evidence import ConfidenceFeature
from millrace.policies.dispatch import DISPATCH_POLICIES

from bench.ingress_core import EOS, letters
from services.ingress.actor import IngressActor
from services.ingress.calls.messages import Call, CallKind, CallSubmitted, MemberCall
from services.ingress.config import CascadeConfig, DispatchConfig, IngressConfig, LimitsConfig, TierConfig
from services.ingress.metrics import IngressMetrics
from services.ingress.tokens.detokenizer import TextModel

MODELS = ("nano", "micro", "mini")
CASCADE = "auto"
PROMPT = list(range(20))
REPEATS = 25
#: Requests of one repeat.
REQUESTS = 60


def main() -> int:
    """Print a row per number of attempts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=32, help="of an answer; one message of an engine each")
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    if options.profile:
        return _profiled(options.tokens)
    head = ("plain us", "judged us", "cascade us", "us an attempt")
    print(f"{'attempts':<10}{head[0]:>10}{head[1]:>12}{head[2]:>12}{head[3]:>16}")
    for attempts in (1, 2, 3):
        plain, judged, cascade = least(
            partial(plain_us, attempts, options.tokens, judged=False),
            partial(plain_us, attempts, options.tokens, judged=True),
            partial(cascade_us, attempts, options.tokens),
        )
        print(f"{attempts:<10}{plain:>10.0f}{judged:>12.0f}{cascade:>12.0f}{(cascade - plain) / attempts:>16.0f}")
    print("us an attempt: what the cascade costs above the same calls by their models' own names, over its attempts")
    return 0


def least(*measures: Callable[[], float]) -> list[float]:
    """The least of some repeats of each, in turn: what else runs on the machine only adds."""
    rounds = [[measure() for measure in measures] for _ in range(REPEATS)]
    return [min(found) for found in zip(*rounds, strict=True)]


def plain_us(attempts: int, tokens: int, *, judged: bool) -> float:
    """CPU time of the attempts as calls of their own, one after another."""
    rig = CascadeRig(attempts)
    begin = time.thread_time_ns()
    for number in range(REQUESTS):
        for attempt in range(attempts):
            rig.serve_plain(f"r{number}-{attempt}", MODELS[attempt], tokens, judged=judged)
    return (time.thread_time_ns() - begin) / 1e3 / REQUESTS


def cascade_us(attempts: int, tokens: int) -> float:
    """CPU time of one request of the cascade that is answered by its last attempt."""
    rig = CascadeRig(attempts)
    begin = time.thread_time_ns()
    for number in range(REQUESTS):
        rig.serve_cascade(f"r{number}", tokens)
    return (time.thread_time_ns() - begin) / 1e3 / REQUESTS


class CascadeRig:
    """A core with one instance of each model that answers at once.

    Args:
        attempts: Of each request; the last one's answer is good enough, those before are not.
    """

    def __init__(self, attempts: int) -> None:
        self.attempts = attempts
        limits = LimitsConfig(calls_open_max=10**6)
        tiers = [TierConfig(model=model, threshold=70.0) for model in MODELS]
        cascade = CascadeConfig(name=CASCADE, tiers=tiers, early_rejection=False)
        policy = "join_shortest_queue"
        self.actor = IngressActor(
            config=IngressConfig(limits=limits, dispatch=DispatchConfig(policy=policy), cascades=[cascade]),
            incarnation=1,
            models={model: TextModel(letters(), frozenset({EOS}), judge(model)) for model in MODELS},
            metrics=IngressMetrics(),
            rng=Random(1),
            policy=DISPATCH_POLICIES.load(policy),
        )
        self.now_ns = 10**18
        self.actor.start(self.now_ns)
        for model in MODELS:
            stage = Stage(name="s0", length_min=0, length_max=None, instances=[model])
            plan = Plan(model=model, epoch=1, stages=[stage], coordinator="c")
            self.send(KeyChanged(bucket="plan", key=model, value=plan, revision=1))
            self.send(KeyChanged(bucket="instance", key=model, value=record(model), revision=1))
            self.send(summary(model, self.now_ns))

    def send(self, body: object) -> list[Effect]:
        """Handle one message."""
        self.now_ns += 1000
        return self.actor.handle(Message(body), self.now_ns)

    def serve_plain(self, request: str, model: str, tokens: int, *, judged: bool) -> None:
        """One call of a model, from its submission to its acknowledgement."""
        sampling = Sampling(max_tokens=tokens + 1, logprobs=0 if judged else None)
        call = Call(request=request, kind=CallKind.CHAT, model=model, prompts=[PROMPT], sampling=sampling)
        self._decode(self.send(CallSubmitted(call=call)), model, tokens, good=True, logprobs=judged)

    def serve_cascade(self, request: str, tokens: int) -> None:
        """One call of the cascade, likewise."""
        sampling = Sampling(max_tokens=tokens + 1)
        members = [MemberCall(model=model, prompts=[PROMPT], sampling=sampling) for model in MODELS]
        call = Call(
            request=request, kind=CallKind.CHAT, model=CASCADE, prompts=[PROMPT], sampling=sampling, members=members
        )
        out = self.send(CallSubmitted(call=call))
        for attempt in range(self.attempts):
            good = attempt == self.attempts - 1
            out = self._decode(out, MODELS[attempt], tokens, good=good, logprobs=True)
        assert not self.actor.state.parents

    def _decode(self, out: list[Effect], model: str, tokens: int, *, good: bool, logprobs: bool) -> list[Effect]:
        """Tag, submission, one message per token; returns what the last of them caused."""
        ask, tag = next((e, e.body) for e in out if isinstance(e, Request) and isinstance(e.body, TagRequest))
        out = self.send(Replied(correlation=ask.correlation, body=LengthTag(request=tag.request)))
        ask, body = next((e, e.body) for e in out if isinstance(e, Request) and isinstance(e.body, SubmitSequence))
        sequence = body.sequence
        self.send(Replied(correlation=ask.correlation, body=SequenceAccepted(sequence=sequence, epoch=0)))
        said = [TokenLogprobs(token_ids=[1], logprobs=[-0.001 if good else -0.5], rank=1)] if logprobs else None
        for index in range(tokens):
            last = index == tokens - 1
            chunk = TokenChunk(
                sequence, 0, index, [EOS if last else index % 26], FinishReason.STOP if last else None, said
            )
            out = self.send(TokensGenerated(instance=model, incarnation=1, step=index, chunks=[chunk]))
        if good:
            self.send(TimerFired(name="acknowledge"))
        self.send(summary(model, self.now_ns))
        return out


def judge(model: str) -> ConfidenceModel:
    """A judge by the least likely token; its curve has as many knots as shipped ones."""
    knots = tuple(-4.0 + index / 10 for index in range(41))
    curve = IsotonicCurve(knots, tuple(math.exp(knot) for knot in knots))
    return ConfidenceModel(
        model=model, feature=ConfidenceFeature.LEAST, curve=curve, answers=1600, area=0.95, error=0.02
    )


def record(model: str) -> InstanceRecord:
    """Registration of a model's instance, which has its name."""
    return InstanceRecord(
        instance=model,
        incarnation=1,
        model=model,
        engine="modelled",
        engine_version="1",
        max_model_len=4096,
        max_sequences=64,
        token_budget=2048,
        block_size=16,
        blocks_total=10_000,
    )


def summary(model: str, at_ns: int) -> InstanceSummary:
    """Heartbeat of an idle instance."""
    return InstanceSummary(
        instance=model,
        incarnation=1,
        model=model,
        at_ns=at_ns,
        running=0,
        waiting=0,
        running_tokens=0,
        waiting_prefill_tokens=0,
        preemptions=0,
        output_tokens_total=0,
        blocks_free=10_000,
        blocks_total=10_000,
        block_size=16,
    )


def _profiled(tokens: int) -> int:
    rig = CascadeRig(2)
    profile = cProfile.Profile()
    profile.enable()
    for number in range(REQUESTS):
        rig.serve_cascade(f"r{number}", tokens)
    profile.disable()
    pstats.Stats(profile).sort_stats("tottime").print_stats(30)
    return 0

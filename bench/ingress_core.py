"""Cost of ingress's core, without bus, HTTP or codec: tokens relayed, calls opened and closed, decisions.

    python -m bench ingress_core            the table
    python -m bench ingress_core --profile  the costliest functions instead

Tokens: 64 streams, one message per step with one token each, as one engine sends it. The share of detokenising is
measured by itself on the same tokens and taken off. Calls: one short call from submission to acknowledgement, with
tag, question to predictors (eight where the policy asks), decision, outcome. Decisions: a policy over a prebuilt view,
with every candidate's prediction. All figures are CPU time of the thread.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import time
from collections.abc import Callable
from functools import partial
from random import Random

from millrace.actor.effects import Effect, Gather, Request
from millrace.contracts.ingress import FinishReason, TokenChunk, TokensGenerated
from millrace.contracts.local import Gathered, KeyChanged, Replied, TimerFired
from millrace.contracts.message import Message
from millrace.contracts.plan import Plan, Stage
from millrace.contracts.predictor import LatencyPrediction
from millrace.contracts.status import InstanceRecord, InstanceSummary
from millrace.contracts.tagger import LengthTag, TagRequest
from millrace.contracts.worker import Sampling, SequenceAccepted, SubmitSequence
from millrace.policies.dispatch import DISPATCH_POLICIES, DispatchView, InstanceView, Prediction
from tokenizers import Tokenizer, decoders, models

from services.ingress.actor import IngressActor
from services.ingress.calls.messages import Call, CallKind, CallSubmitted
from services.ingress.config import DispatchConfig, IngressConfig, LimitsConfig
from services.ingress.metrics import IngressMetrics
from services.ingress.tokens.detokenizer import TextModel, TextStream, TokenizerVocabulary

MODEL = "m"
STREAMS = 64
STEPS = 400
CALLS = 4_000
DECISIONS = 5_000
REPEATS = 5
EOS = 26


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    if arguments.profile:
        return _profiled()
    whole, text = best(relay_us), best(text_us)
    print(f"relay a chunk of one token, {STREAMS} streams    {whole:7.2f} µs  ({1e6 / whole:,.0f} tokens/s)")
    print(f"  of that detokenising                     {text:7.2f} µs, the rest {whole - text:.2f} µs")
    lazy = best(lambda: relay_us(stream=False))
    print(f"the same, not streaming                    {lazy:7.2f} µs")
    for instances in (2, 64):
        for policy in ("join_shortest_queue", "forecast"):
            cost = best(partial(call_us, instances, policy))
            print(f"a short call, {instances:2} instances, {policy:19}{cost:6.1f} µs")
    for name in DISPATCH_POLICIES.names:
        cost = best(partial(decision_us, name))
        print(f"decision of 64: {name:26} {cost:7.1f} µs")
    return 0


def best(measure: Callable[[], float]) -> float:
    """The lowest of some repeats: what else runs on the machine only adds."""
    return min(measure() for _ in range(REPEATS))


def relay_us(stream: bool = True) -> float:
    """Microseconds of one chunk of one token."""
    rig = Rig(instances=1)
    for number in range(STREAMS):
        rig.open(f"r{number}", max_tokens=STEPS + 1, stream=stream)
    messages = [
        Message(
            TokensGenerated(
                instance="i00",
                incarnation=1,
                step=step,
                chunks=[TokenChunk(f"r{n}.0", 0, step, [(step + n) % 26]) for n in range(STREAMS)],
            )
        )
        for step in range(STEPS)
    ]
    handle, now_ns = rig.actor.handle, rig.now_ns
    begin = time.thread_time_ns()
    for message in messages:
        now_ns += 20_000_000
        handle(message, now_ns)
    taken = time.thread_time_ns() - begin
    assert all(len(s.log) == STEPS for s in rig.actor.state.sequences.values())
    return taken / 1e3 / (STEPS * STREAMS)


def text_us() -> float:
    """Microseconds of detokenising one token by itself."""
    vocabulary = letters()
    streams = [TextStream(vocabulary) for _ in range(STREAMS)]
    chunks = [[[(step + n) % 26] for n in range(STREAMS)] for step in range(STEPS)]
    begin = time.thread_time_ns()
    for step in chunks:
        for stream, token_ids in zip(streams, step, strict=True):
            stream.push(token_ids, False, False)
    return (time.thread_time_ns() - begin) / 1e3 / (STEPS * STREAMS)


def call_us(instances: int, policy: str) -> float:
    """Microseconds of one short call, everything the core does for it."""
    rig = Rig(instances=instances, policy=policy)
    begin = time.thread_time_ns()
    for number in range(CALLS):
        rig.serve(f"r{number}")
    return (time.thread_time_ns() - begin) / 1e3 / CALLS


def decision_us(name: str) -> float:
    """Microseconds of one decision over 64 instances."""
    policy = DISPATCH_POLICIES.load(name)
    rng = Random(1)
    candidates = tuple(
        InstanceView(
            name=f"i{n:02}",
            known=True,
            running=rng.randrange(1, 64),
            running_tokens=rng.randrange(60_000),
            waiting_prefill_tokens=rng.randrange(5_000),
            used_tokens=rng.randrange(100_000),
        )
        for n in range(64)
    )
    predictions = {c.name: Prediction(ttft_ns=rng.randrange(10**8), e2e_ns=rng.randrange(10**9)) for c in candidates}
    view = DispatchView(model=MODEL, sequences=1, length_tokens=500, candidates=candidates, predictions=predictions)
    parameters, state = policy.parameters(), policy.initial_state
    begin = time.thread_time_ns()
    for number in range(DECISIONS):
        _, state = policy.decide(view, parameters, state, number * 250_000, rng)
    return (time.thread_time_ns() - begin) / 1e3 / DECISIONS


class Rig:
    """A core with instances that answer at once."""

    def __init__(self, instances: int, policy: str = "join_shortest_queue") -> None:
        limits = LimitsConfig(calls_open_max=10**6)
        self.actor = IngressActor(
            config=IngressConfig(limits=limits, dispatch=DispatchConfig(policy=policy)),
            incarnation=1,
            models={MODEL: TextModel(letters(), frozenset({EOS}))},
            metrics=IngressMetrics(),
            rng=Random(1),
            policy=DISPATCH_POLICIES.load(policy),
        )
        self.now_ns = 10**18
        self.actor.start(self.now_ns)
        self.names = [f"i{n:02}" for n in range(instances)]
        stage = Stage(name="s0", length_min=0, length_max=None, instances=self.names)
        plan = Plan(model=MODEL, epoch=1, stages=[stage], coordinator="c")
        self.send(KeyChanged(bucket="plan", key=MODEL, value=plan, revision=1))
        for name in self.names:
            self.send(KeyChanged(bucket="instance", key=name, value=record(name), revision=1))
            self.send(summary(name, self.now_ns))

    def send(self, body: object) -> list[Effect]:
        """Handles one message."""
        self.now_ns += 1000
        return self.actor.handle(Message(body), self.now_ns)

    def open(self, request: str, *, max_tokens: int, stream: bool) -> str:
        """Opens a call and has it accepted; the instance."""
        call = Call(
            request=request,
            kind=CallKind.COMPLETION,
            model=MODEL,
            prompts=[list(range(20))],
            sampling=Sampling(max_tokens=max_tokens),
            stream=stream,
        )
        out = self.send(CallSubmitted(call=call))
        ask = next(e for e in out if isinstance(e, Request) and isinstance(e.body, TagRequest))
        out = self.send(Replied(correlation=ask.correlation, body=LengthTag(request=request)))
        if isinstance(out[0], Gather):
            out = self.send(Gathered(correlation=out[0].correlation, answers=predictions_of(out[0])))
        ask = next(e for e in out if isinstance(e, Request) and isinstance(e.body, SubmitSequence))
        self.send(Replied(correlation=ask.correlation, body=SequenceAccepted(sequence=f"{request}.0", epoch=0)))
        return ask.subject.split(".")[3]

    def serve(self, request: str) -> None:
        """One short call from its submission to its acknowledgement, and its share of heartbeats."""
        instance = self.open(request, max_tokens=4, stream=False)
        chunk = TokenChunk(f"{request}.0", 0, 0, [1, 2, 3, EOS], FinishReason.STOP)
        self.send(TokensGenerated(instance=instance, incarnation=1, step=1, chunks=[chunk]))
        self.send(TimerFired(name="acknowledge"))
        self.send(summary(instance, self.now_ns))


def predictions_of(asked: Gather) -> list[tuple[str, LatencyPrediction]]:
    """Everyone's answer."""
    names = [subject.rsplit(".", 1)[1] for subject in asked.subjects]
    return [
        ("p", LatencyPrediction(request=asked.request, instance=n, incarnation=1, ttft_ns=10**6, e2e_ns=10**8 + i))
        for i, n in enumerate(names)
    ]


def record(name: str) -> InstanceRecord:
    """A registration."""
    return InstanceRecord(
        instance=name,
        incarnation=1,
        model=MODEL,
        engine="modelled",
        engine_version="1",
        max_model_len=100_000,
        max_sequences=64,
        token_budget=512,
        block_size=16,
        blocks_total=10_000,
    )


def summary(name: str, at_ns: int) -> InstanceSummary:
    """A heartbeat."""
    return InstanceSummary(
        instance=name,
        incarnation=1,
        model=MODEL,
        at_ns=at_ns,
        running=3,
        waiting=0,
        running_tokens=300,
        waiting_prefill_tokens=0,
        blocks_free=9_000,
        blocks_total=10_000,
        block_size=16,
        preemptions=0,
        output_tokens_total=at_ns % 1_000_000,
    )


def letters() -> TokenizerVocabulary:
    """A byte-level vocabulary of letters."""
    vocab = {chr(ord("a") + i): i for i in range(26)} | {"</s>": EOS}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>"])
    return TokenizerVocabulary(tokenizer)


def _profiled() -> int:
    for measure in (relay_us, partial(call_us, 64, "forecast")):
        profile = cProfile.Profile()
        profile.runcall(measure)
        pstats.Stats(profile).sort_stats("tottime").print_stats(18)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

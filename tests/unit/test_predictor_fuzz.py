"""Whatever is said to a predictor, it answers every question, and keeps its invariants."""

import random
from typing import Any

import pytest
from millrace.actor.effects import Reply
from millrace.contracts.local import BusDisconnected, BusReconnected, TimerFired
from millrace.contracts.message import Body, ErrorReply
from millrace.contracts.migration import MigrationFinished, MigrationOutcome
from millrace.contracts.predictor import LatencyPrediction, NoPrediction
from millrace.contracts.status import BatchComposition, PresenceState, SequenceState, ServicePresence
from millrace.kvcache.chain import pack_hashes

from tests.testbed.messages import plain
from tests.unit.predictor_rig import MS, Predictor, decision, outcome, question, record, snapshot, status

NUMBERS = (-(1 << 62), -1, 0, 1, 2, 7, 15, 16, 17, 100, 2_047, 2_048, 5_000, 1 << 31, 1 << 40, (1 << 63) - 1)
REALS = (float("nan"), float("inf"), float("-inf"), -1.0, 0.0, 0.4, 12.5, 1e300)
NAMES = ("w0", "w1", "w2", "stranger", "")


class Speaker:
    """Says things that are mostly wrong in one or two places."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.step = 0
        self.now_ns = 0

    def spoil(self, sensible: dict[str, Any], chance: float = 0.15) -> dict[str, Any]:
        """Fields, some of them replaced by a number that cannot be."""
        return {k: self.rng.choice(NUMBERS) if self.rng.random() < chance else v for k, v in sensible.items()}

    def sequence(self, index: int) -> Any:
        rng = self.rng
        output = rng.randrange(200)
        changes = self.spoil(
            {
                "prompt_tokens": rng.randrange(1, 800),
                "max_tokens": rng.randrange(1, 900),
                "blocks": rng.randrange(60),
                "expected_output_tokens": rng.choice([None, rng.randrange(1, 400)]),
                "computed_tokens": rng.randrange(0, 30),
            },
            chance=0.01,
        )
        state = rng.choice(list(SequenceState))
        return status(f"r{rng.randrange(20)}.{index}", output_tokens=output, state=state, **changes)

    def snapshot(self) -> Body:
        rng = self.rng
        self.step += rng.choice([0, 1, 1, 1, 3])
        batch = self.spoil({"decodes": rng.randrange(9), "prefills": 0, "context_tokens": rng.randrange(900)}, 0.03)
        work = rng.choice([0.0, 0.0, 0.0, 32.5, *REALS[:1]])
        figures = self.spoil({"blocks_free": rng.randrange(300), "step_duration_ns": 9 * MS, "preemptions": 0}, 0.03)
        return snapshot(
            rng.choice(NAMES),
            step=self.step,
            at_ns=self.now_ns - rng.randrange(50 * MS),
            incarnation=rng.choice([5, 5, 5, 4]),
            model=rng.choice(["m", "m", "m", "other"]),
            running=[self.sequence(index) for index in range(rng.randrange(9))],
            waiting=[self.sequence(index) for index in range(10, 10 + rng.choice([0, 0, 3]))],
            batch=BatchComposition(**batch, prefill_work=work),
            **figures,
        )

    def question(self) -> Body:
        fields = self.spoil({"prompt_tokens": 40, "max_tokens": 90, "output_tokens": 0, "sequences": 1}, 0.05)
        expected = self.rng.choice([None, 30.0, *REALS])
        model = self.rng.choice(["m", "m", "m", "other"])
        return question(
            instance=self.rng.choice(NAMES), model=model, expected_output_tokens=expected, **fields, **self.blocks()
        )

    def blocks(self) -> dict[str, Any]:
        """Names of a prompt's blocks, of few prompts; now and then of other blocks, or cut off."""
        rng = self.rng
        hashes = [block * 16 + rng.randrange(2) for block in range(rng.randrange(12))]
        packed = pack_hashes(hashes)[: rng.choice((None, None, None, -3))]
        return {"block_hashes": packed, "block_size": rng.choice((16, 16, 16, *NUMBERS[:4]))}

    def other(self) -> Body:
        rng = self.rng
        request, name = f"r{rng.randrange(20)}", rng.choice(NAMES)
        lengths = self.spoil({"prompt_tokens": 50, "output_tokens": 0, "max_tokens": 80})
        ended = self.spoil({"placed_ns": self.now_ns, "arrival_ns": self.now_ns, "ttft_ns": 5, "e2e_ns": 9})
        told = self.spoil({"predicted_ttft_ns": 5, "predicted_e2e_ns": 9})
        presence = {"state": rng.choice(list(PresenceState)), "incarnation": rng.choice([0, 4, 1])}
        figures = {"cached_tokens": rng.randrange(100), "predicted_cached_tokens": 32, "prompt_tokens": 180}
        return rng.choice(
            [
                decision(request, name, at_ns=rng.choice([self.now_ns, *NUMBERS]), **lengths, **self.blocks()),
                decision(request, name, expected_output_tokens=rng.choice(REALS)),
                outcome(request, predicted_output_tokens=rng.choice(REALS), output_tokens=[rng.choice(NUMBERS)]),
                outcome(request, **ended, **told),
                outcome(request, **ended, **self.spoil(figures), block_hashes=self.blocks()["block_hashes"]),
                self.move(),
                self.move(),
                ServicePresence(role="worker", name=name, at_ns=3, **presence),
                TimerFired(name="heartbeat"),
                BusDisconnected(),
                BusReconnected(),
            ]
        )

    def move(self) -> Body:
        """Of a sequence that is known or not, between instances that are."""
        rng = self.rng
        outcome = rng.choice((MigrationOutcome.MOVED, MigrationOutcome.MOVED, MigrationOutcome.ABORTED))
        sequence = f"r{rng.randrange(20)}.{rng.choice((0, 0, 1))}"
        way = {"source": rng.choice(NAMES), "target": rng.choice(NAMES)}
        return plain(MigrationFinished, sequence=sequence, outcome=outcome, **way, **self.blocks())

    def record(self, instance: str) -> Any:
        fields = self.spoil({"block_size": 16, "max_sequences": 8, "token_budget": 128, "blocks_total": 512}, 0.03)
        other = self.spoil({"long_prefill_token_threshold": 0}, 0.1)
        return record(instance, step_time=self.rng.choice(["ten-ms", "ten-ms", "none"]), **fields, **other)


@pytest.mark.parametrize("seed", range(12))
def test_nothing_that_is_said_stops_it(seed: int) -> None:
    predictor, speaker = Predictor(transit_us=500), Speaker(seed)
    answers: dict[type, int] = {}
    for _ in range(400):
        predictor.now_ns += speaker.rng.randrange(20 * MS)
        speaker.now_ns = predictor.now_ns
        kind = speaker.rng.random()
        if kind < 0.4:
            predictor.send(speaker.snapshot())
        elif kind < 0.45:
            name = speaker.rng.choice(NAMES[:4])
            predictor.register(speaker.rng.choice([speaker.record(name), speaker.record(name), None]), key=name)
        elif kind < 0.75:
            predictor.send(speaker.other())
        else:
            (reply,) = predictor.send(speaker.question(), reply_to="_INBOX.x", subject="mr.local.predict.m.w0")
            assert isinstance(reply, Reply)
            answers[type(reply.body)] = answers.get(type(reply.body), 0) + 1
            if isinstance(reply.body, LatencyPrediction):
                assert 0 < reply.body.ttft_ns <= reply.body.e2e_ns
        predictor.actor.check_invariants()
    assert set(answers) == {LatencyPrediction, NoPrediction, ErrorReply}

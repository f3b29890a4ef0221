"""A predictor that serves instances with steps of a fixed time, and the messages that it hears."""

from typing import Any

import msgspec
from millrace.actor.config import BusConfig
from millrace.actor.effects import Effect, Reply
from millrace.contracts.local import KeyChanged
from millrace.contracts.message import Body, Message
from millrace.contracts.observers import DecisionMade, RequestFinished
from millrace.contracts.predictor import PredictLatency
from millrace.contracts.status import InstanceRecord, SequenceState, SequenceStatus, StatusSnapshot
from millrace.enginemodel.step_time_models import LinearStepTime, StepTimeModel

from services.predictor.actor import PredictorActor
from services.predictor.config import PredictorConfig
from services.predictor.metrics import PredictorMetrics
from tests.testbed import messages
from tests.testbed.messages import plain, plain_record, plain_snapshot

MS = 1_000_000
STEP_MS = 10
MODEL = "m"
STEP_TIMES: dict[str, StepTimeModel] = {"ten-ms": LinearStepTime(fixed=STEP_MS * MS)}
START_NS = 1_000_000 * MS


def record(name: str = "w0", **changes: Any) -> InstanceRecord:
    sizes: dict[str, Any] = {"max_model_len": 2_048, "token_budget": 256, "blocks_total": 512}
    return plain_record(
        **{"instance": name, "incarnation": 5, "model": MODEL, "step_time": "ten-ms", **sizes, **changes}
    )


def status(name: str, output_tokens: int = 0, **changes: Any) -> SequenceStatus:
    """A sequence that decodes; 32 tokens of prompt."""
    fields: dict[str, Any] = {
        "sequence": name,
        "state": SequenceState.RUNNING,
        "prompt_tokens": 32,
        "computed_tokens": 32 + output_tokens - (output_tokens > 0),
        "output_tokens": output_tokens,
        "max_tokens": 400,
        "blocks": 2 + output_tokens // 16,
        "arrival_ns": START_NS,
        "expected_output_tokens": 50,
    }
    return SequenceStatus(**fields | changes)


def snapshot(name: str = "w0", **changes: Any) -> StatusSnapshot:
    fields: dict[str, Any] = {"incarnation": 5, "model": MODEL, "at_ns": START_NS, "step_duration_ns": 0}
    return plain_snapshot(**{"instance": name, **fields, "blocks_free": 512, "blocks_total": 512, **changes})


def decision(request: str, chosen: str, *, at_ns: int = START_NS, **changes: Any) -> DecisionMade:
    fields = {"epoch": 1, "prompt_tokens": 32, "max_tokens": 400, "expected_output_tokens": 50.0}
    return messages.decision(request, chosen=chosen, at_ns=at_ns, **fields | changes)


def outcome(request: str, **changes: Any) -> RequestFinished:
    """A request that completed with 50 tokens."""
    return plain(RequestFinished, request=request, **{"output_tokens": [50]} | changes)


def question(**changes: Any) -> PredictLatency:
    """A request of 32 tokens with 10 expected."""
    fields: dict[str, Any] = {"request": "q", "instance": "w0", "model": MODEL, "prompt_tokens": 32}
    return PredictLatency(**fields | {"max_tokens": 100, "expected_output_tokens": 10.0} | changes)


class Predictor:
    def __init__(self, *, step_times: dict[str, StepTimeModel] | None = None, **config: Any) -> None:
        fields = {"bus": BusConfig(cluster="local"), "transit_us": 0} | config
        self.now_ns = START_NS
        self.metrics = PredictorMetrics()
        self.actor = PredictorActor(
            config=msgspec.convert(fields, PredictorConfig),
            incarnation=7,
            step_times=STEP_TIMES if step_times is None else step_times,
            metrics=self.metrics,
        )

    def register(self, value: InstanceRecord | None, key: str = "w0") -> list[Effect]:
        return self.send(KeyChanged(bucket="instance", key=key, value=value, revision=1))

    def send(self, body: Body, *, reply_to: str = "", subject: str = "") -> list[Effect]:
        return self.actor.handle(Message(body, subject=subject, reply_to=reply_to), self.now_ns)

    def ask(self, body: Body | None = None, *, subject: str = "") -> Any:
        (reply,) = self.send(body or question(), reply_to="_INBOX.x", subject=subject)
        assert isinstance(reply, Reply)
        self.actor.check_invariants()
        return reply.body


def served(*snapshots: StatusSnapshot, **config: Any) -> Predictor:
    predictor = Predictor(**config)
    predictor.register(record())
    for each in snapshots or (snapshot(),):
        predictor.send(each)
    return predictor

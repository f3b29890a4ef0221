"""A driver of one IngressActor that serves a cascade of two or three models, one instance each."""

import math
from typing import Any

import msgspec
from millrace.actor.effects import Effect, Publish
from millrace.contracts.cascade import CascadePlan, CascadeTier
from millrace.contracts.ingress import FinishReason, TokenLogprobs
from millrace.contracts.local import KeyChanged
from millrace.contracts.observers import RequestFinished
from millrace.contracts.worker import Sampling, SubmitSequence
from millrace.judging.confidence import ConfidenceModel

from services.ingress.calls.messages import CallSubmitted, CascadeOptions, CascadeReport, CompleteCall
from services.ingress.config import CascadeConfig, IngressConfig, TierConfig
from tests.unit.ingress_core import NO_TAG, PLAIN, Bench, chunk, make_call

CASCADE = "casc"
MODELS = ("small", "middle", "large")


def cascade_plan(*thresholds: float, epoch: int = 1, judge: str = "confidence", **fields: Any) -> CascadePlan:
    """Tiers ``small``, ``middle``, ... with these thresholds."""
    tiers = [
        CascadeTier(model=model, threshold=threshold, instances=1)
        for model, threshold in zip(MODELS, thresholds, strict=False)
    ]
    return CascadePlan(**({"cascade": CASCADE, "epoch": epoch, "tiers": tiers, "judge": judge} | fields))


class CascadeBench(Bench):
    """Instances ``w-small``, ``w-middle``, ... of the models of one cascade."""

    def __init__(self, *thresholds: float, judges: dict[str, ConfidenceModel] | None = None, **cascade: Any) -> None:
        self.names = MODELS[: len(thresholds)]
        tiers = [TierConfig(model=m, threshold=t) for m, t in zip(self.names, thresholds, strict=True)]
        config = CascadeConfig(name=CASCADE, tiers=tiers, **cascade)
        super().__init__(
            IngressConfig(tagging=NO_TAG, dispatch=PLAIN, cascades=[config]),
            model_of={f"w-{model}": model for model in self.names},
            judges=judges or {},
        )

    def put(self, plan: CascadePlan | None, key: str = CASCADE) -> list[Effect]:
        return self.send(KeyChanged(bucket="cascade", key=key, value=plan, revision=1))

    def ask(self, request: str = "r", *, options: CascadeOptions | None = None, **fields: Any) -> list[Effect]:
        names = fields.pop("members", self.names)
        call = make_call(
            request, **({"model": CASCADE, "stream": False, "cascade": options or CascadeOptions()} | fields)
        )
        own = {"prompts": [[1, 2, 3]], "sampling": Sampling(max_tokens=50), "judged_prompt": "bcd"}
        members = [msgspec.structs.replace(call, model=name, **own) for name in names]
        return self.send(CallSubmitted(call=msgspec.structs.replace(call, members=members)))

    def attempts(self) -> list[tuple[str, str]]:
        """(sequence, instance) of each submission."""
        return [(s.body.sequence, s.subject.split(".")[-2]) for s in self.submissions()]

    def answer(
        self, text: str, logprob: float, *, first_index: int = 0, end: bool = True, choice: int = 0
    ) -> list[Effect]:
        """The newest attempt's engine generates text with this log-probability per token."""
        request = [s for s in self.submissions() if s.body.sequence.endswith(f".{choice}")][-1]
        assert isinstance(request.body, SubmitSequence)
        name, body = request.subject.split(".")[-2], request.body
        if request.correlation in self.actor.state.pending:
            self.accept(request)
        logprobs = [TokenLogprobs(token_ids=[0], logprobs=[logprob], rank=1) for _ in text]
        finish = FinishReason.STOP if end else None
        return self.tokens(
            name, chunk(text, first_index, epoch=body.epoch, sequence=body.sequence, finish=finish, logprobs=logprobs)
        )

    def report(self, request: str = "r") -> CascadeReport:
        (done,) = [e for e in self.made(CompleteCall) if e.request == request]
        assert done.report is not None
        return done.report

    def outcomes(self) -> list[RequestFinished]:
        return [e.body for e in self.effects if isinstance(e, Publish) and isinstance(e.body, RequestFinished)]

    def lose(self, name: str) -> None:
        """The instance falls silent, and its model's plan keeps it."""
        self.pass_time(2.0, alive=tuple(other for other in self.summary_at if other != name))


def logprob(score: float) -> float:
    """Log-probability of each token by which an answer without a fitted judge gets that score."""
    return math.log(score / 100)

"""An engine whose outputs have lengths that a script says: what a workload with known lengths runs on."""

from __future__ import annotations

from collections.abc import Callable

from millrace.actor.engine import EngineSequence
from millrace.contracts.ingress import FinishReason
from millrace.contracts.kv import KvEndpoint
from millrace.enginemodel.engine import ModelledEngine
from millrace.enginemodel.parameters import EngineParameters
from millrace.enginemodel.sequence import ScheduledSequence
from millrace.enginemodel.step_time_models import StepTimeModel
from millrace.enginemodel.stream import ModelledSequence

#: Every output token: the letter a in the simulator's vocabulary of bytes. Content means nothing where lengths are
#: scripted; prompts tell sequences apart.
TOKEN = 64

#: Output length of a sequence by its id, tokens, the end of sequence included.
OutputLength = Callable[[str], int]


class ScriptedSequence(ModelledSequence):
    """Says TOKEN until its length is reached. Its list of tokens stays the prompt without prefix caching."""

    def __init__(self, source: EngineSequence, output_tokens: int, parameters: EngineParameters) -> None:
        sampling = source.sampling
        assert not sampling.stop_token_ids, "a scripted sequence knows no stop tokens"
        assert sampling.logprobs is None, "a scripted sequence knows no log-probabilities"
        self._keeps = parameters.prefix_caching
        known = (
            source.prompt_token_ids + source.output_token_ids if source.output_token_ids else source.prompt_token_ids
        )
        ScheduledSequence.__init__(
            self,
            source.sequence,
            known[:] if self._keeps else known,
            prompt_tokens=len(source.prompt_token_ids),
            max_tokens=sampling.max_tokens,
            arrival_ns=source.arrival_ns,
        )
        self.expected_output_tokens = source.expected_output_tokens
        self.logprobs = None
        self.scheduled_ns = 0
        self.announced = False
        self.reported = self.total
        self.counts_only = not self._keeps
        self._ends_at = self.prompt_tokens + output_tokens
        self.check_at = min(self._ends_at, self.prompt_tokens + sampling.max_tokens, parameters.max_model_len)

    def extend(self, steps: int) -> None:
        if self._keeps:
            self.token_ids += [TOKEN] * steps
        self.total += steps

    def append(self, token_id: int) -> None:
        if self._keeps:
            self.token_ids.append(token_id)
        self.total += 1

    def unreported(self) -> list[int]:
        token_ids = [TOKEN] * (self.total - self.reported)
        self.reported = self.total
        return token_ids

    def output_token_ids(self) -> list[int]:
        return [TOKEN] * (self.total - self.prompt_tokens)

    def next_token(self) -> int:
        return TOKEN

    def ended(self, token: int) -> FinishReason | None:
        if self.total >= self._ends_at:
            return FinishReason.STOP
        return FinishReason.LENGTH if self.total >= self.check_at else None


class ScriptedEngine(ModelledEngine):
    """A modelled engine whose sequences end where ``output_length`` says."""

    content_matters = False

    def __init__(
        self,
        parameters: EngineParameters,
        step_time: StepTimeModel,
        *,
        output_length: OutputLength,
        tell_interval_ns: int | None = None,
        kv: KvEndpoint | None = None,
    ) -> None:
        """The other arguments are as for ModelledEngine."""
        super().__init__(parameters, step_time, tell_interval_ns=tell_interval_ns, kv=kv)
        self._output_length = output_length

    def _sequence(self, source: EngineSequence) -> ModelledSequence:
        return ScriptedSequence(source, self._output_length(source.sequence), self.parameters)

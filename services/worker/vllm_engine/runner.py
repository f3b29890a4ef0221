"""Workers whose V1 model runner lets a new request bring output tokens, with its random generator where it was.

The V1 runner is what runs on a CPU, and on GPUs that ask for it. vLLM finds these classes by path (``worker_cls``).
The V2 runner needs nothing of this: it gets every request with ``prefill_token_ids`` and keys its noise by seed and
position.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_input_batch import CachedRequestState

from services.worker.vllm_engine import compiling, process
from services.worker.vllm_engine.kv_rank import KvRankMixin, PlacedMixin

#: Upper bound of the sampler's seeds on CPU; see advance().
_CPU_SEED_BOUND = 2**31


#: The mixin stands in front of a V1 runner; to the type checker it is one.
_Base: Any = CPUModelRunner if TYPE_CHECKING else object


class ContinuingMixin(_Base):
    """Adds continuations to a V1 model runner."""

    def _update_states(self, scheduler_output: SchedulerOutput) -> Any:
        """Takes the batch; requests that bring output tokens get them just before they enter it.

        vLLM builds the state of a new request with no output and adds it to the batch within this one method, so the
        only place in between is the batch's ``add_request``. It is wrapped for such steps and no others.
        """
        tails = {
            new.req_id: new.prefill_token_ids[len(new.prompt_token_ids) :]
            for new in scheduler_output.scheduled_new_reqs
            if new.prefill_token_ids
        }
        if not tails:
            return super()._update_states(scheduler_output)
        batch = self.input_batch
        add_request = batch.add_request

        def add_with_output(state: CachedRequestState) -> Any:
            tail = tails.pop(state.req_id, None)
            if tail:
                state.output_token_ids.extend(tail)
                if state.generator is not None:
                    advance(state.generator, draws=len(tail), vocabulary=batch.vocab_size)
            return add_request(state)

        batch.add_request = add_with_output
        try:
            return super()._update_states(scheduler_output)
        finally:
            del batch.add_request


def advance(generator: torch.Generator, *, draws: int, vocabulary: int) -> None:
    """Moves a sequence's generator as far as ``draws`` sampled tokens have moved it.

    The CPU sampler takes one integer below 2**31 per token and derives the token's noise from it. The GPU sampler
    (V1) fills a row of the vocabulary's size with exponential noise per token.
    """
    if generator.device.type == "cpu":
        torch.randint(0, _CPU_SEED_BOUND, (draws,), generator=generator, dtype=torch.long)
        return
    row = torch.empty(vocabulary, dtype=torch.float32, device=generator.device)
    for _ in range(draws):
        row.exponential_(generator=generator)


class ContinuingCPUModelRunner(PlacedMixin, ContinuingMixin, CPUModelRunner):
    """The CPU's V1 runner with continuations, with seeded sampling that survives a prompt in several chunks, and with
    its KV where other engines can read it.
    """

    max_num_tokens: int

    def profile_run(self, randomize_inputs: bool = False) -> None:
        """Compiles, or loads what was compiled, with the longest piece of a prompt. A CPU's KV cache has a size that
        was asked for, so that nothing is measured, and vLLM's whole batch would compute for seconds.
        """
        tokens = self.max_num_tokens
        self.max_num_tokens = min(tokens, self.scheduler_config.long_prefill_token_threshold or tokens)
        try:
            super().profile_run(randomize_inputs)
        finally:
            self.max_num_tokens = tokens

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Samples; a sequence whose prompt is not done yet keeps its generator out of it.

        vLLM draws for such a row as well, throws the token away, and sets the generator's offset back. A CPU
        generator has no offset: the whole engine would die of one seeded request with a long prompt.
        """
        generators = self.input_batch.generators
        withheld = {}
        if generators:
            unfinished = self.discard_request_mask.np[: self.input_batch.num_reqs].nonzero()[0]
            withheld = {index: generators.pop(index) for index in unfinished.tolist() if index in generators}
        try:
            return super().sample_tokens(grammar_output)
        finally:
            generators.update(withheld)


class ContinuingCPUWorker(KvRankMixin, CPUWorker):
    """vLLM's CPU worker with that runner."""

    def init_device(self) -> None:
        """Prepares the device and swaps the runner's class for its continuing one."""
        if self.parallel_config.world_size > 1:
            process.yield_to_services()  # a process of its own; the engine's parts its threads when they are there
        compiling.prepare()
        if self.vllm_config.lora_config is not None:
            from services.worker.vllm_engine import cpu_lora  # a second of imports that few need

            cpu_lora.repair()
        super().init_device()
        adopt(self.model_runner, CPUModelRunner, ContinuingCPUModelRunner)


def adopt(runner: Any, plain: type, continuing: type) -> None:
    """Gives a runner just built its subclass. Both have the same fields, so that no state is missing."""
    if type(runner) is plain:
        runner.__class__ = continuing

"""The Engine port on real vLLM: one AsyncLLM, tokens in and out, one EngineStepped per batch of outputs."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import vllm
from millrace.actor.clock import unix_ns
from millrace.actor.engine import (
    AdapterLoaded,
    AdapterNotLoaded,
    EndLeaseInEngine,
    EngineEvent,
    EngineFailed,
    EngineObserved,
    EngineSequence,
    EngineStepped,
    KvCommand,
    KvDenied,
    LeaseInEngine,
    ReserveInEngine,
    SequenceAdded,
    SequenceRejected,
    StepOutput,
    UnreserveInEngine,
    denied,
)
from millrace.actor.errors import EngineStartFailed
from millrace.contracts.kv import KvEndpoint, KvRefusal
from millrace.contracts.scheduler import scheduler_fields
from millrace.contracts.status import EngineDescription, EngineSnapshot
from millrace.contracts.worker import Adapter, StructuredOutput
from millrace.kvcopy.choice import choose
from vllm.exceptions import VLLMClientError
from vllm.inputs.engine import tokens_input
from vllm.platforms import current_platform
from vllm.v1.engine import EngineCoreEventType, EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM

from services.worker.config import WorkerConfig
from services.worker.vllm_engine import kv_endpoint, kv_words, names, snapshot_buffer, startup
from services.worker.vllm_engine.adapters import AdapterRefused, EngineAdapters
from services.worker.vllm_engine.crash import crash_text, refusal_text
from services.worker.vllm_engine.grammar_check import TrialVerdict
from services.worker.vllm_engine.hangs import LivenessJudge, cpu_time_ns
from services.worker.vllm_engine.images import image_input
from services.worker.vllm_engine.kv_selftest import LoopBack
from services.worker.vllm_engine.pooling import pieces, pooling_params, pooling_task
from services.worker.vllm_engine.sampling import (
    FINISH,
    prompt_logprobs,
    sampling_params,
    structured_params,
    token_logprobs,
)
from services.worker.vllm_engine.scheduler_config import scheduler_config
from services.worker.vllm_engine.snapshot_scheduler import decode_snapshot
from services.worker.vllm_engine.standing import StandingSequences

#: How long the engine process has for ending by itself before it is killed. It owns nothing that outlives it; a GPU's
#: memory is given back more surely by an orderly end.
STOP_TIMEOUT_S = 0.5 if current_platform.is_cpu() else 10.0
#: Longest that a snapshot in the buffer goes unseen while no outputs come (an abort in an idle engine).
IDLE_POLL_S = 0.05


@dataclass(slots=True)
class _Active:
    """A sequence that the engine works on. ``told``: whether SequenceAdded was said. ``pieces_told``: of its pooled
    output, in earlier epochs.
    """

    sequence: str
    logprobs: int | None
    pieces_told: int = 0
    preemptions: int = 0
    told: bool = True


class VllmEngine:
    """One vLLM engine in a process of its own. All methods run on the event loop's thread, which is the main one."""

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._llm: AsyncLLM | None = None
        self._listener: Callable[[EngineEvent], None] = lambda event: None
        self._active: dict[str, _Active] = {}
        self._identities: dict[str, str] = {}
        self._adapters = EngineAdapters()
        self._on_trial: dict[str, EngineSequence] = {}
        self._images: dict[str, Any] = {}  # inputs of sequences that are on trial
        self._serial = 0
        self._step = 0
        self._tasks: set[asyncio.Task[Any]] = set()
        self._endpoint: KvEndpoint | None = None
        self._leased: dict[str, str] = {}
        self._standing = StandingSequences()
        self._stopping = False
        self._failure = ""

    async def start(self, listener: Callable[[EngineEvent], None]) -> EngineDescription:
        """Starts it; blocks the loop meanwhile, since the engine must be forked by this thread.

        Raises:
            EngineStartFailed: with vLLM's reason.
        """
        self._listener = listener
        path = snapshot_buffer.create()
        try:
            self._llm, self._grammars = startup.launch(self._config, path)
            self._snapshots = snapshot_buffer.SnapshotReader(path)
        except Exception as error:
            raise EngineStartFailed(refusal_text(error)) from error
        finally:
            path.unlink()
        self._supported = await self._llm.engine_core.get_supported_tasks_async()
        await self._llm.engine_core.call_utility_async("millrace_started")
        self._spawn(self._read_outputs())
        self._spawn(self._poll())
        info = self._info(self._llm, await self._make_movable(self._llm), await self._first_adapters(self._llm))
        if self._failure:  # of which nobody has heard yet
            raise EngineStartFailed(self._failure)
        return info

    async def _make_movable(self, llm: AsyncLLM) -> str:
        """Makes the engine ready to move KV; why it will not, or nothing."""
        refusal = await self._offer(llm)
        if refusal or not self._tests_itself(llm.vllm_config):
            return refusal
        assert self._endpoint is not None
        model = llm.vllm_config.model_config
        test = LoopBack(self, self._endpoint, vocabulary=model.get_vocab_size(), max_model_len=model.max_model_len)
        listener, self._listener = self._listener, test.hear
        try:
            refusal = await test.run()
        finally:
            self._listener = listener
        if refusal:
            self._endpoint = None
        return refusal

    def _tests_itself(self, vllm_config: Any) -> bool:
        wanted = self._config.migration.self_test
        proven = current_platform.is_cpu() and not vllm_config.use_v2_model_runner
        return wanted if wanted is not None else not proven or bool(vllm_config.scheduler_config.async_scheduling)

    async def _offer(self, llm: AsyncLLM) -> str:
        offer = kv_words.decode_offer(await llm.engine_core.call_utility_async("millrace_kv"))
        if not offer.refusal:
            self._endpoint = kv_endpoint.endpoint(self._config, llm.vllm_config, offer)
        return offer.refusal

    async def _first_adapters(self, llm: AsyncLLM) -> list[Adapter] | None:
        """Loads those of the configuration; None where the engine takes none."""
        if llm.vllm_config.lora_config is None:
            return None
        try:
            return [await self._adapters.load(self._core(), *named) for named in self._config.adapters.items()]
        except AdapterRefused as error:
            raise EngineStartFailed(f"adapters: {error}") from error

    def _info(self, llm: AsyncLLM, kv_refusal: str, adapters: list[Adapter] | None) -> EngineDescription:
        return EngineDescription(
            engine="vllm",
            engine_version=vllm.__version__,
            model=self._config.model,
            engine_pid=llm.engine_core.resources.engine_manager.processes[0].pid,
            step_time=self._config.step_time,
            kv=self._endpoint,
            kv_refusal=kv_refusal,
            adapters=adapters,
            task=pooling_task(llm.vllm_config.model_config, self._supported),
            **scheduler_fields(scheduler_config(llm.vllm_config)),
        )

    # --- in

    def add(self, sequence: EngineSequence) -> None:
        """Verifies and adds a sequence. The answer comes with the loop's next turn, or after a constraint's trial. A
        sequence that comes with its KV had that at its source.
        """
        constraint, adapter = sequence.sampling.structured, sequence.sampling.adapter
        if adapter is not None and self._adapters.get(adapter) is None:
            self._add_after(self._load(adapter.name, adapter.path, adapter.fingerprint), sequence)
        elif sequence.sampling.images is not None and sequence.sequence not in self._images:
            self._add_after(self._take_images(sequence), sequence)
        elif constraint is None or sequence.handover is not None:
            self._add(sequence)
        elif (verdict := self._grammars.known(constraint)) is not None:
            self._judged(sequence, verdict)
        else:
            self._on_trial[sequence.sequence] = sequence
            self._spawn(self._add_after_trial(sequence, constraint))

    def _add_after(self, work: Coroutine[Any, Any, str], sequence: EngineSequence) -> None:
        """``work``: says why the sequence is refused, or nothing."""

        async def add() -> None:
            refusal = await work
            if self._still_on_trial(sequence):
                self._reject(sequence, refusal) if refusal else self.add(sequence)

        self._on_trial[sequence.sequence] = sequence
        self._spawn(add())

    async def _take_images(self, sequence: EngineSequence) -> str:
        assert self._llm is not None, "start() first"
        try:
            made = await image_input(self._llm.renderer, sequence)
        except Exception as error:  # noqa: BLE001 - processors raise anything; it refuses this sequence
            return _sentence(error)
        if self._on_trial.get(sequence.sequence) is sequence:
            self._images[sequence.sequence] = made
        return ""

    def _still_on_trial(self, sequence: EngineSequence) -> bool:
        """Ends its trial; False where it was cancelled, or replaced, meanwhile."""
        if self._on_trial.get(sequence.sequence) is not sequence:
            return False
        del self._on_trial[sequence.sequence]
        return True

    def load_adapter(self, name: str, path: str) -> None:
        self._spawn(self._load(name, path))

    async def _load(self, name: str, path: str, fingerprint: str = "") -> str:
        """Loads an adapter and tells so; returns why not, or nothing."""
        try:
            self._say(AdapterLoaded(adapter=await self._adapters.load(self._core(), name, path, fingerprint)))
        except AdapterRefused as error:
            self._say(AdapterNotLoaded(name=name, path=path, detail=str(error), missing=error.missing))
            return str(error)
        return ""

    async def _add_after_trial(self, sequence: EngineSequence, constraint: StructuredOutput) -> None:
        verdict = await self._grammars.check(constraint)
        if self._still_on_trial(sequence):
            self._judged(sequence, verdict)

    def _judged(self, sequence: EngineSequence, verdict: TrialVerdict) -> None:
        if verdict.refusal:
            self._reject(sequence, verdict.refusal)
        else:
            self._add(sequence, backend=verdict.backend)

    def _add(self, sequence: EngineSequence, *, backend: str = "") -> None:
        """``backend``: of vLLM's, which took its constraint on trial; empty where that is to be verified."""
        try:
            request = self._request(sequence, backend)
        except (VLLMClientError, ValueError, TypeError, OverflowError) as error:
            self._reject(sequence, _sentence(error))
            return
        active = _Active(sequence.sequence, sequence.sampling.logprobs, told=sequence.handover is None)
        active.pieces_told = len(sequence.output_token_ids)
        self._active[request.request_id] = active
        self._identities[sequence.sequence] = request.request_id
        if self._endpoint is None:
            self._standing.follow(sequence)
        if active.told:
            self._answer(SequenceAdded(sequence=sequence.sequence))
            self._spawn(self._core().add_request_async(request))
        else:
            self._spawn(self._receive(request))

    def _reject(self, sequence: EngineSequence, detail: str) -> None:
        self._images.pop(sequence.sequence, None)
        self._answer(SequenceRejected(sequence=sequence.sequence, detail=detail))
        if sequence.handover is not None:
            self.move(UnreserveInEngine(migration=sequence.handover.migration))

    async def _receive(self, request: EngineCoreRequest) -> None:
        """Adds a sequence that comes with its KV, and tells so when the rest of that was read."""
        core = self._core()
        await core.add_request_async(request)
        kv_tokens = await core.call_utility_async("millrace_received", request.request_id)
        if active := self._active.get(request.request_id):
            self._tell_added(active, kv_tokens)

    def _tell_added(self, active: _Active, kv_tokens: int = 0) -> None:
        if not active.told:
            active.told = True
            self._say(SequenceAdded(sequence=active.sequence, kv_tokens=kv_tokens))

    def _request(self, sequence: EngineSequence, backend: str) -> EngineCoreRequest:
        assert self._llm is not None, "start() first"
        self._serial += 1
        constraint, adapter = sequence.sampling.structured, sequence.sampling.adapter
        structured = structured_params(constraint) if constraint is not None else None
        if sequence.sampling.pooling is not None:
            return self._pooling_request(sequence)
        tokens = tokens_input(
            [*sequence.prompt_token_ids, *sequence.output_token_ids], cache_salt=sequence.sampling.cache_salt or None
        )
        images = self._images.pop(sequence.sequence, None)
        request = self._llm.input_processor.process_inputs(
            names.request_id(sequence.sequence, self._serial),
            tokens if images is None else {**tokens, **images, "prompt_token_ids": tokens["prompt_token_ids"]},
            sampling_params(sequence, unix_ns(), structured=None if backend else structured),
            supported_tasks=self._supported,
            lora_request=self._adapters.get(adapter) if adapter is not None else None,
            arrival_time=(sequence.arrival_ns or time.time_ns()) / 1e9,
        )
        if structured is not None and backend:  # verified on trial; here it would hold up the loop
            structured._backend = backend
            request.sampling_params.structured_outputs = structured
        request.reasoning_ended = True
        if constraint is not None and constraint.after_reasoning:
            request.reasoning_ended = False
            request.reasoning_parser_kwargs = {"chat_template_kwargs": json.loads(constraint.after_reasoning)}
        return request

    def _pooling_request(self, sequence: EngineSequence) -> EngineCoreRequest:
        """All is computed again, whatever pieces of it were told in earlier epochs."""
        assert self._llm is not None, "start() first"
        request: EngineCoreRequest = self._llm.input_processor.process_inputs(
            names.request_id(sequence.sequence, self._serial),
            tokens_input(sequence.prompt_token_ids, cache_salt=sequence.sampling.cache_salt or None),
            pooling_params(sequence, self._llm.vllm_config.model_config),
            supported_tasks=self._supported,
            arrival_time=(sequence.arrival_ns or time.time_ns()) / 1e9,
        )
        return request

    def cancel(self, sequences: list[str]) -> None:
        """Aborts sequences; nothing more is heard of them, and their blocks are free in the next snapshot."""
        for name in sequences:
            self._on_trial.pop(name, None)
            self._images.pop(name, None)
            self._standing.forget(name)
        identities = [identity for name in sequences if (identity := self._identities.pop(name, None))]
        for identity in identities:
            del self._active[identity]
        if identities:
            self._spawn(self._core().abort_requests_async(identities))

    def limit_step(self, tokens: int) -> None:
        self._spawn(self._core().call_utility_async("millrace_limit_step", tokens))

    def move(self, command: KvCommand, *, match_prefix: bool = True) -> None:
        """Carries it out between two steps; the answer comes after every output of the steps before.

        Without ``match_prefix`` a reservation leaves the prefix cache alone (self-test).
        """
        if self._endpoint is None:
            self._stand(command)
            return
        call = kv_words.KvCall(command=command)
        match command:
            case LeaseInEngine():
                identity = self._leased.setdefault(command.migration, self._identities.get(command.sequence, ""))
                call = kv_words.KvCall(command=command, request_id=identity)
            case EndLeaseInEngine():
                self._let_go(command)
            case ReserveInEngine():
                choice = choose(self._endpoint, command.endpoint, forced=self._config.migration.copiers)
                refusal = kv_endpoint.incompatible(self._endpoint, command.endpoint)
                refusal = refusal or ("" if choice.kinds else choice.text)
                lora = self._adapters.get(command.adapter) if command.adapter is not None else None
                if not refusal and (adapter := command.adapter) is not None and lora is None:
                    self._spawn(self._load(adapter.name, adapter.path, adapter.fingerprint))  # for the next one
                    refusal = f"the adapter {adapter.name} is not loaded here"
                if refusal:
                    self._answer(denied(command, KvRefusal.INCOMPATIBLE, refusal))
                    return
                call = kv_words.KvCall(command=command, copiers=choice.kinds, match_prefix=match_prefix, lora=lora)
        self._spawn(self._move(call))

    def _stand(self, command: KvCommand) -> None:
        """The same where no KV moves: all that can be had is a sequence that stands still."""
        if isinstance(command, EndLeaseInEngine):
            sequence, withheld = self._standing.end(command)
            if command.moved:
                self.cancel([sequence])
            for output in withheld:
                self._say(EngineStepped(step=self._step, at_ns=unix_ns(), outputs=[output]))
        elif not isinstance(command, UnreserveInEngine):
            self._answer(self._standing.ask(command, unix_ns()))

    def _let_go(self, command: EndLeaseInEngine) -> None:
        """A sequence that moved away says nothing more."""
        active = self._active.pop(self._leased.get(command.migration, ""), None) if command.moved else None
        if active is not None and self._identities.get(active.sequence) == self._leased[command.migration]:
            del self._identities[active.sequence]
        self._leased.pop(command.migration, None)

    async def _move(self, call: kv_words.KvCall) -> None:
        core = self._core()
        answer = await core.call_utility_async("millrace_move", kv_words.encode(call))
        while not core.outputs_queue.empty():  # noqa: ASYNC110 - it is emptied by a task that always runs
            await asyncio.sleep(0)  # outputs of earlier steps are told first
        if not answer:
            return
        said = kv_words.decode_answer(answer)
        if isinstance(said, KvDenied) and isinstance(call.command, LeaseInEngine):
            self._leased.pop(said.migration, None)
        self._say(said)

    def _answer(self, event: EngineEvent) -> None:
        asyncio.get_running_loop().call_soon(self._say, event)

    def _say(self, event: EngineEvent) -> None:
        """Tells it, unless EngineFailed was the last word or the engine was stopped."""
        if not (self._failure or self._stopping):
            self._listener(event)

    # --- out

    async def _read_outputs(self) -> None:
        core = self._core()
        while True:
            outputs = await core.get_output_async()
            self._tell(outputs)

    def _tell(self, outputs: EngineCoreOutputs) -> None:
        taken = [told for output in outputs.outputs if (told := self._take(output)) is not None]
        step = outputs.scheduler_stats.step_counter if outputs.scheduler_stats else self._step
        snapshot = self._new_snapshot()
        if taken or step > self._step:
            self._step = max(step, self._step)
            self._say(EngineStepped(step=step, at_ns=unix_ns(), outputs=taken, snapshot=snapshot))
        elif snapshot is not None:
            self._say(EngineObserved(snapshot=snapshot))

    def _take(self, output: EngineCoreOutput) -> StepOutput | None:
        active = self._active.get(output.request_id)
        if active is None:
            return None  # cancelled while this was under way
        # Where the first output comes before the utility's answer.
        self._tell_added(active, output.prefill_stats.num_external_cached_tokens if output.prefill_stats else 0)
        scheduled_ns = self._take_events(active, output)
        finish = FINISH[output.finish_reason] if output.finish_reason is not None else None
        if finish is not None:
            del self._active[output.request_id]
            self._identities.pop(active.sequence, None)
        lists = output.new_logprobs
        pooled = pieces(output.pooling_output)[active.pieces_told :] if output.pooling_output is not None else None
        told = StepOutput(
            sequence=active.sequence,
            token_ids=output.new_token_ids if pooled is None else [active.pieces_told + i for i in range(len(pooled))],
            pooled=pooled,
            finish=finish,
            logprobs=token_logprobs(lists, active.logprobs)
            if lists is not None and active.logprobs is not None
            else None,
            scheduled_ns=scheduled_ns,
            cached_tokens=output.prefill_stats.num_cached_tokens if output.prefill_stats else None,
            preemptions=active.preemptions,
            prompt_logprobs=prompt_logprobs(output.new_prompt_logprobs_tensors)
            if output.new_prompt_logprobs_tensors is not None
            else None,
        )
        return self._standing.take(told)

    def _take_events(self, active: _Active, output: EngineCoreOutput) -> int:
        """Counts preemptions; returns when the sequence was first scheduled, unix ns, or 0."""
        scheduled_ns = 0
        for event in output.events or ():
            if event.type == EngineCoreEventType.PREEMPTED:
                active.preemptions += 1
            elif event.type == EngineCoreEventType.SCHEDULED and not scheduled_ns:
                # Both processes read the same monotonic clock.
                scheduled_ns = unix_ns() - int((time.monotonic() - event.timestamp) * 1e9)
        return scheduled_ns

    def _new_snapshot(self) -> EngineSnapshot | None:
        payload = self._snapshots.read_new()
        return decode_snapshot(payload) if payload is not None else None

    async def _poll(self) -> None:
        """Finds what comes without outputs: the snapshot of an abort in an idle engine, and signs of a hang."""
        judge, pid = LivenessJudge(), self._core().resources.engine_manager.processes[0].pid
        while True:
            await asyncio.sleep(IDLE_POLL_S)
            signs, cpu_ns = self._snapshots.signs(), cpu_time_ns(pid)
            if (liveness := judge.judge(signs, time.monotonic_ns(), unix_ns(), cpu_ns)) is not None:
                self._say(liveness)
            if not self._active and (snapshot := self._new_snapshot()) is not None:
                self._say(EngineObserved(snapshot=snapshot))

    # --- the end

    def _core(self) -> Any:
        assert self._llm is not None, "start() first"
        return self._llm.engine_core

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Tells once that the engine is gone. An unexpected error of ours ends it as well: it is a bug."""
        if self._stopping or self._failure:
            return
        self._active.clear()
        self._identities.clear()
        process = self._core().resources.engine_manager.processes[0]
        self._failure = crash_text(error, process)
        self._listener(EngineFailed(detail=self._failure))

    async def stop(self) -> None:
        """Ends the engine and its process. Idempotent."""
        if self._stopping or self._llm is None:
            return
        self._stopping = True
        for task in list(self._tasks):
            task.cancel()
        llm = self._llm
        self._grammars.stop()
        await asyncio.to_thread(llm.shutdown, STOP_TIMEOUT_S)
        self._snapshots.close()
        self._remove_sockets()

    def _remove_sockets(self) -> None:
        """Removes those that the engine was not given the time to remove."""
        for rank in self._endpoint.ranks if self._endpoint is not None else ():
            if rank.socket:
                Path(rank.socket).unlink(missing_ok=True)


def _sentence(error: BaseException) -> str:
    """VLLM's first sentence, or the kind of error where it says nothing."""
    return str(error).strip() or type(error).__name__

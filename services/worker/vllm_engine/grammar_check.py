"""Constraints compiled on trial, before an engine gets them: in a process that can be given up.

vLLM parses a constraint on the worker's event loop and compiles it in a thread of the engine. Neither can be ended, and
the loop stands still meanwhile: a pattern of twenty characters held all streams of a worker for 13 s. So the first
request with a constraint waits for a trial of both in a process of its own, under bounds of processor time, time and
memory. The verdict is remembered, the worker does not parse again, and the engine compiles only what is short.

    worker  --constraint-->  trial server  ------>  trials: vLLM's validation and compiler, one constraint at a time
            <--verdict------                <-----

The server is forked before the engine, while the worker has one thread, and forks the process of trials: anew after a
constraint that passed a bound. A compiler that crashes, or that leaves something of the constraint out with a warning,
refuses it.
"""

from __future__ import annotations

import asyncio
import os
import re
import resource
import signal
import time
from collections import OrderedDict
from hashlib import blake2b
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import msgspec
from millrace.actor.child_process import die_with_parent
from millrace.contracts.worker import StructuredOutput
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend
from vllm.v1.structured_output.request import StructuredOutputRequest

from services.worker.vllm_engine.hangs import cpu_time_ns
from services.worker.vllm_engine.process import yield_to_services
from services.worker.vllm_engine.sampling import structured_params

#: Processor time of a trial. The engine compiles for as long beside its steps. Schemas take 5 to 100 ms; with 150,000
#: tokens in the vocabulary and bounded strings (each length has a mask of its own), 1.7 s.
CPU_S = 2.0
#: Time of a trial on a busy machine; ingress waits longer for the answer to a constraint (``dispatch/submission.py``).
WALL_S = 4.0
#: A trial that neither computes nor waits for a core for so long is made once more: it may have been forked at a bad
#: moment. If its compiler waits for something, the second trial stands still, too, and refuses the constraint.
STILL_S = 1.0
#: Memory that a trial may take beyond its parent's.
MEMORY_BYTES = 512 << 20
#: Constraints that one process tries before a fresh one goes on: its compiler keeps what it has compiled.
TRIALS_MAX = 200
#: Verdicts that are remembered.
VERDICTS_MAX = 1024
#: The server prepares its compiler after so long without a question: not beside the engine's start.
_PREPARE_AFTER_S = 3.0
_DETAIL_MAX = 1_000
_LOOK_S = 0.1
_WARNING = re.compile(r"Warning: (.*)")
#: Warnings of what ingress has judged: anchors that change nothing, alternatives that are told apart.
_HARMLESS = re.compile(r"Anchor|'[\^$]' should be|oneOf")


class TrialVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a trial.

    Attributes:
        refusal: As a sentence; empty where the constraint is taken.
        backend: The one of vLLM's that takes it.
        lasting: Another trial would end alike.
    """

    refusal: str = ""
    backend: str = ""
    lasting: bool = True


_decode_verdict = msgspec.msgpack.Decoder(TrialVerdict).decode
_decode_constraint = msgspec.msgpack.Decoder(StructuredOutput).decode
_encode = msgspec.msgpack.Encoder().encode


class GrammarCheck:
    """The worker's side. Build it while the process has one thread."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        context = get_context("fork")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, self._pipe, vllm_config), daemon=True)
        self._process.start()
        theirs.close()
        self._one = asyncio.Lock()
        self._verdicts: OrderedDict[bytes, TrialVerdict] = OrderedDict()

    def known(self, constraint: StructuredOutput) -> TrialVerdict | None:
        """The remembered verdict on a constraint."""
        return self._verdicts.get(_key(_encode(constraint)))

    async def check(self, constraint: StructuredOutput) -> TrialVerdict:
        """The verdict on a constraint, from a trial if none is remembered."""
        async with self._one:
            if (known := self.known(constraint)) is not None:
                return known
            question = _encode(constraint)
            try:
                verdict = _decode_verdict(await asyncio.to_thread(self._ask, question))
            except (EOFError, OSError):
                return TrialVerdict(refusal="The process that tries output constraints has ended.", lasting=False)
            if verdict.lasting:
                self._verdicts[_key(question)] = verdict
                if len(self._verdicts) > VERDICTS_MAX:
                    self._verdicts.popitem(last=False)
            return verdict

    def _ask(self, question: bytes) -> bytes:
        self._pipe.send_bytes(question)
        return self._pipe.recv_bytes()

    def stop(self) -> None:
        self._process.kill()
        self._process.join()


def _key(question: bytes) -> bytes:
    return blake2b(question, digest_size=16).digest()


def _serve(pipe: Connection, workers: Connection, vllm_config: VllmConfig) -> None:
    """The server: answers until the worker ends."""
    workers.close()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    die_with_parent()
    yield_to_services()
    pipe.poll(_PREPARE_AFTER_S)
    manager = _manager(vllm_config)
    trials = _Trials(manager)
    while True:
        try:
            question = pipe.recv_bytes()
        except EOFError:
            return
        trials, answer = _tried(trials, manager, question)
        pipe.send_bytes(answer)


def _tried(trials: _Trials, manager: StructuredOutputManager, question: bytes) -> tuple[_Trials, bytes]:
    """The answer, and the process for the next question."""
    answer = trials.ask(question, still_s=STILL_S)
    if answer is None:
        trials = _Trials(manager)
        answer = trials.ask(question, still_s=WALL_S)
    assert answer is not None, "nothing stands still for longer than the trial may take"
    return _Trials(manager) if trials.ended else trials, answer


def _manager(vllm_config: VllmConfig) -> StructuredOutputManager:
    """The manager of vLLM's engines, compiling in the calling thread."""
    manager = StructuredOutputManager(vllm_config)
    manager._use_async_grammar_compilation = False
    if vllm_config.structured_outputs_config.backend == "xgrammar":
        vocabulary = vllm_config.model_config.get_vocab_size()
        manager.backend = XgrammarBackend(vllm_config, tokenizer=manager.tokenizer, vocab_size=vocabulary)
    return manager


class _Trials:
    """The server's side of a process that tries one constraint after the other, until one passes its bounds."""

    def __init__(self, manager: StructuredOutputManager) -> None:
        self._pipe, theirs = get_context("fork").Pipe()
        self._left = TRIALS_MAX
        self.ended = False
        self._pid = os.fork()
        if self._pid == 0:
            try:
                _run_trials(theirs, manager)
            finally:
                os._exit(0)
        theirs.close()

    def ask(self, question: bytes, *, still_s: float) -> bytes | None:
        """The answer; None where the process stood still for ``still_s`` before the time was over."""
        self._left -= 1
        refusal, lasting = f"The output constraint took more than {WALL_S} s to compile.", False
        try:
            self._pipe.send_bytes(question)
            over_s = time.monotonic() + WALL_S
            if self._answers(over_s, still_s):
                answer = self._pipe.recv_bytes()
                if not self._left:
                    self._end()
                return answer
            self._end()
            if time.monotonic() < over_s:
                return None
        except (EOFError, OSError):
            status, lasting = self._end(), True
            refusal = "The output constraint crashes its compiler, or needs too much memory."
            if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF:
                refusal = f"The output constraint takes more than {CPU_S} s to compile."
        return _encode(TrialVerdict(refusal=refusal, lasting=lasting))

    def _answers(self, over_s: float, still_s: float) -> bool:
        """Whether there is an answer, or an end, before the process stands still for so long or the time is over."""
        moved_s = now_s = time.monotonic()
        while now_s < over_s and now_s - moved_s < still_s:
            if self._pipe.poll(min(_LOOK_S, over_s - now_s)):
                return True
            now_s = time.monotonic()
            if cpu_time_ns(self._pid) is not None:
                moved_s = now_s
        return False

    def _end(self) -> int:
        """Ends it, if it has not ended itself; returns its status."""
        self.ended = True
        self._pipe.close()
        os.kill(self._pid, signal.SIGKILL)
        return os.waitpid(self._pid, 0)[1]


def _run_trials(pipe: Connection, manager: StructuredOutputManager) -> None:
    """The process of trials: each under a bound of its own, with what its compiler says where that can be read."""
    die_with_parent()
    pages = int(Path("/proc/self/statm").read_text().split()[5])
    data = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (data, data))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.dup2(os.memfd_create("said"), 2)
    while True:
        constraint = _decode_constraint(pipe.recv_bytes())
        os.ftruncate(2, 0)
        os.lseek(2, 0, os.SEEK_SET)
        signal.setitimer(signal.ITIMER_PROF, CPU_S)
        verdict = _verdict(manager, constraint)
        signal.setitimer(signal.ITIMER_PROF, 0)
        pipe.send_bytes(_encode(verdict))


def _verdict(manager: StructuredOutputManager, constraint: StructuredOutput) -> TrialVerdict:
    config = manager.vllm_config
    try:
        params = SamplingParams(structured_outputs=structured_params(constraint))
        params._validate_structured_outputs(config.model_config, config.structured_outputs_config, manager.tokenizer)
        wanted = StructuredOutputRequest(params=params.structured_outputs)
        manager.grammar_init(
            SimpleNamespace(request_id="trial", sampling_params=params, structured_output_request=wanted)
        )
        if isinstance(wanted.grammar, Exception):
            raise wanted.grammar
        bitmask = manager.backend.allocate_token_bitmask(1)
        wanted.grammar.fill_bitmask(bitmask, 0)
        if not bitmask.any():
            return TrialVerdict(refusal="The output constraint allows no output.")
    except Exception as error:  # noqa: BLE001 - compilers raise anything; all of it refuses this constraint
        return TrialVerdict(refusal=str(error)[:_DETAIL_MAX] or type(error).__name__)
    said = os.pread(2, 1 << 16, 0).decode(errors="replace")
    left_out = [warning for warning in _WARNING.findall(said) if not _HARMLESS.search(warning)]
    if left_out:
        return TrialVerdict(
            refusal=f"The output constraint's compiler leaves out part of it: {left_out[0][:_DETAIL_MAX]}."
        )
    return TrialVerdict(backend=params.structured_outputs._backend)

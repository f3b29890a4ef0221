"""Hidden states of real vLLM: the right rows through chunks, preemption and continuation, the same tokens, the proof,
and estimates in snapshots.
"""

import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from millrace.actor.engine import EngineStepped
from millrace.contracts.status import SequenceStatus
from millrace.contracts.worker import Sampling
from millrace.lengths.head import FEATURES, HEAD_FILE, HeadInfo, RemainingHead, survival_table, write_head
from millrace.lengths.survival import Survival

from papers.ares.hidden_states.recorded import SequenceStates, read_states, states_header
from services.worker.config import MigrationConfig
from tests.engine.bench_engine import BenchEngine, config
from tests.testbed import tiny_llama

WIDTH = tiny_llama.WIDTH
READER = "services.worker.vllm_engine.reading.ReadingCPUWorker"
SCHEDULER = "papers.ares.hidden_states.recording.RecordingScheduler"
#: float16 keeps 11 bits; states have entries up to some 4.
TOLERANCE = 0.01
PROMPTS = [[(seed * 53 + at * 17) % 250 + 1 for at in range(length)] for seed, length in enumerate((6, 40, 9, 300, 21))]
SAMPLINGS = [
    Sampling(max_tokens=40, temperature=0.0, ignore_eos=True),
    Sampling(max_tokens=60, seed=5, ignore_eos=True),
    Sampling(max_tokens=33, seed=6, temperature=0.8, frequency_penalty=0.7, ignore_eos=True),
    Sampling(max_tokens=50, temperature=0.0, ignore_eos=True),
    Sampling(max_tokens=45, seed=8, logprobs=2, ignore_eos=True),
]
ASKED = list(zip(PROMPTS, SAMPLINGS, strict=True))
ESTIMATED = Sampling(max_tokens=60, temperature=0.0, ignore_eos=True)


def started(model: Path, *, states: dict[str, Any] | None = None, worker: str = READER, **fields: Any) -> BenchEngine:
    """An engine; ``states``: settings of what reads its states, and keeps them if they say so."""
    flags: dict[str, Any] = {"additional_config": {"remaining": states or {}}}
    if states and states.get("record"):
        flags |= {"worker_cls": worker, "scheduler_cls": SCHEDULER}
    return BenchEngine(config(model, migration=MigrationConfig(enabled=False), engine_args=flags, **fields))


def random_head(fingerprint: str) -> RemainingHead:
    rng = np.random.default_rng(1)
    layers = [
        (rng.normal(0, 0.1, (WIDTH + len(FEATURES), 8)).astype(np.float32), np.zeros(8, np.float32)),
        (rng.normal(0, 0.1, (8, 2)).astype(np.float32), np.zeros(2, np.float32)),
    ]
    survival = Survival()
    for length in rng.integers(1, 100, 200).tolist():
        survival.learn(length)
    info = HeadInfo(model="m", fingerprint=fingerprint, hidden_size=WIDTH)
    return RemainingHead(info, layers, survival_table(survival))


def state_of(model: Path, tokens: list[int]) -> np.ndarray:
    """Last-layer states after the final norm of every position, by transformers."""
    import torch
    from transformers import LlamaForCausalLM

    with torch.no_grad():
        found = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32).model(torch.tensor([tokens]))
    return np.asarray(found.last_hidden_state[0].numpy())


def assert_right(model: Path, recorded: SequenceStates, output: list[int]) -> None:
    """Each state is that of the position whose logits gave the next token."""
    expected = state_of(model, [*recorded.prompt, *output])
    for generated, state in zip(recorded.generated, recorded.matrix(), strict=True):
        position = len(recorded.prompt) + generated - 1
        assert np.abs(state - expected[position]).max() < TOLERANCE, f"after {generated} tokens"


def test_rows_are_right_after_a_preemption_and_in_a_continuation(model: Path, tmp_path: Path) -> None:
    record = tmp_path / "states"
    small = {"kv_blocks": 14, "kv_bytes": 0, "max_model_len": 256}
    with started(model, **small, states={"record": str(record), "every": 2}) as engine:
        sampling = Sampling(max_tokens=120, temperature=0.0, ignore_eos=True)
        names = [engine.add(PROMPTS[0], sampling), engine.add(PROMPTS[1], sampling), engine.add(PROMPTS[2], sampling)]
        names.append(engine.add(PROMPTS[4], sampling, [9, 8, 7, 6]))
        decoded = engine.finish(*names)
    assert sum(one.preemptions for one in decoded) > 0
    earlier = [[], [], [], [9, 8, 7, 6]]
    recorded = {tuple(one.prompt): one for one in read_states([record])}
    for prompt, before, one in zip([*PROMPTS[:3], PROMPTS[4]], earlier, decoded, strict=True):
        kept = recorded[tuple(prompt)]
        assert min(kept.generated) >= len(before)
        assert_right(model, kept, before + one.tokens)


def _entries(engine: BenchEngine, name: str) -> list[SequenceStatus]:
    snapshots = [event.snapshot for event in engine.events if isinstance(event, EngineStepped) and event.snapshot]
    return [entry for snapshot in snapshots for entry in snapshot.running if entry.sequence == name]


def test_states_and_estimates_are_those_of_their_requests_and_change_no_token(model: Path, tmp_path: Path) -> None:
    from services.worker.vllm_engine.kv_endpoint import weights

    head = random_head(weights(str(model), config(model)))
    path, record = tmp_path / HEAD_FILE, tmp_path / "states"
    write_head(path, head)
    with started(model) as engine:
        plain = [*engine.finish(*[engine.add(*pair) for pair in ASKED]), engine.run(PROMPTS[0], ESTIMATED)]
    with started(model, states={"head": str(path), "every": 4, "record": str(record)}) as engine:
        watched = engine.finish(*[engine.add(*pair) for pair in ASKED])
        name = engine.add(PROMPTS[0], ESTIMATED, expected_output_tokens=30)
        (estimated,) = engine.finish(name)
        entries = _entries(engine, name)
    for one, other in zip(plain, [*watched, estimated], strict=True):
        assert (one.tokens, one.logprobs, one.finish) == (other.tokens, other.logprobs, other.finish)
    assert states_header(record).hidden_size == WIDTH
    recorded = {(tuple(one.prompt), one.length): one for one in read_states([record])}
    for prompt, one in zip(PROMPTS, watched, strict=True):
        kept = recorded[tuple(prompt), len(one.tokens)]
        assert not kept.ended
        assert len(kept.generated) >= 8
        assert_right(model, kept, one.tokens)
    told = {entry.expected_at: entry for entry in entries if entry.expected_at is not None}
    assert len(told) > 5
    assert not np.any(np.diff(sorted(told)) % 4)  # a snapshot may be missed under load
    states = state_of(model, [*PROMPTS[0], *estimated.tokens])
    for at, entry in told.items():
        counts = np.array([at]), np.array([60 - at]), np.array([30])
        p50, p90 = head.estimate(states[None, len(PROMPTS[0]) + at - 1].astype(np.float32), *counts)[0].tolist()
        assert entry.expected_output_tokens == pytest.approx(at + p50, abs=1.1)
        assert entry.expected_p90 == pytest.approx(at + math.ceil(p90), abs=1.1)


def test_a_head_beside_its_model_is_read_and_that_of_another_one_refused(model: Path, tmp_path: Path) -> None:
    from services.worker.vllm_engine.kv_endpoint import weights

    folder = shutil.copytree(model, tmp_path / "model")
    for fingerprint in (weights(str(folder), config(folder)), "other"):
        write_head(folder / HEAD_FILE, random_head(fingerprint))
        with BenchEngine(config(folder, migration=MigrationConfig(enabled=False))) as engine:
            name = engine.add(PROMPTS[0], SAMPLINGS[0])
            assert len(engine.finish(name)[0].tokens) == 40
            assert ({entry.expected_at for entry in _entries(engine, name)} == {None}) == (fingerprint == "other")


def test_rows_in_a_wrong_order_are_found_and_nothing_is_kept(model: Path, tmp_path: Path) -> None:
    record = tmp_path / "states"
    with started(model, worker="tests.engine.swapped_rows.SwappingWorker", states={"record": str(record)}) as engine:
        decoded = engine.finish(*[engine.add(prompt, SAMPLINGS[0]) for prompt in PROMPTS[:3]])
        assert [len(one.tokens) for one in decoded] == [40, 40, 40]
    assert not record.exists()

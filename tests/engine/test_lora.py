"""LoRA adapters in real engines: text as plain vLLM's, moves, continuations, loads while it runs."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from millrace.actor.engine import AdapterLoaded, AdapterNotLoaded, KvDenied, KvLeaseTaken, KvRoomReserved
from millrace.contracts.kv import KvRefusal
from millrace.contracts.worker import Adapter, Sampling
from millrace.kvcopy.weights import adapter_fingerprint

from services.worker.config import MigrationConfig
from tests.engine.bench_engine import BenchEngine, config, reference
from tests.engine.moving import Pair, begin, prompt_of, recomputed, settled, there_and_back, until_tokens, whole
from tests.testbed import tiny_lora

NAMES = ("sql", "law", "art")


@pytest.fixture(scope="module")
def folder(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of adapters of the model."""
    made = tmp_path_factory.mktemp("lora")
    for seed, name in enumerate(NAMES):
        tiny_lora.build(made / name, seed=seed)
    return made


@pytest.fixture(scope="module")
def adapters(folder: Path) -> dict[str, Adapter]:
    paths = {name: folder / name for name in NAMES}
    return {n: Adapter(name=n, path=str(path), fingerprint=adapter_fingerprint(path)) for n, path in paths.items()}


@pytest.fixture(scope="module")
def engines(model: Path, adapters: dict[str, Adapter]) -> Iterator[Pair]:
    """One adapter at the start, and room for one in a batch."""
    fields: dict[str, Any] = {
        "adapters": {"sql": adapters["sql"].path},
        "engine_args": {"max_cpu_loras": 4},
        "migration": MigrationConfig(copy_bytes_per_step=64 << 10),
    }
    with BenchEngine(config(model, **fields)) as source, BenchEngine(config(model, **fields, seed=99), "t") as target:
        yield Pair(source, target)


def sampling(adapter: Adapter | None, tokens: int, **fields: Any) -> Sampling:
    return Sampling(max_tokens=tokens, ignore_eos=True, adapter=adapter, **{"temperature": 0.0, **fields})


def load(engine: BenchEngine, name: str, path: str) -> AdapterLoaded | AdapterNotLoaded:
    since = len(engine.events)

    async def ask() -> None:
        engine.engine.load_adapter(name, path)

    engine.loop.run_until_complete(ask())

    def answers() -> list[Any]:
        return [e for e in engine.events[since:] if isinstance(e, AdapterLoaded | AdapterNotLoaded)]

    engine.until(lambda: bool(answers()))
    return answers()[0]


async def test_of_many_contents_the_last_used_are_known(tmp_path: Path) -> None:
    from services.worker.vllm_engine.adapters import EngineAdapters

    class Core:
        def __init__(self) -> None:
            self.numbers: list[int] = []

        async def add_lora_async(self, request: Any) -> None:
            self.numbers.append(request.lora_int_id)

    known, core = EngineAdapters(known_max=2), Core()
    found = []
    for content in "abc":
        (tmp_path / "adapter_config.json").write_text(content)
        (tmp_path / "adapter_model.safetensors").write_text(content)
        found.append(await known.load(core, "sql", str(tmp_path)))
        assert known.get(found[0]) is not None or content == "c"
    assert [known.get(each) is not None for each in found] == [True, False, True]
    assert core.numbers == [1, 2, 3]


def test_text_is_plain_vllms_with_and_without_an_adapter(
    engines: Pair, model: Path, adapters: dict[str, Adapter]
) -> None:
    fields = {"max_tokens": 100, "temperature": 0.0, "ignore_eos": True}
    prompts = [prompt_of(length, salt=length) for length in (9, 100)]
    engine = engines.source
    assert engine.info.adapters == [adapters["sql"]]
    assert load(engine, "law", adapters["law"].path) == AdapterLoaded(adapter=adapters["law"])
    chosen = [None, adapters["sql"], adapters["law"]]
    names = [engine.add(prompt, sampling(adapter, 100)) for prompt in prompts for adapter in chosen]
    told = [decoded.tokens for decoded in engine.finish(*names)]
    calls = [(prompt, fields | ({"lora": adapter.path} if adapter else {})) for prompt in prompts for adapter in chosen]
    # On a CPU vLLM takes what is in the last of its places for a request without an adapter: here it stays empty.
    plain = reference(model, calls, enable_lora=True, max_loras=3, max_lora_rank=8)
    assert told == [tokens for tokens, _, _ in plain]
    assert len({tuple(tokens) for tokens in told}) == len(told), "adapters change what is said"


def test_a_sequence_goes_there_and_back_and_on_elsewhere_with_its_adapter(
    engines: Pair, adapters: dict[str, Adapter]
) -> None:
    how, prompt, at = sampling(adapters["sql"], 260, temperature=1.0, seed=61), prompt_of(70, salt=61), 60
    expected = engines.source.run(prompt, how).tokens
    since = len(engines.target.events)
    assert there_and_back(engines, prompt, how, at).tokens == expected
    assert not recomputed(engines.target, since), "nothing was computed again"
    assert engines.target.run(prompt, how, expected[:at]).tokens == expected[at:], "as after a kill"
    settled(engines)


def test_an_adapter_comes_with_a_sequence(engines: Pair, adapters: dict[str, Adapter]) -> None:
    prompt = prompt_of(40, salt=5)
    since = len(engines.target.events)
    expected = engines.source.run(prompt, sampling(adapters["law"], 40)).tokens
    assert engines.target.run(prompt, sampling(adapters["law"], 40)).tokens == expected
    assert AdapterLoaded(adapter=adapters["law"]) in engines.target.events[since:]
    wrong = msgspec.structs.replace(adapters["sql"], fingerprint="other")
    assert "other weights" in engines.source.rejection(engines.source.add(prompt, sampling(wrong, 4)))
    nowhere = Adapter(name="none", path="/nowhere", fingerprint="f")
    assert "No adapter found" in engines.source.rejection(engines.source.add(prompt, sampling(nowhere, 4)))


def test_what_cannot_be_loaded_is_said(engines: Pair, tmp_path: Path) -> None:
    missing = load(engines.source, "none", "/nowhere")
    assert isinstance(missing, AdapterNotLoaded)
    assert missing.missing
    large = load(engines.source, "large", str(tiny_lora.build(tmp_path, rank=64)))
    assert isinstance(large, AdapterNotLoaded)
    assert "rank" in large.detail


def test_a_move_waits_until_the_target_has_the_adapter(engines: Pair, adapters: dict[str, Adapter]) -> None:
    how = sampling(adapters["art"], 300)
    prompt = prompt_of(40, salt=9)
    journey = begin(engines, prompt, how, at=10)
    assert isinstance(journey.lease(), KvLeaseTaken)
    since = len(engines.target.events)
    refused = journey.reserve()
    assert (type(refused), refused.reason) == (KvDenied, KvRefusal.INCOMPATIBLE)
    assert "art is not loaded here" in refused.detail
    engines.target.until(lambda: AdapterLoaded(adapter=adapters["art"]) in engines.target.events[since:])
    assert isinstance(journey.reserve(), KvRoomReserved)
    journey.pull()
    journey.freeze()
    journey.commit()
    journey.end(moved=True)
    assert whole(journey).tokens == engines.source.run(prompt, how).tokens
    settled(engines)


def test_a_sequence_that_thaws_after_its_place_was_taken_goes_on(engines: Pair, adapters: dict[str, Adapter]) -> None:
    """A batch has room for one adapter: another one ran while this one stood still."""
    prompt, how = prompt_of(40, salt=11), sampling(adapters["sql"], 300)
    journey = begin(engines, prompt, how, at=10)
    journey.lease()
    journey.freeze()
    other = engines.source.add(prompt_of(40, salt=12), sampling(adapters["law"], 200))
    until_tokens(engines.source, other, 10)
    journey.end(moved=False)
    thawed, _ = engines.source.finish(journey.name, other)
    assert thawed.tokens == engines.target.run(prompt, how).tokens
    settled(engines)

"""Every implementation of the Engine port, started once: the last test of an engine (test_engine_end.py) kills it."""

import importlib.util
import json
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from millrace.actor.engine import Engine

from tests.contract.engine.harness import (
    EOS,
    VOCABULARY,
    Harness,
    LiveHarness,
    Pair,
    SimulatedHarness,
    live_pair,
    modelled_live,
    simulated_pair,
    vllm,
)
from tests.testbed import tiny_llama

NO_VLLM = importlib.util.find_spec("vllm") is None
IMPLEMENTATIONS = [
    "simulated",
    "modelled",
    pytest.param(
        "vllm", marks=[pytest.mark.engine, pytest.mark.skipif(NO_VLLM, reason="real vLLM is not installed here")]
    ),
]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama.build(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="session")
def tiny_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As much of a tokenizer as the modelled engine reads, with the ids that the suite counts on."""
    folder = tmp_path_factory.mktemp("tiny-tokenizer")
    ids = {letter: 65 + index for index, letter in enumerate("abcdefghijklmnopqrstuvwxyz")} | {"Ġ": 222}
    specials = [{"content": "<eos>", "id": EOS}, {"content": "<last>", "id": VOCABULARY - 1}]
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": ids}, "added_tokens": specials}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    return folder


@pytest.fixture(scope="package", params=IMPLEMENTATIONS)
def engine(request: pytest.FixtureRequest) -> Iterator[Harness]:
    build = _build(request)
    with closing(SimulatedHarness() if build is None else LiveHarness(build("contract"))) as ready:
        yield ready


@pytest.fixture(scope="module", params=IMPLEMENTATIONS)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    build = _build(request)
    with simulated_pair() if build is None else live_pair(build, compares=request.param == "vllm") as ready:
        yield ready


def _build(request: pytest.FixtureRequest) -> Callable[[str], Engine] | None:
    """Live engines by their name; None for the simulated ones."""
    match request.param:
        case "modelled":
            return lambda _: modelled_live(request.getfixturevalue("tiny_tokenizer"))
        case "vllm":
            return lambda name: vllm(request.getfixturevalue("tiny_model"), name)
    return None

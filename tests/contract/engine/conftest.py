"""Every implementation of the Engine port, started once: the last test of an engine (test_engine_end.py) kills it."""

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.contract.engine import harness
from tests.contract.engine.harness import Harness, Pair
from tests.testbed import tiny_llama

NO_VLLM = importlib.util.find_spec("vllm") is None
IMPLEMENTATIONS = [
    "simulated",
    "modelled",
    pytest.param(
        "vllm",
        marks=[
            pytest.mark.engine,
            pytest.mark.skipif(NO_VLLM, reason="real vLLM is not installed here"),
        ],
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
    specials = [{"content": "<eos>", "id": harness.EOS}, {"content": "<last>", "id": harness.VOCABULARY - 1}]
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": ids}, "added_tokens": specials}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    return folder


@pytest.fixture(scope="package", params=IMPLEMENTATIONS)
def engine(request: pytest.FixtureRequest) -> Iterator[Harness]:
    with _started(request, harness.simulated, harness.modelled, harness.vllm) as ready:
        yield ready


@pytest.fixture(scope="module", params=IMPLEMENTATIONS)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    with _started(request, harness.simulated_pair, harness.modelled_pair, harness.vllm_pair) as ready:
        yield ready


def _started(request: pytest.FixtureRequest, simulated: Any, modelled: Any, vllm: Any) -> Any:
    """The implementation that the parameter names, by the folder of its tokenizer or model."""
    match request.param:
        case "simulated":
            return simulated()
        case "modelled":
            return modelled(request.getfixturevalue("tiny_tokenizer"))
        case _:
            return vllm(request.getfixturevalue("tiny_model"))

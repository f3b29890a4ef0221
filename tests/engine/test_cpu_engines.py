"""Engines on a CPU: memory of products levels off, and a fork server looks for kernels once for all that it forks."""

import os
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from vllm.multimodal import audio
from vllm.platforms import current_platform

from services.worker.vllm_engine import compiling, preload
from tests.testbed.programs import output_of

pytestmark = pytest.mark.skipif(not current_platform.is_cpu(), reason="vLLM's build for the CPU only")


def test_memory_levels_off_with_prompts_of_many_lengths() -> None:
    taken = []
    for capacity in (os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"], "1024"):  # as engines have it, and oneDNN's own
        variables = os.environ | {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": capacity}
        status, said = output_of("tests.engine.matrix_products", [], environment=variables, limit_s=300)
        assert status == 0, said
        taken.append(int(said.split()[-1]))
    print("{} MB, with oneDNN's own bound {} MB".format(*taken))
    assert taken[0] < 0.7 * taken[1]


def test_forked_engines_do_not_look_for_kernels_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/engine/conftest.py has preloaded; what an engine calls at its start reads no module any more."""
    from vllm.triton_utils import HAS_TRITON, dispatcher

    read: list[str] = []

    class Watched(ModuleType):
        def __getattribute__(self, name: str) -> object:
            read.append(name)
            return super().__getattribute__(name)

    monkeypatch.setitem(sys.modules, "watched_module", Watched("watched_module"))
    current_platform.register_triton_kernel_overrides()
    assert not read
    assert HAS_TRITON or dispatcher._registry, "they are replaced already"


def test_what_hardly_a_model_calls_is_imported_when_it_is_called() -> None:
    preload.preload()  # once more, as the fork server of a cluster of these tests
    assert isinstance(audio.scipy_signal, preload._Later)
    assert audio.resample_audio_scipy(np.ones(8), orig_sr=2, target_sr=1).shape == (4,)


def test_an_instruction_set_that_loads_is_not_tried_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    answers = iter((False, True))
    monkeypatch.setattr(compiling, "_probe", lambda isa, path: next(answers))
    assert [compiling._probe_once(None, str(tmp_path / "isa.so")) for _ in range(3)] == [False, True, True]

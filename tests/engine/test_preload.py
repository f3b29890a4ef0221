"""Work that a fork server does once for all engines that it forks."""

import sys
from types import ModuleType

import pytest
from vllm.platforms import current_platform

pytestmark = pytest.mark.skipif(not current_platform.is_cpu(), reason="only a CPU engine replaces Triton's kernels")


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

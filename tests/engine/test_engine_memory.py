"""Memory of matrix products on a CPU: kernels for prompts of ever new lengths are given up again."""

import os

import pytest

from services.worker.vllm_engine import environment
from tests.testbed.programs import output_of

pytestmark = pytest.mark.skipif(not environment._cpu_only(), reason="vLLM's build for the CPU only")


def test_memory_levels_off_with_prompts_of_many_lengths() -> None:
    taken = []
    for capacity in (os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"], "1024"):  # as engines have it, and oneDNN's own
        variables = os.environ | {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": capacity}
        status, said = output_of("tests.engine.matrix_products", [], environment=variables, limit_s=300)
        assert status == 0, said
        taken.append(int(said.split()[-1]))
    print("{} MB, with oneDNN's own bound {} MB".format(*taken))
    assert taken[0] < 0.7 * taken[1]

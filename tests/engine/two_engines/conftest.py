"""One cluster of two real engines for all tests that stop or kill its processes; each leaves it whole."""

from collections.abc import Iterator

import pytest

from tests.testbed.tiny_llama import build
from tests.testbed.up_cluster import UpRig

OPTIONS = (
    # Whoever is killed shall have had work. A forecast may leave one engine idle at the rates of these tests.
    *("--policy", "round_robin", "--set", "telemetry.trace_sample=0"),
    # Prompts repeat: with a prefix cache the target of a migration would have most blocks already.
    *("--set", 'worker={"enable_prefix_caching": false}'),
    # Streams of the other tests are shorter than this.
    *("--kv-replicas", "--set", "kv_replicas.tokens_min=400"),
)


@pytest.fixture(scope="package")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpRig]:
    """In bfloat16, which vLLM's dtype auto makes of float32: streams here are short enough for another batch or a
    recompute to change none of their tokens (docs/MIGRATION.md).

    Engines are compiled, as a user's are; the model stays where it is from run to run, since vLLM's compile cache knows
    it by its path.
    """
    folder = tmp_path_factory.mktemp("up")
    model = build(tmp_path_factory.getbasetemp().parent / "millrace-two-engines")
    with UpRig(folder / "c", model_path=model, engine="vllm", instances=2, extra=OPTIONS) as cluster:
        yield cluster

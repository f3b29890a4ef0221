"""Real engines become another version of vLLM under load, one after the other, and go back; a wrong one does so alone.

Only with MILLRACE_VERSIONS=1 (`./task test:versions`), which installs that version on top of this environment.
"""

import asyncio
import os
from pathlib import Path

import pytest

from tests.clients.run import environment
from tests.live.faults import PROMPTS, expect_identical, expected_outcomes
from tests.testbed import tiny_llama
from tests.testbed.up_cluster import UpRig, offer_during

#: Nothing is compiled: another version would do so for minutes.
CLUSTER = """
[[models]]
name = "m"
path = "{model}"
groups = [{{ count = 2, processes = 2, python = "{python}" }}]

[settings.worker]
enforce_eager = true
enable_prefix_caching = false
canary = {{ prompt = "a", text = "{text}" }}

[policies.dispatch]
name = "round_robin"
"""
LENGTH = {"max_tokens": 200, "ignore_eos": True}
LIMIT_S = 1200.0
MOVED = ("millrace_ingress_migrations_total", 'outcome="moved"')


@pytest.mark.skipif(not os.environ.get("MILLRACE_VERSIONS"), reason="./task test:versions")
@pytest.mark.timeout(4 * LIMIT_S)
async def test_streams_go_on_from_one_version_to_the_other_and_back(tmp_path: Path) -> None:
    python = environment("earlier_vllm", on_top=True).absolute()
    model, file = tiny_llama.build(tmp_path / "model"), tmp_path / "cluster.toml"
    file.write_text(CLUSTER.format(model=model, python="", text=""))
    with UpRig.of_words(tmp_path / "c", ("--cluster", str(file)), "m") as rig:
        expected = await expected_outcomes(rig, **LENGTH)

        async def applied(how: str, *, python: Path | str = "", text: str = "") -> None:
            file.write_text(CLUSTER.format(model=model, python=python, text=text))
            said = await asyncio.to_thread(rig.cli, "apply", str(file), "--within", "60", limit_s=LIMIT_S)
            print(f"{said}{await rig.metric(*MOVED):.0f} moves", flush=True)
            assert how in said

        async def changed() -> None:
            await applied("the cluster is as the file says", python=python)
            for name in ("worker-0", "worker-1"):
                assert "'engine_version': '0.31.0'" in (rig.folder / "logs" / f"{name}.log").read_text()
            await applied("the cluster is as the file says")
            await applied("the cluster is as it was before", text="something that no engine says")

        results = await offer_during(rig, changed(), rate=0.2, prompts=PROMPTS, **LENGTH)
        print(f"{len(results)} streams, {sum(each.outcome != expected[number] for number, each in results)} differ")
        expect_identical(results, expected)

"""A model of the cluster judges a cascade's answers: the judge asks it through the API, also when it is killed."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders

from tests.live.cascading import ask, barrage, client_of
from tests.live.faults import kill, shown
from tests.live.ingress_rig import write_model_folder
from tests.testbed.timed_streams import client
from tests.testbed.up_cluster import UpRig, prompt_text

TIERS = ("small", "large")
JUDGE = "verdict"
CASCADE = "auto"
PROMPTS = [prompt_text(number) for number in range(8)]
LENGTH = {"max_tokens": 8}

CLUSTER = """
[cascade]
name = "auto"
tiers = ["small", "large"]
thresholds = [50]
judge = "llm"
parameters = { model = "verdict" }
"""
CLUSTER += "".join(
    f"""
[[models]]
name = "{name}"
path = "{name}"

[[models.groups]]
name = "{name}"
engine = "modelled"
count = 1
"""
    for name in (*TIERS, JUDGE)
)


def _write_judge(folder: Path) -> None:
    """A model whose letters e and t read as yes and no."""
    write_model_folder(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    words = [decoders.Replace("e", "yes"), decoders.Replace("t", "no"), decoders.ByteLevel()]
    tokenizer.decoder = decoders.Sequence(words)
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpRig]:
    folder = tmp_path_factory.mktemp("judging")
    for name in TIERS:
        write_model_folder(folder / name)
    _write_judge(folder / JUDGE)
    (folder / "cluster.toml").write_text(CLUSTER)
    with UpRig.of_words(folder / "cluster", ["--cluster", str(folder / "cluster.toml")], model=CASCADE) as cluster:
        yield cluster


def _judgements(metrics: str) -> dict[str, float]:
    """Counts by result."""
    lines = [line for line in metrics.splitlines() if line.startswith("millrace_ingress_judgements_total{")]
    return {line.split('result="')[1].split('"')[0]: float(line.rsplit(" ", 1)[1]) for line in lines}


async def test_verdicts_decide(rig: UpRig) -> None:
    async with client_of(rig) as api:
        answers = [
            await ask(api, CASCADE, prompt, stream=index % 2 == 1, **LENGTH) for index, prompt in enumerate(PROMPTS)
        ]
    for answer in answers:
        answer.check(TIERS)
    scores = {answer.cascade["attempts"][0]["score"] for answer in answers}
    assert len(scores) > 1, "every verdict is the same"
    assert Counter(answer.cascade["reason"] for answer in answers)["score"] > 0
    async with client() as http:
        counts = _judgements((await http.get(f"{rig.url}/metrics")).text)
    assert counts["answered"] >= len(PROMPTS) / 2, counts


async def test_explain_names_the_judge(rig: UpRig) -> None:
    async with client_of(rig) as client:
        raw = await client.chat.completions.with_raw_response.create(
            model=CASCADE, messages=[{"role": "user", "content": PROMPTS[1]}], max_tokens=8
        )
    await shown(rig, "explain", raw.parse().id, "llm")


async def test_a_judging_model_that_dies_costs_no_request(rig: UpRig) -> None:
    faults: dict[int, Any] = {10: lambda: kill(rig.pids(f"{JUDGE}-0.json")[0])}
    answers = await barrage(rig, CASCADE, PROMPTS, count=60, rate=10.0, faults=faults, **LENGTH)
    for answer in answers:
        answer.check(TIERS)
    await rig.well(3)

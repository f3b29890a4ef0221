"""Findings of `millrace doctor` from a machine's facts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from millrace.cli import machine_probes
from millrace.cli.__main__ import main
from millrace.cli.machine_probes import GpuFact, MachineFacts, gpus_of
from millrace.cli.machine_report import GIB, Level, findings, outlook
from millrace.hosting import control_groups
from millrace.hosting.control_groups import MEMORY_GROUPS, group_memory


def test_a_model_s_parsers_are_told_with_what_called_for_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    (tmp_path / "chat_template.jinja").write_text("{{ tools }}<think><tool_call>")
    assert main(["doctor", str(tmp_path)]) == 0
    assert capsys.readouterr().out == (
        "reasoning parser   qwen3 (model_type qwen3 and <think> in its chat template)\n"
        "tool call parser   hermes (<tool_call> in its chat template)\n"
    )
    assert main(["doctor", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["reasoning"] == "qwen3"


LAPTOP = MachineFacts(
    python="3.11.7",
    cores=2,
    memory_bytes=16 * GIB,
    disk_free_bytes=50 * GIB,
    shm_bytes=8 * GIB,
    vllm="0.32.0",
    vllm_build="cpu",
    nats_server="v2.15.1",
    native=["enginemodel", "kvcache", "kvcopy"],
    nixl="1.5.1",
    nixl_backends=["UCX"],
)
NODE = msgspec.structs.replace(
    LAPTOP,
    cores=128,
    vllm_build="cuda",
    gpus=[GpuFact(index=index, name="H100", memory_mib=81_559) for index in range(8)],
    gpu_links=["GPU0\t X \tNV18"],
    driver="580.1",
    native=["kvcopy"],
    container=True,
    ipc_namespace="ipc:[1]",
    memlock_bytes=8 * 1024**2,
)

#: A container of the image that has no vLLM.
SERVICE = msgspec.structs.replace(
    LAPTOP, container=True, vllm="", vllm_build="", nixl="", nixl_backends=[], memory_bytes=GIB // 2
)


def with_(facts: MachineFacts, **changes: Any) -> MachineFacts:
    return msgspec.structs.replace(facts, **changes)


@pytest.mark.parametrize(
    ("facts", "engine", "engines", "copiers"),
    [
        (LAPTOP, "vllm on CPU", 2, ["shared_memory"]),
        (with_(LAPTOP, cores=64), "vllm on CPU", 4, ["shared_memory"]),
        (with_(LAPTOP, memory_bytes=2 * GIB), "vllm on CPU", 1, ["shared_memory"]),
        (with_(LAPTOP, vllm="", vllm_build=""), "modelled", 8, ["modelled"]),
        (NODE, "vllm on GPU", 8, ["nixl"]),
        (with_(NODE, nixl=""), "vllm on GPU", 8, []),
        (with_(NODE, vllm_build="cpu"), "vllm on CPU", 4, ["shared_memory"]),
        (with_(LAPTOP, container=True), "vllm on CPU", 2, ["shared_memory"]),
        (with_(SERVICE, repository=True), "modelled", 8, ["modelled"]),
        (SERVICE, "none", 0, []),
    ],
)
def test_the_outlook_follows_from_the_facts(facts: MachineFacts, engine: str, engines: int, copiers: list[str]) -> None:
    ahead = outlook(facts)
    assert (ahead.engine, ahead.engines, ahead.copiers) == (engine, engines, copiers)


@pytest.mark.parametrize(
    ("facts", "subject", "expected"),
    [
        (with_(LAPTOP, nats_server=""), "nats-server", Level.MISSING),
        (with_(LAPTOP, disk_free_bytes=GIB // 2), "disk", Level.MISSING),
        (with_(LAPTOP, memory_bytes=GIB), "memory", Level.MISSING),
        (with_(LAPTOP, oom_kills=1), "memory limit", Level.NOTE),
        (with_(LAPTOP, clock_step_s=-3600.0), "clock", Level.NOTE),
        (with_(LAPTOP, vllm="", vllm_build=""), "vLLM", Level.NOTE),
        (with_(NODE, vllm_build="cpu"), "vLLM", Level.NOTE),
        (with_(LAPTOP, vllm_build="cuda"), "vLLM", Level.NOTE),
        (with_(NODE, vllm="0.34.0"), "vLLM", Level.NOTE),
        (with_(LAPTOP, native=[]), "compiled modules", Level.MISSING),
        (with_(LAPTOP, nixl=""), "NIXL", Level.NOTE),
        (NODE, "locked memory", Level.NOTE),
        (with_(NODE, memlock_bytes=-1), "locked memory", Level.OK),
        (with_(LAPTOP, memlock_bytes=8 * 1024**2), "locked memory", Level.OK),
        (with_(LAPTOP, shm_bytes=0), "/dev/shm", Level.NOTE),
        (SERVICE, "vLLM", Level.OK),
        (SERVICE, "NIXL", Level.OK),
        (SERVICE, "memory", Level.OK),
        (with_(SERVICE, memory_bytes=GIB // 8), "memory", Level.MISSING),
    ],
)
def test_what_is_missing_or_could_be_better_is_found(facts: MachineFacts, subject: str, expected: Level) -> None:
    assert [finding.level for finding in findings(facts) if finding.subject == subject] == [expected]


@pytest.mark.parametrize(
    ("version", "text"),
    [
        ("0.32.0", "0.32.0 for GPUs; all of Millrace runs with it"),
        ("0.33.1", "0.33.1 for GPUs; its source has all that Millrace uses; nothing was run with it"),
        ("0.3.2", "0.3.2 for GPUs; known are 0.32 and 0.33, `./task check:vllm 0.3.2` tells what is missing"),
    ],
)
def test_a_vllm_is_named_with_what_works_with_it(version: str, text: str) -> None:
    assert text in [finding.text for finding in findings(with_(NODE, vllm=version))]


def test_ports_in_use_are_named_with_what_to_do() -> None:
    (found,) = (each for each in findings(with_(LAPTOP, ports_taken=[8000, 4222])) if each.subject == "ports")
    assert found.level is Level.NOTE
    assert found.text == (
        "8000 (API) is in use: `millrace up --port N` takes another; "
        "4222 in use: `millrace up` takes free ones by itself"
    )


def test_a_plain_laptop_and_a_gpu_node_lack_nothing_that_is_needed() -> None:
    for facts in (LAPTOP, NODE):
        assert Level.MISSING not in [finding.level for finding in findings(facts)]
    links = [finding.text for finding in findings(NODE) if finding.subject == "links"]
    assert links == ["GPU0 X NV18"]


@pytest.mark.parametrize(
    ("told", "files", "expected"),
    [
        (
            "0::/a/b",
            {"a/b/memory.max": "max", "a/memory.max": "7", "a/b/memory.events": "oom 3\noom_kill 2"},
            (7, 0, 2),
        ),
        ("0::/", {"memory.max": "7", "memory.current": "5", "memory.stat": "anon 1\ninactive_file 2"}, (7, 3, 0)),
        ("4:memory:/a\n0::/", {"memory/a/memory.limit_in_bytes": "7", "memory/a/memory.oom_control": ""}, (7, 0, 0)),
        ("4:cpu:/a", {}, (None, 0, 0)),
    ],
)
def test_outer_groups_limit_too_and_kills_are_counted(
    told: str, files: dict[str, str], expected: tuple[object, int, int], tmp_path: Path, monkeypatch: Any
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    moved = {
        key: (root.replace("/sys/fs/cgroup", str(tmp_path)), *names) for key, (root, *names) in MEMORY_GROUPS.items()
    }
    monkeypatch.setattr(control_groups, "MEMORY_GROUPS", moved)
    assert group_memory(told) == expected


def test_nvidia_smi_s_lines_are_read_and_its_complaints_are_not() -> None:
    text = "0, NVIDIA H100 80GB HBM3, 81559, 580.95.05\n1, NVIDIA H100 80GB HBM3, 81559, 580.95.05"
    gpus, driver = gpus_of(text)
    assert ([gpu.index for gpu in gpus], gpus[0].memory_mib, driver) == ([0, 1], 81559, "580.95.05")
    assert gpus_of("NVIDIA-SMI has failed, because it could not, communicate, with the driver") == ([], "")
    assert gpus_of("") == ([], "")


@pytest.mark.parametrize(
    ("facts", "code", "ahead"),
    [
        (LAPTOP, 0, "Millrace will run 2 engine(s), vllm on CPU"),
        (with_(LAPTOP, nats_server=""), 1, "Millrace will run 2 engine(s), vllm on CPU"),
        (SERVICE, 0, "No engine runs here"),
    ],
)
def test_the_exit_code_is_1_only_where_something_needed_is_missing(
    facts: MachineFacts, code: int, ahead: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def look(folder: Path, ports: tuple[int, ...]) -> MachineFacts:
        assert (folder, ports[0]) == (Path("x"), 8000)
        return facts

    monkeypatch.setattr(machine_probes, "look", look)
    assert main(["doctor", "--dir", "x"]) == code
    text = capsys.readouterr().out
    assert ahead in text
    assert facts is not SERVICE or "./task" not in text, "a service's container is not told to start engines"
    assert main(["doctor", "--dir", "x", "--json"]) == code
    report = json.loads(capsys.readouterr().out)
    assert report["outlook"]["copiers"] == outlook(facts).copiers
    assert report["facts"]["cores"] == 2

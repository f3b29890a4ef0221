"""Codex and Claude Code, as npm has them, against the HTTP side: a turn with a tool's call, its result, and the answer.

What the model says is scripted: the shipped models are too small for these programs' prompts.
"""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from services.ingress.calls.messages import Call
from tests.live.ingress_rig import Rig, served

#: Where `./task test:clients` installs them.
PROGRAMS = Path(__file__).resolve().parents[2] / ".millrace" / "npm" / "node_modules" / ".bin"
LENGTH = 1 << 18
LIMIT_S = 120


def program(name: str) -> Path:
    found = PROGRAMS / name
    if not found.exists():
        pytest.skip(f"{found} is not there: `./task test:clients` installs it where there is npm")
    return found


def scripted(rig: Rig, tool: str, arguments: dict[str, Any]) -> None:
    """Make the core call a tool once, and answer when it is told the result. Each is one token."""
    call = "<tool_call>\n" + json.dumps({"name": tool, "arguments": arguments}) + "\n</tool_call>"

    def words(of: Call, i: int) -> str:
        text = rig.models.get("tools").tokenizer.decode(of.prompts[0])
        return "It is 18 degrees." if "<|tool|>" in text else call

    rig.core.words, rig.core.finish, rig.core.tokens_max = words, "stop", 1


def told_results(rig: Rig) -> list[str]:
    """Results of tools in the prompts that the core got."""
    texts = [rig.models.get("tools").tokenizer.decode(call.prompts[0]) for call in rig.core.calls]
    return [text.partition("<|tool|>")[2].partition("<|end|>")[0] for text in texts if "<|tool|>" in text]


async def output_of(command: list[str | Path], folder: Path, **variables: str) -> str:
    home = folder / "home"
    home.mkdir()
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=home,
        env={"PATH": os.environ["PATH"], "HOME": str(home)} | variables,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await asyncio.wait_for(process.communicate(), LIMIT_S)
    assert process.returncode == 0, output.decode()
    return output.decode()


async def test_codex_runs_a_command_and_tells_its_result(tmp_path: Path):
    codex = program("codex")
    async with served(tmp_path, max_model_len=LENGTH) as rig:
        scripted(rig, "exec_command", {"cmd": "echo from-$((6 * 7))"})
        settings = tmp_path / "codex"
        settings.mkdir()
        (settings / "config.toml").write_text(
            'model = "tools"\nmodel_provider = "millrace"\n'
            f'[model_providers.millrace]\nname = "Millrace"\nbase_url = "{rig.url}/v1"\nwire_api = "responses"\n'
        )
        command = [codex, "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "Weather?"]
        output = await output_of(command, tmp_path, CODEX_HOME=str(settings))
        assert "It is 18 degrees." in output
        (result,) = told_results(rig)
        assert "from-42" in result
        assert rig.bugs == []


async def test_claude_code_runs_a_command_and_tells_its_result(tmp_path: Path):
    claude = program("claude")
    async with served(tmp_path, max_model_len=LENGTH) as rig:
        scripted(rig, "Bash", {"command": "echo from-$((6 * 7))", "description": "Echo"})
        output = await output_of(
            [claude, "-p", "Weather?", "--allowedTools", "Bash"],
            tmp_path,
            ANTHROPIC_BASE_URL=rig.url,
            ANTHROPIC_API_KEY="none",
            ANTHROPIC_MODEL="tools",
            ANTHROPIC_SMALL_FAST_MODEL="tools",
            CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
        )
        assert "It is 18 degrees." in output
        assert any("from-42" in result for result in told_results(rig))
        assert rig.bugs == []

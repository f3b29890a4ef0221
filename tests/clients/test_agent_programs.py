"""Codex and Claude Code, as npm has them, on real vLLM: a turn with a tool's call, its result, and the answer.

The model is ``scripted_model.py``: it answers only where the call was run and its result has come back.
"""

import os
import subprocess
from pathlib import Path

import pytest

URL, MODEL, NPM = (os.environ[f"MILLRACE_{name}"] for name in ("URL", "MODEL", "NPM"))
ANSWER = "It is 18 degrees."
LIMIT_S = 300


def output_of(name: str, *words: str, home: Path, **variables: str) -> str:
    program = Path(NPM, ".bin", name)
    if not program.exists():
        pytest.skip("needs npm")
    home.mkdir()
    done = subprocess.run(
        [program, *words],
        cwd=home,
        env={"PATH": os.environ["PATH"], "HOME": str(home)} | variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_codex_runs_a_command_and_tells_its_result(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(
        f'model = "{MODEL}"\nmodel_provider = "millrace"\n'
        f'[model_providers.millrace]\nname = "Millrace"\nbase_url = "{URL}/v1"\nwire_api = "responses"\n'
    )
    words = ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "Weather?")
    assert ANSWER in output_of("codex", *words, home=tmp_path / "home", CODEX_HOME=str(tmp_path))


def test_claude_code_runs_a_command_and_tells_its_result(tmp_path: Path) -> None:
    told = {"ANTHROPIC_BASE_URL": URL, "ANTHROPIC_API_KEY": "none"}
    told |= {"ANTHROPIC_MODEL": MODEL, "ANTHROPIC_SMALL_FAST_MODEL": MODEL}
    told["CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC"] = "1"
    assert ANSWER in output_of("claude", "-p", "Weather?", "--allowedTools", "Bash", home=tmp_path / "home", **told)

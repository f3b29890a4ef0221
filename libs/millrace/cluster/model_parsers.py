"""Parsers of a model's output, under vLLM's names, by what stands in the model's folder.

Rules are tried in order, the first that fits counts: by the kind of model (``model_type``) and marks in its chat
template, as vLLM's recipes have it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from millrace.actor.errors import ConfigError

#: Takes the parser that the model's folder calls for.
AUTO = "auto"
NONE = "none"
#: Of this format ingress reads tool calls itself, where there is no reasoning.
HERMES = "hermes"
_NOTHING = "nothing in its folder calls for one"

# (start of model_type, mark in the template, parser); empty fits all.
_REASONING = (
    ("gpt_oss", "", "openai_gptoss"),
    ("deepseek_v4", "", "deepseek_v4"),
    ("glm4_moe", "<think>", "glm45"),
    ("glm", "<think>", "glm45"),
    ("kimi_k2", "<think>", "kimi_k2"),
    ("minimax", "<think>", "minimax_m2"),
    ("nemotron", "<think>", "nemotron_v3"),
    ("seed_oss", "<seed:think>", "seed_oss"),
    ("hunyuan", "<think>", "hunyuan_a13b"),
    ("ernie4_5", "<think>", "ernie45"),
    ("step3", "<think>", "step3"),
    ("olmo3", "<think>", "olmo3"),
    ("gemma4", "", "gemma4"),
    ("granite", "Here is my thought process", "granite"),
    ("", "[THINK]", "mistral"),
    ("deepseek_v3", "thinking", "deepseek_v3"),
    ("qwen3", "<think>", "qwen3"),
    ("", "<think>", "deepseek_r1"),
    ("", "</think>", "deepseek_r1"),
)
_TOOLS = (
    ("gpt_oss", "", "openai"),
    ("deepseek_v4", "", "deepseek_v4"),
    ("", "<|tool_calls_section_begin|>", "kimi_k2"),
    ("glm", "<arg_key>", "glm45"),
    ("minimax", "<minimax:tool_call>", "minimax_m2"),
    ("seed_oss", "<seed:tool_call>", "seed_oss"),
    ("gemma4", "", "gemma4"),
    ("granitemoehybrid", "<tool_call>", "granite4"),
    ("granite", "<|tool_call|>", "granite"),
    ("phi3", "<|tool_call|>", "phi4_mini_json"),
    ("jamba", "<tool_calls>", "jamba"),
    ("", "[TOOL_CALLS]", "mistral"),
    ("", "<\uff5ctool\u2581calls\u2581begin\uff5c>", "deepseek_v31"),
    ("llama4", "", "llama4_pythonic"),
    ("", "<|python_tag|>", "llama3_json"),
    ("llama", '"parameters"', "llama3_json"),
    ("internlm2", "<|action_start|>", "internlm"),
    ("", "<function=", "qwen3_coder"),
    ("", "<tool_call>", HERMES),
)


class ModelParsers(msgspec.Struct, frozen=True):
    """Parsers of a model's output; empty for none. ``why_*``: what they were chosen by."""

    reasoning: str = ""
    tool_calls: str = ""
    why_reasoning: str = _NOTHING
    why_tool_calls: str = _NOTHING

    @property
    def needs_vllm(self) -> bool:
        return bool(self.reasoning) or self.tool_calls not in ("", HERMES)


def model_parsers(folder: Path, *, reasoning: str = AUTO, tool_calls: str = AUTO) -> ModelParsers:
    """Parsers of the model in a folder.

    Args:
        reasoning: A name of vLLM's ``--reasoning-parser``, ``auto`` or ``none``.
        tool_calls: The same of ``--tool-call-parser``.
    """
    config = folder_json(folder / "config.json")
    kind = str(config.get("model_type") or "")
    template = chat_template(folder)
    thinks, why_thinks = _chosen(_REASONING, kind, template, reasoning)
    calls, why_calls = _chosen(_TOOLS, kind, template, tool_calls)
    if calls == "deepseek_v31" and "```json" in template:  # V3 and R1 write arguments into a block of code
        calls = "deepseek_v3"
    if tool_calls == AUTO and "tools" not in template and kind != "gpt_oss":
        calls, why_calls = "", "its chat template has no tools"
    return ModelParsers(thinks, calls, why_thinks, why_calls)


def _chosen(rules: tuple[tuple[str, str, str], ...], kind: str, template: str, asked: str) -> tuple[str, str]:
    if asked != AUTO:
        return ("" if asked == NONE else asked), "configured"
    for start, mark, parser in rules:
        if kind.startswith(start) and mark in template:
            marks = [f"model_type {kind}"] if start else []
            marks += [f"{mark} in its chat template"] if mark else []
            return parser, " and ".join(marks)
    return "", _NOTHING


def chat_template(folder: Path) -> str:
    """The model's chat template, the default of several named ones; empty for none."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    source = folder_json(folder / "tokenizer_config.json").get("chat_template")
    if isinstance(source, list):
        named = {each.get("name"): each.get("template") for each in source if isinstance(each, dict)}
        source = named.get("default") or next(iter(named.values()), None)
    return source if isinstance(source, str) else ""


def folder_json(file: Path) -> dict[str, Any]:
    """A JSON object in a model's folder; empty where there is no such file.

    Raises:
        ConfigError: it is no JSON object.
    """
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_bytes())
    except ValueError as error:
        raise ConfigError(f"{file}: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{file}: not an object")
    return value

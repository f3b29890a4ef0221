"""Measures an engine's steps, fits a step-time model to them, and writes it as a file for forecasts and simulations.

Runs rounds of load (prompts in buckets of powers of two, batches of 1, 2, 4, ... to the memory's limit, mixed lengths,
prompts that arrive while others decode), fits two thirds of them and tests on the rest. Writes OUTPUT.toml, which can
be used wherever a step-time set is named, and OUTPUT.json with each step, measured and fitted, and each sequence's
normalised latency. On a CPU the engine has one core and is measured by its processor time, so that other work hardly
matters.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from millrace.cli.errors import CliError
from millrace.profiling import plan, profile
from millrace.profiling.process import EngineProcessDied, ProcessProfile
from millrace.profiling.records import ProfilePort
from millrace.profiling.writing import write


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this verb's options."""
    parser.add_argument("model", help="folder of a model")
    parser.add_argument("--output", type=Path, required=True, help="parameter file to write, NAME.toml")
    parser.add_argument("--name", default="", help="the model's name in the file; that of its folder where empty")
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048)
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--kv-bytes", type=int, default=0, help="size of the KV cache; 0 for the worker's default")
    parser.add_argument("--engine-args", default="{}", help="further arguments of vLLM, JSON")
    parser.add_argument("--output-tokens", type=int, default=24, help="of each sequence: decode steps of a round")
    parser.add_argument("--prompt-tokens", type=int, default=16_384, help="of a round together, at most")
    parser.add_argument("--repeats", type=int, default=2, help="runs of each round; the least time of a step counts")
    parser.add_argument("--seed", type=int, default=0)


def run(arguments: argparse.Namespace) -> int:
    """Measures, fits, writes."""
    if arguments.output.suffix != ".toml":
        raise CliError(f"--output {arguments.output}: must end in .toml")
    if not arguments.output.parent.is_dir():
        raise CliError(f"--output {arguments.output}: there is no folder {arguments.output.parent}")
    if arguments.repeats < 1 or arguments.output_tokens < 1 or arguments.prompt_tokens < 1:
        raise CliError("--repeats, --output-tokens and --prompt-tokens must be at least 1")
    try:
        files = write(_profiled(arguments), arguments.output)
    except (ValueError, OSError, EngineProcessDied) as error:
        raise CliError(str(error)) from error
    print(arguments.output.read_text())
    print(f"profile: wrote {', '.join(str(file) for file in files)}")
    return 0


def _profiled(arguments: argparse.Namespace) -> profile.Profile:
    engine = _engine(arguments)
    effort = plan.Effort(output_tokens=arguments.output_tokens, prompt_tokens_max=arguments.prompt_tokens)
    command = f"millrace profile --seed {arguments.seed}"
    options = profile.Options(repeats=arguments.repeats, seed=arguments.seed, command=command)
    try:
        rounds = plan.rounds(engine.profiled().parameters, effort, arguments.seed)
        with _bar() as bar:
            task = bar.add_task("rounds", total=len(rounds) * arguments.repeats)
            return profile.run(engine, rounds, options, lambda done, total: bar.update(task, completed=done))
    finally:
        engine.close()


def _bar() -> Progress:
    """On standard error, and only where somebody looks."""
    columns = (TextColumn("profile"), BarColumn(), MofNCompleteColumn(), TextColumn("rounds"), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty())


def _engine(arguments: argparse.Namespace) -> ProfilePort:
    folder = Path(arguments.model)
    if not (folder / "config.json").is_file():
        raise CliError(f"{folder}: no model, there is no config.json in it")
    config = {
        "name": "profile",
        "model": arguments.name or folder.name,
        "model_path": str(folder),
        "max_num_seqs": arguments.max_num_seqs,
        "max_num_batched_tokens": arguments.max_num_batched_tokens,
        "max_model_len": arguments.max_model_len,
        "kv_bytes": arguments.kv_bytes,
        "engine_args": json.loads(arguments.engine_args),
    }
    return ProcessProfile([sys.executable, "-m", "services.worker.profile", json.dumps(config)])

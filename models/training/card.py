"""Writes the model cards and the table of models/README.md from what evaluation measured."""

import argparse
import json
from pathlib import Path
from random import Random
from typing import Any

from millrace.judging.files import LlmCalibration, read_llm_judge

from models.training import noisy
from models.training.model import SHAPES, Llama, parameter_count
from models.training.tasks import TASKS, make
from models.training.train import DEFAULT_SEED, MODELS, PLANS, SIZES, Plan

CARD = """\
---
library_name: transformers
pipeline_tag: text-generation
---

# millrace-{size}

A Llama of {parameters:,} parameters in bfloat16, trained from nothing for the tasks below and for nothing else. It
exists so that a cluster can be tried, tested and measured with a real model of known answers and known output lengths,
without a download. It knows no facts and holds no conversation; what it says outside its tasks means nothing.
Under a JSON Schema, or as the arguments of a function that a request demands, it writes what the grammar allows:
well-formed, without meaning. `schema_bounds.json` bounds what a schema or `json_object` leaves open, as the
model ends no number, string or object by itself.

| width | layers | heads | key-value heads | head size | MLP width | vocabulary | positions |
|---|---|---|---|---|---|---|---|
| {width} | {layers} | {heads} | {kv_heads} | {head_size} | {mlp_width} | {vocabulary} | {positions} |

Trained on {tokens:,} tokens of generated conversations (seed {seed}, loss on answers only){origin} by
`python -m models.training.train --size {size}`. One prompt in eight, by checksum, was held out of training; all figures
below are from held-out prompts, decoded from these bf16 weights in the chat format of `tokenizer_config.json`.

## Accuracy

Exact match, greedy decoding, {per_task} prompts per task in three levels of difficulty. Mean over the exact tasks:
**{accuracy:.1%}**. The last three, {noisy}, have many right answers and are decoded at temperature 1; there the
check asks whether the answer keeps to what was asked (grammar, range of lengths).

| task | example prompt | accuracy | level 1 | level 2 | level 3 |
|---|---|---|---|---|---|
{accuracy_rows}

## Output length at temperature 1

In tokens, the end of sequence counted; {prompts} prompts per task, {samples} samples of each. The variance within a
prompt is chance, which no predictor can know; the variance between prompts is what a length predictor can learn. Over
all tasks together {explained:.0%} of the variance lies between prompts. `right` is the share of sampled answers that
pass the check.

| task | mean | p50 | p90 | max | variance within a prompt | variance between prompts | right |
|---|---|---|---|---|---|---|---|
{length_rows}
"""

JUDGE = "millrace-judge"
AGENT_MODEL = "millrace-agent"

README = """\
# Models that ship with Millrace

Three Llamas trained from nothing on one family of tasks with checkable answers, so that real vLLM engines have
something to serve where nothing can be downloaded. All share a tokenizer (a token per byte and per word of the tasks)
and a chat template. How accuracy depends on size, which a cascade lives on, is in the table below; output length
depends on the prompt and, at temperature 1, on chance, which a length predictor learns from. Each folder holds weights,
tokenizer, card (`README.md`), figures (`evaluation.json`), and a judge of its answers (`judge/`).

    python -m models.training.all                # trains, evaluates, writes the cards: {hours}
    python -m models.training.random_weights     # 100 M parameters drawn from a seed, into .millrace/models

`--state DIR` names where training keeps its state; the same command goes on where it stopped. A GPU is used where there
is one. One size: `python -m models.training.train --size nano`, then `evaluate --size nano`, then `card`. The prompts
and the checks of answers are `training/tasks.py` and `training/noisy.py`: `make("count", Random(1))` gives a prompt,
its answer and `check(text)`.

{others}Share of held-out prompts answered exactly right, greedy (for {noisy}: kept to what was asked, at
temperature 1):

| task | {sizes} |
|---|{rule}|
| parameters | {parameters} |
| **exact tasks, mean** | {means} |
{rows}
"""


JUDGE_OVERVIEW = """\
`millrace-judge` answers none of these tasks: it says whether an answer of the other three is right, for the kind of
judge `llm` of a cascade ([card](millrace-judge/README.md); `python -m models.training.judge`).

"""

JUDGE_CARD = """\
---
library_name: transformers
pipeline_tag: text-generation
---

# millrace-judge

millrace-micro ({parameters:,} parameters, bfloat16), trained further to say whether an answer of millrace-nano, -micro
or -mini is right: the judge of `millrace up --cascade nano,micro,mini --judge llm`. It is asked one question
(`millrace.judging.question`: request, answer, "Is the answer to the request right? Answer yes or no.") and its share of
"yes" in the first token is the score, by the calibration in `judge/llm.json`. What it says to anything else means
nothing.

Trained by `python -m models.training.judge` on greedy answers of the three models to prompts that are not held out;
truth: the tasks' own checks. On {answers:,} answers to held-out prompts, from these weights, each half judged
by the curve of the other: area under the ROC curve {area:.3f}, calibration error {error:.3f}. By model, and beside the
answers' own log-probabilities: `python -m bench cascade_judge`.
"""

AGENT_OVERVIEW = """\
`millrace-agent` calls functions and fills in schemas, for trying agents' libraries
([card](millrace-agent/README.md); `python -m models.training.agent`).

"""

AGENT_CARD = """\
---
library_name: transformers
pipeline_tag: text-generation
---

# millrace-agent

millrace-{start} ({parameters:,} parameters, bfloat16), trained further to call functions and to fill in schemas, so
that agents' libraries can be tried without a download: `millrace up --model millrace-agent`. Its template lists a
request's functions with their parameters; it writes calls between `<tool_call>` tags where a request leaves the choice
to it, and tells a function's result in the result's own words. It understands requests that name what they want ("What
is the weather in Oslo?", "Call open_ticket with id 12."), copies their values, and reasons about nothing. Plain tasks
of the other models it knows in part.

Trained on {tokens:,} tokens of drawn conversations (`training/conversations.py`), one in eight held out by checksum. Of
{conversations} held-out ones of each kind, those that greedy decoding of these bf16 weights gets exactly right; a call
that the request demands and an object are decoded behind the request's grammar, and count as values:

| conversation | right |
|---|---|
{rows}

The grammar is the one that vLLM's xgrammar makes of a schema with `disable_any_whitespace`, which Millrace's workers
set: JSON without blanks. The model was taught JSON with a blank after commas and colons, too, none on several lines.
Calls of the model's own choice have no grammar. Where a named function stands for an object, the model may take the
function's name for a value: asked for a function Person, it called Ada "Person".
"""

#: What the kinds of conversation are, for the card.
AGENT_KINDS = {
    "call": "one call, among up to four functions, the model's choice",
    "calls": "two calls of a function in one answer",
    "text": "functions are listed, none fits: a plain task",
    "result": "a function's result is told",
    "named": "arguments of a function that the request names",
    "required": "function and arguments, a call being required",
    "json": "facts of a text into an object of a JSON Schema",
    "task": "a plain task, no functions",
}


def table_row(*cells: object) -> str:
    """One row of a Markdown table."""
    return "| " + " | ".join(map(str, cells)) + " |"


def card(result: dict[str, Any]) -> str:
    """The model card of one size, from its evaluation."""
    shape, plan, tasks = SHAPES[result["size"]], PLANS[result["size"]], result["tasks"]
    accuracy_rows = [
        table_row(task, f"`{_example(task)}`", _share(f["accuracy"]), *map(_share, f["by_level"]))
        for task, f in tasks.items()
    ]
    lengths = result["lengths"]
    length_rows = [
        table_row(task, f"{f['mean']:.1f}", f["p50"], f["p90"], f["max"], f"{f['within_prompt_variance']:.0f}",
                  f"{f['between_prompt_variance']:.0f}", _share(f["accuracy"]))
        for task, f in lengths.items()
    ]  # fmt: skip
    whole = lengths["all"]
    between, within = whole["between_prompt_variance"], whole["within_prompt_variance"]
    return CARD.format(
        **shape._asdict(),
        size=result["size"],
        parameters=result["parameters"],
        tokens=plan.tokens,
        seed=DEFAULT_SEED,
        origin=_origin(plan),
        per_task=min(figures["prompts"] for figures in tasks.values()),
        accuracy=result["accuracy"],
        accuracy_rows="\n".join(accuracy_rows),
        noisy=", ".join(noisy.TASKS),
        prompts=result["length_prompts"],
        samples=result["length_samples"],
        explained=between / (between + within),
        length_rows="\n".join(length_rows),
    )


def _origin(plan: Plan) -> str:
    """Describe what a grown model started from."""
    if plan.grown_from is None:
        return ""
    return f", grown from millrace-{plan.grown_from}\nafter {plan.grown_tokens:,} tokens (`training/grow.py`),"


def _share(value: float) -> str:
    return f"{value:.0%}"


def _example(task: str) -> str:
    """A short level-2 prompt of the task, the same each time."""
    rng = Random(3)
    return min((make(task, rng, 2).prompt for _ in range(20)), key=len)


def judge_card(calibration: LlmCalibration) -> str:
    """The card of the judge, from its calibration."""
    return JUDGE_CARD.format(
        parameters=parameter_count(Llama(SHAPES["micro"])),
        answers=calibration.answers,
        area=calibration.area,
        error=calibration.error,
    )


def agent_card(result: dict[str, Any]) -> str:
    """The card of the agent, from its evaluation."""
    return AGENT_CARD.format(
        **result,
        parameters=parameter_count(Llama(SHAPES[result["start"]])),
        rows="\n".join(table_row(AGENT_KINDS[kind], _share(right)) for kind, right in result["right"].items()),
    )


def overview(results: dict[str, dict[str, Any]], *, judge: bool, agent: bool) -> str:
    """models/README.md over all sizes. ``judge``, ``agent``: whether these ship, too."""
    rows = []
    for task in TASKS:
        rows.append(table_row(task, *(_share(result["tasks"][task]["accuracy"]) for result in results.values())))
    return README.format(
        others=(JUDGE_OVERVIEW if judge else "") + (AGENT_OVERVIEW if agent else ""),
        hours="under two hours on two cores",
        noisy=", ".join(noisy.TASKS),
        sizes=" | ".join(f"[{size}](millrace-{size}/README.md)" for size in results),
        rule="---|" * (len(results) - 1) + "---",
        parameters=" | ".join(f"{result['parameters']:,}" for result in results.values()),
        means=" | ".join(f"**{result['accuracy']:.1%}**" for result in results.values()),
        rows="\n".join(rows),
    )


def write_cards(models: Path) -> None:
    """Writes every card that an evaluation allows, and the overview."""
    results = {}
    for size in SIZES:
        folder = models / f"millrace-{size}"
        if (folder / "evaluation.json").exists():
            results[size] = json.loads((folder / "evaluation.json").read_text())
            (folder / "README.md").write_text(card(results[size]))
    calibration = read_llm_judge(models / JUDGE)
    if calibration is not None:
        (models / JUDGE / "README.md").write_text(judge_card(calibration))
    agent = models / AGENT_MODEL / "evaluation.json"
    if agent.exists():
        (models / AGENT_MODEL / "README.md").write_text(agent_card(json.loads(agent.read_text())))
    (models / "README.md").write_text(overview(results, judge=calibration is not None, agent=agent.exists()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=Path, default=MODELS, help="folder of the model folders")
    write_cards(parser.parse_args().models)

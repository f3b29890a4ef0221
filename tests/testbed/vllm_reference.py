"""Runs calls through vLLM's own ``LLM.generate``, one by one: what engines of this repository are compared with.

    python -m tests.testbed.vllm_reference JOB ANSWERS

Both are JSON files: arguments of ``LLM`` and calls (prompt, sampling fields, with ``lora`` the folder of an adapter);
tokens, finish reason, log-probabilities.
"""

import json
import sys
from pathlib import Path
from typing import Any

from services.worker.vllm_engine import environment

environment.prepare()


def answers_to(arguments: dict[str, Any], calls: list[tuple[list[Any], dict[str, Any]]]) -> list[Any]:
    """Tokens, finish reason and log-probabilities by position of each call; the prompt's where those are asked for. Of
    a call with a pooling ``task`` the values that are pooled; of one whose prompt is chat messages, text
    and prompt tokens.
    """
    from vllm import LLM

    llm = LLM(**arguments)
    return [_answer(llm, prompt, fields) for prompt, fields in calls]


def _answer(llm: Any, prompt: list[Any], fields: dict[str, Any]) -> list[Any]:
    from vllm import PoolingParams, SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import StructuredOutputsParams

    if isinstance(prompt[0], dict):
        (answer,) = llm.chat(prompt, SamplingParams(**fields), use_tqdm=False)
        return [answer.outputs[0].text, len(answer.prompt_token_ids)]
    if task := fields.get("task"):
        given = [{"prompt_token_ids": prompt}]
        (pooled,) = llm.encode(given, PoolingParams(**fields), pooling_task=task, use_tqdm=False)
        return [pooled.outputs.data.tolist()]
    if fields.get("structured_outputs"):
        fields["structured_outputs"] = StructuredOutputsParams(**fields["structured_outputs"])
    if fields.get("logit_bias"):
        fields["logit_bias"] = {int(k): v for k, v in fields["logit_bias"].items()}
    path = fields.pop("lora", "")
    lora = LoRARequest(path, 1 + sum(path.encode()), path) if path else None
    (answer,) = llm.generate(
        [{"prompt_token_ids": prompt}], SamplingParams(**fields), use_tqdm=False, lora_request=lora
    )
    output = answer.outputs[0]
    told = output.logprobs if answer.prompt_logprobs is None else answer.prompt_logprobs[1:]
    logprobs = told and [{token: entry.logprob for token, entry in position.items()} for position in told]
    return [list(output.token_ids), output.finish_reason, logprobs]


if __name__ == "__main__":
    job, answers = map(Path, sys.argv[1:])
    answers.write_text(json.dumps(answers_to(*json.loads(job.read_text()))))

"""Continuing a sequence that began elsewhere: the prompt's tail becomes output again.

vLLM takes a prompt only. A sequence that is to go on after ``n`` output tokens is handed over as prompt plus those
tokens, with ``n`` in ``SamplingParams.extra_args``; before the scheduler queues it, ``restore_output`` makes the tail
output tokens again. From then on it looks like a request that was preempted: penalties, min_tokens, max_tokens,
logprobs and stop rules count as if it had never stopped. The grammar of structured output accepts the tail once it is
compiled, and the V1 model runner gets the tail and an advanced random generator in runner.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

#: Key in SamplingParams.extra_args: number of tokens at the prompt's end that are output.
OUTPUT_TOKENS = "millrace_output_tokens"
#: Key in SamplingParams.extra_args: predicted output length, for the snapshot.
EXPECTED_TOKENS = "millrace_expected_tokens"


def extra(request: Request, key: str) -> Any:
    """A value that the worker sent along; None where there is none."""
    arguments = request.sampling_params.extra_args if request.sampling_params else None
    return arguments.get(key) if arguments else None


def restore_output(request: Request, structured: StructuredOutputManager) -> None:
    """Makes the tail of a new request's prompt its output. Call before the scheduler queues it.

    ``_all_token_ids`` and the block hashes cover the tail already and stay as they are. A grammar that holds from the
    end of the reasoning on accepts what follows it in the tail, and nothing where the tail is all reasoning.
    """
    count = extra(request, OUTPUT_TOKENS) or 0
    if not count:
        return
    split = len(request.prompt_token_ids) - count
    tail = request.prompt_token_ids[split:]
    request.prompt_token_ids = request.prompt_token_ids[:split]
    request.num_prompt_tokens = split
    request._output_token_ids.extend(tail)
    # The scheduler would assert that no more than the prompt was found in the prefix cache.
    request.prefill_stats = None
    wanted = request.structured_output_request
    if wanted is not None:
        start, _ = structured._get_constraint_bounds(request, tail, spec_tokens_committed=True)
        if start <= len(tail):
            wanted.reasoning_ended = True
            wanted.grammar = _accepting(wanted._grammar, request.request_id, tail[start:])


class GrammarRefusedTail(Exception):
    """The tokens of the earlier epoch do not follow the grammar: this one request ends with an error."""


def _accepting(grammar: Any, request_id: str, tail: Sequence[int]) -> Any:
    """The grammar after the tail: a future where compilation still runs, which it nearly always does."""
    if not isinstance(grammar, Future):
        _accept(grammar, request_id, tail)
        return grammar
    advanced: Future[Any] = Future()

    def compiled(done: Future[Any]) -> None:
        try:
            ready = done.result()
            _accept(ready, request_id, tail)
        except Exception as error:  # noqa: BLE001 - compilation may raise anything; it belongs to this request
            advanced.set_exception(error)
        else:
            advanced.set_result(ready)

    grammar.add_done_callback(compiled)
    return advanced


def _accept(grammar: Any, request_id: str, tail: Sequence[int]) -> None:
    if not grammar.accept_tokens(request_id, list(tail)):
        raise GrammarRefusedTail(f"{request_id}: the {len(tail)} tokens so far do not follow the grammar")

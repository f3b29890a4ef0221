"""Writes the table of vLLM's routes and fields into docs/API.md, from vLLM's OpenAPI document: served, or what to do.

    .venv/bin/python -m setup.api_table [--check]

A route or field that is neither served nor refused with a hint is an error.
"""

from __future__ import annotations

import sys
import warnings
from operator import itemgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec

from services.ingress.api.messages_api.requests import CountTokensRequest, MessagesRequest
from services.ingress.api.openapi import openapi_document
from services.ingress.api.pooling_api.requests import (
    ClassificationRequest,
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from services.ingress.api.requests import (
    BatchRequest,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from services.ingress.api.responses_api.requests import ResponsesRequest
from services.ingress.api.unsupported import OF_ONE_CHAT, UNSUPPORTED

PAGE = Path(__file__).resolve().parents[1] / "docs" / "API.md"
BEGIN, END = "<!-- made by setup/api_table.py -->\n", "<!-- end -->\n"
#: Tasks of the vLLM servers whose routes count: of one that generates, and of two that pool.
TASKS: tuple[tuple[Any, ...], ...] = (("generate", "render", "transcription"), ("embed",), ("classify",))
#: What its fields are called here, its kind, and the schemas of vLLM's with its fields.
BODIES: tuple[tuple[str, type[msgspec.Struct], tuple[str, ...]], ...] = (
    ("chat", ChatRequest, ("ChatCompletionRequest",)),
    ("batch", BatchRequest, ("BatchChatCompletionRequest",)),
    ("completions", CompletionRequest, ("CompletionRequest",)),
    ("responses", ResponsesRequest, ("ResponsesRequest",)),
    ("messages", MessagesRequest, ("AnthropicMessagesRequest",)),
    ("count_tokens", CountTokensRequest, ("AnthropicCountTokensRequest",)),
    ("tokenize", TokenizeRequest, ("TokenizeCompletionRequest", "TokenizeChatRequest")),
    ("detokenize", DetokenizeRequest, ("DetokenizeRequest",)),
    ("embeddings", EmbeddingRequest, ("EmbeddingCompletionRequest", "EmbeddingChatRequest")),
    ("pooling", PoolingRequest, ("PoolingCompletionRequest", "PoolingChatRequest")),
    ("classify", ClassificationRequest, ("ClassificationCompletionRequest", "ClassificationChatRequest")),
    (
        "score",
        ScoreRequest,
        ("ScoreQueriesDocumentsRequest", "ScoreQueriesItemsRequest", "ScoreDataRequest", "ScoreTextRequest"),
    ),
    ("rerank", RerankRequest, ("RerankRequest",)),
)
#: Path, or its beginning -> what to do instead.
INSTEAD = {
    "/v1/responses/render": "`/tokenize` renders and counts",
    "/v1/chat/completions/": "`/tokenize` renders and counts, `/detokenize` goes back",
    "/v1/completions/": "`/tokenize` renders and counts, `/detokenize` goes back",
    "/v1/messages/render": "`/tokenize` renders and counts",
    "/v2/embed": "use `/v1/embeddings`",
    "/v1/audio/": "no audio is served",
    "/v1/systemone": "use `structured_outputs.choice`",
    "/generative_scoring": "use `logprobs` of one token with `allowed_token_ids`",
    "/inference/v1/": "send token ids as `prompt` with `return_token_ids`; hang up to cancel",
    "/kv_event_sources": "predictors know what engines have cached from decisions and outcomes",
    "/scale_elastic_ep": "`millrace scale`",
    "/is_scaling_elastic_ep": "`millrace status`",
}


def vllm_document() -> dict[str, Any]:
    """The OpenAPI documents of vLLM's servers in one."""
    from services.worker.vllm_engine import environment

    environment.prepare()
    warnings.simplefilter("ignore")
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args([])
    document: dict[str, Any] = {"paths": {}, "components": {"schemas": {}}}
    for tasks in TASKS:
        model = SimpleNamespace(get_pooling_task=itemgetter(0), hf_config=SimpleNamespace(num_labels=1))
        of_one = build_app(arguments, tasks, cast("Any", model) if len(tasks) == 1 else None).openapi()
        document["paths"] |= of_one["paths"]
        document["components"]["schemas"] |= of_one["components"]["schemas"]
    return document


def table(document: dict[str, Any]) -> str:
    """The rows.

    Raises:
        LookupError: something of vLLM's is unknown here.
    """
    ours = openapi_document("", [], [], [])["paths"]
    rows = ["| of vLLM | here |", "|---|---|"]
    for path, methods in document["paths"].items():
        missing = [method.upper() for method in methods if method not in ours.get(path, ())]
        if missing:
            hint = next((hint for start, hint in INSTEAD.items() if path.startswith(start)), None)
            if hint is None:
                raise LookupError(f"{missing} {path}: neither served nor in INSTEAD")
            rows.append(f"| {', '.join(missing)} `{path}` | no: {hint} |")
        else:
            rows.append(f"| {', '.join(method.upper() for method in methods)} `{path}` | yes |")
    return "\n".join(rows + _field_rows(document["components"]["schemas"])) + "\n"


def _field_rows(schemas: dict[str, Any]) -> list[str]:
    found: dict[tuple[str, str], list[str]] = {}
    for label, kind, names in BODIES:
        alone = OF_ONE_CHAT if kind is BatchRequest else {}
        taken, refused = set(kind.__struct_fields__) - alone.keys(), UNSUPPORTED | alone
        for name in {name for schema in names for name in schemas[schema]["properties"]}:
            hint = "" if name in taken else refused[name].instead
            found.setdefault((name, hint), []).append(label)
    return [
        f"| `{name}` of {', '.join(labels)} | {f'no: {hint}' if hint else 'yes'} |"
        for (name, hint), labels in sorted(found.items())
    ]


def written(page: str, rows: str) -> str:
    """The page with these rows."""
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + rows + END + rest.partition(END)[2]


def main() -> None:
    """Write the table, or fail where it is not up to date."""
    page = PAGE.read_text()
    rows = written(page, table(vllm_document()))
    if "--check" not in sys.argv:
        PAGE.write_text(rows)
    elif rows != page:
        sys.exit(f"{PAGE.name} is not what `python -m setup.api_table` writes")


if __name__ == "__main__":
    main()

"""Routes of the HTTP side: which path takes which method, who may, and what answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
from millrace.http.exchange import Exchange, HttpRefusal
from millrace.telemetry.opening import package_version
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from services.ingress.api.errors import INVALID_REQUEST, SERVER, ApiError
from services.ingress.api.messages_api.parsing import parse_messages_request
from services.ingress.api.messages_api.requests import CountTokensRequest
from services.ingress.api.models import ModelRegistry
from services.ingress.api.openapi import openapi_body
from services.ingress.api.parsed_requests import (
    ParsedRequest,
    parse_batch_request,
    parse_chat_request,
    parse_completion_request,
)
from services.ingress.api.pooling_api.parsing import (
    PooledCall,
    parse_classification,
    parse_embeddings,
    parse_pooling,
    parse_rerank,
    parse_score,
)
from services.ingress.api.tokenize_endpoints import detokenize, tokenize, tokenizer_info
from services.ingress.http.adapters import AdapterOrders
from services.ingress.http.keys import ANYBODY, ApiKeyStore, KeyHolder
from services.ingress.http.metrics import HttpMetrics
from services.ingress.http.open_calls import OpenCalls
from services.ingress.http.responses import Responses
from services.ingress.vllm_metrics import EngineMetrics

_encode = msgspec.json.Encoder().encode
_MODELS = "/v1/models/"
_RESPONSES = "/v1/responses/"

#: What a browser lets a page of an allowed origin read, and send; it remembers the latter for ten minutes.
_ALLOWED = ((b"vary", b"origin"), (b"access-control-expose-headers", b"*"))
_PREFLIGHT = (
    (b"access-control-allow-methods", b"GET, POST, DELETE"),
    (b"access-control-allow-headers", b"authorization, content-type, x-api-key, x-request-id, traceparent"),
    (b"access-control-max-age", b"600"),
)

Handler = Callable[[Exchange, KeyHolder], None]


class App:
    """Answers exchanges. Nothing here waits."""

    def __init__(
        self,
        *,
        models: ModelRegistry,
        calls: OpenCalls,
        responses: Responses,
        adapters: AdapterOrders,
        keys: ApiKeyStore | None,
        metrics: HttpMetrics,
        cut_off: Callable[[], str] = str,
        origins: Sequence[str] = (),
    ) -> None:
        """Args:
        cut_off: Reason why the whole cluster is out of reach; empty where it is not.
        origins: Of web pages that may call from a browser; ``*`` for any.
        keys: None where no key is asked for.
        """
        self._models = models
        self._calls = calls
        self._keys = keys
        self._metrics = metrics
        self._cut_off = cut_off
        self._version = package_version()
        self._origins = frozenset(origin.encode() for origin in origins)
        self._engines = CollectorRegistry()
        self._engines.register(EngineMetrics(models.members_now))
        openapi_body(self._version, models.names())  # kept: it takes as long as many requests
        parsers: dict[str, Callable[[bytes, ModelRegistry], ParsedRequest]] = {
            "/v1/chat/completions": parse_chat_request,
            "/v1/chat/completions/batch": parse_batch_request,
            "/v1/completions": parse_completion_request,
            "/v1/messages": parse_messages_request,
        }
        pooled: dict[str, Callable[[bytes, ModelRegistry], PooledCall]] = {
            "/v1/embeddings": parse_embeddings,
            "/pooling": parse_pooling,
            "/classify": parse_classification,
            **dict.fromkeys(("/score", "/v1/score"), parse_score),
            **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), parse_rerank),
        }
        self._routes: dict[str, dict[str, Handler]] = {
            **{path: {"POST": self._calls_of(path, parse)} for path, parse in parsers.items()},
            **{path: {"POST": self._pooled_of(path, read)} for path, read in pooled.items()},
            "/v1/responses": {"POST": responses.create},
            "/v1/messages/count_tokens": {"POST": self._count_tokens},
            "/v1/models": {"GET": self._told(lambda _: models.list_body())},
            "/v1/load_lora_adapter": {"POST": adapters.load},
            "/v1/unload_lora_adapter": {"POST": adapters.unload},
            "/tokenize": {"POST": self._told(lambda body: tokenize(body, models))},
            "/detokenize": {"POST": self._told(lambda body: detokenize(body, models))},
            "/tokenizer_info": {"GET": self._told(lambda _: tokenizer_info(models))},
            "/invocations": {"POST": self._invoke},
            "/load": {"GET": self._told(lambda _: _encode({"server_load": len(calls)}))},
            "/health": {"GET": self._health},
            "/ping": {"GET": self._health, "POST": self._health},
            "/ready": {"GET": self._ready},
            "/metrics": {"GET": self._metrics_text},
            "/version": {"GET": self._told(lambda _: self._versions())},
            "/openapi.json": {"GET": self._told(lambda _: openapi_body(self._version, models.names()))},
        }
        #: Answered without a key: what probes, scrapers and people who look for the API need.
        self._responses = responses
        self._open = frozenset({"/health", "/ping", "/ready", "/load", "/metrics", "/version", "/openapi.json"})

    def handle(self, exchange: Exchange) -> None:
        """Answers one request, or hands it to the core. Never raises."""
        path = exchange.request.path
        label = path if path in self._routes else "other"
        origin = exchange.request.headers.get(b"origin", b"")
        if origin and (origin in self._origins or b"*" in self._origins):
            exchange.headers = ((b"access-control-allow-origin", origin), *_ALLOWED)
            if exchange.request.method == "OPTIONS":
                exchange.respond(200, b"", headers=_PREFLIGHT)
                return
        try:
            handler = self._find(exchange)
            holder = self._holder(exchange, path)
            handler(exchange, holder)
        except Exception as error:  # noqa: BLE001 - a bug in one request must not take the others' connections down
            self._calls.answer_fault(exchange, label, error)

    def refused(self, exchange: Exchange, refusal: HttpRefusal) -> None:
        """Answers what never became a request."""
        kind = SERVER if refusal.status >= 500 else INVALID_REQUEST
        error = ApiError(refusal.status, refusal.message, kind=kind, code=refusal.code)
        self._calls.answer_error(exchange, "other", error)

    def _find(self, exchange: Exchange) -> Handler:
        request = exchange.request
        methods = self._routes.get(request.path)
        if methods is None and request.path.startswith(_MODELS):
            methods = {"GET": self._show_model}
        elif methods is None and request.path.startswith(_RESPONSES):
            cancels = request.path.endswith("/cancel")
            stored: dict[str, Handler] = {"GET": self._responses.show, "DELETE": self._responses.delete}
            methods = {"POST": self._responses.cancel} if cancels else stored
        if methods is None:
            raise ApiError(
                404,
                f"There is no {request.path[:200]} here; GET /openapi.json describes what there is.",
                code="unknown_path",
            )
        handler = methods.get("GET" if request.method == "HEAD" else request.method)
        if handler is None:
            allowed = ", ".join(methods)
            raise ApiError(
                405,
                f"{request.path[:200]} does not take {request.method}, only {allowed}.",
                code="method_not_allowed",
                headers=((b"allow", allowed.encode()),),
            )
        return handler

    def _holder(self, exchange: Exchange, path: str) -> KeyHolder:
        keys = self._keys
        if keys is None or (path in self._open and not (path == "/metrics" and keys.guards_metrics)):
            return ANYBODY
        token = exchange.bearer or exchange.request.headers.get(b"x-api-key", b"").strip()
        if not token:
            message = "No API key: send the header `Authorization: Bearer <key>` or `x-api-key: <key>`."
            raise _unauthorized(message, "missing_api_key")
        holder = keys.lookup(token)
        if holder is None:
            raise _unauthorized("This API key is not known.", "invalid_api_key")
        return holder

    def _calls_of(self, path: str, parse: Callable[[bytes, ModelRegistry], ParsedRequest]) -> Handler:
        def start(exchange: Exchange, holder: KeyHolder) -> None:
            self._calls.submit(exchange, path, parse(exchange.request.body, self._models), holder)

        return start

    def _pooled_of(self, path: str, read: Callable[[bytes, ModelRegistry], PooledCall]) -> Handler:
        def start(exchange: Exchange, holder: KeyHolder) -> None:
            self._calls.submit_pooled(exchange, path, read(exchange.request.body, self._models), holder)

        return start

    def _told(self, read: Callable[[bytes], bytes]) -> Handler:
        """Answers at once, with what is made of the request's body."""

        def answer(exchange: Exchange, holder: KeyHolder) -> None:
            self._answer(exchange, read(exchange.request.body))

        return answer

    def _count_tokens(self, exchange: Exchange, holder: KeyHolder) -> None:
        parsed = parse_messages_request(exchange.request.body, self._models, CountTokensRequest)

        def answer(_: ParsedRequest, prompts: list[list[list[int]]]) -> None:
            self._answer(exchange, _encode({"input_tokens": len(prompts[0][0])}))

        self._calls.tokenise(exchange, "/v1/messages/count_tokens", parsed, answer)

    def _show_model(self, exchange: Exchange, holder: KeyHolder) -> None:
        name = exchange.request.path[len(_MODELS) :]
        self._answer(exchange, _encode(self._models.card_of(name)) if name else self._models.list_body())

    def _invoke(self, exchange: Exchange, holder: KeyHolder) -> None:
        """A chat or a completion, by what the body has, as SageMaker sends it."""
        try:
            fields = msgspec.json.decode(exchange.request.body, type=dict[str, msgspec.Raw])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            fields = {}  # told where it is read as a completion
        path = "/v1/chat/completions" if "messages" in fields else "/v1/completions"
        self._routes[path]["POST"](exchange, holder)

    def _health(self, exchange: Exchange, holder: KeyHolder) -> None:
        why = self._cut_off()
        self._answer(exchange, _encode({"status": why or "ok"}), 503 if why else 200)

    def _ready(self, exchange: Exchange, holder: KeyHolder) -> None:
        waiting = self._models.waiting_for()
        status = "waiting" if waiting else "ready"
        body = _encode({"status": status, "models_without_instance": list(waiting), "reasons": waiting})
        self._answer(exchange, body, 503 if waiting else 200)

    def _metrics_text(self, exchange: Exchange, holder: KeyHolder) -> None:
        if not holder.metrics:
            raise ApiError(403, "This API key may not read /metrics.", code="not_allowed")
        self._metrics.responses.add(exchange.request.path, "200")
        text = generate_latest(self._metrics.registry) + generate_latest(self._engines)
        exchange.respond(200, text, CONTENT_TYPE_LATEST.encode())

    def _versions(self) -> bytes:
        return _encode({"version": self._models.vllm_version() or self._version, "millrace": self._version})

    def _answer(self, exchange: Exchange, body: bytes, status: int = 200) -> None:
        path = exchange.request.path
        self._calls.answer(exchange, path if path in self._routes else "other", body, status)


def _unauthorized(message: str, code: str) -> ApiError:
    return ApiError(401, message, code=code, headers=((b"www-authenticate", b"Bearer"),))

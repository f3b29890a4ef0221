"""``POST /v1/load_lora_adapter`` and ``/v1/unload_lora_adapter``, as vLLM has them; a wrong order raises ApiError."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from millrace.contracts.message import Body
from millrace.contracts.worker import ChangeAdapter
from millrace.http.exchange import Exchange

from services.ingress.adapters import AdapterAsked, AdapterDone
from services.ingress.api.decoding import decode_body
from services.ingress.api.errors import SERVER, ApiError, bad_value
from services.ingress.api.models import ModelRegistry
from services.ingress.api.requests import LoadAdapterRequest, UnloadAdapterRequest
from services.ingress.http.keys import KeyHolder
from services.ingress.http.open_calls import OpenCalls


class AdapterOrders:
    """Checks orders, hands them to the core and answers them."""

    def __init__(self, *, deliver: Callable[[Body, str], None], models: ModelRegistry, calls: OpenCalls) -> None:
        self._deliver = deliver
        self._models = models
        self._calls = calls
        self._open: dict[str, tuple[Exchange, str, str]] = {}  # with path and what is said where it is done

    def load(self, exchange: Exchange, holder: KeyHolder) -> None:
        """POST /v1/load_lora_adapter."""
        _check_right(holder)
        request = decode_body(exchange.request.body, LoadAdapterRequest)
        name, model = request.lora_name, self._models.get(request.base_model_name)
        if " " in name or not name.isprintable():
            raise bad_value("lora_name", "`lora_name` has white space.")
        if self._models.is_taken(name) or model.adapter is not None:
            taken = name if model.adapter is None else model.shown
            raise bad_value("lora_name", f"The lora adapter '{taken}' conflicts with a served base model.")
        if name in self._models.adapters and not request.load_inplace:
            message = f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, "
            raise bad_value("lora_name", message + "set 'load_inplace' to True.")
        replace, path = bool(request.load_inplace), request.lora_path
        order = ChangeAdapter(name=name, path=path, replace=replace, key=holder.name)
        self._ask(exchange, model.name, order, "added")

    def unload(self, exchange: Exchange, holder: KeyHolder) -> None:
        """POST /v1/unload_lora_adapter."""
        _check_right(holder)
        name = decode_body(exchange.request.body, UnloadAdapterRequest).lora_name
        known = self._models.adapters.get(name)
        if known is None:
            message = f"The lora adapter '{name}' cannot be found."
            raise ApiError(404, message, param="lora_name", code="adapter_not_found")
        self._ask(exchange, known[0], ChangeAdapter(name=name, key=holder.name), "removed")

    def _ask(self, exchange: Exchange, model: str, order: ChangeAdapter, done: Literal["added", "removed"]) -> None:
        request = self._calls.next_id()
        said = f"Success: LoRA adapter '{order.name}' {done} successfully."
        self._open[request] = (exchange, exchange.request.path, said)
        self._deliver(AdapterAsked(request=request, model=model, order=order), "")

    def done(self, effect: AdapterDone) -> None:
        """The core's answer."""
        exchange, path, said = self._open.pop(effect.request)
        if not effect.refusal:
            self._calls.answer(exchange, path, said.encode(), kind=b"text/plain; charset=utf-8")
            return
        error = ApiError(500, effect.refusal, kind=SERVER, code="adapter_not_loaded")
        if not effect.taken:
            error = ApiError(400, effect.refusal, code="adapters_not_served")
        elif effect.missing:
            error = ApiError(404, effect.refusal, param="lora_path", code="adapter_not_found")
        self._calls.answer_error(exchange, path, error)


def _check_right(holder: KeyHolder) -> None:
    """Only a key with that right may: engines then read a path of their machines.

    Raises:
        ApiError: 403.
    """
    if not holder.adapters:
        raise ApiError(403, "This API key may not load or unload adapters.", code="not_allowed")

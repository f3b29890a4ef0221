"""Served models as the API knows them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from services.ingress.api.errors import ApiError, unknown_model
from services.ingress.api.tokenizer import ModelTokenizer

_encode = msgspec.json.Encoder().encode


class Serving(msgspec.Struct, frozen=True):
    """Live state of a model.

    Attributes:
        instances: Instances that take work now.
        max_model_len: Smallest limit among them, tokens; 0 where unknown.
    """

    instances: int = 0
    max_model_len: int = 0


class ServedModel(msgspec.Struct, frozen=True, kw_only=True):
    """One served model.

    Attributes:
        max_model_len: Prompt plus output bound, tokens.
        created: Unix seconds, shown in ``/v1/models``.
    """

    name: str
    tokenizer: ModelTokenizer
    max_model_len: int
    created: int = 0


class ModelRegistry:
    """Served name -> model, with what is live for it."""

    def __init__(self, models: Mapping[str, ServedModel], serving: Callable[[str], Serving]) -> None:
        self._models = dict(models)
        self._serving = serving

    def get(self, name: str | None) -> ServedModel:
        """The model; without a name the only one there is.

        Raises:
            ApiError: 404 for a name that is not served, 400 where a name is needed.
        """
        if name is None:
            if len(self._models) == 1:
                return next(iter(self._models.values()))
            raise ApiError(400, "Missing parameter: `model`.", param="model", code="missing_parameter")
        model = self._models.get(name)
        if model is None:
            raise unknown_model(name)
        return model

    def names(self) -> list[str]:
        """Served names, in their configured order."""
        return list(self._models)

    def limit(self, model: ServedModel) -> int:
        """Its length bound now, tokens: the instances may have been started with less than the model can."""
        live = self._serving(model.name).max_model_len
        return min(live, model.max_model_len) if live else model.max_model_len

    def waiting_for(self) -> list[str]:
        """Names of models that no instance serves now."""
        return [name for name in self._models if self._serving(name).instances < 1]

    def card(self, model: ServedModel) -> dict[str, object]:
        """One entry of ``/v1/models``."""
        return {
            "id": model.name,
            "object": "model",
            "created": model.created,
            "owned_by": "millrace",
            "root": model.name,
            "parent": None,
            "max_model_len": self.limit(model),
        }

    def list_body(self) -> bytes:
        """Body of ``GET /v1/models``."""
        return _encode({"object": "list", "data": [self.card(m) for m in self._models.values()]})

"""Served models as the API knows them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

import msgspec
from millrace.cluster.model_parsers import ModelParsers
from millrace.contracts.worker import Adapter
from millrace.membership.member import Member

from services.ingress.api.errors import missing, unknown_model
from services.ingress.api.tokenizer import ModelTokenizer

#: Bound of a model whose config.json has none, until an engine says what vLLM derives.
LENGTH_UNKNOWN = 1 << 20

_encode = msgspec.json.Encoder().encode


class Serving(msgspec.Struct, frozen=True):
    """Live state of a model.

    Attributes:
        max_model_len: Smallest limit among them, tokens; 0 where unknown.
        wanted: Someone planned instances for it. False for a tier that its cascade's plan leaves empty.
        why_none: Reason why no instance takes work; empty where one does.
    """

    instances: int = 0
    max_model_len: int = 0
    wanted: bool = True
    why_none: str = ""


class ServedModel(msgspec.Struct, frozen=True, kw_only=True):
    """One served model.

    Attributes:
        max_model_len: Prompt plus output bound, tokens; 0 where only engines know it.
        created: Unix seconds, shown in ``/v1/models``.
        parsers: Of its output; those that are not usable here left out.
        adapter: LoRA adapter that a client asked for in its place; None for the model itself.
    """

    name: str
    tokenizer: ModelTokenizer
    max_model_len: int
    created: int = 0
    parsers: ModelParsers = ModelParsers()
    adapter: Adapter | None = None

    @property
    def shown(self) -> str:
        """Name that a client asked for."""
        return self.name if self.adapter is None else self.adapter.name


class ModelRegistry:
    """Served name -> model, with what is live for it; adapters and cascades of these models."""

    def __init__(
        self,
        models: Mapping[str, ServedModel],
        serving: Callable[[str], Serving],
        cascades: Callable[[], Mapping[str, Sequence[str]]] = dict,
        members: Callable[[], Iterable[Member]] = tuple,
        adapters: Mapping[str, tuple[str, Adapter]] = MappingProxyType({}),
    ) -> None:
        """Args:
        cascades: Name of each cascade that is served now -> models of its tiers.
        members: Instances that serve now.
        adapters: Name of each adapter that is offered now -> its model, and itself; changes as they do.
        """
        self.members_now = members
        self._models = dict(models)
        self._serving = serving
        self._cascades = cascades
        self.adapters = adapters

    def get(self, name: str | None) -> ServedModel:
        """The model; without a name the only one there is.

        Raises:
            ApiError: 404 for a name that is not served, 400 where a name is needed.
        """
        if name is None:
            if len(self._models) == 1:
                return next(iter(self._models.values()))
            raise missing("model")
        base, adapter = self.adapters.get(name, (name, None)) if name not in self._models else (name, None)
        model = self._models.get(base)
        if model is None:
            raise unknown_model(name)
        return model if adapter is None else msgspec.structs.replace(model, adapter=adapter)

    def is_taken(self, name: str) -> bool:
        """Whether a model or a cascade has this name."""
        return name in self._models or name in self._cascades()

    def members(self, name: str) -> list[ServedModel] | None:
        """Models of a cascade's tiers, those that are served here; None where the name is no cascade's."""
        tiers = self._cascades().get(name)
        return None if tiers is None else [self._models[tier] for tier in tiers if tier in self._models]

    def vllm_version(self) -> str:
        """Of the engines that serve now; empty where none is vLLM's."""
        records = (member.record for member in self.members_now())
        return next((record.engine_version for record in records if record and record.engine == "vllm"), "")

    def task(self, name: str) -> str:
        """Pooling task of a model's engines; empty where it generates, or none has registered."""
        records = (member.record for member in self.members_now())
        return next((record.task for record in records if record and record.model == name), "")

    def names(self) -> tuple[tuple[str, ...], ...]:
        """Names that are served now: of models in their configured order, of adapters and of cascades."""
        adapters = [name for name, (model, _) in self.adapters.items() if model in self._models]
        return tuple(self._models), tuple(adapters), tuple(name for name in self._cascades() if self.members(name))

    def limit(self, model: ServedModel) -> int:
        """Its length bound now, tokens: the instances may have been started with less than the model can."""
        limits = (self._serving(model.name).max_model_len, model.max_model_len)
        return min(filter(None, limits), default=LENGTH_UNKNOWN)

    def waiting_for(self) -> dict[str, str]:
        """Models that no instance serves now, although someone planned one, and why."""
        serving = {name: self._serving(name) for name in self._models}
        return {name: live.why_none for name, live in serving.items() if live.wanted and live.instances < 1}

    def card(self, model: ServedModel) -> dict[str, object]:
        """One entry of ``/v1/models``; with ``planned: false`` for a tier that its cascade's plan leaves empty."""
        empty = {} if self._serving(model.name).wanted else {"planned": False}
        return empty | {
            "id": model.shown,
            "object": "model",
            "created": model.created,
            "owned_by": "millrace",
            "root": model.name if model.adapter is None else model.adapter.path,
            "parent": None if model.adapter is None else model.name,
            "max_model_len": self.limit(model),
        }

    def card_of(self, name: str) -> dict[str, object]:
        """Entry of a model or a cascade.

        Raises:
            ApiError: 404 for a name that is not served.
        """
        members = self.members(name)
        if not members:
            return self.card(self.get(name))
        largest = self.card(max(members, key=self.limit))
        largest.pop("planned", None)
        return largest | {"id": name, "root": name, "cascade": [member.name for member in members]}

    def list_body(self) -> bytes:
        """Body of ``GET /v1/models``: models, then adapters, then cascades."""
        return _encode({"object": "list", "data": [self.card_of(name) for names in self.names() for name in names]})

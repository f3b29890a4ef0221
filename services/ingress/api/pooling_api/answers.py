"""Answers of models that pool, in vLLM's shapes."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
from millrace.contracts.worker import Pooled

from services.ingress.api.answer_forms import AnswerForm
from services.ingress.api.streams import ResponseHead
from services.ingress.calls.messages import CascadeReport, ChoiceDelta, Usage

_encode = msgspec.json.Encoder().encode
_decode = msgspec.msgpack.Decoder(Pooled).decode

#: Pooled outputs in the order of the prompts -> the fields of the answer that follow from them.
Shape = Callable[[Sequence[Pooled]], dict[str, Any]]


def pooled_form(prefix: str, shape: Shape) -> AnswerForm:
    """Form of the answer to one request."""
    return AnswerForm(prefix, lambda head: PooledAnswer(head, shape))


class PooledAnswer:
    """Collects what was pooled of each prompt."""

    def __init__(self, head: ResponseHead, shape: Shape) -> None:
        self._head = head
        self._shape = shape
        self._pooled = [b""] * head.choices

    def deltas(self, deltas: list[ChoiceDelta]) -> None:
        for delta in deltas:
            self._pooled[delta.index] = delta.pooled

    def body(self, usage: Usage, report: CascadeReport | None = None) -> bytes:
        head, tokens = self._head, usage.prompt_tokens
        counts = {
            "prompt_tokens": tokens,
            "total_tokens": tokens,
            "completion_tokens": 0,
            "prompt_tokens_details": None,
        }
        document = {"id": head.id, "object": "list", "created": head.created, "model": head.model, "usage": counts}
        return _encode(document | self._shape([_decode(each) for each in self._pooled]))


def _array(pooled: Pooled) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.frombuffer(pooled.values, "<f4").reshape(pooled.shape)


def vectors(kind: str, field: str, *, base64: bool) -> Shape:
    """The outputs as numbers, rows apart where there are several, or as base64 of them all.

    Args:
        kind: ``object`` of each.
    """

    def shown(pooled: Pooled) -> Any:
        return b64encode(pooled.values).decode() if base64 else _array(pooled).tolist()

    return lambda outputs: {
        "data": [{"index": i, "object": kind, field: shown(pooled)} for i, pooled in enumerate(outputs)]
    }


def classes(labels: Sequence[str]) -> Shape:
    """Probabilities of classes, with the likeliest one's label."""

    def entry(index: int, pooled: Pooled) -> dict[str, Any]:
        probs = _array(pooled).ravel().tolist()
        best = probs.index(max(probs))
        label = labels[best] if best < len(labels) else None
        return {"index": index, "label": label, "probs": probs, "num_classes": len(probs)}

    return lambda outputs: {"data": [entry(i, pooled) for i, pooled in enumerate(outputs)]}


def scores(outputs: Sequence[Pooled], queries: int) -> list[float]:
    """One score per pair.

    Args:
        outputs: Of the queries, then of the documents; without queries those of the pairs themselves.
    """
    if not queries:
        return [float(_array(pooled).ravel()[0]) for pooled in outputs]
    firsts = list(outputs[:queries]) * (len(outputs) - queries if queries == 1 else 1)
    return [_similarity(*pair) for pair in zip(firsts, outputs[queries:], strict=True)]


def _similarity(query: Pooled, document: Pooled) -> float:
    """Cosine of two vectors; of token vectors the sum of each query token's likest one of the document."""
    first, second = _array(query), _array(document)
    if first.ndim > 1:
        return float((first @ second.T).max(axis=1).sum())
    return float(first @ second / max(np.linalg.norm(first) * np.linalg.norm(second), 1e-8))


def score_list(queries: int) -> Shape:
    """Answer of /score."""
    return lambda outputs: {
        "data": [{"index": i, "object": "score", "score": score} for i, score in enumerate(scores(outputs, queries))]
    }


def ranking(queries: int, documents: Sequence[str], top_n: int) -> Shape:
    """Answer of /rerank: the documents in falling order of relevance."""

    def results(outputs: Sequence[Pooled]) -> dict[str, Any]:
        ranked = sorted(enumerate(scores(outputs, queries)), key=lambda ranked: -ranked[1])
        return {
            "results": [
                {"index": i, "document": {"text": documents[i], "multi_modal": None}, "relevance_score": score}
                for i, score in ranked[: top_n or None]
            ]
        }

    return results

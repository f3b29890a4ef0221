"""Quantiles of the rest from a hidden state: a small multi-layer perceptron in numpy, and its file.

The input is the last layer's state of a sequence's last token, after the final norm, beside what is known without it;
the output corrects survival's estimate in the logarithm, so that a head which learnt nothing says what survival says.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from millrace.files import replace_file
from millrace.lengths.survival import EDGES, Survival

Floats = NDArray[np.float32]
Counts = NDArray[np.int64]

FORMAT = "millrace-remaining/1"
#: Below a model's folder: weights that lay in it would be taken for the model's own.
HEAD_FILE = Path("remaining") / "head.safetensors"
#: Inputs besides the state, in order. Logarithms of one plus tokens; 0 where nothing was submitted.
FEATURES = ("generated", "left", "survival_p50", "survival_p90", "submitted_rest", "outrun", "submitted_known")
#: Above this a float's exponent says nothing of a length any more (16 million tokens).
LOG_MAX = 16.6
#: Generated tokens up to which features come from a table.
TABLE = 8_192
_GRID = np.log1p(EDGES[:-1].astype(np.float64))[:: len(EDGES) // 256]


class HeadUnreadable(ValueError):
    """A file that is no head of this version, or of another model; the text names file and reason."""


class HeadInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Metadata of a head's file.

    Attributes:
        fingerprint: Of the weights whose states it reads.
        hidden_size: Width of a state.
        requests, samples: It was trained on.
        stretch: Factor on the distance of the two logarithms, by which p90 covered 90 % of the tuning requests' tokens.
        figures: Of the guard, on held-out requests.
    """

    model: str
    fingerprint: str
    hidden_size: int
    requests: int = 0
    samples: int = 0
    stretch: float = 1.0
    figures: dict[str, Any] = {}
    format: str = FORMAT


class RemainingHead:
    """One trained head. ``layers`` are (weights, bias) pairs with ReLU between them, float32; the first one's weights
    have the state's rows first, then those of FEATURES. ``survival`` is (2, points): log1p of median and 90th
    percentile of the rest on a fixed grid of lengths.
    """

    def __init__(self, info: HeadInfo, layers: list[tuple[Floats, Floats]], survival: Floats) -> None:
        self.info = info
        self.layers = layers
        self.survival = survival
        width = info.hidden_size
        self._state_weights = np.ascontiguousarray(layers[0][0][:width])
        self._feature_weights = np.ascontiguousarray(layers[0][0][width:])
        self._table = self._by_generated(np.arange(TABLE))

    def _by_generated(self, generated: Counts) -> Floats:
        """Features that depend on nothing else: (count, 3)."""
        logs = np.log1p(generated.astype(np.float64))
        columns = [logs, *(np.interp(logs, _GRID, curve) for curve in self.survival)]
        return np.stack(columns, axis=1).astype(np.float32)

    def features(self, generated: Counts, left: Counts, submitted: Counts) -> Floats:
        """FEATURES of each sequence, (count, len(FEATURES)).

        Args:
            generated: Output tokens so far.
            left: Tokens that its bound leaves.
            submitted: Whole output as submitted; 0 for none.
        """
        made = np.empty((len(generated), len(FEATURES)), np.float32)
        in_table = not len(generated) or int(generated.max()) < TABLE
        by_generated = self._table[generated] if in_table else self._by_generated(generated)
        made[:, 0] = by_generated[:, 0]
        made[:, 1] = np.log1p(np.maximum(left, 0))
        made[:, 2:4] = by_generated[:, 1:]
        made[:, 4] = np.log1p(np.maximum(submitted - generated, 0))
        made[:, 6] = submitted > 0
        made[:, 5] = made[:, 6] * (submitted <= generated)
        return made

    def logs(self, states: Floats, features: Floats) -> Floats:
        """log1p of median and 90th percentile of the rest, (count, 2)."""
        value = states @ self._state_weights
        value += features @ self._feature_weights
        value += self.layers[0][1]
        for weights, bias in self.layers[1:]:
            np.maximum(value, 0.0, out=value)
            value = value @ weights
            value += bias
        value[:, 0] += features[:, 2]
        value[:, 1] = value[:, 0] + self.info.stretch * np.logaddexp(0.0, value[:, 1])
        return value

    def estimate(self, states: Floats, generated: Counts, left: Counts, submitted: Counts) -> Floats:
        """Median and 90th percentile of the rest, tokens, (count, 2): from 1 up to ``left``; NaN where a state is no
        number.
        """
        with np.errstate(invalid="ignore"):
            logs = self.logs(states, self.features(generated, left, submitted))
            rest = np.expm1(np.minimum(logs, LOG_MAX))
            bounded: Floats = np.maximum(np.minimum(rest, left[:, None]), 1.0)
        return bounded


def survival_table(survival: Survival) -> Floats:
    """A survival as a head keeps it: log1p of two quantiles of the rest on the grid."""
    rest = survival.quantiles(np.rint(np.expm1(_GRID)), (0.5, 0.9))
    return np.log1p(rest).T.astype(np.float32)


def write_head(path: Path, head: RemainingHead) -> None:
    """Writes a head, atomically.

    Raises:
        OSError: it cannot be written.
    """
    from safetensors.numpy import save

    tensors: dict[str, Any] = {"survival": head.survival}
    for index, (weights, bias) in enumerate(head.layers):
        tensors |= {f"layers.{index}.weight": weights, f"layers.{index}.bias": bias}
    info = {"info": json.dumps(msgspec.to_builtins(head.info), sort_keys=True)}
    replace_file(path, save({name: np.ascontiguousarray(value) for name, value in tensors.items()}, info))


def read_head(path: Path, *, fingerprint: str | None = None) -> RemainingHead:
    """Reads a head. Needs ``safetensors``.

    Args:
        fingerprint: Of the weights it must have been trained on; None for any.

    Raises:
        HeadUnreadable: it is torn, of another version or model, or holds what is no number.
        OSError: it cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    path.open("rb").close()  # a missing file is an OSError whatever the library makes of it
    try:
        with safe_open(path, framework="numpy") as file:
            info = msgspec.json.decode((file.metadata() or {}).get("info", ""), type=HeadInfo)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
    except (SafetensorError, msgspec.DecodeError) as error:
        raise HeadUnreadable(f"{path}: {error}") from None
    if info.format != FORMAT:
        raise HeadUnreadable(f"{path}: format {info.format}, not {FORMAT}")
    if fingerprint is not None and info.fingerprint != fingerprint:
        raise HeadUnreadable(f"{path}: trained on other weights than these")
    return _assembled(path, info, tensors)


def _assembled(path: Path, info: HeadInfo, tensors: dict[str, Any]) -> RemainingHead:
    count = sum(name.endswith(".weight") for name in tensors)
    try:
        layers = [(tensors[f"layers.{index}.weight"], tensors[f"layers.{index}.bias"]) for index in range(count)]
        survival = tensors["survival"]
    except KeyError as error:
        raise HeadUnreadable(f"{path}: {error} is missing") from None
    widths = [info.hidden_size + len(FEATURES), *(len(bias) for _, bias in layers)]
    shapes = list(pairwise(widths))
    if [weights.shape for weights, _ in layers] != shapes or widths[-1] != 2 or survival.shape != (2, len(_GRID)):
        raise HeadUnreadable(f"{path}: tensors of other shapes than a head has")
    if not 0.0 <= info.stretch < 100.0:
        raise HeadUnreadable(f"{path}: a stretch of {info.stretch}")
    if not all(value.dtype == np.float32 and np.isfinite(value).all() for value in tensors.values()):
        raise HeadUnreadable(f"{path}: holds what is no number")
    return RemainingHead(info, layers, survival)

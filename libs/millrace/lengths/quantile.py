"""The trained model: gradient-boosted trees for the mean and two quantiles, and the file they are kept in."""

from __future__ import annotations

import math
import zlib
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from millrace.lengths.estimate import LENGTH_MAX, LengthEstimate, Row
from millrace.lengths.features import FEATURE_VERSION, FEATURES
from millrace.lengths.trees import FlatTrees, Forest

#: Larger models are refused, bytes once inflated.
FILE_BYTES_MAX = 16 * 1024 * 1024
FORMAT = "millrace-lengths/1"
#: exp() of more is no length.
_LOG_MAX = math.log(LENGTH_MAX)


class ModelUnreadable(ValueError):
    """The bytes are no length model of this version; the text says why."""


class ModelFile(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of a model's file.

    Attributes:
        feature_version, features: Of the code that trained it; another version is refused.
        model: Served model whose outputs it learnt from.
        samples: Outcomes that it was trained on.
        trained_ns: Unix ns; 0 where unknown.
        figures: Holdout scores, for people.
        trees: Outputs are log of the mean, and the quantiles 0.5 and 0.9 of log(1 + length).
    """

    format: str
    feature_version: int
    features: int
    model: str
    samples: int
    trees: FlatTrees
    trained_ns: int = 0
    figures: dict[str, Any] = {}


class QuantileModel:
    """Predicts with trees. Immutable."""

    def __init__(self, file: ModelFile) -> None:
        self.file = file
        self._forest = Forest(file.trees)

    def estimate(self, row: Row) -> LengthEstimate:
        """Mean, median and 90th percentile; always in order."""
        log_mean, log_p50, log_p90 = self._forest.predict(row).tolist()
        p50 = math.expm1(min(max(log_p50, 0.0), _LOG_MAX))
        p90 = math.expm1(min(max(log_p90, 0.0), _LOG_MAX))
        return LengthEstimate(math.exp(min(max(log_mean, 0.0), _LOG_MAX)), p50, max(p50, p90))

    def estimate_many(self, rows: NDArray[np.float64]) -> NDArray[np.float64]:
        """The same for (rows, features): columns mean, p50, p90."""
        raw = np.clip(self._forest.predict_many(rows), 0.0, _LOG_MAX)
        p50 = np.expm1(raw[:, 1])
        return np.column_stack([np.exp(raw[:, 0]), p50, np.maximum(p50, np.expm1(raw[:, 2]))])

    def encode(self) -> bytes:
        return zlib.compress(msgspec.msgpack.encode(self.file), 9)


def decode_model(payload: bytes) -> QuantileModel:
    """Reads a file's bytes.

    Raises:
        ModelUnreadable: not one, a damaged one, or one of other features.
    """
    try:
        inflater = zlib.decompressobj()
        plain = inflater.decompress(payload, FILE_BYTES_MAX)
        if not inflater.eof:
            raise ModelUnreadable("no length model: it is cut, or too large")
        file = msgspec.msgpack.decode(plain, type=ModelFile)
    except (zlib.error, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ModelUnreadable(f"no length model: {error}") from None
    if file.format != FORMAT:
        raise ModelUnreadable(f"format {file.format!r}, this is {FORMAT!r}")
    if (file.feature_version, file.features) != (FEATURE_VERSION, len(FEATURES)):
        raise ModelUnreadable(
            f"{file.features} features of version {file.feature_version}, these are {len(FEATURES)} of version "
            f"{FEATURE_VERSION}: train it again"
        )
    try:
        model = QuantileModel(file)
        if model._forest.features_wanted > len(FEATURES) or len(file.trees.outputs) != 3:
            raise ValueError("trees of other features")
    except (ValueError, IndexError) as error:
        raise ModelUnreadable(f"damaged: {error}") from None
    return model

"""Evaluates regression trees from flat arrays: one row through 200 trees in some 20 µs, without LightGBM.

All trees are walked at once, one level at a time. A leaf's children are itself, so that every walk may take the same
number of steps. LightGBM itself takes 23 to 38 µs a row and model, needs 60 MB and reads thread settings; the serving
process has no need of it.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

#: Bounds of what is read from a file: a damaged one must not take all memory.
NODES_MAX = 1_000_000
DEPTH_MAX = 64


class FlatTrees(msgspec.Struct, frozen=True):
    """Trees of several outputs, as bytes: little-endian arrays of one entry per node unless said.

    Attributes:
        features: Column compared, uint16; 0 at leaves.
        thresholds: Go left where the value is at most this, float64; +inf at leaves.
        children: Pairs (left, right), int32.
        values: Leaf values, float32; 0 at inner nodes.
        roots: First node of each tree, int32, ordered by output.
        outputs: Number of trees of each output.
        depth: Steps from a root to the deepest leaf.
    """

    features: bytes
    thresholds: bytes
    children: bytes
    values: bytes
    roots: bytes
    outputs: list[int]
    depth: int


class Forest:
    """The same, ready to evaluate.

    Raises:
        ValueError: the arrays contradict each other.
    """

    def __init__(self, trees: FlatTrees) -> None:
        self.trees = trees
        self._features = np.frombuffer(trees.features, "<u2").astype(np.intp)
        self._thresholds = np.frombuffer(trees.thresholds, "<f8")
        self._children = np.frombuffer(trees.children, "<i4").astype(np.intp)
        self._values = np.frombuffer(trees.values, "<f4").astype(np.float64)
        self._roots = np.frombuffer(trees.roots, "<i4").astype(np.intp)
        self._starts = np.concatenate(([0], np.cumsum(trees.outputs)[:-1])).astype(np.intp)
        self._check()
        # One row is walked on doubled node numbers, to which the side taken is added as it is: saves a fifth.
        self._doubled = self._roots * 2
        self._doubled_features = np.repeat(self._features, 2)
        self._doubled_thresholds = np.repeat(self._thresholds, 2)
        self._doubled_children = self._children * 2
        self._doubled_values = np.repeat(self._values, 2)

    def _check(self) -> None:
        nodes = len(self._values)
        sizes = {len(self._features), len(self._thresholds), len(self._children) // 2, nodes}
        if len(sizes) != 1 or not 0 < nodes <= NODES_MAX or not 0 <= self.trees.depth <= DEPTH_MAX:
            raise ValueError("arrays of different lengths")
        if sum(self.trees.outputs) != len(self._roots) or min(self.trees.outputs, default=0) < 1:
            raise ValueError("roots and outputs differ")
        for places in (self._children, self._roots):
            if places.min() < 0 or places.max() >= nodes:
                raise ValueError("a node that does not exist")
        if not np.isfinite(self._values).all() or np.isnan(self._thresholds).any():
            raise ValueError("a value that is no number")

    @property
    def features_wanted(self) -> int:
        """Columns that a row must have at least."""
        return int(self._features.max()) + 1

    def predict(self, row: NDArray[np.float64]) -> NDArray[np.float64]:
        """Sums of leaf values, one per output, of one row."""
        node = self._doubled
        for _ in range(self.trees.depth):
            right = row.take(self._doubled_features.take(node)) > self._doubled_thresholds.take(node)
            node = self._doubled_children.take(node + right)
        return np.add.reduceat(self._doubled_values.take(node), self._starts)

    def predict_many(self, rows: NDArray[np.float64]) -> NDArray[np.float64]:
        """The same of many rows: (rows, outputs)."""
        node = np.broadcast_to(self._roots, (len(rows), len(self._roots)))
        for _ in range(self.trees.depth):
            right = np.take_along_axis(rows, self._features[node], axis=1) > self._thresholds[node]
            node = self._children[node * 2 + right]
        result: NDArray[np.float64] = np.add.reduceat(self._values[node], self._starts, axis=1)
        return result


def flatten(models: list[dict[str, Any]]) -> FlatTrees:
    """Trees of LightGBM models (``Booster.dump_model()``), one model per output.

    Raises:
        ValueError: a split that is not a plain comparison.
    """
    builder = _Builder()
    for model in models:
        for tree in model["tree_info"]:
            builder.roots.append(builder.add(tree["tree_structure"], 0))
    return FlatTrees(
        features=np.array(builder.features, "<u2").tobytes(),
        thresholds=np.array(builder.thresholds, "<f8").tobytes(),
        children=np.array(builder.children, "<i4").tobytes(),
        values=np.array(builder.values, "<f4").tobytes(),
        roots=np.array(builder.roots, "<i4").tobytes(),
        outputs=[len(model["tree_info"]) for model in models],
        depth=builder.depth,
    )


class _Builder:
    def __init__(self) -> None:
        self.features: list[int] = []
        self.thresholds: list[float] = []
        self.children: list[tuple[int, int]] = []
        self.values: list[float] = []
        self.roots: list[int] = []
        self.depth = 0

    def add(self, node: dict[str, Any], depth: int) -> int:
        """Adds a node with all below it; returns its place."""
        place = len(self.values)
        self.depth = max(self.depth, depth)
        leaf = "leaf_value" in node
        if not leaf and node["decision_type"] != "<=":
            raise ValueError(f"a split by {node['decision_type']!r}")
        self.features.append(0 if leaf else node["split_feature"])
        self.thresholds.append(float("inf") if leaf else node["threshold"])
        self.values.append(node["leaf_value"] if leaf else 0.0)
        self.children.append((place, place))
        if not leaf:
            self.children[place] = (self.add(node["left_child"], depth + 1), self.add(node["right_child"], depth + 1))
        return place

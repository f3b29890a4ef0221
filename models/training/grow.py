"""Starts a larger model from a smaller trained one: it says nearly the same at first and has room to learn more.

On two cores the larger models cannot see enough tokens from nothing in the time there is; grown from the next smaller
one each goes on where that stood. Width: old weights fill the first rows and columns; what is new is drawn and made
small, and new units write nothing to the residual stream yet. Depth: a new layer is a copy of the one before that
writes nothing yet.

Source: Chen, Goodfellow, Shlens, "Net2Net", section 2; differs in that layers are copied with a silenced output.
"""

import torch
from torch import Tensor

from models.training.model import Llama, Shape

# What is drawn for new inputs and outputs: enough to break symmetry, too little to disturb what is known.
NEW_SHARE = 0.1


def grow(small: Llama, large: Llama) -> None:
    """Overwrites the drawn weights of `large` so that it computes nearly what `small` does.

    Both need the same head size, and the large one no fewer heads per key-value head.
    """
    old, new = small.state_dict(), large.state_dict()
    shapes = small.shape, large.shape
    for layer, (source, silent) in enumerate(layer_sources(small.shape.layers, large.shape.layers)):
        for name in (name for name in new if name.startswith(f"model.layers.{layer}.")):
            part = name.removeprefix(f"model.layers.{layer}.")
            grown = _grown(old[f"model.layers.{source}.{part}"], new[name], part, *shapes)
            new[name] = torch.zeros_like(grown) if silent and _writes(part) else grown
    for name in ("model.embed_tokens.weight", "model.norm.weight"):
        new[name] = _grown(old[name], new[name], name, *shapes)
    large.load_state_dict(new)


def layer_sources(old: int, new: int) -> list[tuple[int, bool]]:
    """For each new layer the old one it comes from, and whether it is a silenced copy of the layer before it."""
    sources = [layer * old // new for layer in range(new)]
    return [(source, i > 0 and sources[i - 1] == source) for i, source in enumerate(sources)]


def _writes(part: str) -> bool:
    """Whether this matrix writes to the residual stream."""
    return "o_proj" in part or "down_proj" in part


def _places(part: str, small: Shape, large: Shape, old: Tensor) -> list[Tensor]:
    """Per dimension of an old matrix, where its rows or columns lie in the new one.

    Old heads stay with their key-value head: where a group grows, the new heads follow the old ones of each group.
    """
    old_group, new_group = small.heads // small.kv_heads, large.heads // large.kv_heads
    heads = torch.arange(small.heads)
    starts = (heads // old_group * new_group + heads % old_group) * small.head_size
    head_places = (starts[:, None] + torch.arange(small.head_size)).flatten()
    places = [torch.arange(size) for size in old.shape]
    if "q_proj" in part:
        places[0] = head_places
    if "o_proj" in part:
        places[1] = head_places
    return places


def _grown(old: Tensor, drawn: Tensor, part: str, small: Shape, large: Shape) -> Tensor:
    if old.ndim == 1:
        # The norm divides by the root mean square over more places, of which the new ones hold next to nothing.
        widening = (small.width / large.width) ** 0.5
        grown = torch.full_like(drawn, widening)
        grown[: len(old)] = old * widening
        return grown
    rows, columns = _places(part, small, large, old)
    added = torch.ones(drawn.shape[1], dtype=torch.bool)
    added[columns] = False
    grown = drawn.clone()
    if _writes(part):
        grown[len(rows) :] *= NEW_SHARE
        grown[:, added] = 0
    else:
        grown[:, added] *= NEW_SHARE
    grown[rows[:, None], columns] = old
    return grown

"""Stage policies: which stage serves which lengths with how many instances, and where its boundaries move."""

from __future__ import annotations

from millrace.policies.stages.membership import StageShape, assign, shapes_of, stages_of
from millrace.policies.stages.routing import covers, stage_for, stage_order

__all__ = ["StageShape", "assign", "covers", "shapes_of", "stage_for", "stage_order", "stages_of"]

"""Configuration of the tagger."""

from __future__ import annotations

from typing import Annotated

import msgspec
from millrace.actor.config import ProcessConfig
from millrace.actor.config_marks import WIRED
from millrace.contracts.bounds import Count, Natural, Wait


class LearningConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings for learning from outcomes, and for its storage. History is always learnt, in memory.

    Attributes:
        pretrained: Begin with the models that ship.
        directory: Folder of outcomes and models; empty to keep nothing.
        retrain_outcomes: New outcomes of a model until another candidate is trained; 0 for never.
        outcomes_min: Outcomes before the first training.
        retrain_pause_s: Time between two trainings of one model.
    """

    pretrained: bool = True
    directory: Annotated[str, WIRED] = ""
    retrain_outcomes: Natural = 500
    outcomes_min: Count = 300
    retrain_pause_s: Wait = 60.0


#: For simulations, where nothing is written and no process is started: history only.
NO_TRAINING = LearningConfig(pretrained=False, retrain_outcomes=0)


class TaggerConfig(ProcessConfig, frozen=True, kw_only=True):
    """Configuration of a tagger process.

    Attributes:
        name: Unique name on the bus.
    """

    name: Annotated[str, WIRED] = "tagger-0"
    learning: LearningConfig = LearningConfig()

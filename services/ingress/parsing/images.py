"""The image process: ``python -m services.ingress.parsing.images FD MODELS``. It finds out which tokens images take.

It decodes each image and has the model's own processor cut and scale it, as engines do (``vllm_engine/images.py``):
nothing less tells the number of tokens. This needs all of vLLM, which the parser process does without.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from services.ingress.parsing.host import main
from services.ingress.parsing.messages import Answer, ExpandImages, ImagesExpanded, ParsedModel, Question

#: Pixels of one image, by its header: 100 MB once it is decoded.
PIXELS_MAX = 1 << 25
_FAULT_MAX = 300


class ImageHost:
    """Answers questions about the prompts of some models."""

    def __init__(self, models: Sequence[ParsedModel]) -> None:
        os.environ["VLLM_MAX_IMAGE_PIXELS"] = str(PIXELS_MAX)
        self._processors: dict[str, Any] = {}
        self.faults: dict[str, str] = {}
        for model in models:
            try:
                self._processors[model.name] = _processor(model.path)
            except Exception as error:  # noqa: BLE001 - one model's fault is told, and leaves the others
                self.faults[model.name] = _sentence(error)

    def answer(self, question: Question) -> Answer | None:
        """The answer; None where none is due."""
        if not isinstance(question, ExpandImages):
            return None
        if fault := self.faults.get(question.model):
            return ImagesExpanded([], f"this model's processor cannot be used: {fault}")
        try:
            return ImagesExpanded(self._expanded(question))
        except Exception as error:  # noqa: BLE001 - vLLM's checks raise anything; all of it refuses this request
            return ImagesExpanded([], _sentence(error))

    def _expanded(self, question: ExpandImages) -> list[int]:
        from vllm.multimodal.media.image import ImageMediaIO
        from vllm.multimodal.processing import ProcessorInputs, TimingContext

        processor = self._processors[question.model]
        images = [ImageMediaIO().load_bytes(data) for data in question.images]
        inputs = ProcessorInputs(question.prompt, processor.info.parse_mm_data({"image": images}))
        return list(processor.apply(inputs, TimingContext(enabled=False))["prompt_token_ids"])


def _processor(path: str) -> Any:
    import torch
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.multimodal import MULTIMODAL_REGISTRY

    torch.set_num_threads(1)
    return MULTIMODAL_REGISTRY.create_processor(AsyncEngineArgs(model=path).create_model_config())


def _sentence(error: Exception) -> str:
    return str(error).strip().partition(". ")[0][:_FAULT_MAX] or type(error).__name__


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main(ImageHost)

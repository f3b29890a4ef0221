"""A prompt's images as vLLM takes them: by its own processor, from the files that came with the sequence."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from millrace.actor.engine import EngineSequence
from vllm.multimodal.media.image import ImageMediaIO


async def image_input(renderer: Any, sequence: EngineSequence) -> Any:
    """Input with a sequence's images; its token ids are those of the prompt.

    vLLM's cache of processed images is left alone: its two halves have to see each image in one order, and a sequence
    may be cancelled between them.

    Raises:
        ValueError: an image cannot be used, or takes other tokens here than at the ingress.
    """
    images = sequence.sampling.images
    assert images is not None
    files = await asyncio.to_thread(lambda: [ImageMediaIO().load_bytes(data) for data in images.data])
    prompt = {"prompt_token_ids": images.prompt, "multi_modal_data": {"image": files}}
    made = await renderer.process_for_engine_async(prompt, time.time(), skip_mm_cache=True)
    if made["prompt_token_ids"] != sequence.prompt_token_ids:
        raise ValueError("the engine's processor gives these images other tokens than ingress's does")
    return made

"""Stands for vLLM's ``tests/utils.py``: its servers are the one that runs, at MILLRACE_URL."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import anthropic
import openai
import pytest

ROCM_EXTRA_ARGS: list[str] = []
VLLM_PATH = Path()


class RemoteOpenAIServer:
    """The server that runs, whatever flags a test asks for."""

    DUMMY_API_KEY = "token-abc123"

    def __init__(self, model: str, arguments: list[str], **rest: Any) -> None:
        self.url_root = os.environ["MILLRACE_URL"]
        self.host, self.port = urlsplit(self.url_root).hostname, urlsplit(self.url_root).port
        self.show_hidden_metrics = False

    def __enter__(self) -> RemoteOpenAIServer:
        return self

    def __exit__(self, *told: object) -> None:
        pass

    def url_for(self, *parts: str) -> str:
        """Address of a path."""
        return "/".join([self.url_root, *(part.strip("/") for part in parts if part)])

    def _client(self, kind: Any, path: str, options: dict[str, Any]) -> Any:
        return kind(
            base_url=self.url_for(path), api_key=self.DUMMY_API_KEY, max_retries=0, **{"timeout": 100} | options
        )

    def get_client(self, **options: Any) -> Any:
        """OpenAI's client."""
        return self._client(openai.OpenAI, "v1", options)

    def get_async_client(self, **options: Any) -> Any:
        """The same for asyncio."""
        return self._client(openai.AsyncOpenAI, "v1", options)

    def get_client_anthropic(self, **options: Any) -> Any:
        """Anthropic's client."""
        return self._client(anthropic.Anthropic, "", options)

    def get_async_client_anthropic(self, **options: Any) -> Any:
        """The same for asyncio."""
        return self._client(anthropic.AsyncAnthropic, "", options)


@pytest.fixture(scope="session")
def local_asset_server() -> LocalAssetServer:
    """Pictures, which no test of text asks for."""
    return LocalAssetServer()


class LocalAssetServer:
    """Stands for that of vLLM's ``tests/conftest.py``."""


RemoteLaunchRenderServer = RemoteOpenAIServerCustom = RemoteOpenAIServer


def __getattr__(name: str) -> Any:
    """Decorators of tests that need what is not here."""
    if not (name[0].isupper() or name.startswith(("multi_", "requires_"))):
        raise AttributeError(name)
    return lambda *told, **more: pytest.mark.skip(reason=name)

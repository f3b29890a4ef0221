"""Images fetched by their URLs, from the hosts that the configuration allows. Blocks: runs in a thread."""

from __future__ import annotations

import time
from collections.abc import Collection
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, build_opener

from services.ingress.api.errors import bad_value
from services.ingress.api.images import IMAGES_BYTES_MAX

#: Time for one image, and for its host to answer at all, seconds.
FETCH_S, ANSWER_S = 10.0, 5.0
_PIECE_BYTES = 65_536


class _NoRedirects(HTTPRedirectHandler):
    """A redirect could lead to any host."""

    def redirect_request(self, *told: Any) -> None:
        return None


_opener = build_opener(_NoRedirects)


def fetched(url: str, hosts: Collection[str]) -> bytes:
    """The file at a URL.

    Raises:
        ApiError: 400 where its host is not allowed, or it cannot be had.
    """
    until = time.monotonic() + FETCH_S
    data = b""
    try:
        if (host := urlsplit(url).hostname) not in hosts:
            detail = f"Images are not fetched from {host}: send them as `data:` URLs, or name it in `http.image_hosts`."
            raise bad_value("messages", detail, "image_host_not_allowed")
        with _opener.open(url, timeout=ANSWER_S) as answer:
            while piece := answer.read1(_PIECE_BYTES):
                data += piece
                if len(data) > IMAGES_BYTES_MAX or time.monotonic() > until:
                    raise ValueError(f"more than {IMAGES_BYTES_MAX} bytes, or {FETCH_S:.0f} s")
    except (OSError, HTTPException, ValueError) as error:
        why = f"status {error.code}" if isinstance(error, HTTPError) else str(error)[:100]
        detail = f"The image at {url[:200]} cannot be fetched: {why}."
        raise bad_value("messages", detail, "image_not_fetched") from None
    return data

"""Configuration of the page."""

from __future__ import annotations

from typing import Annotated

from millrace.actor.config import ProcessConfig
from millrace.actor.config_marks import WIRED
from millrace.contracts.bounds import PortOrNone


class PageConfig(ProcessConfig, frozen=True, kw_only=True):
    """Configuration of a page's process. It reads the bus as the role observer.

    Attributes:
        name: Unique name of the process.
        host: Address that it binds. Beyond loopback a viewer needs a key: the observer's password on the bus.
        port: TCP port; 0 for any free one.
        folder: Of the cluster's files, for orders that change it; empty where there is none.
    """

    name: Annotated[str, WIRED] = "page"
    host: Annotated[str, WIRED] = "127.0.0.1"
    port: Annotated[PortOrNone, WIRED] = 8001
    folder: Annotated[str, WIRED] = ""

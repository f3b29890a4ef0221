"""Types of configuration keys with bounds: checked where a file is read, shown in docs/CONFIGURATION.md."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

#: Something that there must be one of.
Count = Annotated[int, Meta(ge=1)]

#: Something that there may be none of; often 0 means no bound.
Natural = Annotated[int, Meta(ge=0)]

#: Processes of one service.
Processes = Annotated[int, Meta(ge=1, le=64)]

#: A time span that cannot be nothing.
Span = Annotated[float, Meta(gt=0)]

#: A time span; 0 for at once, or for no bound.
Wait = Annotated[float, Meta(ge=0)]

#: A part of a whole.
Share = Annotated[float, Meta(ge=0, le=1)]

#: A score of answers.
Score = Annotated[float, Meta(ge=0, le=100)]

#: A TCP port.
PortNumber = Annotated[int, Meta(ge=1, le=65_535)]

#: A TCP port; 0 for a free one, or for none.
PortOrNone = Annotated[int, Meta(ge=0, le=65_535)]

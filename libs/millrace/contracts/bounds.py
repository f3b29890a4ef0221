"""Types with bounds, of configuration keys and of messages: checked where a file is read, or a message decoded."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

#: Something that there must be one of.
Count = Annotated[int, Meta(ge=1)]

#: Something that there may be none of; often 0 means no bound.
Natural = Annotated[int, Meta(ge=0)]

#: Processes of one service.
Processes = Annotated[int, Meta(ge=1, le=64)]

#: A length of a sequence, or a sum of some, tokens or blocks.
Tokens = Annotated[int, Meta(ge=0, lt=1 << 31)]

#: A time, ns.
TimeNs = Annotated[int, Meta(ge=0, lt=1 << 62)]

#: A difference of times, ns.
DelayNs = Annotated[int, Meta(gt=-(1 << 62), lt=1 << 62)]

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

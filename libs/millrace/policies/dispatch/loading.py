"""A dispatch policy by its name, or by the file that it stands in: what composition roots call, live and simulated.

A file is a Python module with ``decide``, and where it wants them ``Parameters``, ``State``, ``ask`` and
``needs_length``; docs/SIMULATION.md shows one. It is executed, so only whoever may change the configuration names it.
The policy's name is the file's, without ``.py``.
"""

from __future__ import annotations

import functools
import importlib.util
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from millrace.policies.dispatch import DISPATCH_POLICIES, DispatchPolicy
from millrace.policies.dispatch.asking import QueryParameters

SUFFIX = ".py"


class PolicyError(ValueError):
    """There is no such policy, or its file is none. The message names it and says what is wrong."""


class Nothing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The parameters or the state of a file that names none."""


def load_policy(name: str) -> DispatchPolicy:
    """The policy of this name, or of the file that ``name`` is the path of: one that ends in ``.py``.

    Raises:
        PolicyError: the name is unknown, or the file cannot be taken as a policy.
    """
    if name.endswith(SUFFIX):
        return _loaded(str(Path(name).absolute()))
    if name not in DISPATCH_POLICIES:
        raise PolicyError(f"{name!r} is none of {', '.join(sorted(DISPATCH_POLICIES))}, and no file that ends in .py")
    return DISPATCH_POLICIES[name]


def policy_name(name: str) -> str:
    """Return the policy's name in decisions, metrics and tables."""
    return Path(name).stem if name.endswith(SUFFIX) else name


@functools.cache
def _loaded(path: str) -> DispatchPolicy:
    name = policy_name(path)
    if name in DISPATCH_POLICIES:
        raise PolicyError(f"{path}: a policy {name} ships already; give the file another name")
    module = _executed(path, name)
    policy = DispatchPolicy(
        name=name,
        decide=_function(module, "decide", path),
        parameters=_struct(module, "Parameters", path),
        initial_state=_struct(module, "State", path)(),
        ask=_function(module, "ask", path) if hasattr(module, "ask") else None,
        needs_length=bool(getattr(module, "needs_length", hasattr(module, "ask"))),
    )
    if policy.ask is not None and not issubclass(policy.parameters, QueryParameters):
        wanted = "millrace.policies.dispatch.QueryParameters"
        raise PolicyError(f"{path}: it has ask, so its Parameters must extend {wanted}")
    return policy


def _executed(path: str, name: str) -> ModuleType:
    specification = importlib.util.spec_from_file_location(f"millrace_policy_{name}", path)
    if specification is None or specification.loader is None or not Path(path).is_file():
        raise PolicyError(f"{path}: no such file")
    module = importlib.util.module_from_spec(specification)
    try:
        specification.loader.exec_module(module)
    except Exception as error:  # whatever a stranger's module raises means that it is no policy
        raise PolicyError(f"{path}:{_line(error, path)} {type(error).__name__}: {error}") from error
    return module


def _line(error: Exception, path: str) -> str:
    """``12:`` where the file's own line is known."""
    if isinstance(error, SyntaxError):
        return f"{error.lineno}:"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    return f"{lines[-1]}:" if lines else ""


def _function(module: ModuleType, name: str, path: str) -> Any:
    found = getattr(module, name, None)
    if not callable(found):
        raise PolicyError(f"{path}: it has no function {name}")
    return found


def _struct(module: ModuleType, name: str, path: str) -> type[msgspec.Struct]:
    """The class, which must be buildable without arguments: every parameter has a default."""
    found = getattr(module, name, Nothing)
    if not (isinstance(found, type) and issubclass(found, msgspec.Struct)):
        raise PolicyError(f"{path}: {name} must be a msgspec.Struct")
    try:
        found()
    except TypeError as error:
        raise PolicyError(f"{path}: every field of {name} needs a default: {error}") from None
    return found

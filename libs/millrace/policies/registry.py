"""Policies of a slot by name, by file or by entry point: what composition roots call, live and simulated.

A slot says with one Struct what a policy is (``DispatchPolicy``); a policy is a module with a function for each of the
Struct's fields, ``Parameters`` and ``State``. A setting names a policy that ships, the path of a file that ends in
``.py``, or an entry point of the group ``millrace.policies.<slot>`` of an installed package. A file is executed, so
only who may change the configuration names it; docs/SIMULATION.md shows one.
"""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Iterable, Mapping
from hashlib import sha1
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar

import msgspec

from millrace.actor.errors import ConfigError

SUFFIX = ".py"


class PolicyError(ConfigError):
    """There is no such policy, it cannot be loaded, or it has no such parameter. The message names it."""


class Nothing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The parameters or the state of a module that has none."""


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of the policies of every slot.

    Attributes:
        name: Name in decisions, metrics and tables; a file's is its stem where the module says none.
        parameters: Struct of its parameters; every field has a default.
    """

    name: str
    parameters: type[msgspec.Struct]


P = TypeVar("P", bound=Policy)


class Registry(Generic[P]):
    """The policies of one slot.

    Attributes:
        slot: Name of the slot, which ends the group of its entry points.
        names: Policies that ship, sorted.
    """

    def __init__(self, slot: str, kind: type[P], shipped: Iterable[ModuleType]) -> None:
        """Loads what ships.

        Args:
            kind: Struct of a policy. ``parameters`` and ``initial_state`` are the module's ``Parameters`` and
                ``State()``, ``name`` its own or the file's; every other field is what the module calls so, which may be
                missing where the field has a default.
            shipped: Modules ``<name>/policy.py``.
        """
        self.slot = slot
        self._kind = kind
        self._shipped = {name: self._built(module, name) for module in shipped for name in [_folder(module)]}
        self._loaded: dict[str, P] = {}
        self.names = tuple(sorted(self._shipped))

    def shipped(self) -> list[P]:
        return [self._shipped[name] for name in self.names]

    def load(self, name: str) -> P:
        """The policy of this name.

        Raises:
            PolicyError: there is none, or its module is not a policy of this slot.
        """
        if name in self._shipped:
            return self._shipped[name]
        key = str(Path(name).absolute()) if is_file(name) else name
        if key not in self._loaded:
            self._loaded[key] = self._from_file(key) if is_file(name) else self._from_entry_point(name)
        return self._loaded[key]

    def choose(
        self, name: str, parameters: Mapping[str, Any], *, key: str = "policy", table: str = ""
    ) -> tuple[P, Any]:
        """The policy with its parameters.

        Args:
            name: As for ``load``.
            parameters: Fields of the policy's ``Parameters``.
            key: Setting that ``name`` comes from.
            table: Table that both stand in, with the dot behind it.

        Raises:
            PolicyError: begins with the key or with ``parameters of``.
        """
        try:
            policy = self.load(name)
        except PolicyError as error:
            raise PolicyError(f"{table}{key}: {error}") from error
        try:
            return policy, msgspec.convert(parameters, policy.parameters)
        except msgspec.ValidationError as error:
            raise PolicyError(f"{table}parameters of {policy.name}: {error}") from None

    def _from_file(self, path: str) -> P:
        name = Path(path).stem
        if name in self._shipped:
            raise PolicyError(f"{path}: a policy {name} ships already; give the file another name")
        module = _executed(path)
        try:
            return self._built(module, name)
        except PolicyError as error:
            raise PolicyError(f"{path}: {error}") from error

    def _from_entry_point(self, name: str) -> P:
        group = f"millrace.policies.{self.slot}"
        found = tuple(entry_points(group=group, name=name))
        if not found:
            known = ", ".join(self.names)
            raise PolicyError(f"{name!r} is none of {known}, no file that ends in .py and no entry point of {group}")
        try:
            return self._built(_imported(found[0]), name)
        except PolicyError as error:
            raise PolicyError(f"entry point {name}, {found[0].value}: {error}") from error

    def _built(self, module: ModuleType, name: str) -> P:
        values = {field.name: _value(module, field, name) for field in msgspec.structs.fields(self._kind)}
        return self._kind(**values)


def is_file(name: str) -> bool:
    """Whether a setting names a policy's file."""
    return name.endswith(SUFFIX)


def policy_name(name: str) -> str:
    """A short name for tables: a file's is its stem."""
    return Path(name).stem if is_file(name) else name


def located(name: str, folder: Path) -> str:
    """The same with a file's path made absolute: of the working directory, else of ``folder``."""
    if not is_file(name):
        return name
    return str(next((place for place in (Path(name), folder / name) if place.is_file()), Path(name)).absolute())


def _folder(module: ModuleType) -> str:
    return module.__name__.split(".")[-2]


def _value(module: ModuleType, field: msgspec.structs.FieldInfo, name: str) -> Any:
    """The module's value for one field of the slot's Struct."""
    if field.name == "name":
        return getattr(module, "name", name)
    if field.name == "parameters":
        return _struct(module, "Parameters")
    if field.name == "initial_state":
        return _struct(module, "State")()
    found = getattr(module, field.name, field.default)
    if field.required and not callable(found):
        raise PolicyError(f"it has no function {field.name}")
    return found


def _struct(module: ModuleType, name: str) -> type[msgspec.Struct]:
    """The class, which must be buildable without arguments: every parameter has a default."""
    found = getattr(module, name, Nothing)
    if not (isinstance(found, type) and issubclass(found, msgspec.Struct)):
        raise PolicyError(f"{name} must be a msgspec.Struct")
    try:
        found()
    except TypeError as error:
        raise PolicyError(f"every field of {name} needs a default: {error}") from None
    return found


def _executed(path: str) -> ModuleType:
    """The file's module. Its name in ``sys.modules`` is of the path: annotations are looked up there."""
    name = f"millrace_policy_{Path(path).stem}_{sha1(path.encode(), usedforsecurity=False).hexdigest()[:8]}"
    specification = importlib.util.spec_from_file_location(name, path)
    if specification is None or specification.loader is None or not Path(path).is_file():
        raise PolicyError(f"{path}: no such file")
    module = sys.modules[name] = importlib.util.module_from_spec(specification)
    try:
        specification.loader.exec_module(module)
    except Exception as error:  # whatever a stranger's module raises means that it is no policy
        del sys.modules[name]
        raise PolicyError(f"{path}:{_line(error, path)} {type(error).__name__}: {error}") from error
    return module


def _imported(point: EntryPoint) -> ModuleType:
    try:
        module = point.load()
    except Exception as error:  # the same with a stranger's package
        raise PolicyError(f"{type(error).__name__}: {error}") from error
    if not isinstance(module, ModuleType):
        raise PolicyError("it must name a module")
    return module


def _line(error: Exception, path: str) -> str:
    """``12:`` where the file's own line is known."""
    if isinstance(error, SyntaxError):
        return f"{error.lineno}:"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    return f"{lines[-1]}:" if lines else ""

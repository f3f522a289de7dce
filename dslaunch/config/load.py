"""Run file and flags -> LoadedSpec: parsed, every key checked, all problems at once."""

from __future__ import annotations

import difflib
import re
import sys
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import ValidationError

from dslaunch.config.overrides import SET, Override, parse_override, put_flag, put_override
from dslaunch.config.problems import (
    RepairedNumber,
    explain_errors,
    note_repairs,
    repair_numbers,
    set_value,
    to_number,
)
from dslaunch.config.spec import CommandSpec, RunSpec
from dslaunch.config.spec_engine import EngineSpec
from dslaunch.config.spec_parts import Section
from dslaunch.config.yaml_tree import Tree, key_text, parse_yaml
from dslaunch.core.bounded import hint_of, read_bounded
from dslaunch.core.errors import ConfigError, ConfigErrors
from dslaunch.core.missing_path import not_found

S = TypeVar("S", bound=Section)
GRACE_TIMES = ("failure_grace_s", "checkpoint_grace_s", "host_timeout_s")
_BOM = "\ufeff"


@dataclass(frozen=True)
class LoadedSpec(Generic[S]):
    """A valid spec, with where each key was written and notes for the user.

    ``positions`` maps a key path (``optimizer.lr``) to ``FILE:LINE`` or a flag;
    a key that is not in it has its default. ``lines`` gives the order in the file.
    ``settled`` says why a value stands where the user wrote ``auto``, by its key in the plan.
    """

    spec: S
    positions: dict[str, str]
    lines: dict[str, int]
    notes: tuple[str, ...] = ()
    base_dir: Path = field(default_factory=Path)
    settled: Mapping[str, str] = field(default_factory=dict)

    def where(self, key: str) -> str:
        """``run.yaml:7: `` for the start of a message; empty where only defaults apply."""
        written = self._written(key)
        return f"{self.positions[written]}: " if written else ""

    def line(self, key: str) -> int:
        """The line of the file that ``key`` (or its section) stands in; 0 for flags and defaults."""
        written = self._written(key)
        return self.lines[written] if written else 0

    def given(self, key: str) -> bool:
        """Whether the file or a flag sets ``key`` itself, not only a section around it."""
        return key in self.positions or key.replace("[0]", "") in self.positions

    def _written(self, key: str) -> str:
        while key:
            for spelling in (key, key.replace("[0]", "")):  # one source may stand without a list
                if spelling in self.positions:
                    return spelling
            above = re.sub(r"(\.|^)[^.\[\]]*$|\[\d+\]$", "", key)
            key = above if above != key else key.rpartition(".")[0]  # a host pattern has brackets of its own
        return key


def load_run_file(
    path: Path,
    overrides: Sequence[str] = (),
    flags: Sequence[Override] = (),
    text: str | None = None,
    base_dir: Path | None = None,
) -> LoadedSpec[RunSpec]:
    """Read and check a run file.

    ``overrides`` are ``key=value`` texts of ``--set``, ``flags`` values of other
    flags; both win over the file. ``text`` is the content where it was read already or
    does not come from ``path`` (stdin); then ``base_dir`` is what paths in it start from
    (default: the current directory). Raises ConfigError(s) with file, line and key path.
    """
    content = _read(path) if text is None else text
    base_dir = base_dir or (path.resolve().parent if text is None else Path.cwd())
    try:
        tree = parse_yaml(content.removeprefix(_BOM), str(path))
        if content.startswith(_BOM):
            tree.problems.append((1, _bom_problem(str(path))))
        return _load(RunSpec, tree, overrides, flags, base_dir)
    except ConfigError as error:
        from dslaunch.config.not_a_run_file import explain_text

        if overrides and not content.strip():
            raise  # the command line stands for the whole file
        raise explain_text(content.removeprefix(_BOM), str(path)) or error from None


def _bom_problem(name: str) -> ConfigError:
    from dslaunch.core.command import quote

    hint = "save the file as UTF-8 without BOM"
    if name != "<stdin>":
        hint += f", or: sed -i '1s/^\\xEF\\xBB\\xBF//' {quote(name)}"
    return ConfigError(f"{name}:1: a byte order mark (BOM) stands before the text", hint=hint)


def load_flags(overrides: Sequence[str] = (), flags: Sequence[Override] = ()) -> LoadedSpec[EngineSpec]:
    """A spec from the command line alone, for the DeepSpeed JSON of someone's own script."""
    return _load(EngineSpec, Tree(), overrides, flags, Path.cwd())


def load_grace_times(overrides: Sequence[str]) -> dict[str, float]:
    """``--set launch.failure_grace_s=10`` and the like, for a launch without a run file; by the last part.

    Raises ConfigError(s) for any other key and for a value that it may not have.
    """
    allowed = [f"launch.{name}" for name in GRACE_TIMES]
    given = [key_text(parse_override(text)[0]) for text in overrides]
    if other := [key for key in given if key not in allowed]:
        near = difflib.get_close_matches(other[0], allowed, n=1)
        raise ConfigError(
            f"{SET} {other[0]}: without a run file only {', '.join(allowed)} are set so",
            hint=f"did you mean {near[0]}?"
            if near
            else "`dslaunch launch --help` lists the flags for the rest",
        )
    launch = _load(CommandSpec, Tree(), overrides, (), Path.cwd()).spec.launch
    return {name: float(getattr(launch, name)) for name in GRACE_TIMES if f"launch.{name}" in given}


def _read(path: Path) -> str:
    try:
        data = read_bounded(path)
    except IsADirectoryError:
        from dslaunch.config.not_a_run_file import explain_directory

        raise explain_directory(path) from None
    except FileNotFoundError:
        raise not_found("run file", path) from None
    except OSError as error:
        raise ConfigError(f"cannot read run file {path}: {error.strerror}", hint=hint_of(error)) from None
    return decode(data, str(path))


def decode(data: bytes, name: str) -> str:
    """Bytes of a run file -> text. Raises ConfigError where it is not UTF-8."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        from dslaunch.config.not_a_run_file import explain_bytes

        line = data[: error.start].count(b"\n") + 1
        plain = ConfigError(f"{name}:{line}: not UTF-8 text", hint="save the file as UTF-8")
        raise explain_bytes(data, name) or plain from None


def _load(
    kind: type[S],
    tree: Tree,
    overrides: Sequence[str],
    flags: Sequence[Override],
    base_dir: Path,
) -> LoadedSpec[S]:
    for text in overrides:
        with _collecting(tree):
            put_override(tree, kind, text)
    for flag in flags:
        with _collecting(tree):
            put_flag(tree, flag)
    _drop_extensions(tree)
    _prefer_flags(tree)
    _refuse_nul(tree)
    spec, repaired = _validate(kind, tree)
    if tree.problems:
        raise ConfigErrors([error for _, error in sorted(tree.problems, key=lambda item: item[0])])
    assert spec is not None
    positions = {key_text(path): mark.source for path, mark in tree.marks.items()}
    lines = {key_text(path): mark.line for path, mark in tree.marks.items()}
    return LoadedSpec(spec, positions, lines, tuple(note_repairs(repaired, tree.name)), base_dir)


@contextmanager
def _collecting(tree: Tree) -> Iterator[None]:
    """Record a ConfigError of the block as one of the tree's problems, and go on after it."""
    try:
        yield
    except ConfigError as error:
        tree.problems.append((0, error))


@contextmanager
def _without_plugins() -> Iterator[None]:
    """Build a spec without pydantic's search for plugins in every installed package.

    The search takes a tenth of a whole command, and nobody hooks into our spec.
    pydantic's own switch for it (PYDANTIC_DISABLE_PLUGINS) comes after the slow
    import, so the module that searches is stood in for while the spec is built.
    """
    name = "pydantic.plugin._loader"
    if name in sys.modules:
        yield
        return
    stand_in = types.ModuleType(name)
    stand_in.__dict__["get_plugins"] = lambda: ()
    sys.modules[name] = stand_in
    try:
        yield
    finally:
        del sys.modules[name]


def _validate(kind: type[S], tree: Tree) -> tuple[S | None, list[RepairedNumber]]:
    noted = repair_numbers_in_free_text(tree)
    try:
        with _without_plugins():
            kind.model_rebuild()
    except (ImportError, AttributeError):  # another pydantic: its slow way works as well
        kind.model_rebuild(force=True)
    for attempt in (1, 2):
        try:
            return kind.model_validate(tree.value), noted
        except ValidationError as error:
            found = error.errors(include_url=False, include_context=True)
            if attempt == 1:
                repaired, more = repair_numbers(tree, found)
                noted += more
                if repaired:
                    continue
            tree.problems += explain_errors(kind, tree, found)
            return None, noted
    return None, noted


def repair_numbers_in_free_text(tree: Tree) -> list[RepairedNumber]:
    """Under ``deepspeed:``, where any type goes: unquoted ``1e-5`` is a number, ``5.0e+8`` a whole one."""
    noted = []
    for path, mark in list(tree.marks.items()):
        if path[0] != "deepspeed" or mark.quoted or not mark.text:
            continue
        number = to_number(mark.text, whole=None)
        value = _get(tree.value, path)
        if number is None or not isinstance(value, (str, float)):
            continue
        set_value(tree, path, number)
        if isinstance(value, str) and mark.line:
            noted.append(RepairedNumber(key_text(path), mark, number))
    return noted


def _get(value: Any, path: Iterable[str | int]) -> Any:
    for part in path:
        try:
            value = value[part]
        except (KeyError, IndexError, TypeError):
            return None
    return value


def _drop_extensions(tree: Tree) -> None:
    """Top-level keys that begin with ``x-`` are the user's own (anchors, remarks)."""
    for key in [k for k in tree.value if k.startswith("x-")]:
        del tree.value[key]
        for path in [p for p in tree.marks if p[0] == key]:
            del tree.marks[path]


def _refuse_nul(tree: Tree) -> None:
    """No path, argument, name or environment variable can hold the character that ends them in C."""
    for path, mark in tree.marks.items():
        if isinstance(value := _get(tree.value, path), str) and "\0" in value:
            message = f"{mark.source}: {key_text(path)} holds a NUL character (\\0)"
            tree.problems.append((mark.line, ConfigError(message, hint="remove it")))


def _prefer_flags(tree: Tree) -> None:
    """``--set max_steps=10`` over a file with num_train_epochs (or the reverse) replaces it."""
    pair = ("num_train_epochs", "max_steps")
    given = [key for key in pair if tree.value.get(key) is not None]
    if len(given) < 2:
        return
    from_file = [key for key in given if tree.marks[(key,)].line > 0]
    if len(from_file) == 1:
        del tree.value[from_file[0]]
        del tree.marks[(from_file[0],)]

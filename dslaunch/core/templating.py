"""Templates and example hostfiles that come with the package, and rendering templates, also a user's own.

A user's template is text like a run file: it is rendered in jinja2's sandbox, may include
what ``dslaunch template list`` shows and nothing else, and reads no file.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dslaunch.core.bounded import bounded
from dslaunch.core.errors import ConfigError

if TYPE_CHECKING:
    import jinja2
    import jinja2.sandbox

_PACKAGE = Path(__file__).resolve().parent.parent
_OURS = re.compile(r"'\w+(?:\.\w+)+ object'")  # an object of a class of ours, by its module
_MEMORY, _CPU_S = 2**28, 3.0  # of one rendering, which takes milliseconds
_LONGEST = 2**22  # characters: a long DeepSpeed config has 10,000
_MARK = re.compile("\x00(.*?):(\\d+)\x00")


@dataclass(frozen=True)
class TemplateFile:
    """A user's template: its text, and the name that messages call it by."""

    name: str
    text: str


@dataclass(frozen=True)
class Rendered:
    """Rendered text, and from which template and line each part of it comes."""

    text: str
    source: TemplateFile | str
    context: Mapping[str, Any]

    @property
    def name(self) -> str:
        return self.source if isinstance(self.source, str) else self.source.name

    def place(self, offset: int) -> str:
        """``FILE:LINE`` of the template that wrote the text at ``offset``; the file alone where unknown."""
        marked = _render(self.source, self.context, marked=True)
        if _MARK.sub("", marked) != self.text:
            return self.name  # the template looks at its own text, which the marks change
        place, removed = self.name, 0
        for mark in _MARK.finditer(marked):
            if mark.start() - removed > offset:
                break
            place = f"{mark[1]}:{mark[2]}"
            removed += len(mark[0])
        return place


def template_root() -> Path:
    """The templates: inside the installed package, or at the top of a source tree."""
    return _data_root("templates")


def hostfile_root() -> Path:
    """The example hostfiles, found likewise."""
    return _data_root("hostfiles")


def shipped_files() -> dict[str, Path]:
    """Name -> path of every shipped template and hostfile (``deepspeed/ds_config.json.j2``)."""
    files = {str(path.relative_to(template_root())): path for path in _files(template_root())}
    root = hostfile_root()
    files |= {f"hostfiles/{path.relative_to(root)}": path for path in _files(root)}
    return files


def load_description(path: Path) -> str:
    """What a shipped file is for: its first comment, which fits on one line."""
    with path.open(encoding="utf-8") as file:
        first = file.readline().strip()
    return first.removeprefix("{#").removesuffix("#}").removeprefix("#").strip()


def render_template(source: TemplateFile | str, context: Mapping[str, Any]) -> Rendered:
    """Render a user's template, or a shipped one by its name.

    A value keeps its type through the ``json`` filter. Raises ConfigError with file and
    line where the template is wrong or names something that is not in ``context``.
    """
    return Rendered(_render(source, context, marked=False), source, context)


def _render(source: TemplateFile | str, context: Mapping[str, Any], *, marked: bool) -> str:
    import jinja2

    name = source if isinstance(source, str) else source.name
    environment = _environment(template_root(), marked)
    try:
        if isinstance(source, str):
            return environment.get_template(source).render(context)
        with bounded(_MEMORY, _CPU_S):
            code = environment.compile(source.text, name, name)
            globals_ = environment.make_globals(None)
            text = jinja2.Template.from_code(environment, code, globals_).render(context)
        if len(text) > _LONGEST:
            raise MemoryError
        return text
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"{error.name or name}:{error.lineno}: {error.message}") from None
    except jinja2.TemplateNotFound as error:
        hint = "a template may include those that `dslaunch template list` shows"
        raise ConfigError(f"{_place(error, name)}: there is no template {error.name}", hint=hint) from None
    except jinja2.UndefinedError as error:
        hint_ = _nearest_name(str(error.message), context)
        message = _OURS.sub("this value", str(error.message))
        raise ConfigError(f"{_place(error, name)}: {message}", hint=hint_) from None
    except jinja2.TemplateError as error:
        raise ConfigError(f"{_place(error, name)}: {error.message}") from None
    except (MemoryError, TimeoutError) as error:
        what = (
            "makes too long a text" if isinstance(error, MemoryError) else f"takes more than {_CPU_S:.0f} s"
        )
        hint = "look for a loop or a repetition without a sensible end"
        raise ConfigError(f"{_place(error, name)}: {what}", hint=hint) from None
    except Exception as error:  # a template may do anything to a value: divide by it, index it
        message = f"{_place(error, name)}: {type(error).__name__}: {error}"
        raise ConfigError(message) from None


def _sandbox() -> type[jinja2.sandbox.SandboxedEnvironment]:
    """jinja2's sandbox without endless powers: a signal is seen only between their multiplications."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Sandbox(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset({"**"})

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            if isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > 4096:
                raise OverflowError(f"{left} ** {right} is too large")
            return super().call_binop(context, operator, left, right)

    return Sandbox


@functools.cache  # with the templates that it has compiled
def _environment(root: Path, marked: bool) -> jinja2.Environment:
    import jinja2

    environment = _sandbox()(
        loader=jinja2.FileSystemLoader(root),
        undefined=jinja2.StrictUndefined,
        autoescape=False,  # JSON, not HTML; the json filter quotes
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["json"] = _to_json
    if marked:
        _add_marks(environment)
    return environment


def _add_marks(environment: jinja2.Environment) -> None:
    """Make every line of a template's plain text begin with a mark that names it."""
    from jinja2.ext import Extension
    from jinja2.lexer import Token, TokenStream

    class Marks(Extension):
        def filter_stream(self, stream: TokenStream) -> Iterator[Token]:
            for token in stream:
                if token.type != "data":
                    yield token
                    continue
                lines = str(token.value).split("\n")
                marks = (f"\x00{stream.name}:{token.lineno + i}\x00" for i in range(len(lines)))
                text = "\n".join(mark + line for mark, line in zip(marks, lines, strict=True))
                yield Token(token.lineno, "data", text)

    environment.add_extension(Marks)


def _to_json(value: Any) -> str:
    import jinja2

    if isinstance(value, jinja2.Undefined):
        value._fail_with_undefined_error()
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _place(error: BaseException, name: str) -> str:
    """``file:line`` of the innermost template, and those that include it: jinja2 rewrites tracebacks."""
    root = str(template_root())
    lines: dict[str, int] = {}
    traceback = error.__traceback__
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        if file == name or file.startswith(f"{root}/"):
            lines[file.removeprefix(f"{root}/")] = traceback.tb_lineno
        traceback = traceback.tb_next
    if not lines:
        return name
    *outer, inner = (f"{file}:{line}" for file, line in lines.items())
    return inner + (f" (included at {', '.join(reversed(outer))})" if outer else "")


def _nearest_name(message: str, context: Mapping[str, Any]) -> str | None:
    """The name that an undefined one most likely stands for."""
    import difflib

    match = re.search(r"'(\w+)' is undefined|no attribute '(\w+)'", message)
    if match is None:
        return None
    known: dict[str, str] = {}
    for name, value in context.items():
        fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
        known |= {field.name: f"{name}.{field.name}" for field in fields}
        known[name] = name
    near = difflib.get_close_matches(match[1] or match[2], known, n=1)
    if near:
        return f"did you mean {known[near[0]]}?"
    return f"the names are {', '.join(sorted(context))}"


def _data_root(kind: str) -> Path:
    in_wheel = _PACKAGE / "_data" / kind
    return in_wheel if in_wheel.is_dir() else _PACKAGE.parent / kind


def _files(root: Path) -> Iterator[Path]:
    return (path for path in sorted(root.rglob("*")) if path.is_file())

"""Templates and example hostfiles that come with the package, and rendering them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dslaunch.core.errors import ConfigError

if TYPE_CHECKING:
    import jinja2

_PACKAGE = Path(__file__).resolve().parent.parent


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


def render_template(name: str, context: dict[str, Any]) -> str:
    """Render a shipped template. Every value goes through the ``json`` filter to keep its type.

    Raises ConfigError with file and line where the template is wrong or names
    something that is not in ``context``.
    """
    import jinja2

    environment = _environment(template_root())
    try:
        return environment.get_template(name).render(context)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"template {error.name or name}:{error.lineno}: {error.message}") from None
    except jinja2.TemplateNotFound as error:
        raise ConfigError(f"template {error.name} not found under {template_root()}") from None
    except jinja2.UndefinedError as error:
        raise ConfigError(f"template {_place(error, name)}: {error.message}") from None


def _environment(root: Path) -> jinja2.Environment:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(root),
        undefined=jinja2.StrictUndefined,
        autoescape=False,  # JSON, not HTML; the json filter quotes
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["json"] = _to_json
    return environment


def _to_json(value: Any) -> str:
    import jinja2

    if isinstance(value, jinja2.Undefined):
        value._fail_with_undefined_error()
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _place(error: BaseException, name: str) -> str:
    """``file:line`` of the innermost template frame: jinja2 rewrites tracebacks to template lines."""
    place, traceback = name, error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename.endswith(".j2"):
            file = Path(traceback.tb_frame.f_code.co_filename)
            place = f"{file.relative_to(template_root())}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return place


def _data_root(kind: str) -> Path:
    in_wheel = _PACKAGE / "_data" / kind
    return in_wheel if in_wheel.is_dir() else _PACKAGE.parent / kind


def _files(root: Path) -> Iterator[Path]:
    return (path for path in sorted(root.rglob("*")) if path.is_file())

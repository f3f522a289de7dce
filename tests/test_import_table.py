"""Who may import whom: the table of the layout, held against every import statement in dslaunch/."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

REPO_ROOT = Path(__file__).resolve().parents[1]
PACKAGE = REPO_ROOT / "dslaunch"

# package -> the packages of dslaunch that it may import. The middle ones never import each other.
MAY_IMPORT: dict[str, set[str]] = {
    "core": {"core"},
    "config": {"config", "core"},
    "launch": {"launch", "core"},
    "losses": {"losses"},
    "observe": {"observe", "core"},
    "train": {"train", "losses", "core"},
    "cli": {"cli", "config", "launch", "train", "observe", "core"},
}

# package -> what it may import beside the standard library.
THIRD_PARTY: dict[str, set[str]] = {
    "core": {"jinja2"},
    "config": {"jinja2", "pydantic", "pydantic_core", "yaml"},
    "launch": set(),
    "losses": {"torch"},
    "observe": {"matplotlib"},  # no dependency: diagnose -o asks for it
    "train": {
        "torch", "deepspeed", "transformers", "peft", "datasets", "pyarrow", "numpy", "safetensors",
        "tokenizers", "gguf", "hjson", "jinja2", "huggingface_hub", "tensorboard", "wandb", "mlflow",
        "psutil", "bitsandbytes",
    },
    "cli": {"click", "jinja2", "yaml"},
}  # fmt: skip

# What a file of cli/ may import before its callback runs: `dslaunch --help` must feel instant.
CLI_AT_IMPORT = {"click"}
# Sent to other machines as text, and run by whatever Python 3 is there.
# The second file travels with the first.
STANDARD_LIBRARY_ONLY: dict[str, set[str]] = {"launch/agent.py": set(), "launch/probe.py": {"launch"}}


@dataclass(frozen=True)
class Import:
    """One imported module: its dotted name, its line, and whether it stands outside any function."""

    module: str
    line: int
    at_import: bool


def find_imports(source: str, module_name: str) -> Iterator[Import]:
    """Every import in ``source``, also those in functions and under TYPE_CHECKING; relative ones resolved."""

    def walk(node: ast.AST, at_import: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            inside = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            type_only = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            if isinstance(child, ast.Import):
                yield from (Import(alias.name, child.lineno, at_import) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                base = child.module or ""
                if child.level:
                    parents = module_name.split(".")[: -child.level]
                    base = ".".join([*parents, *filter(None, [child.module])])
                # `from dslaunch import config` names a package of ours, not an attribute.
                names = [f"{base}.{alias.name}" for alias in child.names] if base == "dslaunch" else [base]
                yield from (Import(name, child.lineno, at_import) for name in names)
            else:
                yield from walk(child, at_import and not inside and not type_only)

    yield from walk(ast.parse(source), True)


def check_imports(source: str, relative: str) -> list[str]:
    """What breaks the table in the file ``relative`` (to dslaunch/); empty when nothing does."""
    package = relative.split("/")[0] if "/" in relative else ""
    module_name = "dslaunch." + relative.removesuffix(".py").replace("/", ".")
    problems = []
    for found in find_imports(source, module_name):
        top, *rest = found.module.split(".")
        where = f"dslaunch/{relative}:{found.line}: imports {found.module}"
        if top == "dslaunch":
            target = rest[0] if rest and (PACKAGE / rest[0]).is_dir() else ""
            if relative in STANDARD_LIBRARY_ONLY and target not in STANDARD_LIBRARY_ONLY[relative]:
                problems.append(f"{where}; this file may use the standard library alone")
            elif package and target and target not in MAY_IMPORT[package]:
                problems.append(f"{where}; {package} may import only {sorted(MAY_IMPORT[package])}")
            elif package == "cli" and found.at_import and target not in ("", "cli", "core"):
                problems.append(f"{where} outside the callback")
        elif top not in sys.stdlib_module_names:
            if relative in STANDARD_LIBRARY_ONLY or top not in THIRD_PARTY.get(package, set()):
                problems.append(f"{where}, which is not in the table of {package or 'the top level'}")
            elif package == "cli" and found.at_import and top not in CLI_AT_IMPORT:
                problems.append(f"{where} outside the callback")
    return problems


SOURCES = sorted(str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("relative", SOURCES)
def test_imports_follow_the_table(relative: str) -> None:
    problems = check_imports((PACKAGE / relative).read_text(encoding="utf-8"), relative)
    assert not problems, "\n" + "\n".join(problems)


def test_every_package_is_in_the_table() -> None:
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert packages == set(MAY_IMPORT) == set(THIRD_PARTY)


@pytest.mark.parametrize(
    ("relative", "source", "says"),
    [
        ("config/load.py", "from dslaunch.launch import local", "config may import only"),
        ("core/plan.py", "def f():\n    from dslaunch.config import spec", "core may import only"),
        ("losses/sft.py", "from dslaunch.core.errors import ConfigError", "losses may import only"),
        ("losses/sft.py", "from ..core import errors", "losses may import only"),
        ("observe/plots.py", "from dslaunch import train", "observe may import only"),
        ("observe/plots.py", "def f():\n    import torch", "not in the table of observe"),
        ("launch/local.py", "import deepspeed.comm", "not in the table of launch"),
        ("launch/agent.py", "from dslaunch.core import events", "the standard library alone"),
        ("launch/probe.py", "from dslaunch.core import events", "the standard library alone"),
        ("cli/plan.py", "import yaml", "outside the callback"),
        ("cli/plan.py", "from dslaunch.config.load import load_run_file", "outside the callback"),
        ("__main__.py", "import torch", "not in the table of the top level"),
    ],
)
def test_a_wrong_import_is_found(relative: str, source: str, says: str) -> None:
    problems = check_imports(source, relative)
    assert len(problems) == 1
    assert says in problems[0]


def test_allowed_imports_are_let_be() -> None:
    source = "import click\nfrom dslaunch import __version__\nfrom dslaunch.core.errors import ConfigError\n"
    lazy = "def command():\n    import yaml\n    from dslaunch.config.load import load_run_file\n"
    assert check_imports(source + lazy, "cli/plan.py") == []


@pytest.mark.parametrize("relative", sorted(STANDARD_LIBRARY_ONLY))
def test_remote_file_is_old_python(relative: str) -> None:
    """Python 3.8 is what old clusters still have as /usr/bin/python3."""
    source = (PACKAGE / relative).read_text(encoding="utf-8")
    ast.parse(source, feature_version=(3, 8))

"""The documentation is true: commands run, flags exist, links lead somewhere, generated pages are current."""

from __future__ import annotations

import functools
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import pytest

from dslaunch.cli import reference
from dslaunch.cli.main import VERBS, dslaunch

REPO_ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(
    path.relative_to(REPO_ROOT).as_posix()
    for pattern in ("*.md", "docs/**/*.md", "benchmarks/*.md", "examples/**/*.md", "hostfiles/*.md")
    for path in REPO_ROOT.glob(pattern)
)
# Above a block that cannot be run here: `<!-- not run by the tests: WHY -->`; where another test does that,
# `<!-- run by tests/... -->`.
_NOT_RUN = re.compile(r"<!-- (?P<why>not run by the tests: \S.*?|run by tests/\S+) -->\s*$")
_RUN_BY = re.compile(r"run by (tests/\S+)")
_FENCE = re.compile(r"^```(?P<language>\S*)\s*$")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page. ``not_run``: what stands above one that is not run here."""

    page: str
    line: int
    language: str
    text: str
    not_run: str | None


def read(page: str) -> str:
    return (REPO_ROOT / page).read_text(encoding="utf-8")


def blocks(page: str) -> list[Block]:
    found: list[Block] = []
    start: int | None = None
    lines = read(page).splitlines()
    for number, line in enumerate(lines, 1):
        fence = _FENCE.match(line.strip())
        if fence is None:
            continue
        if start is None:
            start, language = number, fence["language"]
            mark = _NOT_RUN.match(lines[number - 2]) if number > 1 else None
        else:
            text = "\n".join(lines[start : number - 1])
            found.append(Block(page, start, language, text, mark["why"] if mark else None))
            start = None
    assert start is None, f"{page}:{start}: a block without an end"
    return found


BASH_BLOCKS = [block for page in PAGES for block in blocks(page) if block.language == "bash"]
# What the pages call by these names and a reader has: configs and a model.
DS_CONFIG = """{
  "train_batch_size": 64,
  "train_micro_batch_size_per_gpu": 4,
  "bf16": {"enabled": true},
  "zero_optimization": {"stage": 2},
  "optimizer": {"type": "AdamW", "params": {"lr": 2e-5}}
}
"""
OF_A_READER = {
    "ds_config.json": DS_CONFIG,
    "other.json": DS_CONFIG.replace("\n", ""),
    "configs/one.json": DS_CONFIG,
    "path/to/model/config.json": (
        '{"model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64,'
        ' "num_hidden_layers": 2, "num_attention_heads": 4}'
    ),
}


@pytest.fixture(scope="module")
def workplaces(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Where a page's commands run, one after the other: a folder with examples/ and hostfiles/ in it."""

    @functools.cache
    def make(page: str) -> Path:
        folder = tmp_path_factory.mktemp(Path(page).stem)
        for name in ("examples", "hostfiles"):
            shutil.copytree(REPO_ROOT / name, folder / name)
        for name, text in OF_A_READER.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        return folder

    return make


@pytest.mark.parametrize(
    "block", [b for b in BASH_BLOCKS if b.not_run is None], ids=lambda block: f"{block.page}:{block.line}"
)
def test_documented_commands_run(block: Block, workplaces: Callable[[str], Path]) -> None:
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block.text],
        cwd=workplaces(block.page),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, f"{block.page}:{block.line}\n{done.stdout}\n{done.stderr}"
    shown = output_after(block)
    if shown is not None:
        assert done.stdout.rstrip() == shown.rstrip(), f"{block.page}:{block.line} shows other output"


def test_what_another_test_runs_is_named_there() -> None:
    found = [(block.page, match[1]) for block in BASH_BLOCKS if (match := _RUN_BY.match(block.not_run or ""))]
    assert {page for page, _ in found} >= {"docs/upstream.md", "docs/launching.md"}
    for page, test in found:
        assert page in read(test), f"{test} does not name {page}"


def output_after(block: Block) -> str | None:
    """The text of a ```text or ```json block that follows ``block`` at once: what it prints, exactly."""
    following = [other for other in blocks(block.page) if other.line > block.line][:1]
    end = block.line + block.text.count("\n") + 2
    if following and following[0].language in ("text", "json") and following[0].line <= end + 2:
        return following[0].text
    return None


def test_some_readme_commands_run() -> None:
    run = [block for block in BASH_BLOCKS if block.page == "README.md" and block.not_run is None]
    assert len(run) >= 4
    assert any(output_after(block) for block in run)


def shell_lines(page: str) -> Iterator[tuple[int, list[str]]]:
    """Each command in the page's bash and console blocks, split into words."""
    for block in blocks(page):
        if block.language not in ("bash", "console", "sh", "shell"):
            continue
        text = re.sub(r"\\\n\s*", " ", block.text)
        for line in text.splitlines():
            try:
                yield block.line, shlex.split(line.removeprefix("$ "), comments=True)
            except ValueError:  # half of a quoted text over several lines
                continue


def own_command(words: list[str]) -> list[str] | None:
    """The words after ``dslaunch``, up to ``--`` or a shell operator."""
    if "dslaunch" not in words:
        return None
    rest = words[words.index("dslaunch") + 1 :]
    stop = next((i for i, word in enumerate(rest) if word == "--" or re.match(r"^[|&;<>]|^\d?>", word)), None)
    return rest[:stop]


def unknown_words(words: list[str]) -> list[str]:
    """Verbs and flags in a dslaunch command line that do not exist."""
    command: click.Command = dslaunch
    # As the entry point makes it: click keeps the help option that the first context asked for.
    context = click.Context(command, info_name="dslaunch", **dslaunch.context_settings)
    wrong: list[str] = []
    for word in words:
        flag = word.partition("=")[0]
        if word.startswith("-") and word != "-":
            options = command.get_params(context)
            known = {name for option in options for name in (*option.opts, *option.secondary_opts)}
            wrong += [] if flag in known else [flag]
        elif isinstance(command, click.Group):
            child = command.get_command(context, word)
            if child is None:
                return [*wrong, word]
            command, context = child, click.Context(child, parent=context, info_name=word)
    return wrong


@pytest.mark.parametrize("page", PAGES)
def test_documented_commands_exist(page: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (REPO_ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    for line, words in shell_lines(page):
        own = own_command(words)
        if own is not None and "VERB" not in own:
            assert unknown_words(own) == [], f"{page}:{line}: {shlex.join(words)}"
        if words[:1] == ["make"]:
            goals = {word for word in words[1:] if "=" not in word and not word.startswith("-")}
            assert goals <= targets, f"{page}:{line}: no such make target"


def test_a_wrong_flag_is_found() -> None:
    assert unknown_words(["plan", "run.yaml", "--sett", "a=1"]) == ["--sett"]
    assert unknown_words(["plann", "run.yaml"]) == ["plann"]
    assert unknown_words(["plan", "run.yaml", "--set", "a=1"]) == []
    assert own_command(shlex.split("A=1 dslaunch launch --env X=1 -- python x.py --no-such")) == [
        "launch", "--env", "X=1",
    ]  # fmt: skip


def test_commands_page_is_current() -> None:
    assert read("docs/commands.md") == reference.render_reference(), "run `make docs`"


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_every_verb_is_documented(verb: str) -> None:
    assert f"\n## dslaunch {verb}\n" in read("docs/commands.md")
    assert f"`dslaunch {verb}`" in read("README.md") or f"`{verb}`" in read("README.md")


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for line, target in links(page):
        path, _, anchor = target.partition("#")
        file = (REPO_ROOT / page).parent / path if path else REPO_ROOT / page
        assert file.exists(), f"{page}:{line}: {target} does not exist"
        assert file.resolve().is_relative_to(REPO_ROOT), f"{page}:{line}: {target} leaves the project"
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file), f"{page}:{line}: no heading for #{anchor} in {file.name}"


def links(page: str) -> Iterator[tuple[int, str]]:
    """The relative links of a page, outside fenced blocks and code spans."""
    fenced = False
    for number, line in enumerate(read(page).splitlines(), 1):
        if _FENCE.match(line.strip()):
            fenced = not fenced
        elif not fenced:
            for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`]*`", "", line)):
                if not re.match(r"[a-z]+:", target):
                    yield number, target


def anchors(file: Path) -> set[str]:
    """The names that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#{1,6} (.+)$", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_every_page_can_be_reached() -> None:
    """From README.md by links, so that nothing is written for nobody."""
    seen: set[str] = set()
    waiting = ["README.md"]
    while waiting:
        page = waiting.pop()
        if page in seen:
            continue
        seen.add(page)
        for _, target in links(page):
            path = target.partition("#")[0]
            if path.endswith(".md"):
                waiting.append(os.path.relpath((REPO_ROOT / page).parent / path, REPO_ROOT))
    assert set(PAGES) <= seen, sorted(set(PAGES) - seen)


def test_readme_begins_with_what_matters() -> None:
    first = "\n".join(read("README.md").splitlines()[:30])
    assert "make quickstart" in first
    assert "make test" in first
    assert "DeepSpeed" in first
    assert "```text" in first

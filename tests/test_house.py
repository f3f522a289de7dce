"""The project's own files agree with each other: versions, pins, limits, and what is ignored by git."""

from __future__ import annotations

import importlib.metadata
import itertools
import os
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from dslaunch import __version__
from dslaunch.core.packages import TRAINING
from tests.support import workers
from tests.support.machine import CANNOT_RUN, NEEDS, missing
from tests.support.ranks import RanksTimedOut, check_ranks, run_ranks

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

REPO_ROOT = Path(__file__).resolve().parents[1]
PYPROJECT = tomllib.loads((REPO_ROOT / "pyproject.toml").read_text(encoding="utf-8"))
EXTRAS: dict[str, list[str]] = PYPROJECT["project"]["optional-dependencies"]
CORE: list[str] = PYPROJECT["project"]["dependencies"]
REQUIREMENTS = [*CORE, *itertools.chain.from_iterable(EXTRAS.values())]

MAX_LINES = 400
# A longer file needs a reason here that a reader accepts.
MAY_BE_LONGER: dict[str, str] = {
    "dslaunch/launch/agent.py": "sent to hosts as one text, so it cannot be split into modules",
}


def constraints() -> dict[str, list[Requirement]]:
    lines = (REPO_ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    found: dict[str, list[Requirement]] = {}
    for line in lines:
        if line and not line.startswith("#"):
            requirement = Requirement(line)
            found.setdefault(normal(requirement.name), []).append(requirement)
    return found


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_changelog_begins_with_this_version() -> None:
    text = (REPO_ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    first = re.search(r"^## (\S+)", text, flags=re.MULTILINE)
    assert first is not None
    assert first.group(1) == __version__


def test_an_entry_of_the_changelog_stands_once_and_under_a_theme() -> None:
    text = (REPO_ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    begin, *themes = re.split(r"^### .+$", text, flags=re.MULTILINE)
    assert "\n- " not in begin
    entries = [entry for theme in themes for entry in theme.split("\n- ")[1:]]
    assert entries
    assert [entry for entry, count in Counter(entry.strip() for entry in entries).items() if count > 1] == []


def test_installed_version_is_this_version() -> None:
    assert importlib.metadata.version("dslaunch") == __version__


@pytest.mark.parametrize("name", sorted({Requirement(r).name for r in REQUIREMENTS}))
def test_constraints_pin_every_requirement(name: str) -> None:
    pins = constraints()[normal(name)]
    for pin in pins:
        assert [spec.operator for spec in pin.specifier] == ["=="], pin


def test_pyproject_pins_nothing() -> None:
    """Users choose their torch; only the constraints, which are ours, name exact versions."""
    for text in REQUIREMENTS:
        assert not {spec.operator for spec in Requirement(text).specifier} & {"==", "<", "<=", "~="}, text


def test_the_packages_that_are_asked_for_are_those_of_the_extra() -> None:
    assert set(TRAINING) == {Requirement(text).name for text in EXTRAS["train"]}


def test_core_needs_no_torch() -> None:
    heavy = {"torch", "deepspeed", "transformers", "peft", "datasets", "numpy"}
    assert not heavy & {normal(Requirement(text).name) for text in CORE}


@pytest.mark.parametrize("texts", [CORE, *EXTRAS.values()], ids=["core", *EXTRAS])
def test_nothing_is_required_twice(texts: list[str]) -> None:
    names = [(normal(Requirement(text).name), str(Requirement(text).marker)) for text in texts]
    assert sorted(set(names)) == sorted(names)


def test_constraints_allow_every_supported_python() -> None:
    """Each package has exactly one pin for 3.10 and at most one for any other version."""
    for version in ("3.10", "3.11", "3.12", "3.13"):
        for name, pins in constraints().items():
            chosen = [p for p in pins if p.marker is None or p.marker.evaluate({"python_version": version})]
            assert len(chosen) <= 1, f"{name} on {version}"


@pytest.mark.parametrize(
    "relative", sorted(p.relative_to(REPO_ROOT).as_posix() for p in (REPO_ROOT / "dslaunch").rglob("*.py"))
)
def test_files_stay_readable(relative: str) -> None:
    lines = (REPO_ROOT / relative).read_text(encoding="utf-8").count("\n")
    assert lines <= MAX_LINES or relative in MAY_BE_LONGER, f"{relative} has {lines} lines"


def test_readme_has_no_placeholder() -> None:
    marker = "TODO" + "-REAL-OUTPUT"
    assert marker not in (REPO_ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["runs/x/plan.json", ".venv/bin/python", ".cache/test-ops/x"])
def test_git_ignores_what_a_run_leaves(name: str) -> None:
    if not (REPO_ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    done = subprocess.run(["git", "check-ignore", "-q", name], cwd=REPO_ROOT, timeout=20)
    assert done.returncode == 0


def test_shell_scripts_parse() -> None:
    done = subprocess.run(
        ["bash", "-n", REPO_ROOT / ".ci" / "run"], capture_output=True, text=True, timeout=20
    )
    assert done.returncode == 0, done.stderr
    assert os.access(REPO_ROOT / ".ci" / "run", os.X_OK)


def test_tests_see_no_cache_of_the_user() -> None:
    """The environment that conftest.py sets for every test."""
    session_dir = Path(os.environ["TMPDIR"]).parent
    # or of one of the session's workers
    assert any(part.startswith("dslaunch-tests-") for part in session_dir.parts[-2:])
    for name in ("HOME", "HF_HOME", "DSLAUNCH_CACHE", "XDG_CACHE_HOME"):
        assert Path(os.environ[name]).is_relative_to(session_dir), name
    assert os.environ["DS_ACCELERATOR"] == "cpu"
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    assert "RANK" not in os.environ


def test_op_is_built_once_up_front(ops_dir: Path) -> None:
    assert (ops_dir / "deepspeed_shm_comm" / "deepspeed_shm_comm.so").is_file()
    assert not (ops_dir / "deepspeed_shm_comm" / "lock").exists()


@pytest.mark.parametrize("options", [[], ["-n", "2"]], ids=["one process", "two workers"])
def test_what_cannot_run_is_named_loudly(tmp_path: Path, options: list[str]) -> None:
    """A test whose need is missing is skipped, and the summary says which and why."""
    done = run_pytest(
        tmp_path,
        "import pytest\n\n@pytest.mark.needs('moon')\ndef test_tides():\n    raise AssertionError\n",
        *options,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "COULD NOT RUN ON THIS MACHINE" in done.stdout
    assert "1 test(s): needs a full moon" in done.stdout
    assert "test_it.py::test_tides" in done.stdout
    assert "1 skipped" in done.stdout.splitlines()[-1]


def test_a_test_that_ends_its_worker_is_named_and_the_others_run(tmp_path: Path) -> None:
    """Once: xdist itself would run it again, until there were too many dead workers."""
    done = run_pytest(
        tmp_path,
        "import os\ndef test_a(): pass\ndef test_dies(): os._exit(3)\ndef test_b(): pass\n",
        "-n",
        "1",
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "crashed while running 'test_it.py::test_dies'" in done.stdout
    failed = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("FAILED")]
    assert [test.rpartition("/")[2] for test in failed] == ["test_it.py::test_dies"]
    assert "1 failed, 2 passed" in done.stdout.splitlines()[-1]


def run_pytest(folder: Path, tests: str, *options: str) -> subprocess.CompletedProcess[str]:
    """A session of its own over these tests, with the hooks of this one, where nobody has a moon."""
    (folder / "conftest.py").write_text(
        "from tests.conftest import pytest_collection_modifyitems, pytest_terminal_summary\n"
        "from tests.conftest import pytest_xdist_make_scheduler\n"
        "from tests.support import machine\n"
        "machine.NEEDS['moon'] = (lambda: False, 'needs a full moon')\n"
    )
    (folder / "test_it.py").write_text(tests)
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-c", REPO_ROOT / "pyproject.toml",
         "--rootdir", folder, folder, *options],
        capture_output=True, text=True, timeout=60, env={**os.environ, "PYTHONPATH": str(REPO_ROOT)},
    )  # fmt: skip


def test_tests_that_share_ranks_stay_with_one_worker() -> None:
    """A fixture of the session would else be made twice."""
    having = {
        path.parent.relative_to(REPO_ROOT).as_posix()
        for path in (REPO_ROOT / "tests").rglob("*.py")
        if re.search(r"^@pytest\.fixture\(scope=.session", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert {"tests", "tests/train", "tests/train/engine"} <= having
    assert having - {"tests"} <= set(workers.SHARED)
    together = [workers.unit(f"tests/train/{name}.py::test_it[a]") for name in ("test_a", "replay/test_b")]
    assert together == ["tests/train"] * 2
    assert workers.unit("tests/launch/test_ssh.py::test_it") == "tests/launch/test_ssh.py"
    nodes = ("tests/launch/test_ssh.py::a", "tests/core/test_plan.py::b", "tests/train/test_a.py::c")
    assert sorted(nodes, key=workers.place) == list(reversed(nodes))


def test_unknown_need_is_an_error() -> None:
    assert missing(()) == []
    assert all(isinstance(text, str) and CANNOT_RUN not in text for _, text in NEEDS.values())
    with pytest.raises(KeyError):
        missing(("moon",))


def test_run_ranks_gives_each_rank_its_numbers_and_output() -> None:
    code = "import os, sys; print(os.environ['RANK'], os.environ['WORLD_SIZE']); sys.stderr.write('é\\n')"
    results = run_ranks(["-c", code], world_size=2)
    check_ranks(results)
    assert [result.stdout for result in results] == ["0 2\n", "1 2\n"]
    assert [result.stderr for result in results] == ["é\n", "é\n"]


def test_run_ranks_shows_the_failing_rank() -> None:
    results = run_ranks(["-c", "import os, sys; sys.exit(int(os.environ['RANK']) * 7)"], world_size=2)
    assert [result.returncode for result in results] == [0, 7]
    with pytest.raises(AssertionError, match="rank 1: code 7"):
        check_ranks(results)


def test_run_ranks_leaves_nothing_behind_after_a_timeout() -> None:
    # Each rank starts a child of its own and then hangs; both must be gone.
    code = (
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(os.getpid(), child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    with pytest.raises(RanksTimedOut) as caught:
        run_ranks(["-c", code], world_size=2, timeout_s=3)
    pids = [int(pid) for line in re.findall(r"stdout: (\d+ \d+)", str(caught.value)) for pid in line.split()]
    assert len(pids) == 4
    deadline = time.monotonic() + 10
    while any(is_running(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in pids if is_running(pid)]


def is_running(pid: int) -> bool:
    """False also for a zombie that its adopter has not collected yet."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"

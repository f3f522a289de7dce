"""What a command imports, seen from outside: sys.modules of a real process after it ran."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dslaunch.cli.main import VERBS

REPO_ROOT = Path(__file__).resolve().parents[1]
RUN_FILE = REPO_ROOT / "examples" / "quickstart.yaml"
TEMPLATE = REPO_ROOT / "templates" / "deepspeed" / "ds_config.json.j2"
DS_CONFIG = REPO_ROOT / "tests" / "golden" / "ds_config" / "a100-bf16-accumulation-stage3.json"

# Of these, the first costs seconds; none has a place on a login node.
HEAVY = {"torch", "deepspeed", "transformers", "peft", "datasets", "numpy", "pandas", "pyarrow", "tokenizers"}
RESOLVING = {
    "click", "jinja2", "markupsafe", "yaml", "_yaml", "pydantic", "pydantic_core",
    "annotated_types", "typing_extensions", "typing_inspection",
}  # fmt: skip

_PROBE = """
import sys
before = set(sys.modules)  # what the interpreter and its .pth files bring along
from dslaunch.cli.main import main
code = main(sys.argv[1:])
import json
print("\\n" + json.dumps({"code": code, "modules": sorted(set(sys.modules) - before)}), file=sys.stderr)
"""


def imported(*argv: str, cwd: Path = REPO_ROOT) -> set[str]:
    """The modules that ``dslaunch ARGV`` imported. The command must end with 0."""
    done = subprocess.run(
        [sys.executable, "-c", _PROBE, *argv], cwd=cwd, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stderr.splitlines()[-1])
    assert result["code"] == 0, done.stderr
    return set(result["modules"])


def third_party(modules: set[str]) -> set[str]:
    """Top-level modules from elsewhere, without those that a C extension or sysconfig makes up."""
    tops = {name.partition(".")[0] for name in modules}
    made_up = {top for top in tops if top.startswith(("_cython_", "cython_runtime", "_sysconfigdata_"))}
    return tops - made_up - sys.stdlib_module_names - {"dslaunch"}


def own(modules: set[str]) -> set[str]:
    return {name for name in modules if name.partition(".")[0] == "dslaunch"}


def test_help_imports_click_alone() -> None:
    modules = imported("--help")
    assert third_party(modules) == {"click"}
    assert own(modules) == {
        "dslaunch", "dslaunch.cli", "dslaunch.cli.main", "dslaunch.core", "dslaunch.core.errors",
    }  # fmt: skip


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_a_verb_imports_click_alone(verb: str) -> None:
    modules = imported(verb, "--help")
    assert third_party(modules) == {"click"}
    packages = {".".join(name.split(".")[:2]) for name in own(modules)}
    assert packages <= {"dslaunch", "dslaunch.cli", "dslaunch.core"}


@pytest.mark.parametrize(
    "argv",
    [
        ("gen-config", str(RUN_FILE)),
        ("gen-config", "--zero-stage", "2", "--num-gpus-per-node", "2", "--precision", "fp32",
         "--train-batch-size", "8", "--lr", "1e-4"),
        ("gen-config", str(RUN_FILE), "--template", str(TEMPLATE), "--set", "deepspeed.steps_per_print=9"),
        ("plan", str(RUN_FILE)),
        ("launch", str(RUN_FILE), "--dry-run"),
        ("template", "list"),
        ("hosts", str(REPO_ROOT / "hostfiles" / "unequal-nodes")),
        ("check", str(RUN_FILE)),
        ("doctor",),
    ],
    ids=lambda argv: " ".join(argv[:1]) + (" from flags" if "--lr" in argv else ""),
)  # fmt: skip
def test_resolving_imports_nothing_heavy(
    argv: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))  # doctor looks for locks of builds there
    modules = imported(*argv, cwd=tmp_path)
    tops = third_party(modules)
    assert not tops & HEAVY
    assert tops <= RESOLVING
    assert not any(name.startswith(("dslaunch.train", "dslaunch.losses")) for name in modules)


@pytest.mark.parametrize(
    "argv",
    [
        ("gen-config", str(RUN_FILE), "--set", "precision=fp16", "--gpu", "v100"),
        ("plan", str(RUN_FILE)),
        ("check", str(RUN_FILE)),
    ],
    ids=lambda argv: argv[0],
)
def test_no_model_of_pydantic_is_built_twice(argv: tuple[str, ...]) -> None:
    """model_dump() of a part of the spec builds it anew, with a search for plugins: a tenth of a command."""
    assert "pydantic.plugin._loader" not in imported(*argv)


@pytest.mark.parametrize("argv", [("check", str(DS_CONFIG), "--gpu", "a100"), ("explain", "fp16")])
def test_checking_a_config_imports_click_alone(argv: tuple[str, ...], tmp_path: Path) -> None:
    assert third_party(imported(*argv, cwd=tmp_path)) == {"click"}


def test_diagnosing_a_log_imports_click_alone(tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text("{'loss': 2.0, 'grad_norm': 1.0}\n" * 3)
    assert third_party(imported("diagnose", "train.log", cwd=tmp_path)) == {"click"}


def test_the_probe_sees_an_import(tmp_path: Path) -> None:
    """The probe itself must be able to fail: a sitecustomize-free import inside a verb shows up."""
    (tmp_path / "sneaky.py").write_text("import wave\n")
    code = _PROBE.replace("from dslaunch.cli.main import main", "import sneaky; main = lambda argv: 0")
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert {"sneaky", "wave"} <= set(json.loads(done.stderr.splitlines()[-1])["modules"])

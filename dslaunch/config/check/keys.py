"""Every key of the config against the table: unknown, misplaced, old, removed, not yet there."""

from __future__ import annotations

from typing import Any

from dslaunch.config.check.context import Checker
from dslaunch.config.check.values import check_value
from dslaunch.config.schema import VERSIONS, Key, find_key, nearest_keys, section_keys
from dslaunch.config.schema.other_names import OTHER_NAMES
from dslaunch.core.finding import Edit, KeyPath, Severity

_MOST_GUESSES = 100
_COMMENTS = ("_", "//", "x-")
# What to say of an unknown key, where naming the key to use (schema/other_names.py) does not say it.
_HINTS: dict[str, str] = {
    **dict.fromkeys(("max_grad_norm", "clip_grad"), "clipping is gradient_clipping at the top level"),
    **dict.fromkeys(("lr", "learning_rate"), "the learning rate stands in optimizer.params"),
    "monitor_config": "each monitor is a section of its own at the top level",
    **dict.fromkeys(
        ("num_gpus", "num_processes"), "the launcher decides the number of ranks, not the config"
    ),
    "cuda_visible_devices": "set CUDA_VISIBLE_DEVICES in the environment, or slots in the hostfile",
}
# Other names whose value means the same under the key's own.
_SAME_VALUE = ("max_grad_norm", "clip_grad", "grad_clip", "gradient_clip_val")
_PRECISIONS = ("fp16", "bf16", "bfloat16")
_SWITCHES = ("fp16", "bf16", "type", "dtype")
_SCALE_KEYS = {"loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale"}


def is_comment(name: str) -> bool:
    """Keys that people write as remarks: ``_note``, ``//``, ``x-mine``."""
    return name.startswith(_COMMENTS)


def check_keys(checker: Checker) -> None:
    """Walk the whole config; every value of a known key is checked too."""
    _check_section(checker, (), checker.config, "section")


def _check_section(checker: Checker, path: KeyPath, block: dict[str, Any], kind: str) -> None:
    known = section_keys(".".join(map(str, path)))
    for name, value in block.items():
        here = (*path, name)
        key = known.get(name)
        if key is not None:
            _check_known(checker, here, key, value)
        elif is_comment(name):
            if kind == "strict":
                _report_comment(checker, here)
        elif kind != "open":
            _report_unknown(checker, here, name, kind)


def _check_known(checker: Checker, path: KeyPath, key: Key, value: Any) -> None:
    version = checker.target.version
    if key.removed and known_at(version, key.removed) is not False:
        _report_removed(checker, path, key)
        return
    if key.type == "removed":
        return
    if key.since and known_at(version, key.since) is False:
        checker.report(
            "too-new",
            "error",
            path,
            f"DeepSpeed {version} does not know it; {key.since} does",
            "remove it, or use a newer DeepSpeed",
        )
        return
    if key.deprecated:
        _report_old(checker, path, key, value)
    check_value(checker, path, key, value)
    if key.is_section and isinstance(value, dict):
        _check_section(checker, path, value, key.type)


def known_at(version: str, since: str) -> bool | None:
    """Whether ``version`` has what the table saw first in ``since``; None where that is open."""
    if parse_version(version) >= parse_version(since):
        return True
    earlier = VERSIONS[: VERSIONS.index(since)]
    return False if earlier and parse_version(version) <= parse_version(earlier[-1]) else None


def parse_version(text: str) -> tuple[int, ...]:
    """``0.19.8+cu12`` -> (0, 19, 8)."""
    numbers = []
    for part in text.split("+")[0].split("."):
        digits = "".join(char for char in part if char.isdigit())
        numbers.append(int(digits) if digits else 0)
    return tuple(numbers)


def _report_removed(checker: Checker, path: KeyPath, key: Key) -> None:
    instead = f"use {key.replaced_by}" if key.replaced_by else "remove it"
    new = tuple(key.replaced_by.split("."))
    if key.type != "removed" and not checker.has(*new):
        checker.report(
            "removed-key",
            "error",
            path,
            f"DeepSpeed ignores it without a word: it is {key.replaced_by} now",
            instead,
            fix=f"rename to {key.replaced_by}",
            edits=(Edit("rename", path, new),),
        )
        return
    refuses = "which refuses a config that still has it"
    if key.type != "removed":
        refuses = f"which ignores it beside {key.replaced_by}"
    checker.report_to_remove(
        "removed-key",
        "error",
        path,
        f"was removed from DeepSpeed, {refuses} ({key.effect.rstrip('.')})",
        instead,
        fix=f"remove {key.path}",
    )


def _report_old(checker: Checker, path: KeyPath, key: Key, value: Any) -> None:
    new = tuple(key.replaced_by.split("."))
    if key.name.startswith("cpu_offload"):
        _report_old_offload(checker, path, key, value, new)
        return
    both = checker.has(*new)
    fix = None if both else f"rename to {key.replaced_by}"
    edits = () if both else (Edit("rename", path, new),)
    message = f"is the old name of {key.replaced_by}"
    if both and key.path.startswith("zero_optimization."):
        checker.report_to_remove(
            "old-and-new",
            "error",
            path,
            f"{message}, which is there too; DeepSpeed refuses both together",
            "remove the old one",
            fix=f"remove {key.path}",
        )
    else:
        checker.report(
            "deprecated-key", "warning", path, message, f"use {key.replaced_by}", fix=fix, edits=edits
        )


def _report_old_offload(checker: Checker, path: KeyPath, key: Key, value: Any, new: KeyPath) -> None:
    if key.name != "cpu_offload_use_pin_memory" and checker.has(*map(str, new)):
        checker.report_to_remove(
            "old-and-new",
            "error",
            path,
            f"is the old form of {key.replaced_by}, which is there too; DeepSpeed refuses both together",
            f"remove {key.name}",
            fix=f"remove {key.path}",
        )
        return
    edits: tuple[Edit, ...] = (Edit("delete", path),)
    fix = f"remove {key.path}"
    if value is True and key.name != "cpu_offload_use_pin_memory":
        edits = (Edit("rename", path, new), Edit("set", new, {"device": "cpu"}))
        fix = f'replace by {new[-1]}: {{"device": "cpu"}}'
    checker.report(
        "deprecated-key",
        "warning",
        path,
        f"is deprecated; DeepSpeed now has {key.replaced_by}",
        f'use "{new[1]}": {{"device": "cpu"}}',
        fix=fix,
        edits=edits,
    )


def _report_comment(checker: Checker, path: KeyPath) -> None:
    section = ".".join(map(str, path[:-1]))
    checker.report_to_remove(
        "comment-in-strict-section",
        "error",
        path,
        f"a remark as a key is refused inside {section}: DeepSpeed allows no unknown key there",
        "move it to the top level, or write a // comment",
    )


def _report_unknown(checker: Checker, path: KeyPath, name: str, kind: str) -> None:
    section = ".".join(map(str, path[:-1]))
    then = "DeepSpeed refuses the config" if kind == "strict" else "DeepSpeed ignores it without a word"
    where = f"no key of {section}" if section else "no key of DeepSpeed"
    message = f"is {where}; {then}"
    target, hint = _guess(checker, path, name, section)
    edits: tuple[Edit, ...] = ()
    fix = None
    if name.startswith("#"):  # turned off by its writer, as if this were a shell script
        target, hint = "", f'a remark begins with _, // or x-: "_{name[1:]}"'
    if target and not checker.has(*target.split(".")) and not _is_blocked(checker, target):
        edits = (Edit("rename", path, tuple(target.split("."))),)
        fix = f"rename to {target}"
    elif section in _PRECISIONS and (name in _SWITCHES or (section != "fp16" and name in _SCALE_KEYS)):
        fix, edits = "remove it", (Edit("delete", path),)
    code = "misplaced-key" if target and target.rpartition(".")[0] != section else "unknown-key"
    severity: Severity = "warning" if checker.target.lenient and kind != "strict" else "error"
    checker.report(code, severity, path, message, hint, fix=fix, edits=edits)


def _guess(checker: Checker, path: KeyPath, name: str, section: str) -> tuple[str, str]:
    """The path that was surely meant (else empty), and a hint."""
    if section in ("bf16", "bfloat16") and name in _SCALE_KEYS:
        return "", "bf16 needs no loss scale; remove it (it belongs to fp16)"
    other = OTHER_NAMES.get(name) if not section or name == "max_grad_norm" else None
    if other is not None or (not section and name in _HINTS):
        return other or "" if name in _SAME_VALUE else "", _HINTS.get(name) or f"use {other}"
    if section in _PRECISIONS and name in _SWITCHES:
        return "", f"{section}.enabled turns it on; remove {name}"
    if section == "tensor_parallel" and name in ("enabled", "tp_size"):
        return "", "tensor parallelism is turned on by autotp_size: the number of ranks"
    if section == "compile" and name in ("enabled", "disable", "backend"):
        return "", "DeepCompile is turned on by compile.deepcompile; a backend is given to engine.compile()"
    if section in ("optimizer", "scheduler") and name in _arguments(section):
        return f"{section}.params.{name}", f"{name} belongs in {section}.params"
    generic = f"remove it; `dslaunch explain --list` shows every key{' of ' + section if section else ''}"
    checker.guesses += 1
    if checker.guesses > _MOST_GUESSES:
        return "", generic
    import difflib

    siblings = section_keys(section)
    if near := difflib.get_close_matches(name, siblings, n=1, cutoff=0.8):
        found = siblings[near[0]].path
        return found, f"did you mean {found}?"
    elsewhere = [path for path in nearest_keys(name) if find_key(path) is not None]
    exact = [path for path in elsewhere if path.rpartition(".")[2] == name]
    if len(exact) == 1:
        return exact[0], f"{name} belongs in {exact[0].rpartition('.')[0] or 'the top level'}"
    if exact:
        return "", f"{name} is a key of {', '.join(p.rpartition('.')[0] or 'the top level' for p in exact)}"
    if near := difflib.get_close_matches(name, siblings, n=1, cutoff=0.65):
        return "", f"did you mean {siblings[near[0]].path}?"
    if elsewhere:
        return "", f"did you mean {elsewhere[0]}?"
    return "", generic


def _arguments(section: str) -> set[str]:
    """Every argument that some optimizer, or some schedule, takes."""
    from dslaunch.config.schema.optimizers import OPTIMIZERS, SCHEDULES

    tables = SCHEDULES.values() if section == "scheduler" else [known.params for known in OPTIMIZERS.values()]
    return {name for params in tables for name in params}


def _is_blocked(checker: Checker, target: str) -> bool:
    """Whether a section above ``target`` is written as something that cannot hold it."""
    parts = target.split(".")
    return any(
        checker.has(*parts[:depth])
        and not isinstance(checker.block(*parts[: depth - 1]).get(parts[depth - 1]), dict)
        for depth in range(1, len(parts))
    )

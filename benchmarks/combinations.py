"""One verdict on adapter x weights x precision x ZeRO stage x what is trained besides, from every command.

    python benchmarks/combinations.py [--only TEXT] [--train] [--json FILE]

Writes 864 run files for one small model and two CPU ranks. ``plan`` and ``check`` must refuse the same with
the same sentences, at the line of a key; ``gen-config`` must refuse that too, and beyond it only what no
DeepSpeed JSON can say. ``--train`` has two real ranks train two steps of each that is let through (half an
hour on two busy cores): it must run, with finite losses. Exits 1 where one differs.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import math
import os
import re
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

ADAPTERS: dict[str, dict[str, Any] | None] = {
    "full": None,
    "lora": {"type": "lora", "r": 4},
    "rslora": {"type": "lora", "r": 4, "use_rslora": True},
    "dora": {"type": "dora", "r": 4},
}
WEIGHTS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "nf4": {"load_in_4bit": True},
    "int8": {"load_in_8bit": True},
}
PRECISIONS = ("fp32", "bf16", "fp16")
BESIDES: dict[str, dict[str, Any]] = {
    "-": {},
    "head": {"adapter": {"modules_to_save": ["lm_head"]}},
    "rows": {"adapter": {"trainable_token_indices": [5, 7]}},
    "tokens": {"model": {"new_tokens": ["<a>", "<b>"]}},
    "wide": {"fp32_modules": ["*norm*"]},
    "offload": {"zero_optimization": {"offload_optimizer": "cpu"}},
}
# What a script of one's own would get wrong from the JSON alone, where dslaunch's worker cures it.
JSON_CANNOT = ("DeepSpeed's JSON", "no DeepSpeed JSON", "fp16 at zero_optimization.stage 0")
Cell = tuple[str, str, str, int, str]


def cells(only: str) -> list[Cell]:
    every = itertools.product(ADAPTERS, WEIGHTS, PRECISIONS, range(4), BESIDES)
    return [cell for cell in every if only in "/".join(map(str, cell))]


def run_file(cell: Cell, model: Path, data: Path) -> dict[str, Any]:
    """What a user would write: keys of an adapter only where there is one."""
    adapter, weights, precision, stage, beside = cell
    spec: dict[str, Any] = {
        "model": {"path": str(model)},
        "data": {"train": str(data), "max_length": 64},
        "precision": precision,
        "zero_optimization": {"stage": stage},
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 2,
        "max_steps": 2,
        "scheduler": {"type": "constant"},
        "optimizer": {"type": "AdamW", "lr": 1e-3},
        "cluster": {"gpu": "cpu", "num_gpus_per_node": 2},
    }
    if precision == "fp16":
        spec["allow_emulated_fp16"] = True
    if ADAPTERS[adapter]:
        spec["adapter"] = dict(ADAPTERS[adapter] or {})
    if WEIGHTS[weights]:
        spec["model"]["quantization_config"] = WEIGHTS[weights]
    for section, value in BESIDES[beside].items():
        if section == "adapter" and adapter == "full":
            continue  # the whole model is trained, and these with it
        spec[section] = {**spec.get(section, {}), **value} if isinstance(value, dict) else value
    return spec


def said_by(argv: list[str]) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of a command, in this process."""
    from dslaunch.cli.main import main as dslaunch

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = dslaunch(argv)
    return code, out.getvalue(), err.getvalue()


def sentences(text: str) -> set[str]:
    """``line: sentence`` of each error."""
    return {": ".join(found) for found in re.findall(r"^Error: \S*run\.yaml:(\d+): (.*)", text, re.MULTILINE)}


def verdict(path: Path) -> tuple[bool, str]:
    """(whether the commands agree, the first sentence of a refusal, or what differs)."""
    plan = said_by(["plan", str(path), "--json", "--run-dir", str(path.parent / "run")])
    check = said_by(["check", str(path), "--json"])
    gen = said_by(["gen-config", str(path)])
    errors = sentences(plan[2])
    (checked,) = json.loads(check[1])["files"]
    told = {f"{f['line']}: {f['message']}" for f in checked["findings"] if f["severity"] == "error"}
    generated = sentences(gen[2])
    beyond = {text for text in generated - errors if not any(part in text for part in JSON_CANNOT)}
    if bool(errors) != (plan[0] == 2) or bool(told) != (check[0] == 1):
        return False, f"exit codes: plan {plan[0]}, check {check[0]}: {plan[2][:200]}"
    if errors != told or not errors <= generated or beyond:
        return False, f"plan {sorted(errors)}, check {sorted(told)}, gen-config {sorted(generated)}"
    return True, min(errors, default="")


def train(paths: list[Path], out: Path) -> None:
    """One rank: each plan trained, and what came of it."""
    import gc

    from dslaunch.core.plan import load_run_plan
    from dslaunch.train.dist import init_world, shutdown
    from dslaunch.train.quiet import quiet_libraries
    from dslaunch.train.stopping import StopRequest
    from dslaunch.train.worker import train_rank

    quiet_libraries()
    world, found = init_world(), {}
    for path in paths:
        try:
            code = train_rank(load_run_plan(path), world, StopRequest(), resume=False)
            rows = (path.parent / "metrics.jsonl").read_text().splitlines()
            losses = [row["loss"] for row in map(json.loads, rows) if row["kind"] == "train"]
            right = code == 0 and len(losses) == 2 and all(math.isfinite(loss) for loss in losses)
            found[str(path)] = "" if right else f"exit {code}, losses {losses}"
        except Exception as error:
            found[str(path)] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        gc.collect()
        (out / f"rank-{world.rank}.json").write_text(json.dumps(found))
    shutdown()


def trained(plans: dict[Cell, Path], folder: Path) -> dict[Cell, str]:
    """What each of the let through came to on two ranks; empty where it is right."""
    from tests.support.ranks import check_ranks, run_ranks

    listed = folder / "plans.json"
    listed.write_text(json.dumps([str(path) for path in plans.values()]))
    check_ranks(run_ranks([__file__, "--worker", listed], world_size=2, timeout_s=4 * 3600))
    found = json.loads((folder / "rank-0.json").read_text())
    return {cell: found[str(path)] for cell, path in plans.items()}


def plan_of(path: Path) -> Path:
    """plan.json of a run file, where its run directory would be."""
    from dslaunch.cli.options import load_and_resolve
    from tests.support.plans import save_plan

    return save_plan(load_and_resolve(str(path), set_=(), run_dir=str(path.parent / "run")))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="cells whose name holds this text, such as dora/nf4/bf16")
    parser.add_argument("--train", action="store_true", help="train what is let through")
    parser.add_argument("--json", type=Path, help="write every verdict here as well")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        train([Path(path) for path in json.loads(args.worker.read_text())], args.worker.parent)
        return 0
    import yaml

    from tests.support.plans import write_questions
    from tests.support.tiny import make_tiny_model_dir

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = make_tiny_model_dir(folder / "model", tie=False, layers=1)
        data = write_questions(folder / "train.jsonl")
        verdicts: dict[Cell, tuple[bool, str]] = {}
        plans: dict[Cell, Path] = {}
        for number, cell in enumerate(cells(args.only)):
            path = folder / str(number) / "run.yaml"
            path.parent.mkdir()
            path.write_text(yaml.safe_dump(run_file(cell, model, data)))
            verdicts[cell] = verdict(path)
            if args.train and verdicts[cell] == (True, ""):
                plans[cell] = plan_of(path)
        ran = trained(plans, folder) if plans else {}
    return report(verdicts, ran, args.json)


def report(verdicts: dict[Cell, tuple[bool, str]], ran: dict[Cell, str], path: Path | None) -> int:
    """Print what differs, why what is refused is, and the counts; the exit code."""
    wrong = {cell: text for cell, (agree, text) in verdicts.items() if not agree}
    wrong |= {cell: f"trained: {text}" for cell, text in ran.items() if text}
    for cell, text in wrong.items():
        print(f"WRONG {'/'.join(map(str, cell))}: {text}")
    refused = Counter(re.sub(r"^\d+: ", "", text) for agree, text in verdicts.values() if agree and text)
    for text, count in refused.most_common():
        print(f"{count:4} refused: {text}")
    through = sum(agree and not text for agree, text in verdicts.values())
    print(f"{len(verdicts)} combinations, {through} let through, {len(ran)} trained, {len(wrong)} wrong")
    if path:
        named = {"/".join(map(str, cell)): text for cell, (_, text) in verdicts.items()}
        path.write_text(
            json.dumps({"verdicts": named, "wrong": {str(c): t for c, t in wrong.items()}}, indent=1)
        )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    sys.exit(main())

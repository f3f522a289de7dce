"""What `dslaunch diagnose` costs on long logs: CPU seconds and peak memory of the whole process.

    python benchmarks/diagnose.py [--gib 1.0] [--only deepspeed] [--json]

The logs are made here: a DeepSpeed fp16 run of 8 ranks (overflow lines, progress bars, losses, and the talk
of libraries between them: 1.4 KB a step), and logs that are nothing but one thing: Megatron's steps; a
trainer's losses and norms, alone, behind a bar each, amid free talk, and from 8 ranks in any order; overflows
of 8 ranks without end; progress bars without a line feed. Exit code 1 where one takes more than 30 CPU
seconds per GiB, or over 16 MiB more memory than a hundredth of it does.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

LIMIT_S_PER_GIB = 30.0
LIMIT_GROWTH_MIB = 16.0
GIB = 1 << 30

_RUN = """
import json, os, resource, sys
from dslaunch.cli.main import main
null = os.open(os.devnull, os.O_WRONLY)
keep = os.dup(1); os.dup2(null, 1)
code = main(["diagnose", sys.argv[1], "--json"])
sys.stdout.flush(); os.dup2(keep, 1)
use = resource.getrusage(resource.RUSAGE_SELF)
print(json.dumps({"code": code, "cpu_s": use.ru_utime + use.ru_stime, "rss_mib": use.ru_maxrss / 1024}))
"""


def loss(step: int) -> float:
    return 2 + step % 100 / 1000


def norm(step: int) -> float:
    return 1 + step % 13 / 7


def deepspeed_log() -> Iterator[str]:
    """Steps of 8 ranks, with a line of talk from each: 1.4 KB a step, a tenth of it numbers."""
    step, scale = 0, 65536
    while True:
        step += 1
        stamp = f"[2026-01-01 {step // 3600 % 24:02}:{step // 60 % 60:02}:{step % 60:02},123]"
        if step % 1001 == 0:
            for rank in range(8):
                yield (
                    f"{stamp} [INFO] [loss_scaler.py:266:update_scale] [deepspeed] OVERFLOW! Rank {rank} "
                    f"Skipping step. Attempted loss scale: {scale}, reducing to {scale // 2}\n"
                )
            scale = max(1024, scale // 2)
        for rank in range(8):
            yield (
                f"{stamp} [INFO] [rank{rank}] fetched bucket {step % 7} of shard {rank} in 0.0{step % 97} s, "
                "cache 12 of 16 GiB, queue 4, allocator 40.2 GiB reserved\n"
            )
        yield f"\r 10%|#         | {step}/9000000 [10:00<90:00,  1.10it/s]\n"
        yield f"{{'loss': {loss(step)}, 'grad_norm': {norm(step)}, 'learning_rate': 1e-05}}\n"
        if step % 10 == 0:
            prefix = f"{stamp} [INFO] [logging.py:123:log_dist] [Rank 0]"
            yield f"{prefix} step={step}, skipped={step // 1001}, lr=[1e-05]\n"


def megatron_log() -> Iterator[str]:
    step = 0
    while True:
        step += 1
        yield (
            f" [2026-01-01 00:00:00] iteration {step:8}/ 9000000 | consumed samples: {step * 64:12} | "
            f"elapsed time per iteration (ms): 99.5 | learning rate: 1.000E-05 | global batch size: 64 | "
            f"lm loss: {loss(step):.6E} | loss scale: 65536.0 | grad norm: {norm(step):.3f} | number of "
            "skipped iterations:   0 | number of nan iterations:   0 |\n"
        )


def trainer_log() -> Iterator[str]:
    step = 0
    while True:
        step += 1
        yield (
            f"{{'loss': {loss(step):.4f}, 'grad_norm': {norm(step)}, "
            f"'learning_rate': 1.5e-05, 'epoch': {step / 1e6:.4f}}}\n"
        )


def bar_log() -> Iterator[str]:
    step = 0
    while True:
        step += 1
        yield f"\rtrain: 10%|#####     | {step}/90000000 [10:00<90:00, 1.10it/s, loss={loss(step):.3f}]"


def behind_bars() -> Iterator[str]:
    """What the transformers Trainer leaves in a file: each loss with the bar before it."""
    step = 0
    while True:
        step += 1
        share = step * 100 // 9_000_000
        yield (
            f"\r {share:2}%|{'#' * (share // 10):10}| {step}/9000000 [{step // 3600}:{step // 60 % 60:02}:"
            f"{step % 60:02}<90:00:00,  1.10it/s]\n"
            f"{{'loss': {loss(step):.4f}, 'grad_norm': {norm(step)}, "
            f"'learning_rate': 1.5e-05, 'epoch': {step / 1e6:.4f}}}\n"
        )


def coloured() -> Iterator[str]:
    """A loss every 300 bytes, its numbers in colour, behind talk of changing length."""
    chance = random.Random(0)
    step = 0
    while True:
        step += 1
        yield (
            f"\x1b[32m[10:00:0{step % 10}]\x1b[0m step {step} \x1b[1mloss: {loss(step):.4f}\x1b[0m "
            f"grad_norm: {norm(step)}\n{'.' * chance.randint(150, 300)}\n"
        )


def amid_talk() -> Iterator[str]:
    """A loss every 430 bytes, with bars and lines of other programs in changing number between them."""
    chance = random.Random(0)
    talk = (
        "saved shard {0} of {1} to the object store, {2} s behind\n",
        "[INFO] [rank{0}] fetched bucket {1} in 0.0{2} s, cache {1} of 16 GiB, 40.2 GiB reserved\n",
        "WARNING: the tokenizer saw {1} unknown characters in document {2}{1}{0} and went on without them\n",
        "[2026-01-01 10:00:0{0},{1}] [worker {2}] heartbeat: all is well and nothing else to tell\n",
        "\n",
    )
    step = 0
    while True:
        step += 1
        parts = []
        for _ in range(chance.randrange(6)):
            numbers = (chance.randrange(10), chance.randrange(100), chance.randrange(1000))
            parts.append(chance.choice(talk).format(*numbers))
        parts.append(f"\r {step // 90000:2}%|##        | {step}/9000000 [10:00<90:00,  1.10it/s]\n")
        for _ in range(chance.randrange(3)):
            parts.append(chance.choice(talk).format(step % 10, step % 100, step % 1000))
        parts.append(
            f"{{'loss': {loss(step):.4f}, 'grad_norm': {norm(step)}, "
            f"'learning_rate': 1.5e-05, 'epoch': {step / 1e6:.4f}}}\n"
        )
        if step % 10 == 0:
            parts.append(
                f"[2026-01-01 00:00:00,123] [INFO] [logging.py:123:log_dist] [Rank 0] step={step}, "
                f"skipped={step // 1001}, lr=[1e-05], mom=[(0.9, 0.999)]\n"
            )
        yield from parts


def ranks_log() -> Iterator[str]:
    """Eight ranks that tell each step, in any order."""
    chance = random.Random(0)
    step = 0
    while True:
        step += 1
        for rank in chance.sample(range(8), 8):
            yield f"[Rank {rank}] step {step} loss {loss(step):.4f} grad_norm {norm(step):.4f}\n"


def overflow_log() -> Iterator[str]:
    """A run that gets nowhere, at a scale that is held up by its floor."""
    step = 0
    while True:
        step += 1
        stamp = f"[2026-01-01 {step // 3600 % 24:02}:{step // 60 % 60:02}:{step % 60:02},123]"
        for rank in range(8):
            yield (
                f"{stamp} [INFO] [loss_scaler.py:266:update_scale] [deepspeed] OVERFLOW! Rank {rank} "
                "Skipping step. Attempted loss scale: 1, reducing to 1\n"
            )


LOGS: dict[str, Callable[[], Iterator[str]]] = {
    "deepspeed": deepspeed_log,
    "megatron": megatron_log,
    "trainer": trainer_log,
    "behind bars": behind_bars,
    "amid talk": amid_talk,
    "colours": coloured,
    "ranks": ranks_log,
    "overflow": overflow_log,
    "no line feed": bar_log,
}


def write(path: Path, lines: Iterator[str], size: int) -> None:
    written, part = 0, []
    with path.open("w", encoding="utf-8") as stream:
        while written < size:
            part = [next(lines) for _ in range(20_000)]
            text = "".join(part)
            stream.write(text)
            written += len(text)


def measure(path: Path) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-c", _RUN, str(path)], stdout=subprocess.PIPE, text=True, check=True, env=os.environ
    )
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    assert result["code"] in (0, 1), "0: nothing is wrong in it; 1: something is, and was found"
    return result


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gib", type=float, default=1.0, help="size of each log")
    parser.add_argument("--only", choices=sorted(LOGS), action="append", help="this log (repeatable)")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows, broken = {}, False
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "train.log"
        for name in options.only or LOGS:
            lines = LOGS[name]
            write(path, lines(), int(options.gib * GIB / 100))
            small = measure(path)
            write(path, lines(), int(options.gib * GIB))
            large = measure(path)
            growth = large["rss_mib"] - small["rss_mib"]
            rows[name] = {**large, "rss_growth_mib": growth, "gib": path.stat().st_size / GIB}
            slow = large["cpu_s"] > LIMIT_S_PER_GIB * max(rows[name]["gib"], 0.05)
            broken |= slow or growth > LIMIT_GROWTH_MIB
            if not options.json:
                print(
                    f"{name:14} {rows[name]['gib']:6.2f} GiB  {large['cpu_s']:7.2f} CPU s  peak "
                    f"{large['rss_mib']:6.1f} MiB (+{growth:.1f} over a hundredth of it)",
                    flush=True,
                )
    if options.json:
        print(json.dumps(rows, indent=2))
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())

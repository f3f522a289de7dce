"""One rank that trains into a planted fault and replays it: ``rank_run.py PLAN.json OUT_DIR``.

Each rank prints nothing; rank 0 writes the reports: of the trace at the end of the run, of the step
that was kept, and of the same step reached from the checkpoint before it.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

import torch

from dslaunch.core.errors import Diverged
from dslaunch.core.plan import RunPlan, load_run_plan
from dslaunch.core.run_dir import RunDir
from dslaunch.train.dist import World, barrier, init_world, shutdown
from dslaunch.train.quiet import quiet_libraries
from dslaunch.train.replay.worker import replay_rank
from dslaunch.train.stopping import StopRequest
from dslaunch.train.worker import train_rank


def main(plan_path: str, out_dir: str) -> None:
    quiet_libraries()
    world = init_world()
    plan = load_run_plan(Path(plan_path))
    run_dir = RunDir(Path(plan.launch.run_dir))
    results: dict[str, Any] = {"diverged": _train(plan, world)}
    (step,) = run_dir.kept_steps()
    folder = run_dir.nonfinite / f"step-{step}"
    results["step"] = step
    results["traced"] = json.loads((folder / "report.json").read_text())
    torch.manual_seed(99)
    results["kept"] = replay_rank(plan, world, step)
    gc.collect()
    barrier("the end of the replay")
    aside = folder.with_name("aside")
    if world.rank == 0:
        folder.rename(aside)
    barrier("the window being gone")
    results["reached"] = replay_rank(plan, world, step)
    if world.rank == 0:
        aside.rename(folder)
        Path(out_dir, "results.json").write_text(json.dumps(results))
    shutdown()


def _train(plan: RunPlan, world: World) -> dict[str, str | None]:
    try:
        train_rank(plan, world, StopRequest(), resume=False)
    except Diverged as error:
        return {"message": error.message, "hint": error.hint}
    finally:
        gc.collect()
    raise AssertionError("the run did not diverge")


if __name__ == "__main__":
    main(*sys.argv[1:])

"""One rank that runs several plans one after the other: ``rank_plans.py PLAN.json [PLAN.json:resume] ...``.

Starting processes is what costs: a whole matrix of runs shares one pair of them.
Each rank prints ``EXIT <plan> <code>`` for each plan.
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path

from dslaunch.core.plan import load_run_plan
from dslaunch.train.dist import init_world, shutdown
from dslaunch.train.quiet import quiet_libraries
from dslaunch.train.stopping import StopRequest
from dslaunch.train.worker import train_rank


def main(arguments: list[str]) -> None:
    quiet_libraries()
    world = init_world()
    for argument in arguments:
        path, _, resume = argument.partition(":")
        plan = load_run_plan(Path(path))
        code = train_rank(plan, world, StopRequest(), resume=resume == "resume")
        print(f"EXIT {argument} {code}", flush=True)
        gc.collect()  # the ZeRO-3 config of one plan must not outlive it
    shutdown()


if __name__ == "__main__":
    main(sys.argv[1:])

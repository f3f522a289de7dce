"""One rank that runs several plans one after the other: ``rank_plans.py PLAN.json [PLAN.json:resume] ...``.

Starting processes is what costs: a whole matrix of runs shares one pair of them.
Each rank prints ``EXIT <plan> <code>`` for each plan; one that diverges is told of as the worker does.
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path

from dslaunch.core.errors import Diverged
from dslaunch.core.events import utc_now
from dslaunch.core.plan import load_run_plan
from dslaunch.train.dist import init_world, shutdown
from dslaunch.train.failures import report_failure
from dslaunch.train.quiet import quiet_libraries
from dslaunch.train.stopping import StopRequest
from dslaunch.train.worker import train_rank


def main(arguments: list[str]) -> None:
    quiet_libraries()
    world = init_world()
    for argument in arguments:
        path, _, resume = argument.partition(":")
        plan = load_run_plan(Path(path))
        try:
            code = train_rank(plan, world, StopRequest(), resume=resume == "resume")
        except Diverged as error:
            run_dir = Path(plan.launch.run_dir)
            code = report_failure(error, rank=world.rank, run_dir=run_dir, since=utc_now())
        print(f"EXIT {argument} {code}", flush=True)
        gc.collect()  # the ZeRO-3 config of one plan must not outlive it
    shutdown()


if __name__ == "__main__":
    main(sys.argv[1:])

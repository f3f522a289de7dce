"""The matrix of the engine: which cells there are, which of them cover every pair, and what each must do.

No torch here: the ranks run the cells (cases_matrix.py), tests and benchmarks/numerics.py compare.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np

from tests.oracles.loss_scaler import Scaler
from tests.oracles.mixed_precision import AdamW, Array, AtMinimum, Momentum, Training, loss_of, round_to

SIZES = (7, 6)  # elements of the two parameters: no shard of any stage ends where a tensor does
STEPS, OVERFLOWS, TURN = 19, frozenset({1, 4, 5, *range(13, 19)}), 8
INITIAL_POWER, WINDOW, HYSTERESIS, MINIMUM = 8, 2, 2, 64
STATIC_SCALE, CLIPPING = 128.0, 1.75  # the clip binds on some steps and not on others
FP32_EPS = 1.2e-7

LEVELS: dict[str, tuple[Any, ...]] = {
    "precision": ("fp32", "bf16", "bf16 summed in fp32", "fp16 static", "fp16 dynamic"),
    "stage": (0, 1, 2, 3),
    "accumulation": (1, 2),
    "clipping": (0.0, CLIPPING),
    "offload": (False, True),
    "optimizer": ("AdamW", "SGD"),
    "course": ("straight", "rolled back", "resumed"),
    "ranks": (2, 1),
}


@dataclass(frozen=True)
class Cell:
    precision: str
    stage: int
    accumulation: int
    clipping: float
    offload: bool
    optimizer: str
    course: str
    ranks: int

    @property
    def name(self) -> str:
        return "/".join(str(value) for value in asdict(self).values())

    @property
    def dtype(self) -> str:
        return self.precision.split()[0]


def all_cells() -> list[Cell]:
    """Every cell that exists: at stage 0 there is nothing to offload."""
    cells = (Cell(*values) for values in itertools.product(*LEVELS.values()))
    return [cell for cell in cells if not (cell.offload and cell.stage == 0)]


# DeepSpeed's own Adams have to be compiled first, and run in no test: benchmarks/numerics.py.
COMPILED = {"cpu": "DeepSpeedCPUAdam", "fused": "FusedAdam"}


def compiled_cells(kind: str) -> list[Cell]:
    """The cells of AdamW with one of :data:`COMPILED`: the CPU's runs offloaded, the fused one does not."""
    cells = (cell for cell in all_cells() if cell.optimizer == "AdamW" and cell.offload == (kind == "cpu"))
    return [replace(cell, optimizer=COMPILED[kind]) for cell in cells]


def pairs_of(cell: Cell) -> set[tuple[tuple[str, Any], tuple[str, Any]]]:
    values = [(field.name, getattr(cell, field.name)) for field in fields(cell)]
    return set(itertools.combinations(values, 2))


def pairwise_cells() -> list[Cell]:
    """Few cells in which every two values of two settings meet, if they meet anywhere. Greedy."""
    cells = all_cells()
    pairs = {cell: pairs_of(cell) for cell in cells}
    left = set().union(*pairs.values())
    chosen = []
    while left:
        best = max(cells, key=lambda cell: len(pairs[cell] & left))
        chosen.append(best)
        left -= pairs[best]
    return chosen


def further_cells() -> list[Cell]:
    """What no pair of settings gives away: F17, which the whole matrix found, and F8 through a resume."""
    return [
        Cell("bf16 summed in fp32", 1, 1, 0.0, True, "SGD", "straight", 2),
        Cell("bf16 summed in fp32", 2, 2, 0.0, True, "SGD", "resumed", 2),
        Cell("fp32", 0, 2, CLIPPING, False, "AdamW", "resumed", 2),
    ]


def inputs(cell: Cell, step: int) -> Array:
    """x of one window, [ranks, accumulation, elements]; at an overflow one rank's last micro-batch is bad.

    In fp16 the bad value is finite and only its scaled gradient overflows.
    """
    generator = np.random.default_rng([step, 7])
    x: Array = generator.integers(-40, 41, (cell.ranks, cell.accumulation, sum(SIZES))) / 32
    if step in OVERFLOWS:
        x[step % cell.ranks, -1, step % sum(SIZES)] = 60000.0 if cell.dtype == "fp16" else math.inf
    return x


def start(cell: Cell) -> Array:
    """The masters that training begins with: what the 16-bit weights hold, which DeepSpeed makes first."""
    return round_to(cell.dtype, np.random.default_rng(5).normal(size=sum(SIZES)))


def expected(cell: Cell) -> list[dict[str, Any]]:
    """What each step must do; the list ends before the step in which the run must stop."""
    dynamic = cell.precision == "fp16 dynamic"
    training = Training(
        precision=cell.dtype,
        weights=start(cell),
        optimizer=Momentum() if cell.optimizer == "SGD" else AdamW(),
        clipping=cell.clipping,
        accumulation=cell.accumulation,
        scaler=Scaler(2.0**INITIAL_POWER, WINDOW, HYSTERESIS, minimum=MINIMUM) if dynamic else None,
        static_scale=STATIC_SCALE if cell.precision == "fp16 static" else 1.0,
    )
    records = []
    for step in range(STEPS):
        try:
            records.append(training.step(inputs(cell, step)))
        except AtMinimum:
            break
    return records


def differences(cell: Cell, measured: list[dict[str, Any]]) -> list[str]:
    """Where an engine's steps are not those of the oracle, to the precision of fp32; empty: nowhere."""
    truth = expected(cell)
    found = []
    if len(measured) != len(truth):
        found.append(f"stopped before step {len(measured)}, must stop before step {len(truth)}")
    before = start(cell)
    for step, (have, must) in enumerate(zip(measured, truth, strict=False)):
        if cell.optimizer in COMPILED.values():
            # Their last bit is not numpy's, and may put a weight on the other side of a 16-bit rounding.
            must = {**must, "loss": loss_of(cell.dtype, before, inputs(cell, step))}
            before = np.asarray(have["weights"])
        for key, value in must.items():
            if not _equal(have[key], value, step + 1):
                found.append(f"step {step}: {key} {have[key]} must be {value}")
    return found


def _equal(have: Any, must: Any, steps: int) -> bool:
    if must is None or isinstance(must, bool):
        return bool(have == must)
    a, b = np.asarray(have, dtype=np.float64), np.asarray(must, dtype=np.float64)
    with np.errstate(invalid="ignore"):
        close = np.abs(a - b) <= FP32_EPS * (2 + steps) * np.maximum(1.0, np.abs(b))
    return bool(np.all(close | (a == b) | (np.isnan(a) & np.isnan(b))))

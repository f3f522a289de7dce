"""train_batch_size = micro batch x accumulation x world size, as DeepSpeed works it out."""

from __future__ import annotations

from dslaunch.config.check.context import FILLED, Checker

TRAIN, MICRO, STEPS = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
)


def check_batch(checker: Checker) -> None:
    """The three sizes for the target's world size; without one only what fits no world size."""
    names = (TRAIN, MICRO, STEPS)
    written = {name: checker.config.get(name) for name in names}
    if any(
        written[name] is not None and checker.get(name) is None and written[name] != "auto" for name in names
    ):
        return  # a size of a wrong type or range: said already
    autos = [name for name in names if written[name] == "auto"]
    if autos:
        _check_beside_auto(checker, autos)
        return
    train, micro, steps = (checker.get(name) for name in names)
    if train is None and micro is None:
        _report_missing(checker)
        return
    world = data_parallel_size(checker)
    if world is None:
        if train is not None and train % ((micro or 1) * (steps or 1)):
            _report_any_world(checker, train, micro, steps)
        return
    if train is None:
        return  # DeepSpeed multiplies, which always works
    unit = (micro or 1) * (steps or 1) * world
    if micro is not None and steps is not None:
        if train != unit:
            _report_three(checker, train, micro, steps, world)
    elif train % unit:
        _report_division(checker, train, micro, steps, world)


def data_parallel_size(checker: Checker) -> int | None:
    """Ranks that see different data: the world size without tensor and sequence parallelism."""
    world = checker.target.world_size
    if world is None:
        return None
    for path in (("tensor_parallel", "autotp_size"), ("sequence_parallel_size",)):
        size = checker.get(*path)
        if isinstance(size, int) and size > 1:
            if world % size:
                checker.report(
                    "world-size",
                    "error",
                    path,
                    f"{size} does not divide the world size {checker.target.world_size}",
                    "choose a divisor of the number of ranks",
                )
                return None
            world //= size
    return world


def _report_missing(checker: Checker) -> None:
    reader = checker.target.reader
    if reader == "accelerate" or (
        reader == "hf-trainer" and not checker.has(TRAIN) and not checker.has(MICRO)
    ):
        if reader == "accelerate":
            return  # accelerate puts them in
        message = "no batch size is written, and the Hugging Face Trainer fills in only what says auto"
        hint = f'write "{TRAIN}": "auto" and "{MICRO}": "auto"'
    else:
        message = f"no batch size is written: {TRAIN} or {MICRO} is needed"
        hint = f"write {MICRO} and {STEPS}; DeepSpeed multiplies them by the world size"
    checker.report("batch-missing", "error", (), message, hint)


def _check_beside_auto(checker: Checker, autos: list[str]) -> None:
    if not all(name in FILLED[checker.target.reader] for name in autos):
        return  # auto itself is the error
    for name in (TRAIN, MICRO, STEPS):
        if checker.get(name) is not None:
            checker.report(
                "batch-beside-auto",
                "warning",
                (name,),
                f"is a number beside {' and '.join(autos)} = auto:"
                " the trainer stops unless its own argument is equal",
                'write "auto" for all three, or numbers for all',
            )


def _report_any_world(checker: Checker, train: int, micro: int | None, steps: int | None) -> None:
    from dslaunch.core.batch_size import WORLD, ways_out

    given = {name: size for name, size in ((MICRO, micro), (STEPS, steps)) if size}
    unit = (micro or 1) * (steps or 1)
    factors = " x ".join(f"{name} {size}" for name, size in given.items())
    open_ = " x ".join((WORLD, *(name for name in (MICRO, STEPS) if name not in given)))
    checker.report(
        "batch",
        "error",
        (TRAIN,),
        f"{train} is no multiple of {factors} (= {unit}), so it fits no world size",
        f"use {ways_out({TRAIN: train, **given}, open_)}, or leave {TRAIN} out",
    )


def _report_three(checker: Checker, train: int, micro: int, steps: int, world: int) -> None:
    from dslaunch.core.batch_size import ways_out

    product = micro * steps * world
    sizes = {TRAIN: train, MICRO: micro, STEPS: steps, _name_of_ranks(checker, world): world}
    checker.report(
        "batch",
        "error",
        (TRAIN,),
        f"{train} is not {MICRO} {micro} x {STEPS} {steps} x {_ranks(checker, world)} (= {product})",
        f"use {ways_out(sizes, None)}, or leave one of the three out",
    )


def _report_division(checker: Checker, train: int, micro: int | None, steps: int | None, world: int) -> None:
    from dslaunch.core.batch_size import ways_out

    given = MICRO if micro else STEPS if steps else None
    size = micro or steps or 1
    unit = size * world
    with_size, product = (f"{given} {size} x ", f" (= {unit})") if given else ("", "")
    wanted = STEPS if micro else MICRO
    sizes = {TRAIN: train, **({given: size} if given else {}), _name_of_ranks(checker, world): world}
    checker.report(
        "batch",
        "error",
        (TRAIN,),
        f"{train} is not a multiple of {with_size}{_ranks(checker, world)}{product}",
        f"use {ways_out(sizes, wanted)}, or leave {TRAIN} out and write {wanted}",
    )


def _ranks(checker: Checker, world: int) -> str:
    whole = checker.target.world_size
    return f"world size {world}" if world == whole else f"{world} data-parallel ranks of {whole}"


def _name_of_ranks(checker: Checker, world: int) -> str:
    return "world_size" if world == checker.target.world_size else "data-parallel ranks"

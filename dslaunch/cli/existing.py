"""Whether what a command is given is there, said at once: before torch is imported or the hub is asked."""

from __future__ import annotations

import os
from pathlib import Path

from dslaunch.cli.talk import note
from dslaunch.core.errors import ConfigError
from dslaunch.core.missing_path import not_found


def check_model(text: str) -> None:
    """A directory or .gguf file must be there; what can be a hub id passes, with a note where it may be none.

    Raises ConfigError with the nearest name that is there.
    """
    if Path(text).expanduser().exists():
        return
    from dslaunch.config.facts import look_at_path
    from dslaunch.config.paths import doubt_hub_id

    fact = look_at_path("model.path", text, Path.cwd())
    doubt = doubt_hub_id(text, fact)
    if doubt in ("path", "mistyped"):
        hint = f"did you mean {fact.nearest}?" if fact.nearest else f"looked for {fact.absolute}"
        raise ConfigError(f"no such directory or .gguf file: {text}", hint=hint)
    if doubt == "like":
        note(f"{text} is taken for a hub id; there is also {fact.nearest}")


def check_checkpoint(path: Path) -> None:
    """A checkpoint or run directory must be there. Raises ConfigError with what is there instead."""
    from dslaunch.core.run_dir import RunDir, checkpoint_step, checkpoint_steps

    if not path.exists():
        if checkpoint_step(path) is not None and path.parent.is_dir():
            raise ConfigError(
                f"{path.parent} has no {path.name}",
                hint=_describe_steps(path.parent) or "it has no checkpoint",
            )
        raise not_found("directory", path, hint=_RUN_HINT, wanted=os.DirEntry.is_dir)
    if not path.is_dir():
        raise ConfigError(f"{path} is a file, not a run directory or checkpoint", hint=_RUN_HINT)
    if (
        checkpoint_steps(path)
        or RunDir(path).checkpoint_steps()
        or checkpoint_step(path.resolve()) is not None
    ):
        return
    if RunDir(path).plan.is_file():
        raise ConfigError(
            f"the run in {path} has no checkpoint yet",
            hint="one is written at its end, and every output.save_steps steps",
        )
    if any((path / name).is_file() for name in ("config.json", "adapter_config.json")):
        raise ConfigError(f"{path} is no run: it holds a model or adapter already", hint=_RUN_HINT)


_RUN_HINT = "give RUN_DIR, or RUN_DIR/checkpoints/step-N"


def _describe_steps(directory: Path) -> str | None:
    from dslaunch.core.run_dir import checkpoint_steps

    steps = checkpoint_steps(directory)
    shown = ", ".join(f"step-{step}" for step in steps[-8:])
    return f"it has {'..., ' if len(steps) > 8 else ''}{shown}" if steps else None

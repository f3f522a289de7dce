"""dslaunch logs: what the ranks of a run wrote."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from collections.abc import Sequence


@click.command("logs", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("run_dir", metavar="RUN_DIR")
@click.option(
    "--rank",
    "ranks",
    metavar="RANKS",
    help="0,3 or 4-7 or all (default: the failed one, else 0).",
)
@click.option("-n", "--lines", type=click.IntRange(min=0), default=40, metavar="N", help="Last lines (40).")
@click.option("-f", "--follow", is_flag=True, help="Go on showing what is added, until the run ends.")
def command(run_dir: str, ranks: str | None, lines: int, follow: bool) -> None:
    """Show the last lines that ranks of the run in RUN_DIR wrote. Ranks that say the same are shown once."""
    from dslaunch.core.topology import span
    from dslaunch.observe import rank_logs
    from dslaunch.observe.run_status import is_over, load_status

    path = Path(run_dir)
    status = load_status(path)
    default = 0 if status.failed_rank is None else status.failed_rank
    wanted = [default] if ranks is None else None if ranks == "all" else parse_ranks(ranks)
    shown = rank_logs.find_ranks(path, wanted)
    tails = rank_logs.read_tails(path, shown, lines, finished=follow)
    for members, tail in rank_logs.group_tails(tails):
        prefix = "" if len(shown) == 1 else f"rank {span(members)}| "
        for line in tail:
            click.echo(prefix + line)
    if follow:
        places = {rank: tail.end for rank, tail in tails.items()}
        for rank, line in rank_logs.follow(path, places, lambda: is_over(path)):
            click.echo(line if len(shown) == 1 else f"rank {rank}| {line}")


def parse_ranks(text: str) -> Sequence[int]:
    """``0,3`` or ``4-7`` -> numbers. Raises ConfigError where it is neither."""
    from dslaunch.core.errors import ConfigError

    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or (dash and int(last) < int(first)):
            raise ConfigError(
                f"--rank {text!r}: {part.strip()!r} is no rank", hint="write 0,3 or 4-7, or all"
            )
        found += range(int(first), int(last or first) + 1)
    return found

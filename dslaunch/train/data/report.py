"""What preparing the data did with it: counts and places, for the log and plan of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

NO_ANSWER = "it has no answer, or an empty one"
ANSWER_CUT = "truncation took all of its answer"


@dataclass(frozen=True)
class SourceReport:
    """One source. Counts are records, except ``num_*_tokens``.

    ``dropped_where`` holds the first places only, each ``file:line: reason``.
    """

    path: str
    split: str
    read: int
    kept: int
    dropped: int
    truncated: int  # kept, but shortened to max_length
    bos_removed: int
    num_tokens: int
    num_supervised_tokens: int
    num_cut_tokens: int  # what truncation took from the kept ones
    formats: Mapping[str, int] = field(default_factory=dict)
    dropped_where: tuple[str, ...] = ()


@dataclass(frozen=True)
class DataReport:
    """All sources of one data set; ``drawn`` says how many samples of each an epoch has."""

    sources: tuple[SourceReport, ...]
    drawn: tuple[int, ...]

    @property
    def read(self) -> int:
        """Records read."""
        return sum(source.read for source in self.sources)

    @property
    def kept(self) -> int:
        """Samples that can be trained on."""
        return sum(source.kept for source in self.sources)

    @property
    def dropped(self) -> int:
        """Records without a trained token."""
        return sum(source.dropped for source in self.sources)

    @property
    def truncated(self) -> int:
        """Samples that were kept, but shortened."""
        return sum(source.truncated for source in self.sources)

    @property
    def dropped_where(self) -> tuple[str, ...]:
        """The first places of dropped records, with the reason."""
        return tuple(where for source in self.sources for where in source.dropped_where)

    def lines(self) -> list[str]:
        """The report as text: a line for each source, and one for each thing to look at."""
        text = []
        for source, drawn in zip(self.sources, self.drawn, strict=True):
            formats = ", ".join(sorted(source.formats))
            text.append(
                f"{source.path}: {source.kept} of {source.read} samples ({formats}), {drawn} an epoch, "
                f"{source.num_tokens} tokens, {source.num_supervised_tokens} of them trained"
            )
            if source.truncated:
                text.append(
                    f"  {source.truncated} truncated to max_length ({source.num_cut_tokens} tokens cut)"
                )
            if source.bos_removed:
                text.append(f"  {source.bos_removed} began with more than one BOS; one was kept")
            if source.dropped:
                text.append(f"  {source.dropped} dropped, for example {source.dropped_where[0]}")
        return text

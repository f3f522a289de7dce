"""Which files can be training data, by the ends of their names."""

from __future__ import annotations

JSON_LINES = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz")
JSON = (".json", ".json.gz")
PARQUET = (".parquet",)
DATA_SUFFIXES = (*JSON_LINES, *JSON, *PARQUET)
# What people have as well, and what is told apart from a hub id by it.
OTHER_SUFFIXES = (
    *(".csv", ".tsv", ".txt", ".md", ".xls", ".xlsx", ".yaml", ".yml", ".arrow", ".feather", ".orc", ".pkl"),
    *(".gz", ".zst", ".bz2", ".xz", ".zip", ".tar", ".tgz", ".lz4"),
)


def is_data_file(name: str) -> bool:
    """Whether a file of this name is read as data."""
    return name.lower().endswith(DATA_SUFFIXES)


def describe_data_suffixes() -> str:
    """What is read, for a message."""
    return ".jsonl, .ndjson or .json (each also .gz) or .parquet"

"""Reads back what wandb (offline) and MLflow (a directory) keep of a run's curves.

``python tracker_curves.py wandb|mlflow DIRECTORY`` prints {run id: {name: [[step, value], ...]}}
as JSON, in the order in which it was written. In a process of its own, since both leave threads
and settings behind.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

Curves = dict[str, dict[str, list[tuple[int, float]]]]

# wandb's .wandb files: a header, then the blocks of LevelDB's log format, each record one protobuf.
# https://github.com/google/leveldb/blob/main/doc/log_format.md
_WANDB_HEADER, _BLOCK, _RECORD_HEADER = 7, 1 << 15, 7
_FULL, _LAST = 1, 4


def wandb_records(data: bytes) -> Iterator[bytes]:
    """The records of a .wandb file."""
    at, record = _WANDB_HEADER, b""
    while at + _RECORD_HEADER <= len(data):
        left = _BLOCK - at % _BLOCK
        if left < _RECORD_HEADER:  # too little for a header: zeros up to the next block
            at += left
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        at += _RECORD_HEADER
        record += data[at : at + length]
        at += length
        if kind in (_FULL, _LAST):
            yield record
            record = b""


def wandb_curves(directory: Path) -> Curves:
    from wandb.proto.wandb_internal_pb2 import Record

    curves: Curves = defaultdict(lambda: defaultdict(list))
    for path in sorted(directory.glob("offline-run-*/run-*.wandb"), key=lambda path: path.stat().st_mtime):
        run_id = path.stem.removeprefix("run-")
        for data in wandb_records(path.read_bytes()):
            record = Record.FromString(data)
            if record.WhichOneof("record_type") != "history":
                continue
            for item in record.history.item:
                name = item.key or "/".join(item.nested_key)
                if not name.startswith("_"):
                    value = json.loads(item.value_json)
                    curves[run_id][name].append((record.history.step.num, value))
    return curves


def mlflow_curves(directory: Path) -> Curves:
    import mlflow

    client = mlflow.MlflowClient(tracking_uri=directory.as_uri())
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    return {
        run.info.run_id: {
            name: [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, name)]
            for name in run.data.metrics
        }
        for run in client.search_runs(experiments)
    }


if __name__ == "__main__":
    read = {"wandb": wandb_curves, "mlflow": mlflow_curves}[sys.argv[1]]
    print("CURVES", json.dumps(read(Path(sys.argv[2]))))

"""Which units a global step trains on, and how they are dealt to the ranks.

A *unit* is what fills one row of a batch: one sample, or one pack of samples.
The schedule is a pure function of its arguments: resuming at step k means
asking for step k, and nothing has to be saved or replayed.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from dslaunch.core.training_length import stream_length
from dslaunch.train.data.order import seeded_permutation

EMPTY_UNIT = -1

Int64Array = npt.NDArray[np.int64]


class BatchSchedule:
    """The units of every optimizer step of a run.

    The units form one continuous stream: epoch after epoch, each in its own
    seeded order (file order when ``shuffle`` is false). A step takes the next
    ``train_batch_size`` of them, so a window may span two epochs. The last
    window of ``num_train_epochs`` is filled up with ``EMPTY_UNIT`` (-1): no
    unit is seen twice or lost to make the numbers fit.

    Which units make up a step depends on ``seed``, ``num_units`` and
    ``train_batch_size`` only, never on the world size or the micro batch.

    Raises ConfigError when there is nothing to train on, or when
    ``num_train_epochs`` and ``max_steps`` are not exactly one of the two.
    """

    def __init__(
        self,
        *,
        num_units: int,
        train_batch_size: int,
        train_micro_batch_size_per_gpu: int,
        gradient_accumulation_steps: int,
        world_size: int,
        seed: int,
        num_train_epochs: float | None = None,
        max_steps: int | None = None,
        shuffle: bool = True,
    ) -> None:
        assert train_batch_size == train_micro_batch_size_per_gpu * gradient_accumulation_steps * world_size
        self.num_units = num_units
        self.train_batch_size = train_batch_size
        self.train_micro_batch_size_per_gpu = train_micro_batch_size_per_gpu
        self.gradient_accumulation_steps = gradient_accumulation_steps
        self.world_size = world_size
        self.seed = seed
        self.shuffle = shuffle
        self.stream_length = stream_length(num_units, train_batch_size, num_train_epochs, max_steps)
        self.total_steps = -(-self.stream_length // train_batch_size)

    def window_units(self, step: int) -> Int64Array:
        """The unit ids of global step ``step`` (from 0), [train_batch_size], -1 where empty.

        The window as a whole, the same on every rank: sum a per-unit count over
        it (where it is not -1) for the global denominator, without a collective.
        """
        if not 0 <= step < self.total_steps:
            raise IndexError(f"step {step} of {self.total_steps}")
        start = step * self.train_batch_size
        stop = min(start + self.train_batch_size, self.stream_length)
        window = np.full(self.train_batch_size, EMPTY_UNIT, dtype=np.int64)
        window[: stop - start] = self._stream(start, stop)
        return window

    def micro_batches(self, step: int, rank: int) -> list[list[int]]:
        """What ``rank`` runs in global step ``step``: one list of unit ids per micro-batch.

        [gradient_accumulation_steps] lists of [train_micro_batch_size_per_gpu]
        ids, -1 for an empty row. Every rank gets the same shape at every step,
        so no rank does a forward pass that the others do not.
        """
        if not 0 <= rank < self.world_size:
            raise IndexError(f"rank {rank} of {self.world_size}")
        dealt = self.window_units(step).reshape(
            self.gradient_accumulation_steps, self.world_size, self.train_micro_batch_size_per_gpu
        )
        rows: list[list[int]] = dealt[:, rank].tolist()
        return rows

    def epoch(self, step: int) -> float:
        """Epochs of data seen once ``step`` steps are done; for logs."""
        return min(step * self.train_batch_size, self.stream_length) / self.num_units

    def _stream(self, start: int, stop: int) -> Int64Array:
        parts = []
        while start < stop:
            epoch, offset = divmod(start, self.num_units)
            take = min(stop - start, self.num_units - offset)
            parts.append(self._epoch_order(epoch)[offset : offset + take])
            start += take
        return np.concatenate(parts)

    def _epoch_order(self, epoch: int) -> Int64Array:
        if not self.shuffle:
            return np.arange(self.num_units, dtype=np.int64)
        return _cached_permutation(self.num_units, self.seed, epoch)


# Two epochs: a window that spans them asks for both in turn.
@lru_cache(maxsize=2)
def _cached_permutation(num_units: int, seed: int, epoch: int) -> Int64Array:
    order = seeded_permutation(num_units, seed, "epoch", epoch)
    order.setflags(write=False)
    return order

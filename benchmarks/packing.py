"""Packed against padded SFT: tokens per CPU second, at equal loss.

    python benchmarks/packing.py [--samples 96] [--steps 5]

Samples of log-normal length (median 128 tokens, longest 512) train a small random
Llama in fp32 under ZeRO-2 on one rank, once padded (8 samples in a forward pass,
padded to the longest of them) and once packed to 512 tokens (4 packs in a forward
pass). Every optimizer step sees all samples, so both runs must show the same losses.
Exits 1 where a loss differs by more than 1e-5 or the speed-up is below 1.5.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from dataclasses import dataclass

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("DS_LOG_LEVEL", "error")

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from dslaunch.core.plan import DataPlan
from dslaunch.train.corpus import Corpus, build_corpus
from dslaunch.train.data.collate import Sample
from dslaunch.train.engine import Engine, initialize
from dslaunch.train.objectives.sft import SftObjective

MAX_LENGTH, MEDIAN, SIGMA, VOCABULARY = 512, 128, 0.7, 4096
TARGET_SPEEDUP = 1.5


class RandomDialogues:
    """Samples of random tokens; the second half of each is the answer."""

    fingerprint = "random"

    def __init__(self, count: int) -> None:
        rng = np.random.default_rng(0)
        lengths = (
            np.exp(rng.normal(np.log(MEDIAN), SIGMA, count)).round().clip(8, MAX_LENGTH).astype(np.int64)
        )
        self._samples = [self._sample(rng, int(length)) for length in lengths]
        self.lengths = lengths
        self.num_supervised = np.array([int(s.completion_mask.sum()) for s in self._samples])

    @staticmethod
    def _sample(rng: np.random.Generator, length: int) -> Sample:
        return Sample(rng.integers(0, VOCABULARY, length, dtype=np.int32), np.arange(length) >= length // 2)

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Sample:
        return self._samples[index]


@dataclass
class Run:
    """One way to lay out the rows, with its engine and what it measured."""

    name: str
    corpus: Corpus
    micro_batches: list[list[int]]
    engine: Engine
    objective: SftObjective
    losses: list[float]
    cpu_seconds: list[float]

    def step(self) -> None:
        """One optimizer step over all samples."""
        started = time.process_time()
        num_tokens = int(self.corpus.num_supervised.sum())
        result = None
        for units in self.micro_batches:
            loss = self.objective.token_loss(self.corpus.batch(units))
            self.engine.backward_token_sum(loss.sum, num_tokens=num_tokens)
            result = self.engine.step()
        assert result is not None
        self.losses.append(result.loss)
        self.cpu_seconds.append(time.process_time() - started)


def build_run(name: str, data: RandomDialogues, *, packing: bool, micro: int) -> Run:
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=256, intermediate_size=704, num_hidden_layers=4,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=MAX_LENGTH,
        )
    )  # fmt: skip
    plan = DataPlan(train=(), max_length=MAX_LENGTH, packing=packing)
    corpus = build_corpus(data, plan, pad_token_id=0, seed=0)
    units = np.random.default_rng(1).permutation(len(corpus)).tolist()
    units += [-1] * (-len(units) % micro)
    micro_batches = [units[i : i + micro] for i in range(0, len(units), micro)]
    config = {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": len(micro_batches),
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 2_000_000},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    }
    engine = initialize(model, config)
    objective = SftObjective(engine, engine.module, engine.device)
    return Run(name, corpus, micro_batches, engine, objective, [], [])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=96)
    parser.add_argument("--steps", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "0")

    data = RandomDialogues(arguments.samples)
    runs = [
        build_run("padded", data, packing=False, micro=8),
        build_run("packed", data, packing=True, micro=4),
    ]
    for _ in range(arguments.steps + 1):  # alternating; the first step of each warms up
        for run in runs:
            run.step()

    tokens = int(data.lengths.sum())
    print(f"{len(data)} samples, {tokens} tokens, lengths {np.percentile(data.lengths, [10, 50, 90, 100])}")
    speeds = {}
    for run in runs:
        speeds[run.name] = tokens / statistics.median(run.cpu_seconds[1:])
        print(f"{run.name}: {len(run.corpus)} rows, {speeds[run.name]:.0f} tokens per CPU second")
    worst = max(abs(a - b) for a, b in zip(runs[0].losses, runs[1].losses, strict=True))
    speedup = speeds["packed"] / speeds["padded"]
    print(f"losses {[round(x, 5) for x in runs[1].losses]}, largest difference {worst:.1e}")
    print(f"packed is {speedup:.2f} times as fast (target {TARGET_SPEEDUP})")
    return 0 if speedup >= TARGET_SPEEDUP and worst <= 1e-5 else 1


if __name__ == "__main__":
    sys.exit(main())

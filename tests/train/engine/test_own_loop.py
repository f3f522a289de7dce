"""docs/upstream.md, "In your own loop": its script and its commands, as they stand there, on two ranks."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

PAGE = Path(__file__).resolve().parents[3] / "docs" / "upstream.md"


def test_the_loop_of_the_page_trains(ops_dir: Path, tmp_path: Path) -> None:
    section = PAGE.read_text(encoding="utf-8").partition("\n## In your own loop\n")[2].partition("\n## ")[0]
    blocks = dict(re.findall(r"^```(python|bash)\n(.*?)^```$", section, flags=re.MULTILINE | re.DOTALL))
    (tmp_path / "train.py").write_text(blocks["python"])
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", blocks["bash"]], cwd=tmp_path, capture_output=True, text=True,
        stdin=subprocess.DEVNULL, timeout=120, env={**os.environ, "TORCH_EXTENSIONS_DIR": str(ops_dir)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    steps = re.findall(r"^step (\d+)  loss ([\d.]+)  grad_norm ([\d.]+)  None$", done.stdout, re.MULTILINE)
    assert [int(step) for step, _, _ in steps] == [1, 2, 3, 4], done.stdout
    assert all(float(norm) > 0 for _, _, norm in steps)

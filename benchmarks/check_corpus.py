"""``dslaunch check`` against what DeepSpeed itself said about real configs.

    python benchmarks/check_corpus.py --corpus DIR [--json]

DIR holds ``ds/*.json`` (configs as they were found) and ``ds-verdicts.jsonl``: one object a
config with ``file`` and ``deepspeed_<version>_world_size_<n>``, which is ``ok`` or what
DeepSpeed's parser raised. The configs are not part of this project.

Two things must hold. A config that DeepSpeed refuses has at least one error. One that its
parser accepts has none, unless each error is of a kind that a parser cannot know; those
are listed by kind, and docs/check.md explains them. Exit code 1 where either fails, or
where 1,000 configs take more than 10 CPU seconds.
"""

from __future__ import annotations

import argparse
import collections
import json
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dslaunch.config.check import Target, check_config
from dslaunch.core.finding import Finding

CONFIGS, LIMIT_S = 1000, 10.0

# Error codes that DeepSpeed's parser does not know, and why each is an error all the same.
EXPLAINED = {
    "auto": "the parser drops the word or keeps it as a text: the value means something else",
    "unknown-key": "an unknown key is an error here, and ignored there",
    "misplaced-key": "an unknown key is an error here, and ignored there",
    "placeholder": "a template that was never filled in: the value means something else",
    "bare-word": "hjson makes a text of it: the value means something else",
    "type": "a value of another type than was meant",
    "range": "a value that cannot be meant",
    "optimizer-type": "raises at initialize: the optimizer is not there any more",
    "needs": "raises at initialize",
    "untested-optimizer": "raises at initialize",
    "prescale": "raises at initialize",
}


@dataclass(frozen=True)
class Case:
    """One config: what DeepSpeed said (``ok`` or its error) and what check says."""

    file: str
    verdict: str
    errors: tuple[Finding, ...]

    @property
    def problem(self) -> str | None:
        """A disagreement without a reason; None where all is well."""
        if self.verdict != "ok":
            return None if self.errors else f"refused, but no error: {self.verdict}"
        odd = sorted({finding.code for finding in self.errors} - set(EXPLAINED))
        return f"accepted, but errors: {', '.join(odd)}" if odd else None


def cases(corpus: Path) -> Iterator[Case]:
    """Every config of the corpus with both verdicts."""
    for line in (corpus / "ds-verdicts.jsonl").read_text(encoding="utf-8").splitlines():
        row: dict[str, Any] = json.loads(line)
        name = next((key for key in row if re.fullmatch(r"deepspeed_\w+_world_size_\d+", key)), "")
        world_size = int(name.rpartition("_")[2]) if name else None
        text = (corpus / "ds" / row["file"]).read_text(encoding="utf-8")
        findings = check_config(text, Target(world_size=world_size)).findings
        errors = tuple(finding for finding in findings if finding.severity == "error")
        yield Case(row["file"], row.get(name, "cannot be read"), errors)


def cpu_seconds(corpus: Path) -> float:
    """CPU seconds for CONFIGS configs in one process, the corpus over and over."""
    texts = [path.read_text(encoding="utf-8") for path in sorted((corpus / "ds").glob("*.json"))]
    start = time.process_time()
    for index in range(CONFIGS):
        check_config(texts[index % len(texts)], Target(world_size=8))
    return time.process_time() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--corpus", type=Path, required=True, help="folder with ds/ and ds-verdicts.jsonl")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    found = list(cases(options.corpus))
    seconds = cpu_seconds(options.corpus)
    problems = {case.file: case.problem for case in found if case.problem}
    kinds = collections.Counter(
        code for case in found if case.verdict == "ok" for code in {f.code for f in case.errors}
    )
    refused = sum(case.verdict != "ok" for case in found)
    report = {
        "schema_version": 1,
        "configs": len(found),
        "refused_by_deepspeed": refused,
        "refused_without_error": sum(1 for c in found if c.verdict != "ok" and not c.errors),
        "accepted_with_errors": {
            code: {"configs": n, "why": EXPLAINED.get(code)} for code, n in kinds.items()
        },
        "problems": problems,
        "cpu_seconds_for_1000": round(seconds, 3),
    }
    if options.json:
        print(json.dumps(report, indent=2))
    else:
        summary = f"{len(found)} configs; DeepSpeed refuses {refused}"
        print(f"{summary}, {report['refused_without_error']} of them unseen")
        for code, count in kinds.most_common():
            print(f"accepted with {code} in {count}: {EXPLAINED.get(code, 'no reason known')}")
        for file, problem in problems.items():
            print(f"DISAGREES  {file}: {problem}")
        print(f"{CONFIGS} configs in {seconds:.2f} CPU s (limit {LIMIT_S:.0f})")
    return 1 if problems or seconds > LIMIT_S else 0


if __name__ == "__main__":
    sys.exit(main())

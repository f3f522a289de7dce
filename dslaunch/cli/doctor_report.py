"""What ``dslaunch doctor`` prints: for a reader and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from dslaunch.cli.doctor_checks import HostFinding, devices_text
from dslaunch.core.hostfile import filter_text
from dslaunch.core.packages import COMPARED

if TYPE_CHECKING:
    from dslaunch.core.devices import Inventory
    from dslaunch.launch.preflight import Difference
    from dslaunch.launch.probing import Probed

SCHEMA_VERSION = 1
_HOSTS_SHOWN = 6


@dataclass(frozen=True, kw_only=True)
class Report:
    """All that is known. ``precision``: the recommended one and why; None where no device is known.

    ``memory``: of each host, in bytes, what a job may use there. ``exclude``: hosts to leave out.
    """

    probed: tuple[Probed, ...]
    inventories: Mapping[str, Inventory]
    memory: Mapping[str, int | None]
    precision: tuple[str, str] | None
    python: str
    differences: tuple[Difference, ...]
    findings: tuple[HostFinding, ...]
    exclude: tuple[str, ...]
    seconds: float

    @property
    def is_ready(self) -> bool:
        """Whether nothing is wrong that a run would fail on."""
        return not any(finding.severity == "error" for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        """The object that ``--json`` prints; its ``inventory`` is one for ``--inventory``."""
        from dslaunch.core.inventory import inventory_json

        first = self.probed[0]
        return {
            "schema_version": SCHEMA_VERSION,
            "ready": self.is_ready,
            "hosts": [_host_json(one, self.memory.get(one.host.name)) for one in self.probed],
            "precision": self.precision and dict(zip(("value", "reason"), self.precision, strict=True)),
            "master": first.meets_at and dict(zip(("addr", "port"), first.meets_at, strict=True)),
            "differences": [
                {"what": d.what, "values": [{"value": v, "hosts": list(hosts)} for v, hosts in d.values]}
                for d in self.differences
            ],
            "findings": [asdict(finding) for finding in self.findings],
            "exclude": filter_text(self.exclude) or None,
            "inventory": {
                one.facts.node if one.host.name == "localhost" else one.host.name: inventory_json(
                    self.inventories[one.host.name]
                )
                for one in self.probed
                if one.facts is not None
            },
        }


def report_lines(report: Report) -> list[str]:
    """The report for a reader."""
    lines = _one_host(report) if len(report.probed) == 1 else _several_hosts(report)
    for message, hosts in _alike(report.findings).items():
        severity, text, hint = message
        where = f"{_names(hosts)}: " if len(report.probed) > 1 else ""
        lines.append(f"{severity:<8} {where}{text}")
        if hint is not None:
            lines.append(f"         -> {hint}")
    if report.exclude:
        lines += ["", f"without what cannot be used: --exclude {filter_text(report.exclude)}"]
    return lines


def summary(report: Report) -> str:
    """The last line, for stderr."""
    said_once = [severity for severity, _, _ in _alike(report.findings)]
    counts = {severity: said_once.count(severity) for severity in ("error", "warning")}
    if not any(counts.values()):
        return "nothing is missing"
    words = [f"{count} {severity}{'s' * (count > 1)}" for severity, count in counts.items() if count]
    return " and ".join(words) + ("" if counts["error"] else "; a run can start")


def _one_host(report: Report) -> list[str]:
    from dslaunch.launch.preflight import gib

    one = report.probed[0]
    if one.facts is None:
        return []
    facts, inventory = one.facts, report.inventories[one.host.name]
    memory = report.memory.get(one.host.name)
    packages = facts.interpreter.packages
    rows = {
        "machine": f"{facts.node} ({facts.machine}, glibc {facts.glibc or 'unknown'})",
        "devices": devices_text(inventory),
        "cpu": f"{facts.cpu or 'unknown'}, {facts.cores} usable cores",
        "precision": ": ".join(report.precision) if report.precision else "not known: see the device table",
        "memory": f"{gib(memory)} for a job" if memory is not None else "unknown",
        "/dev/shm": _space(facts.shm.total_bytes, facts.shm.free_bytes),
        "python": f"{facts.interpreter.version or '?'}, {report.python}",
        "packages": ", ".join(f"{n} {v}" for n, v in packages.items() if v is not None) or "none",
        "compilers": ", ".join(
            f"{n} {v}".rstrip() if v is not None else f"no {n}" for n, v in facts.tools.items()
        ),
        "limits": f"{_limit(facts.nofile)} open files, {_locked(facts.memlock)} locked memory",
        "cache": f"{facts.cache_path}, {_space(facts.cache.total_bytes, facts.cache.free_bytes)}",
        "ops": facts.ops,
    }
    return [*(f"{name:<10} {value}" for name, value in rows.items()), ""]


def _several_hosts(report: Report) -> list[str]:
    from dslaunch.launch.preflight import difference_table

    first = report.probed[0]
    answered = [one for one in report.probed if one.facts is not None]
    lines = [f"{len(answered)} of {len(report.probed)} hosts answered, in {report.seconds:.1f} s"]
    if first.meets_at is not None:
        reached = [one for one in answered if one is not first and one.unreached is None]
        lines.append(
            f"ranks would meet at {first.meets_at[0]} ({first.host.name});"
            f" {len(reached)} of {len(report.probed) - 1} others reach it{_interfaces(reached)}"
        )
    if report.precision is not None:
        lines.append(f"precision {': '.join(report.precision)}")
    if report.differences:
        lines += ["", *difference_table(report.differences)]
    elif len(answered) > 1:
        lines.append("versions, devices and CPUs are the same on all")
    return [*lines, ""]


def _interfaces(reached: Sequence[Probed]) -> str:
    names = dict.fromkeys(one.interface for one in reached if one.interface)
    return f" (by {', '.join(names)})" if names else ""


def _alike(
    findings: Sequence[HostFinding],
) -> dict[tuple[str, str, str | None], list[str]]:
    """The same said of several hosts once; errors first."""
    found: dict[tuple[str, str, str | None], list[str]] = {}
    order = {"error": 0, "warning": 1, "info": 2}
    for finding in sorted(findings, key=lambda finding: order[finding.severity]):
        found.setdefault((finding.severity, finding.message, finding.hint), []).append(finding.host)
    return found


def _names(hosts: Sequence[str]) -> str:
    more = len(hosts) - _HOSTS_SHOWN
    return ", ".join(hosts[:_HOSTS_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _space(total: int | None, free: int | None) -> str:
    from dslaunch.launch.preflight import gib

    return "unknown" if total is None or free is None else f"{gib(free)} of {gib(total)} free"


def _limit(value: int) -> str:
    return "unlimited" if value == -1 else str(value)


def _locked(value: int) -> str:
    from dslaunch.launch.preflight import gib

    return "unlimited" if value == -1 else gib(value)


def _host_json(one: Probed, memory: int | None) -> dict[str, Any]:
    shown: dict[str, Any] = {"name": one.host.name, "problem": one.problem}
    facts = one.facts
    if facts is None:
        return shown
    return shown | {
        "node": facts.node,
        "machine": facts.machine,
        "glibc": facts.glibc,
        "cpu": facts.cpu,
        "cores": facts.cores,
        "memory_bytes": memory,
        "python": facts.interpreter.version or None,
        "packages": {name: facts.interpreter.packages.get(name) for name in COMPARED},
        "torch_cuda": facts.interpreter.torch_cuda,
        "tools": dict(facts.tools),
        "shm": asdict(facts.shm),
        "cache": {"path": facts.cache_path, **asdict(facts.cache)},
        "nofile": facts.nofile,
        "memlock": facts.memlock,
        "ops": facts.ops,
        "locks": [asdict(lock) for lock in facts.locks],
        "clock_skew_s": round(one.skew_s, 3),
        "interface": one.interface,
        "reaches_master": None if one.interface is None and one.unreached is None else one.unreached is None,
    }

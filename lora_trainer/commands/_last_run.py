"""How the last run of a config ended, read from its folder: metricas.jsonl, plano.json and its lock."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ..atomic import read_json
from ..config.declared import techniques
from ..config.loading import Loaded
from ..config.schema import Config
from ..errors import t
from ..journal.progress import read_metrics
from ..journal.run_folder import Lock, RunFolder
from ..planner.advice import explain
from ..planner.foresee import keys
from ..units import GIB

End = Literal["done", "stopped", "killed", "running"]
ENDS = ("done", "stopped")
"""Events that a run ends with, unless it is killed."""
MEMORY_REASONS = ("DoesNotFitError", "OutOfMemoryError")


@dataclass(frozen=True)
class LastRun:
    end: End
    step: int
    reason: str = ""
    problem: str = ""
    ooms: list[dict[str, Any]] = field(default_factory=list)
    phase: str = ""
    """Of the last out-of-memory, else of the highest peak on record."""
    causes: dict[str, int] = field(default_factory=dict)
    """Bytes at that peak."""
    techniques: list[str] = field(default_factory=list)
    saves: dict[str, int] = field(default_factory=dict)
    """Option that could be changed -> bytes that the plan says it would save."""

    @property
    def memory_ended(self) -> bool:
        return self.reason in MEMORY_REASONS or (self.end == "killed")


def read_last_run(loaded: Loaded) -> LastRun | None:
    """None where the config has not been run."""
    folder = RunFolder(loaded.run_dir, loaded.name)
    rows = _last_start(read_metrics(folder.metrics))
    if not rows:
        return None
    row = rows[-1] if rows[-1].get("event") in ENDS else {}
    end: End = row.get("event", "killed")
    if end == "killed" and Lock(folder).owner() is not None:
        end = "running"
    ooms = [row for row in rows if row.get("event") == "oom"]
    plan = read_json(folder.plan)
    phase, causes = _peak(plan, str(ooms[-1].get("phase", "")) if ooms else "")
    return LastRun(
        end=end,
        step=max((int(r["step"]) for r in rows if "loss" in r), default=0),
        reason=str(row.get("reason", "")),
        problem=str(row.get("problem", "")),
        ooms=ooms,
        phase=phase,
        causes=causes,
        techniques=[str(name) for name in plan.get("techniques", [])],
        saves=_bytes(plan.get("saves")),
    )


def last_run_lines(run: LastRun, config: Config) -> list[str]:
    """The end in one line, then, where memory was the trouble, what to change."""
    lines = [_end_line(run)]
    if run.problem:
        lines.append(f"  {run.problem}")
    if run.end == "killed":
        notice = t(
            pt="  a execução acabou sem dizer por quê: o sistema a encerrou, quase sempre porque faltou RAM",
            en="  the run ended without saying why: the system killed it, nearly always because RAM ran out",
        )
        lines.append(notice)
    if run.ooms:
        count = len(run.ooms)
        lines.append(t(pt=f"  faltou VRAM {count} vez(es)", en=f"  out of VRAM {count} time(s)"))
    if run.memory_ended or run.ooms:
        on = frozenset(one.key for one in techniques() if one.options and one.__name__ in run.techniques)
        lines += [f"  {line}" for line in explain(run.phase or "train", run.causes, config, on, keys(run.saves))]
    return lines


def _end_line(run: LastRun) -> str:
    how = {
        "done": t(pt="terminou", en="it finished"),
        "stopped": t(pt="parou", en="it stopped"),
        "killed": t(pt="foi encerrada", en="it was killed"),
        "running": t(pt="está em andamento", en="it is running"),
    }[run.end]
    where = t(pt=f"no passo {run.step}", en=f"at step {run.step}")
    return t(pt=f"última execução: {how} {where}", en=f"last run: {how} {where}")


def _last_start(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows since the end before the last: resumed runs append to the same file."""
    ends = [index for index, row in enumerate(rows[:-1]) if row.get("event") in ENDS]
    return rows[ends[-1] + 1 :] if ends else rows


def _peak(plan: Mapping[str, Any], phase: str) -> tuple[str, dict[str, int]]:
    """(phase, bytes by cause): `phases` of the plan are GiB by cause."""
    recorded = plan.get("phases")
    by_name = recorded.items() if isinstance(recorded, dict) else ()
    phases = {str(name): _bytes(causes) for name, causes in by_name if isinstance(causes, dict)}
    if phases and not phase:
        phase = max(phases, key=lambda name: sum(phases[name].values()))
    return phase, {cause: count for cause, count in phases.get(phase, {}).items() if cause not in ("total", "host")}


def _bytes(gib_by_name: Any) -> dict[str, int]:
    """A mapping in GiB of plano.json, in bytes; what is no number is left out."""
    items = gib_by_name.items() if isinstance(gib_by_name, dict) else ()
    return {str(name): int(float(count) * GIB) for name, count in items if type(count) in (int, float)}

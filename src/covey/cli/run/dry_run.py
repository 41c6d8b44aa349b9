"""Description of a plan, printed by `covey run --dry-run`."""

from __future__ import annotations

import shlex

from covey.cli.run.plan import ALL_RANKS, RunPlan
from covey.core.plurals import count_noun
from covey.settings import format_value, settings_table
from covey.transport import address


def describe_plan(plan: RunPlan) -> str:
    """Return the description of a plan, one section per topic; empty sections are omitted."""
    sections = [
        ("workers", _describe_workers(plan)),
        ("scheduler", [_describe_scheduler(plan)]),
        ("REST port", [_describe_manage_port(plan)]),
        ("command", [_describe_command(plan)]),
        ("start", [_describe_start(plan)]),
        ("logs", [_describe_logs(plan)]),
        ("console", _describe_echo(plan)),
        ("on event", [plan.on_event] if plan.on_event else []),
        ("cores", _describe_cores(plan)),
        ("journal", [plan.recovery_path] if plan.recovery_path else []),
        ("TLS", [plan.tls] if plan.tls else []),
        ("settings", _describe_settings(plan)),
        ("environment", [f"{name}={value}" for name, value in worker_variables(plan)]),
        ("remarks", plan.remarks),
    ]
    lines: list[str] = []
    for heading, entries in sections:
        lines += [f"{heading if index == 0 else '':<12} {entry}".rstrip() for index, entry in enumerate(entries)]
    return "\n".join(lines) + "\n"


def worker_variables(plan: RunPlan) -> list[tuple[str, str]]:
    """Return the main variables of this host's workers, with their values; one entry may name several variables.

    The ranks of several workers are a range such as 0..3. A value that is not known yet is a text in parentheses.
    """
    ranks = f"{_format_range(plan.first_rank, plan.local_workers)}" if plan.first_rank >= 0 else "(assigned by the scheduler)"
    host = str(plan.node_rank) if plan.node_rank >= 0 else "(assigned by the scheduler)"
    port = str(plan.master_port or "(a free port)")
    known = [
        ("MS_ROLE", "MS_WORKER"),
        ("MS_SCHED_HOST", plan.master_host),
        ("MS_SCHED_PORT", port),
        ("MS_WORKER_NUM", str(plan.world)),
        ("MS_NODE_ID, RANK_ID, RANK", ranks),
        ("DEVICE_ID, LOCAL_RANK", _format_range(0, plan.local_workers)),
        ("RANK_SIZE, WORLD_SIZE", str(plan.world)),
        ("LOCAL_WORLD_SIZE", str(plan.local_workers)),
        ("GROUP_RANK", host),
        ("ROLE_NAME", plan.role_name),
        ("TORCHELASTIC_MAX_RESTARTS", str(plan.max_restarts)),
    ]
    if plan.rank_table_file:
        known.append(("RANK_TABLE_FILE", plan.rank_table_file))
    return known


def _describe_workers(plan: RunPlan) -> list[str]:
    if plan.is_single_host:
        return [f"{plan.world}, all on this host"]
    hosts = count_noun(plan.nnodes, "host") if plan.nnodes else "any number of hosts"
    which = f"host {plan.node_rank}" if plan.node_rank >= 0 else "ranks assigned by the scheduler"
    here = f"{plan.local_workers} on this host ({which})" if plan.local_workers else "only spares on this host"
    later = f"; up to {plan.world_max} if more hosts join" if plan.world_max > plan.world else ""
    return [f"{plan.world} on {hosts}, {here}{later}"]


def _describe_scheduler(plan: RunPlan) -> str:
    found = address.split_list(plan.master_host, plan.master_port)
    at = ", ".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port or '(a free port)'}" for host, port in found)
    where = "started on this host" if plan.is_single_host else "started on the host with this address"
    where = "started on the hosts with these addresses" if "," in plan.master_host else where
    wait = (
        f"waits {format_value(plan.topo_timeout_s)} s for all nodes"
        if plan.topo_timeout_s > 0
        else "waits for all nodes without limit"
    )
    return f"{at}, {where}, {wait}"


def _describe_manage_port(plan: RunPlan) -> str:
    return {-1: "a free port", 0: "none"}.get(plan.manage_port, str(plan.manage_port))


def _describe_command(plan: RunPlan) -> str:
    before = ["python", "-m"] if plan.is_module else ["python"] if plan.is_python else []
    return shlex.join([*before, *plan.command])


def _describe_start(plan: RunPlan) -> str:
    how = "each by exec" if plan.start == "exec" else "forked from one template"
    preload = f", which also imports {', '.join(plan.preload)}" if plan.preload else ""
    return f"{how}{preload}; {plan.max_restarts} full restarts; {format_value(plan.grace_s)} s to exit"


def _describe_logs(plan: RunPlan) -> str:
    log_dir = (plan.log_dir or ".").rstrip("/")
    return f"{log_dir}/scheduler.log, {log_dir}/{plan.worker_log_name}_<rank>.log"


def _describe_echo(plan: RunPlan) -> list[str]:
    streams = {1: "stdout", 2: "stderr", 3: "stdout and stderr"}
    lines = [f"{streams[which]} of local rank {rank}" for rank, which in plan.tee.items()]
    if plan.tail_ranks:
        lines.append(
            "the log of " + ("every rank on this host" if plan.tail_ranks == [ALL_RANKS] else f"ranks {plan.tail_ranks}")
        )
    if plan.shown_local_ranks:
        lines.append(f"only of local ranks {plan.shown_local_ranks}")
    return lines


def _describe_cores(plan: RunPlan) -> list[str]:
    if isinstance(plan.bind_core, bool):
        return ["an equal share for each worker"] if plan.bind_core else []
    return [f"{name}: {', '.join(map(str, cores))}" for name, cores in plan.bind_core.items()]


def _describe_settings(plan: RunPlan) -> list[str]:
    return [
        f"{variable}={value} (from {origin})" if origin != variable else f"{variable}={value}"
        for variable, value, origin, _ in settings_table(plan.loaded)
        if origin != "default"
    ]


def _format_range(first: int, count: int) -> str:
    return "-" if not count else str(first) if count == 1 else f"{first}..{first + count - 1}"

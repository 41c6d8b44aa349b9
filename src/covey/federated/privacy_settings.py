"""Checks of privacy settings that depend on each other, and the settings of request authentication."""

from __future__ import annotations

from pathlib import Path

from covey.core.federated.messages import RoundPlan
from covey.core.federated.secagg import neighbor_graph
from covey.core.federated.secagg.messages import DEVICES_MAX
from covey.errors import UsageError
from covey.federated import context
from covey.federated.server.request_auth import RequestAuthSettings
from covey.federated.strategies import Strategy
from covey.federated.update_compression import NO_COMPRESSION

SECAGG_DEVICES_MIN = 3  # in a sum of two, each device can compute the other's update


def check_privacy_settings(plan: RoundPlan, strategy: Strategy) -> None:
    """Raise `UsageError` if the plan's privacy settings do not fit the strategy, the compression or the thresholds."""
    name = type(strategy).__name__
    if plan.noise is not None and (strategy.sees_all or strategy.staleness):
        raise UsageError(f"differential privacy needs the mean of one round, which {name} does not use: use FedAvg or similar")
    if not plan.secure:
        return
    if plan.compress != NO_COMPRESSION:
        raise UsageError(
            f"encrypt_type=PW_ENCRYPT cannot compress uploads: replace upload_compress_type={plan.compress} by {NO_COMPRESSION}"
        )
    if strategy.sees_all or strategy.staleness:
        raise UsageError(f"{name} needs single updates, which encrypt_type=PW_ENCRYPT hides: use FedAvg or similar")
    if not SECAGG_DEVICES_MIN <= plan.threshold <= DEVICES_MAX:
        raise UsageError(
            f"PW_ENCRYPT needs start_fl_job_threshold from {SECAGG_DEVICES_MIN} to {DEVICES_MAX}, not {plan.threshold}"
        )
    least = min(plan.needed_updates, plan.update_min or plan.needed_updates)
    needed = plan.reconstruct or neighbor_graph.default_share_threshold(neighbor_graph.choose_degree(plan.threshold) + 1)
    if plan.reconstruct and 2 * plan.reconstruct <= plan.threshold:
        raise UsageError(
            f"reconstruct_secrets_threshold={plan.reconstruct} of {plan.threshold} devices allows two lists to be unmasked: "
            f"set more than half, {plan.threshold // 2 + 1} or more"
        )
    if least < needed:
        raise UsageError(
            f"a round of {plan.threshold} devices that closes with {least} updates cannot be unmasked, which needs {needed}: "
            "raise update_model_ratio or lower reconstruct_secrets_threshold (more than half of the devices)"
        )


def make_auth_settings() -> RequestAuthSettings:
    """Return certificate paths (with `pki_verify`), replay window and device rate from the context.

    Raise `UsageError` if `pki_verify` is set without the path of a root certificate.
    """
    replay, rate = context.get_int("replay_attack_time_diff"), float(context.get_fl_context("device_rate"))
    if not context.get_fl_context("pki_verify"):
        return RequestAuthSettings(replay_window_ms=replay, requests_per_second=rate)
    roots = [context.get_str(key) for key in ("root_first_ca_path", "root_second_ca_path") if context.get_str(key)]
    if not roots:
        raise UsageError(
            "pki_verify needs root_first_ca_path, the root certificate of devices (root_second_ca_path is optional)"
        )
    lists = [context.get_str("equip_crl_path")] if context.get_str("equip_crl_path") else []
    return RequestAuthSettings(tuple(map(Path, roots)), tuple(map(Path, lists)), replay, rate)

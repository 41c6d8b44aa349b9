"""When a cluster is complete."""

from __future__ import annotations

from tests.unit.core.cluster.editable_cluster import EditableCluster

from covey.core.cluster import formation
from covey.core.types import ClusterSettings, Host, Member, Role

NEAR, FAR = Host("boot-near", "box", "10.0.0.1"), Host("boot-far", "box", "10.0.0.2")


def cluster(workers: int, servers: int, *members: Member) -> EditableCluster:
    made = EditableCluster(ClusterSettings(workers, servers), cluster_id="c1")
    for member in members:
        made.add(member)
    return made


def worker(node_id: str, host: Host = NEAR, agent: str = "") -> Member:
    return Member(Role.WORKER, node_id, f"life of {node_id}", host, agent=agent)


def test_formation_reports_missing_nodes_without_any_node() -> None:
    ranks, reason = formation.decide_formation(cluster(2, 1))
    assert ranks is None and reason == "2 workers missing, 1 pserver missing"
    assert (
        formation.describe_missing(cluster(2, 1)) == "2 workers missing, registered: none; 1 pserver missing, registered: none"
    )


def test_describe_missing_names_registered_nodes() -> None:
    waiting = cluster(30, 0, *(worker(f"w{n}") for n in range(25)))
    said = formation.describe_missing(waiting)
    assert said.startswith("5 workers missing, registered: worker:w0, worker:w1, worker:w2, ") and said.endswith(
        "worker:w19 and 5 more"
    )


def test_both_server_roles_are_counted_together() -> None:
    servers = [Member(Role.PSERVER, "0", "a", NEAR, rank=0), Member(Role.SERVER, "x", "b", NEAR)]
    ranks, reason = formation.decide_formation(cluster(1, 2, worker("0"), *servers))
    assert ranks == {"worker:0": 0, "pserver:0": 0, "server:x": 1}
    assert reason == "all 3 nodes are here"


def test_formation_of_single_node_uses_singular() -> None:
    assert formation.decide_formation(cluster(1, 0, worker("0")))[1] == "the only node is here"

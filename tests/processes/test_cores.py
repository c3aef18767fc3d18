from __future__ import annotations

from instar.processes.cores import share_cores


def test_waiting_threads_leave_the_cores_to_others_unless_told() -> None:
    environ: dict[str, str] = {}
    share_cores(environ)
    assert environ == {"GOMP_SPINCOUNT": "4000"}
    for policy in ({"GOMP_SPINCOUNT": "5"}, {"OMP_WAIT_POLICY": "ACTIVE"}):
        variables = dict(policy)
        share_cores(variables)
        assert variables == policy

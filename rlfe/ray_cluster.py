"""A Ray cluster to spread work over: an existing one, or one on this machine for as long as needed.

What: connecting and leaving quietly (no usage report, no dashboard, no worker's words on this
terminal), what its nodes offer, and Ray's failures as ours. A cluster of our own listens on the
loopback interface only and ends with the command. What not: what runs there (`rlfe.eval.fleet`,
`rlfe.cli.sweep_ray`). Ray takes these settings from the environment only.
Try: `with cluster("local") as found: print(found.nodes())`.
"""

from __future__ import annotations

import importlib.util
import os
import socket
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rlfe.errors import NetworkError, RequestError, RlfeError

CONNECT_SECONDS = 10.0
LOCAL = "local"  # Ray's own word for a cluster of this command alone
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",  # no report to anyone
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # a task without GPUs: no words about it
    "RAY_DEDUP_LOGS": "0",
}
# Ray's switch between a cluster's address and the loopback interface; read when ray is imported.
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A machine of a cluster. `Node(id="3f..", host="gpu07", cpus=64, gpus=8)`"""

    id: str
    host: str
    cpus: int
    gpus: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What one sampler or one cell takes. `Needs(cpus=1, gpus=2)`"""

    cpus: int
    gpus: int

    def fit(self, node: Node) -> int:
        """How many fit on a node; on a node with GPUs its CPUs are not counted.

        >>> Needs(cpus=1, gpus=2).fit(Node(id="", host="", cpus=4, gpus=8))
        4
        """
        return node.gpus // self.gpus if self.gpus else node.cpus // self.cpus


class Cluster:
    """A cluster that this process is connected to."""

    def __init__(self, address: str) -> None:
        self.address = address

    def nodes(self) -> list[Node]:
        """The machines that are alive."""
        import ray

        return [_node(facts) for facts in ray.nodes() if facts["Alive"]]

    @property
    def gpus(self) -> int:
        return sum(node.gpus for node in self.nodes())

    def room(self, needs: Needs) -> int:
        """How many samplers or cells run at a time.

        Raises:
            RequestError: Not one does.
        """
        nodes = self.nodes()
        places = sum(needs.fit(node) for node in nodes)
        if places == 0:
            largest = max((node.gpus, node.cpus) for node in nodes)
            raise RequestError(
                f"{needs.gpus} GPUs and {needs.cpus} CPUs are needed on one node; the largest of "
                f"the {len(nodes)} nodes has {largest[0]} and {largest[1]}",
                hint="Ask for less, or use a larger cluster.",
            )
        return places


def _node(facts: Mapping[str, Any]) -> Node:
    has = facts["Resources"]
    return Node(
        id=facts["NodeID"],
        host=facts["NodeManagerHostname"],
        cpus=int(has.get("CPU", 0)),
        gpus=int(has.get("GPU", 0)),
    )


def chosen_address(asked: str, environment: Mapping[str, str]) -> str:
    """What `--ray [ADDRESS]` means: "" is RAY_ADDRESS where it is set, else a cluster of our own.

    Raises:
        RequestError: A Ray client address; rlfe has to run on a node of the cluster.
    """
    address = asked or environment.get("RAY_ADDRESS", "") or LOCAL
    if address.startswith("ray://"):
        raise RequestError(
            f"--ray {address}: that is the address for Ray clients",
            hint="Run rlfe on a node of the cluster with --ray auto, or give its HOST:PORT.",
        )
    return address


@contextmanager
def cluster(
    address: str, environment: MutableMapping[str, str] | None = None, **local: int
) -> Iterator[Cluster]:
    """Connect, and disconnect at the end; a local cluster is started and stopped.

    `environment`: this process's, where not given. `local`: num_cpus, num_gpus of a local cluster.

    Raises:
        RequestError: Ray is not installed.
        NetworkError: No cluster answers there.
    """
    if importlib.util.find_spec("ray") is None:
        raise RequestError(
            "--ray needs ray, which is not installed", hint="pip install 'rlfe[ray]'"
        )
    environment = os.environ if environment is None else environment
    settings = QUIET | (LOOPBACK if address == LOCAL else {})
    before = {name: environment.get(name) for name in settings}
    environment.update(settings)
    try:
        _connect(address, local if address == LOCAL else {})
        yield Cluster(address)
    finally:
        _leave()
        for name, value in before.items():
            environment.pop(name) if value is None else environment.update({name: value})


def _connect(address: str, local: Mapping[str, int]) -> None:
    if address not in (LOCAL, "auto"):
        _reach(address)
    import ray

    quiet = {"log_to_driver": False, "logging_level": "CRITICAL"}
    own = {"include_dashboard": False, **local} if address == LOCAL else {}
    try:
        ray.init(address, **quiet, **own)
    except (ConnectionError, TimeoutError) as error:
        raise NetworkError(
            f"no Ray cluster answers at {address}: {_first_line(error)}",
            hint="Start one with ray start --head, or leave the address out for a local one.",
        ) from error
    except Exception as error:  # Ray raises the bare class where its processes start too slowly
        what = "started here" if address == LOCAL else f"used at {address}"
        raise RlfeError(
            f"Ray cannot be {what}: {_first_line(error)}",
            hint="The machine may be overloaded: try again."
            if address == LOCAL
            else "All nodes need the same versions of Python and Ray.",
        ) from error


def _reach(address: str) -> None:
    """Ray itself tries for minutes without a word where nothing listens."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise RequestError(f"--ray {address} is no HOST:PORT", hint="Or give --ray auto.")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
    except OSError as error:
        raise NetworkError(
            f"no Ray cluster answers at {address}: {error.strerror or error}",
            hint="Start one with ray start --head, or leave the address out for a local one.",
        ) from error


def _leave() -> None:
    import ray

    ray.shutdown()


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def reason(error: BaseException) -> str:
    """One line of why Ray lost something: the last line of its report, which names the cause."""
    lines: Sequence[str] = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1]}" if lines else type(error).__name__

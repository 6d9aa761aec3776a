"""Nodes of an allocation: their names, and their order by switch.

Called by launch.py and by the submitit plugin. Neighbours on a switch become neighbours in the rank
order, because ranks are numbered node by node.
"""
import re
import socket

from orchestrator.submission import SubmissionError
from orchestrator.submission.client import ask

_NO_NODES = ("", "(null)", "None", "None assigned")  # what Slurm prints for an empty node list
_BOUNDARY = "orc-switch-boundary"  # a host name between two lists, so that one command expands them all


def expand_nodelist(nodelist: str) -> tuple[str, ...]:
    """`gpu[001-004,007]` → five names, by Slurm's own parser. Raises SubmissionError."""
    if nodelist.strip() in _NO_NODES:
        return ()
    answer = ask("scontrol", "show", "hostnames", nodelist.replace(" ", ""))
    names = tuple((answer or "").split())
    if not names:  # scontrol exits with 0 even where it cannot read the list
        raise SubmissionError(f"scontrol could not expand the node list {nodelist!r}; "
                              "`scontrol show hostnames LIST` tells why")
    return names


def order_by_switch(nodes: tuple[str, ...]) -> tuple[str, ...]:
    """`nodes` with those of one switch together; by name where Slurm knows no topology."""
    paths = switch_paths(ask("scontrol", "show", "topology") or "")
    return tuple(sorted(nodes, key=lambda node: ([natural(s) for s in paths.get(node, ())], natural(node))))


def switch_paths(topology: str) -> dict[str, tuple[str, ...]]:
    """Output of `scontrol show topology` → the switches above each node, topmost first.

    Understands topology/tree (`SwitchName=… Level=…`) and topology/block (`BlockName=…`).
    """
    units = []  # (level, name, node list)
    for line in topology.splitlines():
        fields = dict(word.split("=", 1) for word in line.split() if "=" in word)
        name = fields.get("SwitchName") or fields.get("BlockName")
        if name and fields.get("Nodes") and fields["Nodes"] not in _NO_NODES:
            units.append((int(fields.get("Level", 0)), name, fields["Nodes"]))
    if not units:
        return {}
    units.sort(key=lambda unit: -unit[0])
    names = expand_nodelist(f",{_BOUNDARY},".join(nodelist for _, _, nodelist in units))
    paths: dict[str, list[str]] = {}
    index = 0
    for node in names:
        if node == _BOUNDARY:
            index += 1
        else:
            paths.setdefault(node, []).append(units[index][1])
    return {node: tuple(path) for node, path in paths.items()}


def natural(name: str) -> list[tuple[int, int, str]]:
    """Sort key by which n2 comes before n10."""
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"(\d+)", name) if part]


def own_address(nodes: tuple[str, ...], *, own: str) -> str:
    """The address of this host (node `own`) from which it reaches the others, so they reach it there too.

    A host name will not do: on many machines it resolves to 127.0.1.1, and with several network
    cards to the wrong one. The kernel's routing knows which card leads to a given peer; connecting a
    UDP socket asks it without sending anything.
    """
    peers = [node for node in nodes if node != own] or [own]
    for peer in peers:
        answer = ask("scontrol", "--oneliner", "show", "node", peer) or ""
        match = re.search(r"\bNodeAddr=(\S+)", answer)
        try:
            family, kind, _, _, target = socket.getaddrinfo(match[1] if match else peer, 9, socket.AF_INET,
                                                            socket.SOCK_DGRAM)[0]
        except socket.gaierror:
            continue  # a node without a resolvable address: another one will tell
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            return probe.getsockname()[0]
    raise SubmissionError(f"no address of {', '.join(peers)} can be resolved from {own}; NodeAddr in slurm.conf or "
                          "/etc/hosts must name them")

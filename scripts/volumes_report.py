"""What `refmodel volumes` says: totals by link and class, the three views, all dialects beside each other, checks."""

from dataclasses import asdict

from parallel.dispatch.draw import KINDS
from parallel.dispatch.hints import LOW_LATENCY_VERSIONS, get_low_latency_rdma_size_hint
from parallel.dispatch.row_bytes import CLASSES, DISPATCHES
from parallel.dispatch.volumes import DIRECTIONS, Volumes, volumes_of
from parallel.dispatch.workload import Workload
from parallel.topology import LINKS


def summary(workload: Workload, total: Volumes, routing: str, notices) -> dict:
    """Everything counted, in bytes and rows, summed over layers unless a name says otherwise."""
    topology, layers = total.topology, total.counts.layers
    tokens = int(total.counts.tokens.sum())
    expected = workload.expected_reach() if routing in KINDS else None
    return {
        "deployment": asdict(workload) | {"layers": layers, "nodes": topology.num_nodes, "routing": routing},
        "notices": list(notices),
        "tokens_per_layer": tokens // layers,
        "reach": {
            "ranks_per_token": float(total.counts.tokens_to_rank.sum() / max(tokens, 1)),
            "nodes_per_token": float(total.counts.tokens_to_node.sum() / max(tokens, 1)),
            "expected_ranks_per_token": expected.ranks if expected else None,
            "expected_nodes_per_token": expected.nodes if expected else None,
        },
        "bytes": {
            d: {k: {c: int(total.matrix(d, k, classes=c).sum()) for c in CLASSES} for k in LINKS} for d in DIRECTIONS
        },
        "rows": {d: {k: int(total.matrix(d, k, "rows").sum()) for k in LINKS} for d in DIRECTIONS},
        "views": _views(total),
        "dialects": {
            d: _remote(volumes_of(total.counts, total.hidden, d, total.payload, total.mode)) for d in DISPATCHES
        },
        "matrix": {d: total.matrix(d).tolist() for d in DIRECTIONS},
        "buffer_hints": _hints(workload),
    }


def _views(total: Volumes) -> dict:
    """Bytes by rank; `wire` and `nic` are sent, DeepEP's figures are as its tests name them."""
    measured = total.payload in ("fp8", "bf16") and total.dispatch in ("normal", "low_latency", "elastic")
    return {
        "wire": {d: total.wire(d).tolist() for d in DIRECTIONS},
        "deepep": {name: values.tolist() for name, values in total.deepep().items()} if measured else None,
        "nic": {d: total.nic(d).tolist() for d in DIRECTIONS},
    }


def _remote(volumes: Volumes) -> dict:
    """What leaves the rank, per token: rows by link, and bytes."""
    tokens = max(int(volumes.counts.tokens.sum()), 1)
    found = {}
    for direction in DIRECTIONS:
        rows = {k: int(volumes.matrix(direction, k, "rows").sum()) / tokens for k in ("nvlink", "rdma")}
        sizes = {k: int(volumes.matrix(direction, k).sum()) / tokens for k in ("nvlink", "rdma")}
        found[direction] = {"rows_per_token": rows, "bytes_per_token": sizes}
    return found


def _hints(workload: Workload) -> dict | None:
    """DeepEP's low-latency buffer for these tokens, by version."""
    if workload.dispatch != "low_latency" or not workload.tokens:
        return None
    sizes = (workload.tokens, workload.hidden, workload.ranks, workload.num_physical)
    return {version: get_low_latency_rdma_size_hint(*sizes, version) for version in LOW_LATENCY_VERSIONS}


def findings_json(findings) -> list[dict]:
    return [
        {
            "where": f.measurement.where,
            "quantity": f.measurement.quantity,
            "direction": f.measurement.direction,
            "place": f.measurement.place,
            "measured": list(f.measured),
            "counted": f.counted,
            "allowed": list(f.allowed),
            "ratio": f.ratio,
            "holds": f.holds,
            "likely_cause": f.cause,
        }
        for f in findings
    ]


def print_report(content: dict) -> None:
    """Tables for a person."""
    from scripts.tables import console

    out = console()
    deployment, reach = content["deployment"], content["reach"]
    ranks, layers = deployment["ranks"], deployment["layers"]
    out.print(f"{deployment['description'] or 'custom deployment'}", highlight=False)
    out.print(
        f"{ranks} ranks on {deployment['nodes']} nodes, {deployment['experts']} experts + {deployment['redundant']} "
        f"redundant, {layers} layers, {content['tokens_per_layer']:,} tokens in each; "
        f"{deployment['dispatch']} dispatch, {deployment['payload']}; routing {deployment['routing']}",
        highlight=False,
    )
    for notice in content["notices"]:
        out.print(f"note: {notice}", highlight=False)
    expected = ""
    if reach["expected_ranks_per_token"] is not None:
        expected = (
            f" (in expectation {reach['expected_ranks_per_token']:.6f} ranks, "
            f"{reach['expected_nodes_per_token']:.6f} nodes)"
        )
    out.print(
        f"a token reaches {reach['ranks_per_token']:.6f} ranks, {reach['nodes_per_token']:.6f} nodes{expected}\n",
        highlight=False,
    )
    out.print(_class_table(content, ranks * layers))
    out.print(_view_table(content, layers))
    out.print(_dialect_table(content))
    if content["buffer_hints"]:
        version, size = next(reversed(content["buffer_hints"].items()))
        out.print(f"low-latency buffer of DeepEP {version}: {size:,} bytes", highlight=False)


def _class_table(content: dict, parts: int):
    from rich.table import Table

    table = Table(title="bytes per rank and layer, by link and class (mean)", title_justify="left")
    used = [c for c in CLASSES if any(content["bytes"][d][k][c] for d in DIRECTIONS for k in LINKS)]
    used = [*(c for c in used if c != "control"), "data", "control"]  # data: everything but control
    for name in ("direction", "link", "rows", *used):
        table.add_column(name, justify="left" if name in ("direction", "link") else "right", overflow="fold")
    for direction in DIRECTIONS:
        links = content["bytes"][direction]
        summed = {c: sum(links[k][c] for k in LINKS) for c in CLASSES}
        rows = content["rows"][direction]
        for link, sizes in (*links.items(), ("all", summed)):
            sizes = sizes | {"data": sum(sizes.values()) - sizes["control"]}
            cells = [sum(rows.values()) if link == "all" else rows[link]] + [sizes[c] for c in used]
            table.add_row(direction, link, *(f"{cell / parts:,.0f}" for cell in cells), end_section=link == "all")
    return table


def _view_table(content: dict, layers: int):
    from rich.table import Table

    table = Table(title="the same traffic in three views, bytes per rank and layer", title_justify="left")
    for name in ("view", "what it counts", "mean", "least", "most"):
        table.add_column(name, justify="left" if name in ("view", "what it counts") else "right")
    views = content["views"]
    lines = [("wire", f"{d}, every link, copies in place too", views["wire"][d]) for d in DIRECTIONS]
    lines += [("DeepEP's tests", name, values) for name, values in (views["deepep"] or {}).items()]
    lines += [("NIC", f"{d}, between nodes only", views["nic"][d]) for d in DIRECTIONS]
    for view, what, values in lines:
        numbers = (sum(values) / len(values), min(values), max(values))
        table.add_row(view, what, *(f"{number / layers:,.0f}" for number in numbers))
    return table


def _dialect_table(content: dict):
    from rich.table import Table

    table = Table(title="this routing in every dialect: what leaves a rank, per token", title_justify="left")
    for name in ("dispatch", "NVLink rows", "RDMA rows", "dispatch bytes by RDMA", "combine bytes by RDMA"):
        table.add_column(name, justify="left" if name == "dispatch" else "right")
    for dialect, parts in content["dialects"].items():
        there, back = parts["dispatch"], parts["combine"]
        table.add_row(
            dialect,
            *(f"{there['rows_per_token'][link]:.4f}" for link in ("nvlink", "rdma")),
            *(f"{part['bytes_per_token']['rdma']:,.0f}" for part in (there, back)),
        )
    return table


def print_findings(findings, limit: int = 20) -> None:
    """What does not hold, by place, or how many measurements do."""
    from scripts.tables import console

    out = console()
    wrong = [f for f in findings if not f.holds]
    out.print(f"\ncheck: {len(findings) - len(wrong)} of {len(findings)} measurements lie within their intervals")
    for f in wrong[:limit]:
        m = f.measurement
        place = (
            ""
            if m.place is None
            else f" {m.place[0]} to {m.place[1]}"
            if isinstance(m.place, tuple)
            else f" rank {m.place}"
        )
        ratio = f", {f.ratio:.4f} of the count" if f.ratio is not None else ""
        unit = "rows" if m.quantity == "splits" else "bytes"
        out.print(
            f"{m.where}: {m.quantity}{place}: {_interval(f.measured)} {unit}{ratio}; allowed {_interval(f.allowed)}; "
            f"likely cause: {f.cause or 'none known'}",
            highlight=False,
            soft_wrap=True,
        )
    if len(wrong) > limit:
        out.print(f"... and {len(wrong) - limit} more")


def _interval(bounds) -> str:
    low, high = bounds
    return f"{low:,.0f}" if low == high else f"{low:,.0f} to {high:,.0f}"

"""Volumes by loops over tokens, one message at a time, written from the tables of bytes and not from the counting
code."""

import numpy as np

ELEMENT = {"fp8": 1, "bf16": 2, "fp32": 4, "fp64": 8}


def rows_by_loop(tables, num_experts, topology, dispatch, mode="hybrid"):
    """{direction: [hop matrices]} with one entry per message."""
    ranks, width, local = topology.num_ranks, topology.ranks_per_node, num_experts // topology.num_ranks
    several = topology.num_nodes > 1
    hops = {name: [np.zeros((ranks, ranks), int) for _ in range(2)] for name in ("dispatch", "combine")}
    there, back = hops["dispatch"], hops["combine"]
    for src, table in enumerate(tables):
        for token in np.asarray(table).tolist():
            owners = [expert // local for expert in token if expert >= 0]
            if dispatch == "low_latency":
                for dst in owners:
                    there[0][src, dst] += 1
                    back[0][dst, src] += 1
            elif dispatch == "allgather":
                for dst in range(ranks):
                    there[0][src, dst] += 1
                    back[0][dst, src] += 1
            elif several and (dispatch == "normal" or (dispatch == "elastic" and mode == "hybrid")):
                for node in {dst // width for dst in owners}:
                    middle = node * width + src % width
                    if dispatch == "normal" or node != src // width:
                        there[0][src, middle] += 1
                        back[1][middle, src] += 1
                    for dst in {dst for dst in owners if dst // width == node}:
                        there[1][middle, dst] += 1
                        back[0][dst, middle] += 1
            else:
                for dst in set(owners):
                    there[0][src, dst] += 1
                for dst in owners if (dispatch, mode) == ("elastic", "single") else set(owners):
                    back[0][dst, src] += 1
    return hops


def row_classes(dispatch, several, hidden, k, payload):
    """(classes of a dispatch row, of a combine row, of a combine row by RDMA)."""
    w = 8 if payload == "fp64" else 4
    data = {"payload": hidden * ELEMENT[payload], "scales": 4 * ((hidden + 127) // 128) if payload == "fp8" else 0}
    back = {"payload": hidden * ELEMENT["bf16" if payload == "fp8" else payload]}
    if dispatch == "low_latency":
        return {**data, "header": 16}, back, back
    if dispatch == "elastic":
        whole = sum((size + 31) // 32 * 32 for size in (*data.values(), k * (8 + w) + 4))
        padding = whole - sum(data.values()) - k * (8 + w) - 4
        row = {**data, "routing": k * (8 + w), "header": 4, "padding": padding}
        return row, back, {**back, "padding": (8 * k + 31) // 32 * 32}
    if dispatch == "normal":
        row = {**data, "header": 8 if several else 4, "routing": k * ((4 if several else 8) + w)}
        back |= {"header": 8 if several else 4}
        if several:
            row["padding"] = (sum(row.values()) + 15) // 16 * 16 - sum(row.values())
            back["padding"] = (sum(back.values()) + 15) // 16 * 16 - sum(back.values())
        return row, back, back
    return {**data, "routing": k * (4 + w)}, back, back


def control_by_loop(num_experts, topology, dispatch, direction):
    ranks, width, nodes = topology.num_ranks, topology.ranks_per_node, topology.num_nodes
    local = num_experts // ranks
    control = np.zeros((ranks, ranks), int)
    for src in range(ranks):
        for dst in range(ranks):
            if dispatch == "low_latency":
                control[src, dst] += 4 * local
            elif direction == "combine":
                continue
            elif dispatch in ("allgather", "alltoallv"):
                control[src, dst] += 8
            elif dispatch == "elastic" or nodes == 1:
                control[src, dst] += 4 * (1 + local)
            else:
                if src // width == dst // width:
                    control[src, dst] += 4 * (nodes + local)
                elif src % width == dst % width:
                    control[src, dst] += 4 * (max(8, width) + num_experts // nodes + 1)
    return control


def matrix_by_loop(tables, num_experts, topology, hidden, dispatch, payload, mode, direction, link, cls):
    """Bytes of one class over one link, int [R, R]."""
    k = np.asarray(tables[0]).shape[1]
    row, back, back_rdma = row_classes(dispatch, topology.num_nodes > 1, hidden, k, payload)
    hops = rows_by_loop(tables, num_experts, topology, dispatch, mode)[direction]
    total = np.zeros((topology.num_ranks,) * 2, int)
    for src in range(topology.num_ranks):
        for dst in range(topology.num_ranks):
            if topology.link(src, dst) != link:
                continue
            weights = row if direction == "dispatch" else back_rdma if link == "rdma" else back
            total[src, dst] = sum(hop[src, dst] for hop in hops) * weights.get(cls, 0)
            if cls == "control":
                total[src, dst] += control_by_loop(num_experts, topology, dispatch, direction)[src, dst]
    return total


def random_tables(rng, num_experts, ranks, top_k, most, distinct=True):
    """One [T_r, K] table per rank: uneven, some ranks empty, some ids -1, distinct experts where they suffice."""
    tables = []
    for _ in range(ranks):
        tokens = int(rng.integers(0, most + 1)) * int(rng.random() > 0.2)
        if distinct and top_k <= num_experts:
            table = np.array([rng.permutation(num_experts)[:top_k] for _ in range(tokens)], int).reshape(tokens, top_k)
        else:
            table = rng.integers(0, num_experts, (tokens, top_k))
        table[rng.random((tokens, top_k)) < rng.choice([0, 0.2, 0.9])] = -1
        tables.append(table)
    return tables

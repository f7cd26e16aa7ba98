"""All figures of a day in base units: nodes by phase, hit rate, cost, income, what the cache and the scaling save."""

import numpy as np

from parallel.serving.economics import (
    R1,
    Market,
    cost,
    discounted_share,
    income,
    margin,
    revenue,
)
from parallel.serving.fleet import Day, Rates, autoscale, need, prefill_without_cache, split, time_mean

LATENT_BYTES = 576 * 2 * 61  # bfloat16 rows of 61 layers, without the MTP layer


def day_figures(day: Day, rates: Rates, market: Market, gpu_hour: float = 2.0, max_nodes: int | None = None) -> dict:
    """Figures of the whole day and, under `hours`, of each clock hour; units are in the names.

    Nodes are the recorded ones where the day has them, else the autoscaler's.
    """
    needed = need(day, rates)
    scaled = autoscale(needed, max_nodes=max_nodes)
    nodes = scaled if day.nodes is None else day.nodes
    peak = float(nodes.max())
    spent = cost(nodes * day.hours, gpu_hour)
    listed = revenue(day.traffic, R1)
    kept = income(day.traffic, market, discounted_share(day.start_hour, day.hours))
    total_cost, total_listed = float(spent.sum()), float(listed.sum())
    cold = None if day.traffic.hit_rate == 1 else prefill_without_cache(day, rates)
    freed = float(((peak - nodes) * day.hours).sum())
    return {
        "nodes_recorded": day.nodes is not None,
        "mean_nodes": time_mean(day, nodes),
        "peak_nodes": peak,
        "autoscaled_mean_nodes": time_mean(day, scaled),
        "autoscaled_peak_nodes": float(scaled.max()),
        "autoscaled_equal_share": time_mean(day, (scaled == nodes).astype(float)),
        "prefill_nodes_by_tokens": time_mean(day, needed.prefill),
        "decode_nodes_by_tokens": time_mean(day, needed.decode),
        **_phases(day, nodes),
        "prefill_nodes_without_cache": None if cold is None else time_mean(day, cold),
        "freed_node_hours": freed,
        "freed_dollars": float(cost(freed, gpu_hour)),
        "input_tokens": float(day.traffic.input.sum()),
        "hit_tokens": float(day.traffic.hit.sum()),
        "output_tokens": float(day.traffic.output.sum()),
        "hit_rate": day.traffic.hit_rate,
        "cost_dollars": total_cost,
        "cost_per_million_output_dollars": total_cost / max(float(day.traffic.output.sum()), 1.0) * 1e6,
        "income_list_dollars": total_listed,
        "margin_list": margin(total_listed, total_cost),
        "income_dollars": float(kept.sum()),
        "margin": margin(float(kept.sum()), total_cost),
        "break_even_share_of_list": total_cost / total_listed if total_listed else None,
        "nodes": nodes.tolist(),
        "hours": _hours(day, nodes, spent, listed, kept),
    }


def decode_ranges(speed: tuple[float, float], rates: Rates, context: float, tokens_per_step: float) -> dict:
    """What an output speed of `speed` tokens per second and user means for one decode GPU; each value is (low, high).

    Requests = tokens per second of the GPU over the speed of one user (Little's law); a step yields `tokens_per_step`.
    """
    slow, fast = speed
    per_gpu = rates.decode / 8
    requests = [per_gpu / fast, per_gpu / slow]
    return {
        "tokens_per_second": [slow, fast],
        "requests_per_gpu": requests,
        "step_seconds": [tokens_per_step / fast, tokens_per_step / slow],
        "latent_bytes_per_gpu": [n * context * LATENT_BYTES for n in requests],
    }


def _phases(day: Day, nodes: np.ndarray) -> dict:
    """Mean nodes of each phase if the counts are whole units; None where they are not."""
    try:
        phases = split(nodes)
    except ValueError:
        return {"prefill_nodes_by_units": None, "decode_nodes_by_units": None}
    return {
        "prefill_nodes_by_units": time_mean(day, phases.prefill_nodes),
        "decode_nodes_by_units": time_mean(day, phases.decode_nodes),
    }


def _hours(day: Day, nodes, spent, listed, kept) -> list[dict]:
    """Sums and means by clock hour, in order; an interval belongs to the hour in which it starts."""
    hour_of = np.floor(day.start_hour + 1e-9).astype(int)
    table = []
    for hour in np.unique(hour_of):
        here = hour_of == hour
        table.append(
            {
                "hour": int(hour % 24),
                "start_hour": int(hour),
                "nodes": float((nodes * day.hours)[here].sum() / day.hours[here].sum()),
                "input_tokens": float(day.traffic.input[here].sum()),
                "hit_tokens": float(day.traffic.hit[here].sum()),
                "output_tokens": float(day.traffic.output[here].sum()),
                "cost_dollars": float(spent[here].sum()),
                "income_list_dollars": float(listed[here].sum()),
                "income_dollars": float(kept[here].sum()),
            }
        )
    return table

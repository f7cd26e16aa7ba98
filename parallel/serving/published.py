"""The published day: 27 February 2025 12:00 to 28 February 12:00 (UTC+8), V3 and R1 together.

Totals are stated in DeepSeek open-infra-index, 202502OpenSourceWeek/day_6; node counts and hourly income are read off
its two charts (steps to the quarter hour; bars to about $100, then scaled to the stated income). Traffic by hour is
not published: here it follows the hourly income, which assumes one mix of hits, misses and output all day.
"""

import numpy as np

from parallel.serving.economics import Traffic
from parallel.serving.fleet import Day

INPUT_TOKENS, HIT_TOKENS, OUTPUT_TOKENS = 608e9, 342e9, 168e9
MEAN_NODES, PEAK_NODES = 226.75, 278
COST, INCOME, MARGIN = 87_072.0, 562_027.0, 5.45
HIT_RATE = 0.563
SPEED = (20.0, 22.0)  # output tokens per second of one user
CONTEXT = 4989  # cached tokens per output token, on average
TOKENS_PER_STEP = 1.8  # one draft token, accepted four times in five
START_HOUR = 12

#: (hour of day counted on from the noon it starts at, nodes from then on)
NODE_STEPS = (
    (12.0, 278),
    (24.0, 218),
    (25.25, 188),
    (26.0, 158),
    (26.75, 128),
    (27.0, 98),
    (27.5, 68),
    (30.5, 98),
    (31.0, 128),
    (31.5, 188),
    (32.0, 218),
    (32.5, 278),
)

#: Dollars of theoretical income in each hour from 12:00.
HOURLY_INCOME = (
    *(27018, 28507, 30455, 30914, 30455, 27820, 26789, 29539, 30684, 30799, 31028, 29768),
    *(21747, 17965, 13153, 7997, 6392, 6392, 7997, 13726, 23122, 29424, 30455, 29882),
)


def published_day() -> Day:
    """The day in quarter hours, with the nodes of the chart and tokens spread as the hourly income is."""
    quarters = START_HOUR + np.arange(96) / 4
    share = np.repeat(HOURLY_INCOME, 4) / (4 * sum(HOURLY_INCOME))
    edges, nodes = np.array(NODE_STEPS).T
    return Day(
        start_hour=quarters,
        hours=np.full(96, 0.25),
        traffic=Traffic(HIT_TOKENS * share, (INPUT_TOKENS - HIT_TOKENS) * share, OUTPUT_TOKENS * share),
        nodes=nodes[np.searchsorted(edges, quarters, side="right") - 1],
    )

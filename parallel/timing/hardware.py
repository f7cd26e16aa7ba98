"""Accelerators as data: peak rates of one GPU, each with the place where the figure stands."""

from dataclasses import dataclass, fields, replace
from typing import NamedTuple


class Figure(NamedTuple):
    """A number with its unit and its source."""

    value: float
    unit: str
    source: str


@dataclass(frozen=True)
class Hardware:
    """Peak rates of one GPU in base units; dense arithmetic, one direction of a link.

    bf16_flops, fp8_flops [FLOP/s]; hbm [B/s]; memory [B]; nvlink, nic [B/s]; sms; nvlink_domain: GPUs that reach each
    other by NVLink. sources: field name -> where the figure stands. Raises ValueError for a rate that is not positive.
    """

    name: str
    bf16_flops: float
    fp8_flops: float
    hbm: float
    memory: float
    nvlink: float
    nic: float
    sms: int
    nvlink_domain: int
    sources: tuple[tuple[str, str], ...] = ()

    def __post_init__(self):
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, (int, float)) and not value > 0:
                raise ValueError(f"{field.name} = {value} of {self.name}: a rate or a count must be positive")

    def figures(self) -> dict[str, Figure]:
        """Every number with unit and source."""
        units = {"bf16_flops": "FLOP/s", "fp8_flops": "FLOP/s", "memory": "B", "sms": "SMs", "nvlink_domain": "GPUs"}
        sources = dict(self.sources)
        return {
            field.name: Figure(
                getattr(self, field.name), units.get(field.name, "B/s"), sources.get(field.name, "given")
            )
            for field in fields(self)
            if field.name not in ("name", "sources")
        }

    def with_rates(self, **rates: float) -> "Hardware":
        """The same GPU with some rates changed, as for `nic=100e9`."""
        kept = tuple((name, source) for name, source in self.sources if name not in rates)
        return replace(self, sources=kept, **rates)


_INSIGHTS = "Insights into DeepSeek-V3 (ISCA 2025), section 4"
_HOPPER = "NVIDIA H100 Tensor Core GPU datasheet, SXM, dense rates"
_NOTEBOOK = "constants of the case-study notebook (H800 with Hopper compute rates)"
_H20 = "vendor listings of the H20 datasheet (second-hand), 96 GB HBM3"
_GB200 = "NVIDIA GB200 NVL72 page: rack totals / 72, dense = half of the sparse rate"

_HOPPER_SOURCES = {"bf16_flops": _HOPPER, "fp8_flops": _HOPPER, "hbm": _HOPPER, "memory": _HOPPER, "sms": _HOPPER}


def _sources(common: dict[str, str], **own: str) -> tuple[tuple[str, str], ...]:
    return tuple(sorted({**common, **own}.items()))


HARDWARE = {
    "h800": Hardware(
        "h800",
        bf16_flops=989e12,
        fp8_flops=1979e12,
        hbm=3.35e12,
        memory=80e9,
        nvlink=160e9,
        nic=50e9,
        sms=132,
        nvlink_domain=8,
        sources=_sources(
            dict.fromkeys(("bf16_flops", "fp8_flops", "hbm", "memory"), _NOTEBOOK),
            nvlink=_INSIGHTS + ": 160 GB/s effective of 200",
            nic=_INSIGHTS + ": one 400 Gb/s NIC per GPU",
            sms="device properties in deepseek-ai/profile-data train.json",
            nvlink_domain=_INSIGHTS,
        ),
    ),
    "h100": Hardware(
        "h100",
        bf16_flops=989e12,
        fp8_flops=1979e12,
        hbm=3.35e12,
        memory=80e9,
        nvlink=450e9,
        nic=50e9,
        sms=132,
        nvlink_domain=8,
        sources=_sources(
            _HOPPER_SOURCES,
            nvlink=_HOPPER + ": 900 GB/s both directions",
            nic="NVIDIA DGX H100 datasheet: one 400 Gb/s port per GPU",
            nvlink_domain="NVIDIA DGX H100 datasheet",
        ),
    ),
    "h20": Hardware(
        "h20",
        bf16_flops=148e12,
        fp8_flops=296e12,
        hbm=4.0e12,
        memory=96e9,
        nvlink=450e9,
        nic=50e9,
        sms=78,
        nvlink_domain=8,
        sources=_sources(
            dict.fromkeys(("bf16_flops", "fp8_flops", "hbm", "memory", "nvlink", "sms", "nvlink_domain"), _H20),
            nic="assumed: one 400 Gb/s port per GPU",
        ),
    ),
    "gb200_nvl72": Hardware(
        "gb200_nvl72",
        bf16_flops=2500e12,
        fp8_flops=5000e12,
        hbm=8e12,
        memory=186e9,
        nvlink=900e9,
        nic=50e9,
        sms=148,
        nvlink_domain=72,
        sources=_sources(
            dict.fromkeys(("bf16_flops", "fp8_flops", "hbm", "memory", "nvlink_domain"), _GB200),
            nvlink=_INSIGHTS + ": 900 GB/s in one direction",
            nic="assumed: one 400 Gb/s port per GPU",
            sms="assumed: 148 SMs of a B200-class GPU",
        ),
    ),
}


def hardware(name: str) -> Hardware:
    """A preset by name. Raises ValueError for an unknown one."""
    if name not in HARDWARE:
        raise ValueError(f"hardware {name!r}: known are {', '.join(HARDWARE)}")
    return HARDWARE[name]

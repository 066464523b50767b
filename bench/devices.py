"""Devices a floor is computed for: a read bandwidth per device, fixed here and never measured anew.

A floor is bytes over this bandwidth. What a run measured is printed beside it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """One GPU.

    Attributes:
        read_tb_s: bandwidth that floors are computed with, 1e12 bytes per second.
        nominal_tb_s: what the maker states.
        memory_gb: 1e9 bytes.
        basis: where `read_tb_s` comes from.
    """

    name: str
    read_tb_s: float
    nominal_tb_s: float
    memory_gb: float
    basis: str


# the slope of read time over size on one H200, 4.55 TB/s, is 0.948 of the stated rate
_SHARE = 4.55 / 4.8
_LIKE_H200 = "stated rate times the share that an H200 reaches; not measured"
DEVICES = {
    d.name: d
    for d in (
        Device("H100", round(3.35 * _SHARE, 2), 3.35, 80, _LIKE_H200),
        Device("H200", 4.55, 4.8, 141, "measured: slope of read time over size, 8 to 256 MiB"),
        Device("B200", round(8.0 * _SHARE, 2), 8.0, 180, _LIKE_H200),
        Device("GB300", round(8.0 * _SHARE, 2), 8.0, 288, _LIKE_H200),
    )
}


def find(kind: str) -> Device | None:
    """The device whose name is a word of what JAX calls it, such as `NVIDIA H200`.

    None for all others, also where the memory is another one: a GH200 is no H200, and boards for
    PCIe are slower than their name says.
    """
    words = kind.split()
    if {"PCIe", "NVL"} & set(words):
        return None
    return next((device for name, device in DEVICES.items() if name in words), None)
